"""`veilstream.run`: a simulation that also writes its report."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, cast

from veilstream.reports.page_kit import REPORT
from veilstream.reports.report import write_report
from veilstream.runs.folder import Run
from veilstream.simulation.runner import simulate

P = ParamSpec("P")


def _reported(function: Callable[P, Run]) -> Callable[P, Run]:
    @wraps(function)
    def reported(*args: P.args, **kwargs: P.kwargs) -> Run:
        options = cast(dict[str, Any], kwargs)
        options.setdefault("on_written", write_report)
        finished = function(*args, **kwargs)
        if not (finished.path / REPORT).exists():  # a finished run that was resumed, without its report
            write_report(finished)
        return finished

    return reported


run = _reported(simulate)
