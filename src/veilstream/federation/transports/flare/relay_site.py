"""What FLARE starts at a site: bytes to the learner's daemon and back, and nothing else.

It holds no state and never looks inside. Who calls is not checked here: the daemon answers only
what the server has signed, and signs what it answers.
"""

from __future__ import annotations

import os
import sys

from nvflare.collab import collab

from veilstream.federation.protocol import frames
from veilstream.federation.transports.flare.exit_with_parent import exit_with_parent
from veilstream.federation.transports.flare.names import SOCKET

# Where PyTorch is installed, FLARE imports it for tensors that are never sent here: seconds, and
# hundreds of megabytes a worker. None stands for "not installed". (Read before FLARE looks for it.)
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]

__all__ = ["ANSWERED", "FAILED", "SiteRelay"]

ANSWERED, FAILED = b"R", b"F"
_TIMEOUT_S = 3600.0
# The same whatever went wrong: what happens at a learner is not the server's to know.
_UNREACHABLE = FAILED + b"the learner's daemon cannot be reached"


class SiteRelay:
    """One connection a call, so that a daemon that was started again is found at once."""

    def __init__(self) -> None:
        exit_with_parent()

    @collab.publish  # type: ignore[untyped-decorator]
    def round(self, payload: bytes) -> bytes:
        """The daemon's reply, or one constant error."""
        try:
            return ANSWERED + frames.ask(os.environ[SOCKET], payload, _TIMEOUT_S)
        except (OSError, KeyError):
            return _UNREACHABLE

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self) -> bytes:
        """That this process runs."""
        return ANSWERED
