"""The HTTP server under the model API and the learner API: uvicorn in a thread, with limits.

Every connection has a deadline at every moment: for its next request to arrive whole, and for its
answer to be read. If there are too many, a new connection replaces the one that has kept the server
waiting longest, at the address that has most. Connections are counted from the moment they are
accepted, before TLS: each has a buffer of 0.3 MB from there on. So callers who say nothing, trickle
bytes, or read nothing, cost a socket each for some seconds and block nobody else. Requests are not
logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, MissingExtra, VeilstreamError
from veilstream.federation.addresses import connections_allowed, listen_at
from veilstream.federation.certificate_files import CertificateFiles

try:
    import uvicorn
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra("uvicorn", "federation", "an HTTP API") from error


_log = logging.getLogger(__name__)

_BACKLOG = 128  # also the most that are accepted before the first of them is counted
_START_S = 20.0
_ABORT_S = 1.0  # from asking a connection to end until it is cut
_GRACE_S = 1  # for answers under way when the server is closed
_LARGEST_HEAD = 16 << 10
_PIECE = 1 << 16
_LATE_BODY = b'{"error": "the request came too slowly"}\n'
_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(_LATE_BODY), _LATE_BODY)
)


@dataclass(frozen=True)
class Limits:
    """What one caller, and all callers together, may take."""

    connections: int = 512
    """Fewer where the system allows few open files."""
    connections_per_address: int = 64
    handshake_s: float = 5.0
    """From accepting a connection to the end of its TLS handshake."""
    idle_s: float = 30.0
    """How long a connection may stay open between two requests."""
    request_s: float = 10.0
    """From a request's first byte to its last."""
    answer_s: float = 60.0
    """From there until the answer is read."""


class SharedBody(Response):
    """A large body, sent in pieces as it is read, so that slow callers share one copy of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each piece when the one before has been taken."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = bytes(self.body)
        for at in range(0, len(body), _PIECE):
            await send({"type": "http.response.body", "body": body[at : at + _PIECE], "more_body": True})
            await asyncio.sleep(0)  # others' turn; and a caller who has left is noticed
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class AsgiServer:
    """Serves one application until `close`; answering when the constructor returns."""

    def __init__(
        self,
        app: ASGIApp,
        address: tuple[str, int] | socket.socket,
        *,
        option: str,
        tls: tuple[Path, Path] | None = None,
        limits: Limits | None = None,
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``address``: where to listen, or a socket that listens already."""
        limits = limits or Limits()
        most = min(limits.connections, connections_allowed(0))
        self._connections = _Connections(replace(limits, connections=most), refused)
        config = uvicorn.Config(
            _guarded(app),
            http=type("Connection", (_Connection,), {"guard": self._connections}),
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=3600,  # `Limits.idle_s` comes first
            timeout_graceful_shutdown=_GRACE_S,
            h11_max_incomplete_event_size=_LARGEST_HEAD,
            backlog=_BACKLOG,
        )
        config.load()
        self._tls: CertificateFiles | None = None
        if tls is not None:
            config.ssl, self._tls = _context(tls), CertificateFiles(*tls)
        listening = address if isinstance(address, socket.socket) else listen_at(address, option)
        self.port = int(listening.getsockname()[1])
        self._server = _Server(config, self._connections)
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), name=f"http {option}", daemon=True)
        self._thread.start()
        if not self._up.wait(_START_S) or not self._server.started:
            listening.close()
            raise VeilstreamError(f"{option}: the HTTP server did not start; try again")

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: _Loop(self._connections, self._tls)) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        serving = asyncio.ensure_future(self._server.serve([listening]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.001)
        self._up.set()
        await serving

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections.open)

    def close(self) -> None:
        """Stop answering; answers under way have a second to be read."""
        self._server.should_exit = True
        self._thread.join(_START_S)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, guard: _Connections) -> None:
        super().__init__(config)
        self._guard = guard

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn knows connections from their first request on; the others are ended here."""
        for connection in tuple(self._guard.open):
            if isinstance(connection, _Handshake):
                connection.cut()
        await super().shutdown(sockets)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose TLS servers count a connection before its handshake, not after it."""

    def __init__(self, guard: _Connections, tls: CertificateFiles | None) -> None:
        super().__init__()
        self._guard, self._tls = guard, tls

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> asyncio.Server:
        context, make = options.pop("ssl", None), protocol_factory
        if context is not None:

            def make() -> _Handshake:
                nonlocal context
                context = (self._tls and self._tls.renewed()) or context
                return _Handshake(protocol_factory, context, self._guard, self)

        return await super().create_server(make, *args, **options)


