"""Flower carries the federation's messages: a SuperLink beside the server, a relay at each learner.

Flower is used for what it is good at: TLS, machines with keys, queues that outlive a process. It
runs no code of ours and none that comes over the network. The server holds the run's ServerApp task
itself; a learner's machine runs a relay that moves bytes between Flower and the learner's socket.

    server.py     FlowerServer: the SuperLink as a child, and the `Transport` on top of it
    run.py        one Flower run, held as its ServerApp
    superlink.py  what the child runs: Flower's SuperLink behind access control
    node.py       FlowerNode: the relay as a child of the learner
    relay.py      what that child runs
    client.py     Flower's HTTP clients without retries, proxies, exits and signals
    envelope.py   bytes in Flower's messages, and out of them

Written against flwr 1.41; `client`, `envelope`, `run`, `relay` and `superlink` import it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veilstream.federation.transports.flower.node import FlowerNode
    from veilstream.federation.transports.flower.server import FlowerServer

__all__ = ["FlowerNode", "FlowerServer"]

_LATER = {
    "FlowerNode": "veilstream.federation.transports.flower.node",
    "FlowerServer": "veilstream.federation.transports.flower.server",
}


def __getattr__(name: str) -> Any:
    """Load a side only when it is asked for: the relay needs neither."""
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
