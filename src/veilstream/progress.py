"""A progress bar on standard error, shown only when work takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOW_AFTER_S = 2.0
_shown = False


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yields ``tick(n)``: n more units are done. Nothing is shown before two seconds, or without a terminal."""
    global _shown
    began = time.monotonic()
    done = 0
    bar = None
    inner, _shown = _shown, True  # a bar within a bar would overwrite it

    def tick(amount: int) -> None:
        nonlocal done, bar
        done += amount
        if bar is None and not inner and sys.stderr.isatty() and time.monotonic() - began > SHOW_AFTER_S:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

            bar = Progress(
                SpinnerColumn(),
                *Progress.get_default_columns(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            bar.start()
            bar.add_task(what, total=total)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield tick
    finally:
        _shown = inner
        if bar is not None:
            bar.stop()