def _context(tls: tuple[Path, Path]) -> ssl.SSLContext:
    try:
        return CertificateFiles(*tls).context()
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            "keys", str(tls[0]), "a certificate and its key, made by `veilstream keys`", str(error)
        ) from error


def _guarded(app: ASGIApp) -> ASGIApp:
    """Log an application's defects by kind alone: their text might quote data."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            _log.error("%s while answering an HTTP request; this is a defect", type(error).__name__)
            body = b'{"error": "a defect; the log says more"}\n'
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 500, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    return call


class _Connections:
    def __init__(self, limits: Limits, refused: Callable[[str], None]) -> None:
        self.limits, self.refused = limits, refused
        self.open: set[_Connection | _Handshake] = set()

    def enter(self, new: _Connection | _Handshake) -> None:
        """Add a connection; if there are too many, one that waits for its caller leaves, or else the new one."""
        self.open.add(new)
        held = Counter(connection.address for connection in self.open)
        if held[new.address] > self.limits.connections_per_address:
            crowded = new.address
        elif len(self.open) > self.limits.connections:
            crowded = held.most_common(1)[0][0]
        else:
            return
        others = [c for c in self.open if c.address == crowded and c is not new and c.waiting]
        leaving = min(others, key=lambda c: c.since, default=new)
        self.refused("too many connections")
        leaving.cut()


class _Handshake(asyncio.Protocol):
    """A connection from the moment it is accepted to the end of its TLS handshake."""

    waiting = True

    def __init__(
        self, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext, guard: _Connections, loop: _Loop
    ) -> None:
        self._make, self._context, self._guard, self._loop = make, context, guard, loop
        self._early = b""
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.pause_reading()  # TLS reads, not this
        self.transport, self.since = transport, self._loop.time()
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        self._guard.enter(self)
        if not self._ended:
            self._task = self._loop.create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        try:
            encrypted = await self._loop.start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._guard.limits.handshake_s,
                ssl_shutdown_timeout=_ABORT_S,
            )
        except (OSError, asyncio.CancelledError):
            if not self._ended:
                self._guard.refused("no TLS handshake")
            return
        finally:
            self._guard.open.discard(self)
        if encrypted is None or self._ended:
            return
        inner = self._make()
        encrypted.set_protocol(inner)
        inner.connection_made(encrypted)
        if self._early:
            inner.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        """What came with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._guard.open.discard(self)

    def cut(self) -> None:
        self._ended = True
        self._guard.open.discard(self)
        _reset(self.transport)


def _reset(transport: asyncio.Transport) -> None:
    if (raw := transport.get_extra_info("socket")) is not None:
        # By a reset: otherwise the kernel keeps unread bytes until the caller reads them.
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Connection(H11Protocol):
    guard: _Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._receiving = self._cut = False
        self._timer: asyncio.TimerHandle | None = None
        self._set(self.guard.limits.idle_s)
        self.guard.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.guard.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._cut:
            return
        if self._idle and not self._receiving:
            self._receiving = True
            self._set(self.guard.limits.request_s)
        super().data_received(data)
        if self._receiving and self.cycle is not None and not self.cycle.more_body:
            self._receiving = False
            if not self._idle:
                self._set(self.guard.limits.answer_s)

    def on_response_complete(self) -> None:
        limits, self._receiving = self.guard.limits, False
        unread = self.transport.get_write_buffer_size() > 0
        self._set(limits.answer_s if unread else limits.idle_s)
        super().on_response_complete()

    def shutdown(self) -> None:
        """An answer under way may be read; other connections are cut."""
        if self.waiting:
            self.cut()
        else:
            super().shutdown()

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def waiting(self) -> bool:
        """Whether it is the caller's turn, to send or to read."""
        return self._idle or self.cycle.more_body or self.flow.write_paused

    def cut(self) -> None:
        self._cut = True
        self.guard.open.discard(self)
        _reset(self.transport)

    def _set(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._overdue)

    def _overdue(self) -> None:
        """Tell the caller of a slow request, then close; close any other connection at once."""
        if self._receiving and self.transport.get_write_buffer_size() == 0:
            self.guard.refused("request too slow")
            self._cut = True
            if self._idle:
                self.transport.write(_LATE)
            else:
                self._say_late()
            self.transport.close()
            self._timer = self.loop.call_later(_ABORT_S, self.cut)
        else:
            if not self._idle or self.transport.get_write_buffer_size():
                self.guard.refused("answer not read")
            self.cut()

    def _say_late(self) -> None:
        """Tell an application that waits for the rest of a body that its caller is gone."""
        if not self.cycle.response_started:
            self.transport.write(_LATE)
        self.cycle.disconnected = True
        self.cycle.message_event.set()
