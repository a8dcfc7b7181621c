"""A worker whose parent was killed ends; FLARE leaves some of them waiting for ever."""

from __future__ import annotations

import os
import threading
import time

__all__ = ["exit_with_parent"]

_LOOK_S = 1.0


def exit_with_parent() -> None:
    """Watch the process that started this one, and end when it has."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
