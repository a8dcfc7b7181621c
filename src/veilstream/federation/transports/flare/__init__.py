"""NVIDIA FLARE carries the messages: pushed over mutual TLS, some hundredths of a second a round.

    provision      kits for server and learners, from `veilstream keys`
    FlareServer    beside the coordinator: FLARE's server, a job manager, and a relay socket
    FlareNode      beside a learner's daemon: FLARE's site

What FLARE starts (`relay_server`, `relay_site`) is stateless: a process that is killed costs a new
job, never a number. FLARE always speaks mutual TLS here; "insecure" only means loopback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veilstream.federation.transports.flare.node import FlareNode
    from veilstream.federation.transports.flare.provisioning import provision
    from veilstream.federation.transports.flare.server import FlareServer

__all__ = ["FlareNode", "FlareServer", "provision"]

_LATER = {
    "FlareNode": "veilstream.federation.transports.flare.node",
    "FlareServer": "veilstream.federation.transports.flare.server",
    "provision": "veilstream.federation.transports.flare.provisioning",
}


def __getattr__(name: str) -> Any:
    """FLARE's own processes import this package too, and need none of it."""
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
