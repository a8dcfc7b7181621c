"""The HTTP server under the model API and the learner API: uvicorn in a thread, with limits.

Every connection has a deadline at every moment: for its next request to arrive whole, and for its
answer to be read. If there are too many, a new connection replaces the one that has kept the server
waiting longest, at the address that has most. So callers who trickle bytes, or read nothing, cost a
socket each for some seconds and block nobody else. Requests are not logged.
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
from veilstream.federation.addresses import connections_allowed

try:
    import uvicorn
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra("uvicorn", "federation", "an HTTP API") from error


_log = logging.getLogger(__name__)

_BACKLOG = 256
_START_S = 20.0
_ABORT_S = 1.0  # from asking a connection to end until it is cut
_GRACE_S = 1  # for answers under way when the server is closed
_HANDSHAKE_S = 10.0
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
    connections_per_address: int = 64
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
        address: tuple[str, int],
        *,
        option: str,
        tls: tuple[Path, Path] | None = None,
        limits: Limits | None = None,
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
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
        if tls is not None:
            config.ssl = _context(tls)
        listening = _listen(address, option)
        self.port = int(listening.getsockname()[1])
        self._server = uvicorn.Server(config)
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), name=f"http {option}", daemon=True)
        self._thread.start()
        if not self._up.wait(_START_S) or not self._server.started:
            listening.close()
            raise VeilstreamError(f"{option}: the HTTP server did not start; try again")

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
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


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose servers give a TLS handshake ten seconds, not a minute."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", _HANDSHAKE_S)
        return await super().create_server(*args, **options)


def _listen(address: tuple[str, int], option: str) -> socket.socket:
    host, port = address
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio sets TCP_NODELAY only on sockets that name the protocol. Without it, every second
        # answer on a connection waits 40 ms for the caller's delayed ACK.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        shown = f"{host}:{port}"
        raise InputError(option, shown, "an address to listen at", str(error)) from None
    listening.setblocking(False)
    return listening


def _context(tls: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(*tls)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            "keys", str(tls[0]), "a certificate and its key, made by `veilstream keys`", str(error)
        ) from error
    return context


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
        self.open: set[_Connection] = set()

    def enter(self, new: _Connection) -> None:
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
        """An answer under way may be read; other connections are cut, also during a TLS handshake."""
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
        if (raw := self.transport.get_extra_info("socket")) is not None:
            # By a reset: otherwise the kernel keeps unread bytes until the caller reads them.
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

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
