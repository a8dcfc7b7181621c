"""A live page over HTTP: the page, and its changes as server-sent events.

    GET /live           the page as it stands, with the number of the last event in it
    GET /live/events    what changes after that; `Last-Event-ID` or `?after=` says since when

A stream of events ends after forty seconds, well within the deadline that every answer has here, and
the browser comes back with the last number that it saw. So a reader who missed something is told,
and no connection stays open unseen. Ten seconds of silence bring a heartbeat. A reader who does not
read is dropped, and the number of readers is limited, in all and from one address. Pages of other
sites may not ask; on loopback, callers must name this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from veilstream.errors import MissingExtra
from veilstream.federation.addresses import is_own_host
from veilstream.federation.http.asgi_server import AsgiServer, SharedBody
from veilstream.federation.http.event_feed import EventFeed

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingExtra("starlette", "federation", "a live page") from error


PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""No other page may embed or read it; the page itself says what it may load and reach."""

_EVENT_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Accel-Buffering": "no",  # a proxy that buffers answers would hold events back
    "Cross-Origin-Resource-Policy": "same-origin",
}
_LAST_EVENT_S = 3.0  # for readers to take the last event


class LivePage(Protocol):
    """What is shown."""

    feed: EventFeed

    def snapshot(self) -> tuple[str, bytes]:
        """The last event's id, and the whole state at that event, as JSON."""

    def html(self) -> tuple[str, bytes]:
        """The last event's id, and the whole page at that event."""


@dataclass(frozen=True)
class StreamLimits:
    """What readers of events may take."""

    streams: int = 64
    streams_per_address: int = 16
    heartbeat_s: float = 10.0
    stream_s: float = 40.0
    """How long one stream lasts; less than `Limits.answer_s` of the server below it."""
    slow_s: float = 5.0
    """How long a reader may leave an event unread."""
    retry_s: float = 1.0


Page = TypeVar("Page", bound=LivePage)


@contextmanager
def local_live_server(
    page_at: Callable[[str], Page], port: int = 0, tell: Callable[[str], object] = lambda _: None
) -> Iterator[Page]:
    """Serve a page on loopback, under a path that nobody can guess, until the end of the block."""
    path = f"/{secrets.token_urlsafe(16)}"
    page = page_at(path)
    routes = LiveRoutes(page, path, own_port=lambda: server.port)
    server = AsgiServer(Starlette(routes=routes.routes), ("127.0.0.1", port), option="--live-port")
    try:
        tell(f"http://127.0.0.1:{server.port}{path}")
        yield page
        until = time.monotonic() + _LAST_EVENT_S
        while page.feed.ended and routes.readers and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        page.feed.stop()
        server.close()


class LiveRoutes:
    """The two routes of a live page; with ``own_port``, callers must name this machine and that port in Host."""

    def __init__(
        self,
        page: LivePage,
        path: str,
        *,
        own_port: Callable[[], int] | None = None,
        limits: StreamLimits | None = None,
    ) -> None:
        self.page, self.limits = page, limits or StreamLimits()
        self._own_port = own_port
        self._readers: Counter[str] = Counter()
        self._working = asyncio.Lock()
        self._made: dict[str, tuple[str, bytes]] = {}
        self.routes = [
            Route(path, self._show, methods=["GET"]),
            Route(f"{path.rstrip('/')}/events", self._events, methods=["GET"]),
        ]

    @property
    def readers(self) -> int:
        """How many listen now."""
        return self._readers.total()

    @contextmanager
    def counted(self, address: str) -> Iterator[None]:
        """Count a reader while it listens."""
        self._readers[address] += 1
        try:
            yield
        finally:
            self._readers[address] -= 1
            if not self._readers[address]:
                del self._readers[address]

    async def newest(self, kind: str, make: Callable[[], tuple[str, bytes]]) -> tuple[str, bytes]:
        """Made once for each event, however many ask, and outside the loop that answers others."""
        async with self._working:
            made = self._made.get(kind)
            if made is None or made[0] != self.page.feed.last_id:
                made = self._made[kind] = await asyncio.to_thread(make)
            return made

    async def _show(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        _, body = await self.newest("page", self.page.html)
        return SharedBody(body, headers=PAGE_HEADERS, media_type="text/html")

    async def _events(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        address = request.client.host if request.client else ""
        if self.readers >= self.limits.streams or self._readers[address] >= self.limits.streams_per_address:
            return _error(503, "too many readers of events; come again", {"Retry-After": "5"})
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return _Stream(self, address, after)

    def _refusal(self, request: Request) -> Response | None:
        hosts = request.headers.getlist("host")
        if self._own_port is not None and (len(hosts) != 1 or not is_own_host(hosts[0], self._own_port())):
            return _error(403, f"Host: expected this machine and port, like 127.0.0.1:{self._own_port()}")
        origin = request.headers.get("origin")
        if origin is not None and (not hosts or urlsplit(origin).netloc != hosts[0]):
            return _error(403, "Origin: a web page of another origin may not ask")
        from_another_site = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if from_another_site and request.headers.get("sec-fetch-mode") != "navigate":
            return _error(403, "Sec-Fetch-Site: a web page of another origin may not ask")
        return None


class _Stream(Response):
    def __init__(self, live: LiveRoutes, address: str, after: str) -> None:
        super().__init__(None, headers=_EVENT_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._live, self._address, self._after = live, address, after
        self._limits, self._feed = live.limits, live.page.feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the server was closed meanwhile
                loop.call_soon_threadsafe(changed.set)

        forget = self._feed.on_change(wake)
        self._send = send
        try:
            with self._live.counted(self._address):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._write(b"retry: %d\n\n" % round(1000 * self._limits.retry_s))
                await self._follow(changed, gone, loop.time() + self._limits.stream_s)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # the server below cuts the connection, as any that is not read
        finally:
            forget()
            gone.cancel()

    async def _follow(self, changed: asyncio.Event, gone: asyncio.Future[None], until: float) -> None:
        loop = asyncio.get_running_loop()
        while not (gone.done() or self._feed.stopped):
            changed.clear()
            ended = self._feed.ended  # read before the events, so that none is missed
            await self._catch_up()
            if ended:
                await self._write(b"event: end\ndata: {}\n\n")
                return
            left = until - loop.time()
            if left <= 0:
                return
            waiting = asyncio.ensure_future(changed.wait())
            both: set[asyncio.Future[Any]] = {waiting, gone}
            await asyncio.wait(both, timeout=min(left, self._limits.heartbeat_s), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await self._write(b": still here\n\n")

    async def _catch_up(self) -> None:
        events = self._feed.since(self._after)
        if events is None:
            self._after, state = await self._live.newest("state", self._live.page.snapshot)
            await self._write(_event("state", self._after, state))
            return
        for event in events:
            self._after = self._feed.id_of(event.number)
            await self._write(_event("patch", self._after, event.data))

    async def _write(self, body: bytes) -> None:
        message: Any = {"type": "http.response.body", "body": body, "more_body": True}
        await asyncio.wait_for(self._send(message), self._limits.slow_s)


def _event(kind: str, event_id: str, data: bytes) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), kind.encode(), data)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status, {"Connection": "close", **(headers or {})})
