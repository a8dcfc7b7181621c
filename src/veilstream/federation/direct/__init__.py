"""The direct transport: a learner dials the server and holds one gRPC stream, with mutual TLS.

    learner                                server
    connects, learner and instance   ->    certificate, name, place checked
                                     <-    W            welcome
                                     <-    Q, request   one at a time
    R, reply                         ->
                                     <-    P            are you there? (a second one has called)
    P                                ->

There is no relay and no other process on the learner's machine: the stream's client calls the
daemon's `handle`. It knows bytes and nothing else of veilstream.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veilstream.federation.direct.node import DirectNode
    from veilstream.federation.direct.server import DirectServer

__all__ = ["DirectNode", "DirectServer", "require_grpc"]

_LATER = {"DirectNode": "veilstream.federation.direct.node", "DirectServer": "veilstream.federation.direct.server"}


def require_grpc() -> None:
    """Say what to install."""
    import importlib.util

    from veilstream.errors import MissingExtra

    if importlib.util.find_spec("grpc") is None:
        raise MissingExtra("grpcio", "federation", "a federation")


def __getattr__(name: str) -> Any:
    """Load a side only when it is asked for: neither needs the other."""
    if name in _LATER:
        from importlib import import_module

        require_grpc()
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
