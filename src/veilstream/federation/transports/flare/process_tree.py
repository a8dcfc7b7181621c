"""FLARE's processes and those that they start, which FLARE puts in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal

from veilstream.federation.processes import Child

__all__ = ["descendants", "end"]


def end(child: Child) -> None:
    """With all that it has started."""
    tree = descendants(child.pid)
    child.end()
    for pid in tree:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int | None) -> list[int]:
    """Children, theirs, and so on; none of a process that has ended."""
    if pid is None:
        return []
    import psutil  # nvflare brings it

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
