"""What both ends of the stream agree on, and the event loop that drives them."""

from __future__ import annotations

import asyncio
import functools
import os
import threading

# gRPC's core writes to stderr of its own accord, about every stray connection; we say what matters.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


SERVICE, METHOD = "veilstream.Federation", "Carry"
PATH = f"/{SERVICE}/{METHOD}"
LEARNER, INSTANCE = "learner", "instance"
"""Metadata of the call: who calls, and a number that a process draws once."""

WELCOME, REQUEST, REPLY, PING = b"W", b"Q", b"R", b"P"

_KEEP_ALIVE_S = 10.0
_HANDSHAKE_S = 10.0
_UNUSED_S = 30.0


def target(host: str, port: int) -> str:
    """As gRPC writes an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def options(largest_incoming: int) -> list[tuple[str, int]]:
    """Channel arguments of either end; a message that is larger ends the stream."""
    return [
        ("grpc.max_receive_message_length", largest_incoming),
        ("grpc.max_send_message_length", -1),  # checked before
        ("grpc.keepalive_time_ms", int(_KEEP_ALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(_KEEP_ALIVE_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(_KEEP_ALIVE_S * 500)),
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1000)),
        ("grpc.max_concurrent_streams", 4),
        ("grpc.max_metadata_size", 1 << 13),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),  # no back-off left over from the last connection
    ]


def server_options(most_connections: int) -> list[tuple[str, int]]:
    """A server's further ones: each connection costs an open file, and strangers may connect."""
    return [
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.max_connection_idle_ms", int(_UNUSED_S * 1000)),  # without a stream
    ]


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The process's loop for gRPC, in a thread of its own; `grpc.aio` wants one, not several."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="direct transport", daemon=True).start()
    return loop
