"""A stream between an aggregator and the server: many learners' requests and replies on one.

    server                                 aggregator
    W                              ->      welcome
    M, model                       ->      what the requests after it end with, once
    H, (name, head)...             ->      requests without that end, each signed for its learner
                                   <-      N, names        learners that are connected there
                                   <-      R, name, reply  verbatim, signed by the learner
                                   <-      S, names, sum   signed by the aggregator
                                   <-      F, name, why    no reply

Nothing that a learner or the server has signed is changed on the way, so an aggregator can neither
ask learners for anything nor speak for one that enrols or refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from veilstream.federation.direct import wire
from veilstream.federation.direct.certificates import diagnose
from veilstream.federation.protocol.transport import Failure, Inbox

import grpc  # isort: skip  # after wire, which says how loud it may be
import grpc.aio  # isort: skip

if TYPE_CHECKING:
    from veilstream.federation.direct.client import TlsFiles


MODEL, HEADS, NODES, SUM, FAILED = b"M", b"H", b"N", b"S", b"F"

_LENGTHS = struct.Struct("<HI")
_LONGEST_WHY = 300
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0
_CONNECT_S = 10.0
_MOST_WAITING = 64  # messages that nobody has read, beside one of each learner
_PACE_S = 0.005


def pack(pairs: Iterable[tuple[str, bytes]]) -> bytes:
    """Names with bytes."""
    pieces = []
    for name, data in pairs:
        key = name.encode()
        pieces += [_LENGTHS.pack(len(key), len(data)), key, data]
    return b"".join(pieces)


def unpack(data: memoryview) -> list[tuple[str, memoryview]]:
    """As they were packed.

    Raises:
        ValueError: cut short, or of another form.

    """
    found, at = [], 0
    while at < len(data):
        if at + _LENGTHS.size > len(data):
            raise ValueError("cut short")
        name, size = _LENGTHS.unpack_from(data, at)
        start = at + _LENGTHS.size
        at = start + name + size
        if at > len(data):
            raise ValueError("cut short")
        found.append((bytes(data[start : start + name]).decode(), data[start + name : at]))
    return found


class Branch:
    """The server's end: what is out to the learners behind one aggregator."""

    def __init__(self, name: str, instance: str, learners: frozenset[str], inbox: Inbox) -> None:
        self.name, self.instance, self._learners, self._inbox = name, instance, learners, inbox
        self.present: frozenset[str] = frozenset()
        """Learners that are connected there."""
        self._waiting: dict[str, tuple[bytes, bytes]] = {}
        self._ready = asyncio.Event()
        self._outstanding: set[str] = set()
        self._task = asyncio.current_task()

    def take(self, learner: str, head: bytes, body: bytes) -> None:
        """Send a request; it replaces one of the same learner that has not left yet.

        An aggregator that reads nothing would otherwise have the server keep every round's model.
        """
        self._outstanding.add(learner)
        self._waiting[learner] = (head, body)
        self._ready.set()

    async def write_all(self, context: Any) -> None:
        """Write what waits, all that have come together in one frame, until the stream ends."""
        sent = b""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await context.write(wire.WELCOME)
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._waiting:
                    _, body = next(iter(self._waiting.values()))
                    if body and body is not sent:
                        await context.write(MODEL + body)
                        sent = body
                    same = {learner: head for learner, (head, own) in self._waiting.items() if own is body}
                    for learner in same:
                        del self._waiting[learner]
                    await context.write(HEADS + pack(same.items()))

    def hear(self, frame: bytes) -> bool:
        """Take a frame; whether it was to be expected."""
        kind, rest = frame[:1], memoryview(frame)[1:]
        try:
            if kind == NODES:
                names = json.loads(bytes(rest))
                self.present = self._learners.intersection(map(str, names))
                for gone in self._outstanding - self.present:
                    self._inbox.put(gone, Failure("it has left its aggregator"))
                self._outstanding &= self.present
                return True
            if kind == SUM:
                (_, names), (_, data) = unpack(rest)
                self._outstanding.difference_update(json.loads(bytes(names)))
                self._inbox.put(f"@{self.name}", bytes(data))
                return True
            if kind not in (wire.REPLY, FAILED):
                return False
            for learner, data in unpack(rest):
                if learner not in self._learners:
                    return False
                self._outstanding.discard(learner)
                what = bytes(data)
                if kind == FAILED:
                    why = ascii(what[:_LONGEST_WHY].decode(errors="replace"))
                    self._inbox.put(learner, Failure(f"its aggregator: {why}"))
                else:
                    self._inbox.put(learner, what)
        except (ValueError, TypeError, RecursionError):
            return False
        return True

    async def wait_for_reader(self) -> None:
        """Return when the server has read nearly all that came; until then nothing more is taken.

        So a peer that sends without end fills no memory.
        """
        while self._inbox.waiting > _MOST_WAITING + len(self._learners):
            await asyncio.sleep(_PACE_S)

    def lost(self) -> None:
        """The stream has ended."""
        self.present = frozenset()
        for learner in self._outstanding:
            self._inbox.put(learner, Failure("the connection to its aggregator was lost"))
        self._outstanding.clear()

    def end(self) -> None:
        """End the stream: the aggregator has connected anew."""
        if self._task is not None:
            self._task.cancel()


