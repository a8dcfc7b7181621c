"""The server's end of all streams: a `Transport` on `grpc.aio`, in a thread of its own.

A learner is let in if its certificate names the learner that it says it is, with the identity that
the server knows. It has one place: the same process that connects anew takes it over, another one
is refused while the first is there. One request is out at a time; the newest of those that come
meanwhile waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veilstream.errors import InputError
from veilstream.federation.addresses import check_loopback, connections_allowed, wait_until_free
from veilstream.federation.certificate_files import CertificateFiles
from veilstream.federation.direct import wire
from veilstream.federation.direct.certificates import expiring, invalid, load
from veilstream.federation.keys.identity import ServerKeys, check_private, learner_uri
from veilstream.federation.protocol.sizes import reply_limit, request_limit
from veilstream.federation.protocol.transport import Failure, Inbox, Received
from veilstream.federation.repeated_lines import RepeatedLines

import grpc  # isort: skip  # after wire, which says how loud it may be
import grpc.aio  # isort: skip


_PING_S = 2.5  # a learner answers one a second
_OPEN_S = 20.0
_PORT_S = 1.0  # a server that was killed leaves its port at once
_DAY_S = 86_400.0
_SMALL = 1 << 16  # a request that is written as it comes
_OUT = 48  # larger ones that are out, or whose replies wait to be read; beyond, they are paced
_LEAST_RATE = 25e6  # bytes a second at which they leave all the same
_PACE_S = 0.001
_TRIM_BYTES = 1 << 26  # of replies, between two times that freed memory is given back

_Parts = tuple[bytes, bytes]
"""A request: its head, and a body that others may share."""


class DirectServer:
    """Learners by name, each behind the stream that it holds."""

    def __init__(
        self, keys: Path, address: tuple[str, int], *, dim: int, answer_within_s: float = 600.0, insecure: bool = False
    ) -> None:
        """``answer_within_s``: when an unanswered request is reported as a failure; a later answer is still taken."""
        if insecure:
            check_loopback(address[0])
        self._keys, self._insecure, self._dim = keys, insecure, dim
        self._known = ServerKeys.load(keys).learners
        check_private(keys / "tls.key")
        self._host, self.port = address
        self._answer_within_s = answer_within_s
        self._inbox = Inbox()
        self._links: dict[str, _Link] = {}
        self._posts: deque[tuple[str, _Parts]] = deque()
        self._posting = False
        self._received = 0
        self._pace = _Pace(self._inbox)
        self._server: grpc.aio.Server | None = None
        self._loop = wire.event_loop()
        self._notes: deque[str] = deque(maxlen=100)
        self._lines = RepeatedLines()
        self._warn_at = 0.0

    def start(self) -> None:
        """Listen."""
        if not self._insecure:
            trouble = invalid(self._certificate(), "the server's")
            if trouble is not None:
                raise InputError("keys", str(self._keys / "tls.pem"), f"to be valid: {trouble.what}", trouble.way_out)
        if self.port:
            wait_until_free(self._host, self.port, _PORT_S)
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(_OPEN_S)

    def _certificate(self) -> Any:
        try:
            return load(self._keys / "tls.pem")
        except (OSError, ValueError) as error:
            raise InputError("keys", str(self._keys), "a folder that `veilstream keys` made", str(error)) from error

    async def _open(self) -> None:
        largest = 1 + reply_limit(self._dim)
        most = connections_allowed(len(self._known))
        server = grpc.aio.server(options=[*wire.options(largest), *wire.server_options(most)])
        handler = grpc.stream_stream_rpc_method_handler(self._carry)
        generic = grpc.method_handlers_generic_handler(wire.SERVICE, {wire.METHOD: handler})
        server.add_generic_rpc_handlers((generic,))
        where = wire.target(self._host, self.port)
        try:
            if self._insecure:
                self.port = server.add_insecure_port(where)
            else:
                self.port = server.add_secure_port(where, self._credentials())
        except RuntimeError as error:
            raise InputError(
                "--listen", where, "an address that is free", "stop what is there, or take another"
            ) from error
        await server.start()
        self._server = server

    def _credentials(self) -> grpc.ServerCredentials:
        """Read again for a new connection when the files have been renewed; the others keep theirs."""
        files = CertificateFiles(self._keys / "tls.pem", self._keys / "tls.key")

        def read() -> grpc.ServerCertificateConfiguration:
            pair = (files.key.read_bytes(), files.certificate.read_bytes())
            return grpc.ssl_server_certificate_configuration([pair], (self._keys / "ca.pem").read_bytes())

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            return None if files.renewed() is None else read()

        return grpc.dynamic_ssl_server_credentials(read(), renewed, require_client_authentication=True)

    def supervise(self) -> str | None:
        """Lines to show, if there are any."""
        if not self._insecure and time.monotonic() > self._warn_at:
            self._warn_at = time.monotonic() + _DAY_S
            if soon := expiring(self._certificate(), "the server's"):
                self._notes.append(f"warning: {soon}")
        lines = self._lines.due()
        while self._notes:
            lines.append(self._notes.popleft())
        return "; ".join(lines) or None

    def _note(self, peer: str, reason: str, text: str) -> None:
        if (line := self._lines.add(peer, reason, text)) is not None:
            self._notes.append(line)

    def nodes(self) -> set[str]:
        """Learners that are connected."""
        links = self._links.copy()  # at once: the loop changes it meanwhile
        return {name for name, link in links.items() if link.welcomed}

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        """Deliver a request, or the newest of several when the last one has been answered."""
        largest, size = request_limit(self._dim), len(head) + len(body)
        if size > largest:
            self._inbox.put(node, Failure(f"a request of {size} bytes, over {largest}"))
            return
        self._posts.append((node, (head, body)))
        if not self._posting:  # waking the loop costs more than all the rest
            self._posting = True
            self._loop.call_soon_threadsafe(self._post_all)

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """Replies and failures since the last call."""
        found = self._inbox.receive(timeout_s)
        self._received += sum(len(what) for _, what in found if not isinstance(what, Failure))
        if self._received > _TRIM_BYTES:
            self._received = 0
            _return_memory()
        return found

    def close(self) -> None:
        """End all streams and stop listening."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_OPEN_S)

    async def _stop(self) -> None:
        """Here, since gRPC closes its sockets under the loop where its last object is dropped."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def _post_all(self) -> None:
        self._posting = False  # first: what is appended from here on wakes the loop again
        while self._posts:
            self._post(*self._posts.popleft())

    def _post(self, node: str, request: _Parts) -> None:
        link = self._links.get(node)
        if link is None or not link.welcomed:
            self._inbox.put(node, Failure("not connected"))
        else:
            link.take(request)

    def _overdue(self, name: str) -> None:
        self._inbox.put(name, Failure(f"no answer within {self._answer_within_s:g} s"))

    async def _carry(self, _: Any, context: Any) -> None:
        name, instance = await self._identify(context)
        link = await self._place(name, instance, context)
        why = "it has ended the connection"
        writing = asyncio.ensure_future(link.write_all())
        try:
            link.welcome()
            while (frame := await context.read()) is not grpc.aio.EOF:
                if not self._hear(link, frame):
                    why = "it sent what was not asked for"
                    self._note(name, "unasked", f"{name}: {why}; its connection was ended")
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
                del frame  # else each stream would hold its last one while it waits
        except asyncio.CancelledError:
            why = "the connection was lost"
            if link.ended:
                await context.abort(grpc.StatusCode.ABORTED, "it connected anew")
            raise
        finally:
            writing.cancel()
            link.watch(None)
            if self._links.get(name) is link:
                del self._links[name]
            self._pace.answered(link.outstanding)
            if link.outstanding is not None:
                self._inbox.put(name, Failure(why))

    def _hear(self, link: _Link, frame: bytes) -> bool:
        if frame == wire.PING:
            return link.answered_ping()
        if frame[:1] != wire.REPLY or link.outstanding is None:
            return False
        self._inbox.put(link.name, memoryview(frame)[1:])  # not copied: it is as large as two models
        link.answered()
        return True

    async def _identify(self, context: Any) -> tuple[str, str]:
        said = {str(key): str(value) for key, value in context.invocation_metadata()}
        name, instance = said.get(wire.LEARNER, ""), said.get(wire.INSTANCE, "")
        key = self._known.get(name)
        if key is None or not (self._insecure or learner_uri(name, key) in self._uris(context)):
            shown = ascii(name[:64])
            who = "the learner that it names" if key else "known"
            text = f"a connection as {shown} was refused: its certificate is not {who}"
            self._note(name if key else "unknown names", "certificate", text)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not known")
        return name, instance

    def _uris(self, context: Any) -> list[str]:
        from cryptography import x509

        (pem,) = context.auth_context()["x509_pem_cert"]
        certificate = x509.load_pem_x509_certificate(pem)
        with contextlib.suppress(x509.ExtensionNotFound):
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            return names.value.get_values_for_type(x509.UniformResourceIdentifier)
        return []

    async def _place(self, name: str, instance: str, context: Any) -> _Link:
        link = _Link(name, instance, context, self._answer_within_s, self._overdue, self._pace)
        first = self._links.get(name)
        if first is not None and first.instance != instance:
            there = await first.ping()
            if there:
                self._note(name, "second", f"a second learner calls itself {name!r}: it was refused")
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, "this name is connected")
            if name in self._links:  # keep-alive will tell; then it may have the place
                await context.abort(grpc.StatusCode.UNAVAILABLE, "this place is being cleared")
        elif first is not None:
            self._links[name] = link
            first.end()
            if first.outstanding is not None:
                self._inbox.put(name, Failure("it connected anew"))
                self._pace.answered(first.outstanding)
                first.outstanding = None
        self._links[name] = link
        return link


def _return_memory() -> None:
    """Give freed buffers back to the system: the C library keeps them in pieces that nothing fits."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


