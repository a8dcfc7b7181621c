"""FLARE's processes and those that they start, which FLARE puts in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

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
    """Children, theirs, and so on; none where the system does not tell."""
    if pid is None:
        return []
    found: list[int] = []
    with contextlib.suppress(OSError):
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text().split()):
                found += [child, *descendants(child)]
    return found
