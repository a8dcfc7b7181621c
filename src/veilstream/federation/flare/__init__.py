"""NVIDIA FLARE carries the messages: pushed over mutual TLS, some hundredths of a second a round.

    provisioning.py      kits for FLARE's server, its administrator and its sites
    server.py            FlareServer: a `Transport`; the socket to which FLARE's jobs connect
    jobs.py              a process beside it that submits the jobs, as the administrator
    veilstream_relay.py  what a job runs, at the server and at a site: bytes to a socket and back
    local.py             FLARE's processes on one machine, for a demo or a test

FLARE is used as it comes: stock kits, started by their own scripts, and a job of its Collab API.
Its processes take orders (a site even runs what the server sends it), so a site has an account of
its own and reaches nothing of the learner but the socket of `veilstream learner`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veilstream.federation.flare.provisioning import provision
    from veilstream.federation.flare.server import FlareServer

__all__ = ["FlareServer", "provision"]

_LATER = {"FlareServer": "veilstream.federation.flare.server", "provision": "veilstream.federation.flare.provisioning"}


def __getattr__(name: str) -> Any:
    """Load a part only when it is asked for."""
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
