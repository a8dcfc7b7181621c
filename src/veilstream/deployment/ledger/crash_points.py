"""Names of the places between two durable writes, for tests that kill the process there.

In production `reached` does nothing. A test's own child process replaces it; no setting can.
"""

from __future__ import annotations

CRASH_POINTS = (
    "pinned",
    "step-computed",
    "step-stored",
    "step-witnessed",
    "message-computed",
    "message-stored",
    "message-witnessed",
    "acknowledged",
    "snapshot-stored",
    "epoch-closed",
)


def reached(point: str) -> None:
    """A place has been reached."""
