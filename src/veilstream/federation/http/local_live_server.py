"""A live page for the person at this machine, while a command runs.

    with local_live_server(page_of) as url: ...

It listens on loopback, under a path that nobody can guess: other accounts of this machine, and
pages of other sites in the same browser, do not get to it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from veilstream.errors import MissingExtra
from veilstream.federation.http.asgi_server import AsgiServer
from veilstream.federation.http.live_routes import LivePage, LiveRoutes

try:
    from starlette.applications import Starlette
except ImportError as error:
    raise MissingExtra("starlette", "federation", "a live page") from error


_LAST_S = 3.0  # that readers have to take the last event


def secret_path() -> str:
    """Where a page may be that is for one person."""
    return f"/{secrets.token_urlsafe(16)}"


@contextmanager
def local_live_server(
    page: LivePage, path: str, port: int = 0, tell: Callable[[str], object] = lambda _: None
) -> Iterator[str]:
    """Serve the page until the end of the block; its readers are given the last event before.

    Args:
        page: what is shown.
        path: where, as `secret_path` made it.
        port: 0 takes one that is free.
        tell: called with the address once it answers.

    Raises:
        InputError: the port is taken.

    """
    routes = LiveRoutes(page, path, own_port=lambda: server.port)
    server = AsgiServer(Starlette(routes=routes.routes), ("127.0.0.1", port), option="--live-port")
    try:
        url = f"http://127.0.0.1:{server.port}{path}"
        tell(url)
        yield url
        until = time.monotonic() + _LAST_S
        while page.feed.ended and routes.readers and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        page.feed.stop()
        server.close()
