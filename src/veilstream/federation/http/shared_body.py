"""A large answer that many slow callers share one copy of."""

from __future__ import annotations

import asyncio

from veilstream.errors import MissingExtra

try:
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingExtra("starlette", "federation", "an HTTP API") from error


_PIECE = 1 << 16


class SharedBody(Response):
    """A body that is handed over as it is read, so that slow callers share one copy of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it in pieces, each when the one before has been taken."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        body = bytes(self.body)
        for at in range(0, len(body), _PIECE):
            piece = body[at : at + _PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # others' turn; and whether this caller is still there shows
        await send({"type": "http.response.body", "body": b"", "more_body": False})
