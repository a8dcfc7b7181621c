"""Children that can be interrupted, also where the tests run in the background."""

from __future__ import annotations

import signal
import subprocess
from typing import Any


def start_interruptible(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """A shell's background jobs ignore SIGINT, and a child inherits that; a handler it does not.

    (A ``preexec_fn`` would fork, which JAX in the parent warns of.)
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **options)
    finally:
        signal.signal(signal.SIGINT, before)
