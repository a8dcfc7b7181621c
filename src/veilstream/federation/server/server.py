"""The server's side of the messages: requests out, replies in, a model after every round.

`Server` is all that decides what a message may do: signatures, whether it answers what was asked, one
learner a seat, bounds, and that both sides have the same terms. It has no sockets, files or timers, so
whatever carries bytes can drive it: the coordinator of `veilstream server`, a framework's loop, a mail.
When to ask again, how long to wait and what to write down is its driver's.

What messages do to the model is `protocol.fold`. Nothing here imports noise or clients' data.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.terms import SAME_TERMS, Terms, both_sides, differences
from veilstream.errors import InputError, ProtocolError, UnknownName
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.protocol.bounds import OutOfBounds
from veilstream.federation.protocol.fold import ClosedRound, FoldState, OtherEpoch, Seat, ServerFold
from veilstream.federation.protocol.messages import Buffer, Reply, Request, body_hash, digest
from veilstream.federation.protocol.sizes import reply_limit
from veilstream.federation.server.run_start import first_model, server_keys
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of
from veilstream.privacy import Guarantee
from veilstream.runs.released_model import ReleasedModel
from veilstream.wording import shown

NO_PLACE = "`veilstream keys add` makes its keys; a run that has begun keeps its learners, so it waits for the next"
_REQUESTS_KEPT = 16  # to one peer, that may still be answered: it may never answer any
_PUBLISHED_SENT = 100  # times in a run that learners are sent an average beside x^r
_LONGEST_REASON = 1000  # a refusal names settings of both sides
_ANSWERS = {"enrol": ("enrolled", "refusal"), "round": ("release", "absent", "refusal"), "end": ("ended", "refusal")}

Taken = Literal["enrolled", "release", "repeated", "absent", "refusal", "ended", "late"]
"""What a reply was. repeated: a release that was counted before; late: to a request that no longer matters."""


class OtherTerms(ProtocolError):
    """A learner whose plan is another."""


@dataclass(frozen=True)
class Accepted:
    """What a reply did."""

    kind: Taken
    learner: str
    why: str = ""
    """Of a refusal."""
    request: bytes = b""
    """Of an enrolment: the signed request that it answers."""


@dataclass(frozen=True)
class AskedPeer:
    """An enrolment or an end that a peer may still answer."""

    kind: str
    learner: str
    """Whom it names; "" where the transport does not say who sits there."""
    sent: bytes = b""


class Server:
    """One run's server, for any transport: bytes in and out.

    ``request`` says what a learner is to be sent next, ``accept`` takes what came back, ``close_round`` makes
    the next model of the releases that came. A learner whose release is lost or late is made good by its next
    one; its weight stays 1/n.

    Args:
        plan: the run, or its file; the learners need the same one.
        keys: the server's folder of keys, as `veilstream keys` or `make_keys` made it. Left out, messages are
            not signed, and ``accept`` has to be told by the transport who sent them.
        learners: names of the learners, where there are no keys.
        task: what is learned, where the plan's own is not wanted.
        start: the first model; the task's own where it is left out.
        clock: seconds since 1970, which requests carry so that an old one cannot be used again.

    Raises:
        InputError: for a plan that cannot be deployed, or another number of learners than it has.

    """

    terms: Terms
    fold: ServerFold
    run: str
    """Its name: a learner's epoch belongs to one run."""
    round_answers = _ANSWERS["round"]
    """Kinds of replies that answer what is asked in a round."""

    def __init__(
        self,
        plan: Plan | Path | str,
        keys: ServerKeys | Path | str | None = None,
        *,
        learners: Iterable[str] | None = None,
        task: Task | None = None,
        start: NDArray[np.float32] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        if plan.trust is not None:
            raise InputError(
                "privacy.trust",
                "sum",
                '"each" for a Server in Python',
                '`veilstream server` opens sums, for learners that `veilstream learner` runs; trust = "each" here',
            )
        task = task_of(plan) if task is None else task
        terms = Terms.of(plan, task.dim, task)
        known = server_keys(plan, keys, learners)
        x0 = first_model(plan, task, start)
        fold = ServerFold(terms, x0, sorted(known.learners))
        self._set(plan, terms, fold, known, f"{plan.name}-{secrets.token_hex(4)}", (), clock)

    @classmethod
    def over(
        cls,
        plan: Plan,
        terms: Terms,
        fold: ServerFold,
        keys: ServerKeys,
        run: str,
        follows: tuple[str, ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Around a fold that somebody else keeps; ``follows``: runs of this server that are over."""
        server = cls.__new__(cls)
        server._set(plan, terms, fold, keys, run, follows, clock)
        return server

    def _set(
        self,
        plan: Plan,
        terms: Terms,
        fold: ServerFold,
        keys: ServerKeys,
        run: str,
        follows: tuple[str, ...],
        clock: Callable[[], float],
    ) -> None:
        self.plan, self.terms, self.fold, self.run, self.follows = plan, terms, fold, run, follows
        self.keys, self._clock, self._settings = keys, clock, terms.settings
        self.largest_reply = reply_limit(max(terms.release_dim, terms.wire_dim))
        """Bytes of the largest message that is read."""
        self.seated: set[str] = set()
        """Learners that have enrolled and can be asked for rounds."""
        self.absent: set[str] = set()
        """Who had no clients when asked for the open round."""
        self.refused: dict[str, str] = {}
        """Learners that cannot take part, and why."""
        self.refusals: Counter[str] = Counter()
        """Of each learner since its last release."""
        self.ended: set[str] = set()
        """Learners that have closed their epoch after the last round."""
        self.senders: dict[str, str] = {}
        """Where messages are not signed: from whom each learner's come, since its first enrolment."""
        self._asked: dict[str, dict[str, AskedPeer]] = {}
        self._outstanding: dict[str, set[str]] = {name: set() for name in fold.seats}
        self._heads: dict[str, bytes] = {}
        self._body: tuple[FoldState, bytes, str, int | None] | None = None

    # --- where the run stands

    @property
    def guarantee(self) -> Guarantee:
        """What every client has."""
        return self.terms.guarantee

    @property
    def round(self) -> int:
        """Rounds that are closed."""
        return self.fold.round

    @property
    def rounds(self) -> int:
        """How many there are in all."""
        return self.terms.rounds

    @property
    def finished(self) -> bool:
        """Whether all rounds are closed."""
        return self.fold.finished

    @property
    def model(self) -> NDArray[np.float32]:
        """The model after the rounds that are closed; it may be published."""
        return self.fold.published

    @property
    def released(self) -> ReleasedModel:
        """The same with its plan and its guarantee, as `vs.load` reads it from a file."""
        promise, toml = self.terms.guarantee.as_dict(), self.plan.to_toml()
        return ReleasedModel(self.model, self.round, self.rounds, self.run, toml, promise)

    @property
    def answered(self) -> tuple[str, ...]:
        """Whose release counts in the open round."""
        return self.fold.answered

    @property
    def needed(self) -> int:
        """How many releases a round needs (`federation.quorum`, of the seats that are not void)."""
        void = sum(seat.state == "void" for seat in self.fold.seats.values())
        return max(1, math.ceil(self.plan.federation.quorum * (self.plan.learning.learners - void)))

    @property
    def out(self) -> set[str]:
        """Who cannot answer in this round, whatever it is asked."""
        seats = self.fold.seats.items()
        out = set(self.refused) | {name for name, seat in seats if not self.askable(seat)}
        return out - set(self.answered)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Who may still answer in this round."""
        return tuple(sorted(set(self.fold.missing) - self.out - self.absent))

    @property
    def enough(self) -> bool:
        """Whether the open round may be closed: as many have answered as the plan's quorum."""
        return not self.finished and self.fold.answered_count >= self.needed

    @property
    def complete(self) -> bool:
        """Whether the open round has what it needs, and nobody more is waited for."""
        return self.enough and not self.waiting

    def askable(self, seat: Seat) -> bool:
        """Whether a learner can be asked for a round at all."""
        return seat.asked and seat.round < self.terms.rounds

    # --- requests

    def request(self, learner: str) -> bytes | None:
        """What this learner is to be sent next: who it is, the open round, or the end; None where nothing.

        Asking for the same thing again gives the same bytes; a learner answers them alike.
        """
        seat = self.fold.seats[self._known(learner)]
        if self.finished:
            return None if learner in self.ended else self.end(learner)
        if seat.state == "void" or learner in self.answered:
            return None
        if learner not in self.seated:
            return self.enrol(learner)
        return self.round_head(learner) + self.round_body if self.askable(seat) else None

    def requests(self) -> dict[str, bytes]:
        """`request` for every learner that there is something to send to.

        Raises:
            ProtocolError: too few learners can take part for a first round.

        """
        self.check_possible()
        due = ((name, self.request(name)) for name in sorted(self.fold.seats))
        return {name: request for name, request in due if request is not None}

    def enrol(self, peer: str) -> bytes:
        """Ask who sits there and where it stands: a learner by name, or a place in the transport."""
        learner = peer if peer in self.fold.seats else ""
        asked = Request(
            "enrol",
            self.run,
            learner,
            secrets.token_hex(8),
            settings=self._settings,
            time=int(self._clock()),
            follows=self.follows,
        )
        sent = asked.sign(self.keys.identity)
        self._remember(peer, AskedPeer("enrol", learner, sent), sent)
        return sent

    def end(self, peer: str) -> bytes:
        """Tell a learner, or who sits there, that the run is over; the last model comes along."""
        learner = peer if peer in self.fold.seats else ""
        asked = Request(
            "end",
            self.run,
            learner,
            secrets.token_hex(8),
            self.fold.round,
            body=self.model.astype("<f4").tobytes(),
            time=int(self._clock()),
            published=self.fold.round,
        )
        sent = asked.sign(self.keys.identity)
        self._remember(peer, AskedPeer("end", learner), sent)
        return sent

    def round_head(self, learner: str) -> bytes:
        """The open round's request without its body, which all learners share."""
        seat = self.fold.seats[self._known(learner)]
        _, _, hashed, published = self._round()
        head = self._heads.get(learner)
        if head is not None:
            return head
        asked = Request(
            "round",
            self.run,
            learner,
            secrets.token_hex(8),
            seat.round,
            seat.accepted,
            time=int(self._clock()),
            epoch=seat.epoch,
            published=published,
        )
        head = self._heads[learner] = asked.sign_head(self.keys.identity, hashed)
        self._outstanding[learner].add(digest(head))
        return head

    @property
    def round_body(self) -> bytes:
        """x^r, and the published model where that is another; a hundred times a run, since it doubles what is sent."""
        return self._round()[1]

    def _round(self) -> tuple[FoldState, bytes, str, int | None]:
        fold = self.fold
        if self._body is None or self._body[0] is not fold.state:
            self._heads = {}
            body, published = fold.x.astype("<f4").tobytes(), fold.published.astype("<f4").tobytes()
            told: int | None = fold.round
            if body != published:
                every = max(1, min(self.terms.rounds // _PUBLISHED_SENT, _PUBLISHED_SENT))
                body, told = (body + published, fold.round) if fold.round % every == 0 else (body, None)
            self._body = (fold.state, body, body_hash(body), told)
        return self._body

    def _remember(self, peer: str, asked: AskedPeer, sent: bytes) -> None:
        kept = self._asked.setdefault(peer, {})
        kept[digest(sent)] = asked
        if len(kept) > _REQUESTS_KEPT:
            del kept[next(iter(kept))]  # the oldest

    def forget(self, peer: str) -> None:
        """What this peer was asked about itself is no longer to be answered."""
        self._asked.pop(peer, None)

    # --- replies

    def accept(self, data: Buffer, sender: str | None = None) -> Accepted:
        """Take a learner's reply.

        Args:
            data: the bytes that came back.
            sender: who sent them by the transport's own word: a learner's name, or the place that was given to
                ``enrol``. Needed where messages are not signed.

        Returns:
            What it was; a refusal says why.

        Raises:
            ProtocolError: a message that must not be acted on; nothing was done but that its learner may be
                asked anew, or its seat held (`OutOfBounds`).
            InputError: a release of unknown form.

        """
        return self.take(self.read(data, sender), sender)

    def read(self, data: Buffer, sender: str | None = None) -> Reply:
        """Check that a reply is from a known learner, signed, and answers something that was asked."""
        if len(data) > self.largest_reply:
            raise ProtocolError(f"a reply of {len(data)} bytes", f"at most {self.largest_reply} are read")
        name = Reply.claimed_learner(data)
        if name not in self.keys.learners:
            raise ProtocolError(f"a reply from {name!r}, who is not enrolled", NO_PLACE)
        if sender is None and not self.keys.signed:
            raise InputError("sender", None, "who sent the message", "the transport must say it, or use keys")
        if not self.keys.signed and self.senders.get(name, sender) != sender:
            raise ProtocolError(
                f"a message of learner {name!r} from another sender than its first",
                "where messages are not signed, a name belongs to who took it first; Server.reset frees it",
            )
        if sender in self.keys.learners and sender != name:
            raise ProtocolError(f"learner {name!r} answers what learner {sender!r} was asked", "each has its own keys")
        reply = Reply.read(data, self.keys.learners[name])
        asked = self._asked_of(reply, sender)
        if asked is not None:
            expected = _ANSWERS[asked.kind]
        else:
            expected = self.round_answers if reply.answers in self._outstanding[name] else ()
        if reply.kind not in expected:
            raise ProtocolError(f"a reply from {name!r} to nothing that was asked", "an old message was sent again")
        return reply

    def take(self, reply: Reply, sender: str | None = None) -> Accepted:
        """Do what a reply says that `read` has checked."""
        asked = self._asked_of(reply, sender)
        if reply.kind == "ended":
            self._forget(reply, sender)
            self.ended.add(reply.learner)
            return Accepted("ended", reply.learner)
        if reply.kind == "refusal":
            return self._refusal(reply, asked)
        if asked is not None:
            return self._seat(reply, sender, asked)
        if self.finished:
            return Accepted("late", reply.learner)
        return self._absent(reply) if reply.kind == "absent" else self._release(reply)

    def _asked_of(self, reply: Reply, sender: str | None) -> AskedPeer | None:
        """What it answers, of what its place or its learner was asked about itself."""
        peers = [reply.learner] if sender is None else [sender, reply.learner]
        return next((asked for peer in peers if (asked := self._asked.get(peer, {}).get(reply.answers))), None)

    def _forget(self, reply: Reply, sender: str | None) -> None:
        """Only of the place that answered: another may claim to be the same learner, and is then told so."""
        for peer in {reply.learner, sender or reply.learner}:
            if reply.answers in self._asked.get(peer, {}):
                self.forget(peer)

    def _seat(self, reply: Reply, sender: str | None, asked: AskedPeer) -> Accepted:
        name, facts = reply.learner, reply.facts
        unlike = differences(self._settings, facts["settings"])
        if unlike:
            both = both_sides(unlike)
            self.refused[name] = f"{name}: another plan ({both})"
            raise OtherTerms(f"learner {name!r} has another plan ({both})", SAME_TERMS)
        try:
            self.fold.enrol(name, facts["epoch"], facts["round"])
        except ProtocolError as error:
            if self.fold.seats[name].asked:
                self.refused[name] = f"{name}: {error.what}"
            raise
        self._forget(reply, sender)
        if sender is not None and not self.keys.signed:
            self.senders[name] = sender
        self.refused.pop(name, None)
        self._heads.pop(name, None)
        self.seated.add(name)
        return Accepted("enrolled", name, request=asked.sent)

    def _release(self, reply: Reply) -> Accepted:
        name = reply.learner
        try:
            if not self.fold.accept(name, reply.body, reply.hashed_body):
                return Accepted("repeated", name)
        except OutOfBounds:
            self._heads.pop(name, None)
            raise
        except OtherEpoch:  # it has begun another: ask who it is now
            self.unseat(name)
            self.refusals[name] += 1
            raise
        self.refusals.pop(name, None)
        self.absent.discard(name)
        self._outstanding[name].clear()
        return Accepted("release", name)

    def _absent(self, reply: Reply) -> Accepted:
        name = reply.learner
        if name not in self._heads or reply.answers != digest(self._heads[name]):
            return Accepted("late", name)  # to an earlier round
        self.absent.add(name)
        self.refusals.pop(name, None)
        return Accepted("absent", name)

    def _refusal(self, reply: Reply, asked: AskedPeer | None) -> Accepted:
        """A learner may have come back in another epoch: after a first refusal it is asked who it is."""
        name, why = reply.learner, shown(str(reply.facts["why"]), _LONGEST_REASON)
        if asked is not None and asked.kind == "end":
            return Accepted("refusal", name, why)
        self.refusals[name] += 1
        if self.refusals[name] > 1 or asked is not None:
            self.refused[name] = f"{name}: {why}"
        self.unseat(name)
        return Accepted("refusal", name, why)

    # --- rounds

    def close_round(self) -> ClosedRound:
        """Make the next model of the releases that came; learners that did not answer are left for the next round.

        Raises:
            InputError: all rounds are closed, or fewer answered than the plan's quorum.

        """
        if self.finished:
            raise InputError(
                "round", self.round, f"a run with rounds left; this one had {self.rounds}", "begin another run"
            )
        if self.fold.answered_count < self.needed:
            raise InputError(
                "learners",
                ", ".join(self.answered) or "none",
                f"at least {self.needed} that have answered in round {self.round} (federation.quorum)",
                "; ".join(self.refused[name] for name in sorted(self.refused)) or "ask the others again",
            )
        closed = self.fold.close_round()
        self.absent = set()
        return closed

    def check_possible(self) -> None:
        """Refuse to wait for a run that cannot begin: too few learners are left that have not refused."""
        n, needed = self.plan.learning.learners, self.needed
        if self.fold.round == 0 and self.refused and n - len(self.refused) < needed:
            why = "; ".join(self.refused[name] for name in sorted(self.refused))
            raise ProtocolError(
                f"{len(self.refused)} of {n} learners cannot take part ({why})",
                f"a round needs {needed}: repair them, then start the server again",
            )

    def unseat(self, learner: str) -> None:
        """Ask this learner who it is before it is asked for a round again."""
        self.seated.discard(learner)
        self._heads.pop(learner, None)

    def void(self, learner: str, why: str = "by the operator") -> None:
        """Never ask this learner again; its weight stays 1/n."""
        self.fold.void(self._known(learner), why)
        self.unseat(learner)

    def reset(self, learner: str) -> None:
        """Take this learner at its next enrolment as it is."""
        self.fold.reset(self._known(learner))
        self.refused.pop(learner, None)
        self.senders.pop(learner, None)
        self.unseat(learner)

    def _known(self, learner: str) -> str:
        if learner not in self.fold.seats:
            raise UnknownName("learner", learner, sorted(self.fold.seats))
        return learner

    # --- a checkpoint

    def to_bytes(self) -> bytes:
        """All that the server must not forget, in the open round too; it holds no keys and no data of clients."""
        from veilstream.federation.server.server_state import pack

        return pack(self)

    @classmethod
    def from_bytes(
        cls,
        plan: Plan,
        state: bytes,
        keys: ServerKeys | Path | str | None = None,
        *,
        task: Task | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """A server as it stood; the plan and the keys are those that it was made with.

        Raises:
            InputError: for bytes that are damaged, or of another plan, or of other learners than have keys.

        """
        from veilstream.federation.server.server_state import unpack

        return unpack(cls, plan, state, keys, task, clock)
