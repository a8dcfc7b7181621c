"""The learner's end of the stream: connect, answer what is asked, connect again.

One request is answered at a time, in a thread of its own, so that the stream is read meanwhile. A
reply whose stream has ended is dropped: asked again, the daemon says the same. A ping is answered
once a second at most: how quickly an answer comes depends on what else this process computes, and
in a round that is whether clients come. Texts of the other side are never shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilstream.federation.direct import wire
from veilstream.federation.direct.certificates import Trouble, diagnose, expiring, load
from veilstream.federation.protocol.sizes import reply_limit, request_limit
from veilstream.federation.repeated_lines import RepeatedLines

import grpc  # isort: skip  # after wire, which says how loud it may be
import grpc.aio  # isort: skip


_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0
_PATIENT_DELAY_S = 5.0  # once enrolled, where waiting alone may not help; and after the run's end
_DAY_S = 86_400.0
_PING_EVERY_S = 1.0
_MOST_ASKED = 4  # requests that wait for an answer; a server has one out on a stream
_TRIES = 3  # at first contact, before a trouble with TLS is believed
_UNKNOWN = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files; read at every attempt, so that renewed ones are used."""

    ca: Path
    certificate: Path
    key: Path

    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


class StreamClient:
    """Holds a stream to one server and answers on it until it is closed or refused."""

    def __init__(
        self,
        address: tuple[str, int],
        name: str,
        handle: Callable[[bytes], bytes],
        tls: TlsFiles | None,
        *,
        dim: int,
        enrolled: bool,
        run_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run_over = run_over
        self._ping_at, self._pinged = 0.0, False  # the next answer: when, and whether one is due
        self._address, self._name, self._handle, self._tls = address, name, handle, tls
        self._dim, self._enrolled = dim, enrolled
        self._instance = secrets.token_hex(16)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answer")
        self._future: Any = None
        self._said = ""
        self._lines = RepeatedLines()
        self._answered = False
        self._warn_at = 0.0
        self.connected = False
        self.refused: Trouble | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._future = asyncio.run_coroutine_threadsafe(self._run(), wire.event_loop())

    def close(self) -> None:
        """End the stream; an answer that is under way is not sent."""
        if self._future is not None:
            self._future.cancel()
            with contextlib.suppress(BaseException):
                self._future.result(5.0)
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        delay, tries = _FIRST_DELAY_S, 0
        while self.refused is None:
            trouble = await self._attempt()
            if self._answered:
                delay, tries, self._answered = _FIRST_DELAY_S, 0, False
            if trouble is not None and trouble.lasting:
                tries += 1
                if not self._enrolled and tries >= _TRIES:
                    self.refused = trouble
            longest = _LONGEST_DELAY_S
            if trouble is not None:
                if (trouble.lasting and self._enrolled) or self._run_over():
                    longest = _PATIENT_DELAY_S
                self._tell(trouble)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, longest)

    async def _attempt(self) -> Trouble | None:
        """One connection, from first to last; why it ended."""
        try:
            await self._session()
        except grpc.aio.AioRpcError as error:
            return await self._explain(error.code())
        except (TimeoutError, asyncio.InvalidStateError):
            return await self._explain(grpc.StatusCode.UNAVAILABLE)
        except (OSError, ValueError) as error:
            return Trouble(f"keys that cannot be read ({error})", "see `veilstream keys`")
        finally:
            self.connected = False
        return Trouble("the server has ended the connection", "connecting again", lasting=False)

    async def _session(self) -> None:
        async with self._channel() as channel:
            metadata = ((wire.LEARNER, self._name), (wire.INSTANCE, self._instance))
            call = channel.stream_stream(wire.PATH)(metadata=metadata)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    welcome = await call.read()
                if welcome == wire.WELCOME:
                    self._welcomed()
                    await self._answer_all(call)
            finally:
                call.cancel()

    def _channel(self) -> grpc.aio.Channel:
        where = wire.target(*self._address)
        options = wire.options(1 + request_limit(self._dim))
        if self._tls is None:
            return grpc.aio.insecure_channel(where, options=options)
        return grpc.aio.secure_channel(where, self._tls.credentials(), options=options)

    def _welcomed(self) -> None:
        self.connected = self._enrolled = True
        self._say(f"connected to {wire.target(*self._address)}", logging.INFO, "connected")

    def warn_of_expiry(self) -> None:
        """A line from 30 days before this learner's certificate ends, every day."""
        if self._tls is None or time.monotonic() < self._warn_at:
            return
        self._warn_at = time.monotonic() + _DAY_S
        with contextlib.suppress(OSError, ValueError):  # said when it connects
            if soon := expiring(load(self._tls.certificate), "this learner's"):
                _log.warning("%s", soon)

    async def _explain(self, code: grpc.StatusCode) -> Trouble:
        shown = wire.target(*self._address)
        if code == grpc.StatusCode.ALREADY_EXISTS:
            self.refused = Trouble(
                f"a learner called {self._name!r} is already connected to {shown}",
                "each learner needs keys of its own; if it moved, stop the first",
            )
            return self.refused
        if code in _UNKNOWN:
            return Trouble(
                f"the server at {shown} does not know a learner {self._name!r} with these keys",
                "`veilstream keys add` enrols it; then the server is given its folder anew",
            )
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return Trouble(f"what answers at {shown} is not a veilstream server", "check --server")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Trouble(f"a message too large for d = {self._dim}", "compare the plans")
        if self.connected:
            return Trouble(f"the connection to {shown} was lost", "connecting again", lasting=False)
        if self._tls is not None:
            tls = self._tls
            ask = (self._address, tls.ca, tls.certificate, tls.key)
            trouble = await asyncio.to_thread(diagnose, *ask)
            if trouble is not None:
                return trouble
        return Trouble(f"no connection to {shown}", "is the server running?", lasting=False)

    def _tell(self, trouble: Trouble) -> None:
        """That a server goes away when its run is over is to be expected, and no warning."""
        if self._run_over() and not trouble.lasting:
            where = wire.target(*self._address)
            self._say(f"the run is over and the server at {where} has gone", logging.INFO, "server gone")
        else:
            self._say(f"{trouble.what}; waiting ({trouble.way_out})", logging.WARNING, "no connection")

    def _say(self, text: str, level: int, event: str) -> None:
        """Once, until something else is to be said; and each line once a minute, however often the server goes."""
        if text != self._said:
            self._said = text
            if (line := self._lines.add("the server", event, text)) is not None:
                _log.log(level, "%s", line, extra={"event": event})

    def say_repeated(self) -> None:
        """Lines that came more than once within the last minute, with their number."""
        for line in self._lines.due():
            _log.info("%s", line)

    async def _answer_all(self, call: Any) -> None:
        writing = asyncio.Lock()
        self._pinged = False
        pongs: set[asyncio.Task[None]] = set()
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                if frame[:1] == wire.REQUEST:
                    while len(self._tasks) >= _MOST_ASKED:  # what is not read fills no memory here
                        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                    task = asyncio.ensure_future(self._answer(call, writing, frame[1:]))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    del frame
                elif frame == wire.PING and not self._pinged:
                    self._pinged = True
                    pong = asyncio.ensure_future(self._answer_ping(call, writing))
                    pongs.add(pong)
                    pong.add_done_callback(pongs.discard)
        finally:
            for pong in pongs:
                pong.cancel()

    async def _answer_ping(self, call: Any, writing: asyncio.Lock) -> None:
        """In its time; pings that come before it leaves are answered by this one."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._ping_at - loop.time())
        self._ping_at, self._pinged = loop.time() + _PING_EVERY_S, False
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with writing:
                await call.write(wire.PING)

    async def _answer(self, call: Any, writing: asyncio.Lock, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        try:
            reply = await loop.run_in_executor(self._worker, self._handle, request)
        except Exception as error:  # its text might hold data; asked again, it may do better
            _log.warning("%s: a request is left without an answer", type(error).__name__)
            return
        if not reply:  # it stops, or its disk cannot be written
            return
        if len(reply) > reply_limit(self._dim):
            _log.warning("a reply of %d bytes is too large for d = %d", len(reply), self._dim)
            return
        # The stream may have ended meanwhile; the server asks again on the next.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with writing:
                await call.write(wire.REPLY + reply)
            self._answered = True
