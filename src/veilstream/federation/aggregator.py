"""The process between some learners and the server: verifies, sums, forwards one message.

Prefixes are whole numbers, so sums of what they add are exact, and the model is the same to the bit
whether learners' releases are added here or at the server. Learners connect here as they would to
the server; requests are the server's, signed for each learner, and go on as they came. Replies are
checked as the server would: signature, the request that they answer, epoch, round, bounds. What a
learner says when it enrols or refuses goes up verbatim.

    STORE/server.lock     held while an aggregator runs: two would write over each other's messages
    STORE/names.json      which learner has which place in the other; only ever longer
    STORE/messages.bin    two messages a learner: the one that the server has acknowledged, and the
                          one after it, which is written over neither before a newer is acknowledged

Nothing is sent up before it is durable here. The server's next request names what it has accepted;
so either side may be killed at any time, and the next sum begins where the server stands.

An aggregator sees what a server sees: releases with their noise. Nothing here imports noise or
clients' data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError, VeilstreamError
from veilstream.federation.keys.identity import AggregatorKeys
from veilstream.federation.protocol.bounds import ReleaseBounds, norm
from veilstream.federation.protocol.messages import Buffer, Part, Reply, Request, Sum, digest
from veilstream.federation.protocol.peer_text import shown
from veilstream.federation.protocol.transport import Failure, Inbox
from veilstream.federation.server.message_file import MessageFile
from veilstream.federation.server.run_lock import lock_run
from veilstream.federation.supervision import Address, supervised
from veilstream.files import sync_directory, write_file
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of

_log = logging.getLogger(__name__)

_LINGER_S = 0.25  # how long a reply waits for others before it goes up without them
_LOOK_S = 0.05
_LONGEST_LINE = 1000
_SERVER = "@server"


class MessageStore:
    """Two messages a learner, found again by their hashes."""

    def __init__(self, folder: Path, dim: int, learners: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = folder / "names.json"
        known: list[str] = json.loads(names.read_text()) if names.exists() else []
        known += [name for name in learners if name not in known]
        write_file(names, json.dumps(known) + "\n")
        self._file = MessageFile(folder / "messages.bin", dim, create=True)
        sync_directory(folder)
        self._index = {name: index for index, name in enumerate(known)}
        self._hashes = {name: [self._hash(name, 0), self._hash(name, 1)] for name in known}

    def _hash(self, name: str, slot: int) -> str:
        """Empty where nothing was written; of what was cut short, a hash that nobody names."""
        data = self._file.read(self._index[name], slot)
        return hashlib.sha256(data).hexdigest() if data else ""

    def prefix(self, name: str, hashed: str) -> NDArray[np.int64] | None:
        """That of the message with this hash; None if it is not here."""
        if hashed not in self._hashes[name]:
            return None
        slot = self._hashes[name].index(hashed)
        return decode(self._file.read(self._index[name], slot), hashed).prefix

    def keep(self, name: str, payload: Buffer, hashed: str, acknowledged: str | None) -> None:
        """Take a message in the other place than that of the acknowledged one; see `sync`."""
        hashes = self._hashes[name]
        if hashed in hashes:
            return
        slot = 1 if hashes[0] == acknowledged else 0
        self._file.write(self._index[name], slot, payload)
        hashes[slot] = hashed

    def sync(self) -> None:
        """Durable when it returns."""
        self._file.sync()


@dataclass
class _Asked:
    """A request that is out to a learner."""

    request: Request
    digest: str


@dataclass
class PartialSums:
    """What replies add, checked one by one: no sockets, no clocks."""

    name: str
    terms: Terms
    store: MessageStore
    run: str = ""
    asked: dict[str, _Asked] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bounds = ReleaseBounds.of(self.terms)
        self._total = np.zeros(self.terms.release_dim, np.int64)

    def ask(self, request: Request, digest_: str) -> None:
        """Note what a learner is asked; what it was asked before counts no more.

        Raises:
            ProtocolError: the message that the server has accepted last is not here.

        """
        base = request.acknowledged
        if request.kind == "round" and base is not None and self._base(request) is None:
            raise ProtocolError(
                f"the last message of {request.learner!r} is not in this aggregator's store",
                f"put its store back, or start the server with --reset {request.learner}",
            )
        self.run = request.run
        self.asked[request.learner] = _Asked(request, digest_)

    def _base(self, request: Request) -> NDArray[np.int64] | None:
        if request.acknowledged is None:
            return np.zeros(self.terms.release_dim, np.int64)
        return self.store.prefix(request.learner, request.acknowledged[1])

    def take(self, name: str, reply: Reply) -> bool:
        """Add a release; False for what is to be passed on instead.

        Raises:
            ProtocolError, InputError: what was not asked for, or no learner of this plan makes.

        """
        asked = self.asked.get(name)
        if asked is None or reply.learner != name or reply.answers != asked.digest:
            raise ProtocolError(f"a reply from {name!r} to nothing that was asked", "an old message was sent again")
        if reply.kind != "release":
            del self.asked[name]
            return False
        request, message = asked.request, decode(reply.body, reply.hashed_body)
        rounds, base = request.round + 1, request.acknowledged
        given = (message.epoch, message.round, message.steps, message.grid, len(message.prefix))
        steps = rounds * self.terms.local_steps
        numbers = self.terms.release_dim
        asked_for = (request.epoch, request.round, steps, self.terms.grid.step, numbers)
        if given != asked_for:  # one part that the server refuses would void all the others
            raise ProtocolError(
                f"a release of epoch {message.epoch}, round {message.round} from {name!r}",
                f"epoch {request.epoch}, round {request.round} was asked for",
            )
        self.bounds.check_prefix(name, rounds, message.prefix)
        before = self._base(request)
        assert before is not None  # as asked
        if base is None and request.round:  # it only says where it stands
            before = message.prefix
        increment = message.prefix - before
        first = 0 if base is None else base[0] + 1
        self.bounds.check_increment(name, first, rounds, increment, norm(increment))
        self.store.keep(name, reply.body, message.hash, None if base is None else base[1])
        self._total += increment
        self.parts.append(Part(name, message.epoch, message.round, message.hash, base))
        del self.asked[name]
        return True

    def sum(self) -> Sum:
        """All since the last; durable here before it is returned."""
        self.store.sync()
        said = Sum(self.name, self.run, tuple(self.parts), self._total.astype("<i8").tobytes())
        self.forget()
        return said

    def forget(self) -> None:
        """What was not sent is asked for again."""
        self.parts = []
        self._total = np.zeros(self.terms.release_dim, np.int64)


@dataclass
class AggregatorService:
    """`veilstream aggregator`."""

    plan: Plan
    keys: Path
    store: Path
    address: Address
    server: Address
    insecure: bool = False
    task: Task | None = None

    def run(self, stop: threading.Event | None = None) -> None:
        """Stand in between until ``stop``."""
        from veilstream.federation.direct import DirectServer
        from veilstream.federation.direct.branch import BranchClient
        from veilstream.federation.direct.client import TlsFiles

        if self.plan.federation.combine != "mean":
            raise InputError(
                "federation.combine",
                self.plan.federation.combine,
                "mean",
                "sums cannot be taken apart: let all learners connect to the server",
            )
        stop = threading.Event() if stop is None else stop
        self._keys = AggregatorKeys.load(self.keys)
        task = task_of(self.plan) if self.task is None else self.task
        dim = int(np.asarray(task.init(self.plan.run.first_seed)).size)
        terms = Terms.of(self.plan, dim, task)
        lock = lock_run(self.store)
        store = MessageStore(self.store, terms.release_dim, sorted(self._keys.learners))
        self._sums = PartialSums(self._keys.name, terms, store)
        self._model, self._due = b"", 0.0
        self._inbox = Inbox()
        self._present: set[str] = set()
        tls = None
        if not self.insecure:
            tls = TlsFiles(self.keys / "ca.pem", self.keys / "tls.pem", self.keys / "tls.key")
        self._learners = DirectServer(
            self.keys,
            self.address,
            dim=dim,
            insecure=self.insecure,
            inbox=self._inbox,
            answer_within_s=self.plan.federation.deadline_s,
        )
        self._up = BranchClient(self.server, self._keys.name, tls, dim=dim, heard=self._heard)
        self._learners.start()
        self._up.start()
        _log.info(
            "aggregator %s waits for %d learners at %s:%d", self._keys.name, len(self._keys.learners), *self.address
        )
        try:
            with supervised([self._learners]) as check:
                while not stop.is_set():
                    check()
                    self._step()
        finally:
            self._up.close()
            self._learners.close()
            lock.close()

    def _heard(self, frame: bytes | None) -> None:
        self._inbox.put(_SERVER, Failure("") if frame is None else frame)

    def _step(self) -> None:
        while self._up.notes:
            _log.warning("%s", self._up.notes.popleft())
        self._tell_present()
        for node, data in self._inbox.receive(_LOOK_S):
            if node == _SERVER:
                self._from_server(data)
            elif isinstance(data, Failure):
                self._sums.asked.pop(node, None)
                self._fail(node, data.why)
            else:
                self._from_learner(node, data)
        waits = self._sums.parts and (not self._sums.asked or time.monotonic() >= self._due)
        if waits:
            names = [part.learner for part in self._sums.parts]
            self._send_sum(names, self._sums.sum().sign(self._keys.identity))

    def _send_sum(self, names: list[str], data: bytes) -> None:
        from veilstream.federation.direct.branch import SUM, pack

        self._up.send(SUM + pack([("parts", json.dumps(names).encode()), ("sum", data)]))

    def _tell_present(self, *, anew: bool = False) -> None:
        from veilstream.federation.direct.branch import NODES

        present = self._learners.nodes()
        if anew or present != self._present:
            self._present = present
            self._up.send(NODES + json.dumps(sorted(present)).encode())

    def _from_server(self, frame: bytes | Failure) -> None:
        from veilstream.federation.direct.branch import HEADS, MODEL, unpack

        if isinstance(frame, Failure):  # a new connection: the server asks all that it needs again
            _log.info("connected to the server")
            self._sums.asked.clear()
            self._sums.forget()
            self._tell_present(anew=True)
        elif frame[:1] == MODEL:
            self._model = frame[1:]
        elif frame[:1] == HEADS:
            for learner, head in unpack(memoryview(frame)[1:]):
                self._ask(learner, bytes(head))

    def _ask(self, learner: str, head: bytes) -> None:
        try:
            body = b"" if Request.without_body(head) else self._model
            request = Request.read(head + body, self._keys.server)
            unnamed = request.kind != "round" and request.learner == ""
            if request.learner != learner and not unnamed:
                raise ProtocolError(f"a request to {request.learner!r}", "check the server")
            self._sums.ask(dataclasses.replace(request, learner=learner, settings={}, body=b""), digest(head))
        except VeilstreamError as error:
            _log.error("%s: %s", learner, shown(error, _LONGEST_LINE))
            self._fail(learner, str(error))
            return
        self._learners.send_parts(learner, head, body)

    def _from_learner(self, name: str, data: Buffer) -> None:
        from veilstream.federation.direct.branch import pack
        from veilstream.federation.direct.wire import REPLY

        try:
            reply = Reply.read(data, self._keys.learners[name])
            if self._sums.take(name, reply):
                if len(self._sums.parts) == 1:
                    self._due = time.monotonic() + _LINGER_S
            else:
                self._up.send(REPLY + pack([(name, bytes(data))]))
        except VeilstreamError as error:
            self._sums.asked.pop(name, None)
            _log.warning("%s: %s", name, shown(error, _LONGEST_LINE))
            self._fail(name, str(error))
        except Exception as error:  # a defect of ours: no message may end the aggregator
            self._sums.asked.pop(name, None)
            kind = type(error).__name__
            _log.error("%s: %s while reading a reply; this is a defect", name, kind)
            self._fail(name, "its reply could not be read")

    def _fail(self, name: str, why: str) -> None:
        from veilstream.federation.direct.branch import FAILED, pack

        self._up.send(FAILED + pack([(name, why.encode())]))