class BranchClient:
    """The aggregator's end: connects, hands frames over, connects again."""

    def __init__(
        self,
        address: tuple[str, int],
        name: str,
        tls: TlsFiles | None,
        *,
        dim: int,
        heard: Callable[[bytes | None], None],
    ) -> None:
        """``heard`` is called in the loop's thread: with a frame, or None at a new connection."""
        self._address, self._name, self._tls, self._heard = address, name, tls, heard
        self._limit = 1 + wire.request_limit(dim) + (1 << 26)  # heads of some 10^5 learners
        self._instance = secrets.token_hex(16)
        self._loop = wire.event_loop()
        self._frames: asyncio.Queue[bytes] | None = None
        self._future: Any = None
        self.notes: deque[str] = deque(maxlen=100)
        """Lines to show."""

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._future = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def close(self) -> None:
        """End the stream."""
        if self._future is not None:
            self._future.cancel()
            with contextlib.suppress(BaseException):
                self._future.result(5.0)

    def send(self, frame: bytes) -> None:
        """Soon, if there is a connection; else not at all: the server asks again."""
        self._loop.call_soon_threadsafe(self._put, frame)

    def _put(self, frame: bytes) -> None:
        if self._frames is not None:
            self._frames.put_nowait(frame)

    async def _run(self) -> None:
        delay, said = _FIRST_DELAY_S, ""
        while True:
            try:
                if await self._session():
                    delay, said = _FIRST_DELAY_S, ""
                line = "the connection to the server has ended; connecting again"
            except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
                line = await self._explain(error)
            except (OSError, ValueError) as error:
                line = f"keys that cannot be read ({error})"
            if line != said:
                self.notes.append(line)
                said = line
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)

    async def _explain(self, error: Exception) -> str:
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        shown = wire.target(*self._address)
        if code == grpc.StatusCode.PERMISSION_DENIED:
            return (
                f"the server at {shown} does not know an aggregator {self._name!r} with these "
                "keys; give it its folder anew"
            )
        if self._tls is not None:
            tls = self._tls
            trouble = await asyncio.to_thread(diagnose, self._address, tls.ca, tls.certificate, tls.key)
            if trouble is not None:
                return f"{trouble.what}; waiting ({trouble.way_out})"
        return f"no connection to {shown}; waiting (is the server running?)"

    async def _session(self) -> bool:
        """One connection; whether the server let it in."""
        where, options = wire.target(*self._address), wire.options(self._limit)
        if self._tls is None:
            channel = grpc.aio.insecure_channel(where, options=options)
        else:
            channel = grpc.aio.secure_channel(where, self._tls.credentials(), options=options)
        async with channel:
            metadata = ((wire.AGGREGATOR, self._name), (wire.INSTANCE, self._instance))
            call = channel.stream_stream(wire.PATH)(metadata=metadata)
            writing: asyncio.Future[None] | None = None
            try:
                async with asyncio.timeout(_CONNECT_S):
                    if await call.read() != wire.WELCOME:
                        return False
                self._frames = asyncio.Queue()
                writing = asyncio.ensure_future(self._write_all(call, self._frames))
                self._heard(None)
                while (frame := await call.read()) is not grpc.aio.EOF:
                    self._heard(frame)
                return True
            finally:
                self._frames = None
                if writing is not None:
                    writing.cancel()
                call.cancel()

    async def _write_all(self, call: Any, frames: asyncio.Queue[bytes]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await frames.get())
