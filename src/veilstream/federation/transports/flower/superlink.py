"""What the server's child runs: Flower's SuperLink behind access control.

Flower's open build lets anybody who can reach its port submit an app, that is, code. Access control
stands before all of Flower: machines may use the Fleet API, if their node key is one that the
server knows; everything else needs a secret that only the server's process has. Until the server
says that all is ready, machines are told to come again.

Access control also holds a question until there is an answer, so that nobody has to poll: a request
with the header `WAIT` waits until another one rings for it (`RING`), or for a few seconds.

    python -m veilstream.federation.transports.flower.superlink ACCESS.json
    FLOWER-SUPERLINK-ARGUMENTS
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["OPEN", "SECRET", "UNKNOWN", "AccessControl"]

OPEN = "/veilstream/open"
SECRET = "x-veilstream-secret"
UNKNOWN = "x-veilstream-unknown"
"""Marks the refusal of a node key."""

_FLEET = "/v1/fleet/"
_CLOSED_FLEET = frozenset({"/v1/fleet/register-node", "/v1/fleet/unregister-node"})
_NODE_KEY = b"flwr-public-key"
_HOLD_S = 5.0
_LONGEST_QUESTION = 1 << 20
_SERVER = "server"


class LongPoll:
    """Wakes who waits for it; one that rang while nobody waited is heard at the next wait."""

    def __init__(self) -> None:
        self._rung, self._heard = 0, -1
        self._next = asyncio.Event()

    def ring(self) -> None:
        """Wake them."""
        self._rung += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, gone: asyncio.Future[Any]) -> None:
        """Until it rings, the asker is gone, or it took too long."""
        if self._heard == self._rung:
            rung = asyncio.ensure_future(self._next.wait())
            await asyncio.wait({rung, gone}, timeout=_HOLD_S, return_when="FIRST_COMPLETED")
            rung.cancel()
        self._heard = self._rung


class AccessControl:
    """ASGI middleware, outermost."""

    def __init__(self, app: Any, secret: str, nodes: Mapping[str, str]) -> None:
        """``nodes`` maps public keys, as they stand in Flower's header, to names."""
        self._app, self._secret = app, secret.encode()
        self._nodes = {key.encode(): name for key, name in nodes.items()}
        self._polls = {name: LongPoll() for name in [*nodes.values(), _SERVER]}
        self._open = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As the server calls it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        headers, path = dict(scope["headers"]), scope["path"]
        ours = hmac.compare_digest(headers.get(SECRET.encode(), b""), self._secret)
        node = self._nodes.get(headers.get(_NODE_KEY, b""))
        if not ours:
            if not path.startswith(_FLEET) or path in _CLOSED_FLEET:
                return await _say(send, 403, b"closed")
            if not self._open:
                return await _say(send, 503, b"not ready")
            if node is None:
                return await _say(send, 403, b"unknown node key", UNKNOWN)
        elif path == OPEN:
            self._open = True
            return await _say(send, 204)
        me = _SERVER if ours else str(node)
        if b"x-veilstream-wait" in headers:
            receive = await _held(receive, self._polls[me])
            if receive is None:
                return None  # nobody is there to hear what Flower would consider delivered
        await self._app(scope, receive, send)
        wanted = headers.get(b"x-veilstream-ring", b"").decode()
        if wanted and (ours or wanted == _SERVER) and wanted in self._polls:
            self._polls[wanted].ring()
        return None


async def _held(receive: Any, poll: LongPoll) -> Any:
    """Wait with the request in hand; None if the asker has gone."""
    body = b""
    while True:
        part = await receive()
        body += part.get("body", b"")
        if part["type"] != "http.request" or len(body) > _LONGEST_QUESTION:
            return None
        if not part.get("more_body"):
            break
    gone = asyncio.ensure_future(receive())
    await poll.wait(gone)
    if gone.done():
        return None
    said = False

    async def again() -> Any:
        nonlocal said
        if said:
            return await asyncio.shield(gone)
        said = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _say(send: Any, status: int, body: bytes = b"", mark: str = "") -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    if mark:
        headers.append((mark.encode(), b"1"))
    if status == 204:
        headers = []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header_of(public_key_pem: bytes) -> str:
    """A public key as Flower's clients send it."""
    return base64.b64encode(public_key_pem).decode()


def main(access: Path, arguments: list[str]) -> None:
    """Run Flower's SuperLink with it in place."""
    os.umask(0o077)
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    settings = json.loads(access.read_text())

    def middleware() -> tuple[Middleware, ...]:
        return (Middleware(AccessControl, secret=settings["secret"], nodes=settings["nodes"]),)

    extensions.get_middleware = middleware
    sys.argv = ["flower-superlink", *arguments]
    with contextlib.suppress(KeyboardInterrupt):
        flower_superlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