class _Pace:
    """Holds large requests back while many are out: each is a copy of the model, and its reply twice as much."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox, self._turn = inbox, asyncio.Lock()
        self.out = 0

    async def write(self, context: Any, request: _Parts) -> None:
        frame_bytes = len(request[0]) + len(request[1])
        if frame_bytes > _SMALL:
            async with self._turn:
                until = time.monotonic() + frame_bytes / _LEAST_RATE
                while self.out + self._inbox.waiting >= _OUT and time.monotonic() < until:
                    await asyncio.sleep(_PACE_S)
                self.out += 1
        await context.write(b"".join((wire.REQUEST, *request)))
        if frame_bytes > _SMALL:  # a connection holds what it wrote last: let that be small
            await context.write(wire.WELCOME)

    def answered(self, request: _Parts | None) -> None:
        if request is not None and len(request[0]) + len(request[1]) > _SMALL:
            self.out = max(0, self.out - 1)


class _Link:
    def __init__(
        self, name: str, instance: str, context: Any, within_s: float, overdue: Callable[[str], None], pace: _Pace
    ) -> None:
        self.name, self.instance = name, instance
        self._within_s, self._overdue, self._pace = within_s, overdue, pace
        self._timer: asyncio.TimerHandle | None = None
        self.welcomed = self.ended = False
        self.outstanding: _Parts | None = None
        self._next: _Parts | None = None
        self._context = context
        self._frames: asyncio.Queue[bytes | _Parts] = asyncio.Queue()
        self._ping: asyncio.Future[bool] | None = None
        self._task = asyncio.current_task()

    def welcome(self) -> None:
        self._frames.put_nowait(wire.WELCOME)
        self.welcomed = True

    def take(self, request: _Parts) -> None:
        """Send now, or after the answer; nothing to do if just this is being answered."""
        if self.outstanding is None:
            self._send(request)
        elif request != self.outstanding:
            self._next = request

    def watch(self, request: _Parts | None) -> None:
        """Time the answer to this request and no other; a timer must not outlive its request."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if request is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._within_s, self._overdue, self.name)

    def answered(self) -> None:
        self._pace.answered(self.outstanding)
        request, self.outstanding, self._next = self._next, None, None
        self.watch(None)
        if request is not None:
            self._send(request)

    def _send(self, request: _Parts) -> None:
        self.outstanding = request
        self.watch(request)
        self._frames.put_nowait(request)

    async def ping(self) -> bool:
        if self._ping is None:
            self._ping = asyncio.get_running_loop().create_future()
            self._frames.put_nowait(wire.PING)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._ping), _PING_S)
        return False

    def answered_ping(self) -> bool:
        """Its answer; False if nobody asked."""
        ping, self._ping = self._ping, None
        if ping is None:
            return False
        if not ping.done():
            ping.set_result(True)
        return True

    async def write_all(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                frame = await self._frames.get()
                if isinstance(frame, bytes):
                    await self._context.write(frame)
                else:
                    await self._pace.write(self._context, frame)

    def end(self) -> None:
        self.ended = True
        if self._task is not None:
            self._task.cancel()
