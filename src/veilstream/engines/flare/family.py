"""FLARE's processes and those that they start, which FLARE puts in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from veilstream.engines.federation.processes import Child

__all__ = ["begin", "descendants", "end", "keep"]

# A child is killed when the *thread* that started it ends (Linux, PR_SET_PDEATHSIG). Whoever calls
# `tend` may do so from a thread that ends before us, so children are started by one that does not.
_starter = ThreadPoolExecutor(1, "veilstream-flare")


def begin(child: Child) -> None:
    """Start it."""
    _starter.submit(child.start).result()


def keep(child: Child) -> bool:
    """Start it again if it has ended; whether it had to be."""
    return not child.running and _starter.submit(child.keep_running).result()


def end(child: Child) -> None:
    """With all that it has started."""
    family = descendants(child.pid)
    child.end()
    for pid in family:
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
