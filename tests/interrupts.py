"""Children that can be interrupted, also where the tests run in the background."""

from __future__ import annotations

import signal


def listen_to_interrupts() -> None:
    """For ``preexec_fn``: a shell's background jobs, and all they start, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
