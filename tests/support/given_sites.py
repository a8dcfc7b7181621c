"""Sites with the simulation's draws in place of secrets: for parity alone, such noise protects no one.

`give` changes what `vs.Site.open` opens in this process, and nothing else of it. `run` does so for a script:

    python -m tests.support.given_sites SCRIPT WORDS...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from studies.parity import GivenRounds

import veilstream as vs
from veilstream.deployment.epochs import LearnerParts

_open = vs.Site.open.__func__


def give() -> None:
    """From here on sites draw what the simulation draws at the place of their ``plan:PLACE``."""

    def open_given(cls: type, plan: vs.Plan, store: Path | str, data: str, **more: Any) -> vs.Site:
        place = int(data.removeprefix("plan:"))
        parts = LearnerParts(rounds=lambda terms, epoch: GivenRounds(terms, epoch, place))
        return _open(cls, plan, store, data, **more, parts=parts)

    vs.Site.open = classmethod(open_given)  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    give()
    script, *words = sys.argv[1:]
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
