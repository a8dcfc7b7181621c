"""The server's side of Algorithm 1, and nothing else: messages in, models out.

Learners have constant weights, 1/n of those that the plan names, whoever answers: otherwise the
correlated noise would no longer cancel. A learner's message is the prefix sum of all its noisy
steps; the fold keeps the last one that it accepted and takes the difference, so a reply that was
lost or late is made good by the next. A learner's own round advances only when it takes part.

A learner may lie. A release that clipping and noise do not allow (`bounds`) is refused; a round
after which learners would refuse x is closed without those that moved it most. Both hold the
learner's seat: it is not asked again until the server's operator has it reset or void. x is the
server's to choose, so nothing of this costs privacy.

No clocks, sockets or files: the coordinator, the audit, studies and tests drive this one object.
Nothing here imports noise or clients' data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import Message, decode
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.protocol.bounds import OutOfBounds, ReleaseBounds, norm
from veilstream.federation.protocol.messages import Buffer
from veilstream.learning.algorithm import next_model, step_size
from veilstream.learning.telemetry_estimates import Span

if TYPE_CHECKING:
    from veilstream.deployment.terms import Terms


Floats = NDArray[np.float64]

SeatState = Literal["new", "open", "base", "reset", "held", "void"]
"""new: not enrolled in this run yet, so at any epoch. open: as usual. reset: the next enrolment is
taken as it is. base: its next release says where it stands, and adds nothing. held: not asked until
the operator decides. void: never asked again."""


class LastMessage(Protocol):
    """Where the last accepted message of one learner is kept."""

    def prefix(self) -> NDArray[np.int64]:
        """The message's; zeros without one."""

    def keep(self, payload: Buffer) -> None:
        """Take this message for the last one."""

    def increment(self) -> NDArray[np.int64]:
        """What the last message has added to the one before it, also if it is forgotten since."""

    def forget(self) -> None:
        """There is none any more: a new epoch's sums begin at zero."""


class InMemory:
    """A `LastMessage` in memory: for studies, the audit and tests."""

    def __init__(self, dim: int) -> None:
        self._prefix = self._newest = self._before = self._nothing = np.zeros(dim, np.int64)

    @classmethod
    def of(cls, prefix: NDArray[np.int64], newest: NDArray[np.int64], before: NDArray[np.int64]) -> InMemory:
        """As another was when it was asked for its `numbers`."""
        kept = cls(len(prefix))
        kept._prefix, kept._newest, kept._before = prefix, newest, before
        return kept

    @property
    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The last message's, those of the one that came last (also if it is forgotten since), and the one before."""
        return self._prefix, self._newest, self._before

    def prefix(self) -> NDArray[np.int64]:
        """The message's; zeros without one."""
        return self._prefix

    def keep(self, payload: Buffer) -> None:
        """Take this message for the last one."""
        self._before, self._prefix = self._prefix, decode(payload).prefix
        self._newest = self._prefix

    def increment(self) -> NDArray[np.int64]:
        """What the last message has added to the one before it."""
        return self._newest - self._before

    def forget(self) -> None:
        """There is none any more."""
        self._prefix = self._nothing


@dataclass
class Seat:
    """A learner, as the server knows it."""

    name: str
    kept: LastMessage
    epoch: int = 0
    round: int = 0
    accepted: tuple[int, str] | None = None
    """Round and hash of its last accepted message."""
    state: SeatState = "new"
    why: str = ""
    """Why the seat is held or void."""

    @property
    def asked(self) -> bool:
        """Whether this learner is asked for rounds."""
        return self.state not in ("held", "void")

    @property
    def prefix(self) -> NDArray[np.int64]:
        """Sum of its noisy steps so far, in units of the grid, as last accepted."""
        return self.kept.prefix()


@dataclass(frozen=True)
class ClosedRound:
    """What a round was made of."""

    round: int
    accepted: dict[str, tuple[int, int, str]]
    """Epoch, round and hash of each learner's message."""
    missing: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    """Whose message was accepted and does not count, since x would have left its bounds."""
    telemetry: Floats | None = None
    """What all messages that count have added to the sums of telemetry, in units of gradients."""
    spans: Mapping[str, Span] = field(default_factory=dict)
    """For each learner whose message counts: which of its own rounds it adds. None of them, from a
    round to the same, where it only said where it stands: its noise begins anew there."""


@dataclass(frozen=True)
class FoldState:
    """The model between two rounds."""

    round: int
    x: Floats
    """x^r, which learners are asked to start from."""
    average: Floats
    """What is published: x^r itself, or the plan's average of all so far."""
    start: NDArray[np.float32]
    """x⁰, the run's first model: what a server that forgets is drawn to."""


@dataclass(frozen=True)
class _Counted:
    message: tuple[int, int, str]
    span: Span
    length: float
    """Norm of what it adds, in units of the grid."""


@dataclass(frozen=True)
class InFlight:
    """What the open round has come to."""

    total: NDArray[np.int64]
    counted: Mapping[str, Sequence[Any]]
    """For each learner whose message counts: epoch, round and hash; its span; and the norm of what it adds."""


class OtherEpoch(ProtocolError):
    """A release of an epoch that the learner was not enrolled in: ask who it is now."""


class ServerFold:
    """x, each learner's last accepted prefix, and the round in flight."""

    def __init__(
        self,
        terms: Terms,
        x0: NDArray[np.float32],
        learners: Iterable[str],
        kept: Mapping[str, LastMessage] | None = None,
        *,
        bounded: bool = True,
    ) -> None:
        """``kept``: where last messages go (None: memory); ``bounded=False`` takes any size, for audits."""
        x = x0.astype(np.float64)
        seats = {name: Seat(name, InMemory(terms.release_dim) if kept is None else kept[name]) for name in learners}
        self._set(terms, FoldState(0, x, x.copy(), x0), seats, bounded)

    @classmethod
    def resumed(cls, terms: Terms, state: FoldState, seats: dict[str, Seat]) -> ServerFold:
        """As it stood between two rounds."""
        fold = cls.__new__(cls)
        fold._set(terms, state, seats, True)
        return fold

    def _set(self, terms: Terms, state: FoldState, seats: dict[str, Seat], bounded: bool) -> None:
        if len(state.x) != terms.dim:
            raise InputError("x", f"{len(state.x)} numbers", f"{terms.dim}", "check the task")
        self.terms, self.state, self.seats = terms, state, seats
        self.bounds = ReleaseBounds.of(terms) if bounded else None
        self._total = np.zeros(terms.release_dim, np.int64)  # of this round's increments
        self._counted: dict[str, _Counted] = {}

    @property
    def round(self) -> int:
        """Rounds that are closed."""
        return self.state.round

    @property
    def finished(self) -> bool:
        """Whether all rounds are closed."""
        return self.round == self.terms.rounds

    @property
    def x(self) -> Floats:
        """x^r, which learners are asked to start from."""
        return self.state.x

    @property
    def average(self) -> Floats:
        """x^r itself, or the plan's average of all so far."""
        return self.state.average

    @property
    def published(self) -> NDArray[np.float32]:
        """The model that leaves: `average`, in the form in which it is kept and served."""
        return self.average.astype(np.float32)

    @property
    def answered(self) -> tuple[str, ...]:
        """Whose message counts in the round in flight."""
        return tuple(sorted(self._counted))

    @property
    def answered_count(self) -> int:
        """How many messages count so far."""
        return len(self._counted)

    @property
    def in_flight(self) -> InFlight:
        """The open round, to be kept and given to `go_on`."""
        return InFlight(self._total, {n: (c.message, c.span, c.length) for n, c in self._counted.items()})

    def go_on(self, flight: InFlight) -> None:
        """Go on in the middle of a round, as `in_flight` was."""
        self._total = flight.total.copy()
        self._counted = {
            name: _Counted((m[0], m[1], m[2]), (s[0], s[1], s[2]), float(length))
            for name, (m, s, length) in flight.counted.items()
        }

    @property
    def missing(self) -> tuple[str, ...]:
        """Whose does not, so far."""
        return tuple(sorted(set(self.seats) - set(self._counted)))

    def enrol(self, learner: str, epoch: int, round_: int) -> None:
        """A learner says where it stands.

        The first time in a run it may be in any epoch. Then only the next one is taken: its epoch
        has ended, or its store was lost, and its sums begin at zero again. A thief of a key
        can therefore not put a seat beyond its learner's reach. A learner may be one round ahead, since
        its last release may have been lost on the way; further ahead, this server has forgotten rounds.
        """
        seat = self.seats[learner]
        if seat.state == "void":
            raise ProtocolError(
                f"learner {learner!r}, whose seat is void ({seat.why})",
                f"the server's operator may take it in again with --reset {learner}",
            )
        known = seat.round if epoch == seat.epoch else 0
        if seat.state == "reset":
            self._begin(seat, epoch)
            seat.round, seat.state = round_, "base" if round_ else "open"
        elif round_ > known + 1 and (epoch in (seat.epoch, seat.epoch + 1) or seat.state == "new"):
            raise ProtocolError(
                f"this server's folder (round {known}) is older than learner {learner!r} (round {round_})",
                f"restore the newest copy of the run's folder, or start with --reset {learner}",
            )
        elif epoch == seat.epoch + 1 or (seat.state == "new" and epoch > seat.epoch):
            self._begin(seat, epoch)
        elif epoch > seat.epoch:
            raise ProtocolError(
                f"learner {learner!r} is at epoch {epoch}, and had come to epoch {seat.epoch}",
                f"only the next epoch is taken; if it is right, start the server with --reset {learner}",
            )
        elif epoch < seat.epoch or round_ < seat.round:
            raise ProtocolError(
                f"learner {learner!r} is at epoch {epoch}, round {round_}, and had come to epoch "
                f"{seat.epoch}, round {seat.round}",
                "its store is an old copy: put the newest one back; if its key was stolen and used "
                f"elsewhere, give it new keys and start the server with --reset {learner}",
            )
        elif seat.state == "new":
            seat.state = "open"

    def _begin(self, seat: Seat, epoch: int) -> None:
        seat.epoch, seat.round, seat.accepted = epoch, 0, None
        seat.kept.forget()
        if seat.asked:
            seat.state = "open"

    def accept(self, learner: str, payload: Buffer, hashed: str | None = None) -> bool:
        """Count a message in this round; False for one that was counted before.

        One out of bounds holds its seat; `OtherEpoch`: the learner must be enrolled in its new epoch first.
        """
        seat, message = self.seats[learner], decode(payload, hashed)
        if (message.epoch, message.round) < (seat.epoch, seat.round):
            _check_same(seat, message)
            return False
        steps = (seat.round + 1) * self.terms.local_steps
        asked = (seat.epoch, seat.round, self.terms.grid.step, self.terms.release_dim, steps)
        given = (message.epoch, message.round, message.grid, len(message.prefix), message.steps)
        if given != asked or (self.bounds and seat.round >= self.terms.rounds):
            refusal = ProtocolError if message.epoch == seat.epoch else OtherEpoch
            raise refusal(
                f"a release of epoch {message.epoch}, round {message.round} from {learner!r}",
                f"epoch {seat.epoch}, round {seat.round} was asked for",
            )
        if not seat.asked:
            raise ProtocolError(
                f"a release of {learner!r}, whose seat is {seat.state} ({seat.why})",
                f"start the server with --reset {learner} or --void {learner}",
            )
        if learner in self._counted:
            raise ProtocolError(
                f"a second release of {learner!r} in one round of the server",
                "it is asked for its next one when this round is closed",
            )
        increment, length = self._increment(seat, message)
        seat.kept.keep(payload)  # first: it may fail, and then nothing of the message counts
        self._total += increment
        first = seat.round + 1 if seat.state == "base" else _rounds_counted(seat)
        told = (message.epoch, message.round, message.hash)
        self._counted[learner] = _Counted(told, (seat.epoch, first, seat.round + 1), length)
        seat.accepted = (message.round, message.hash)
        seat.round, seat.state = seat.round + 1, "open"
        return True

    def _increment(self, seat: Seat, message: Message) -> tuple[NDArray[np.int64], float]:
        """What a message adds to the last one, and its norm in grid units; one out of bounds holds its seat."""
        rounds, bounds = seat.round + 1, self.bounds
        base = seat.state == "base"
        try:
            if bounds is not None:
                bounds.check_prefix(seat.name, rounds, message.prefix)
            increment = message.prefix - (message.prefix if base else seat.prefix)
            length = norm(increment)
            if bounds is not None and not base:
                bounds.check_increment(seat.name, _rounds_counted(seat), rounds, increment, length)
        except OutOfBounds as error:
            seat.state, seat.why = "held", error.what
            raise
        return increment, length

    def close_round(self) -> ClosedRound:
        """x^{r+1} = x^r - η·η_g/n·Σ increments (eq-comp-alg, η̃·ĝ with ĝ the mean over τ).

        Learners refuse a model beyond `model_norm_cap`, so one is never made: the longest
        increments are left out until x stays within, and their seats are held.
        """
        state, counting = self.state, dict(self._counted)
        x, dropped = self._moved(), []
        while not self._within(x) and counting:
            worst = max(counting, key=lambda name: counting[name].length)
            length = counting.pop(worst).length
            if length:
                self._total -= self.seats[worst].kept.increment()
            self._hold_dropped(self.seats[worst], length)
            dropped.append(worst)
            x = self._moved()
        weight = self.terms.method.blend(state.round)
        average = (1.0 - weight) * state.average + weight * x
        closed = ClosedRound(
            state.round,
            {name: counted.message for name, counted in self._counted.items()},
            self.missing,
            tuple(dropped),
            self._telemetry(),
            {name: counted.span for name, counted in counting.items()},
        )
        self.state = FoldState(state.round + 1, x, average, state.start)
        self._counted, self._total = {}, np.zeros_like(self._total)
        return closed

    def _hold_dropped(self, seat: Seat, length: float) -> None:
        seat.state = "held"
        seat.why = (
            f"its release of round {seat.round - 1}, of norm {length * self.terms.grid.step:.3g}, would "
            f"have led x beyond learning.model_norm_cap = {self.terms.model_norm_cap:g}"
        )

    def _moved(self) -> Floats:
        terms, method, state = self.terms, self.terms.method, self.state
        direction = self._total[: terms.dim] / terms.learners * terms.grid.step
        size = step_size(method.local_step_size * method.server_step_size, method.step_decay, state.round)
        start = state.start if method.forgets else None
        after: Floats = next_model(
            state.x, direction, size, terms.projection_radius, start=start, forgetting=method.forgetting
        )
        return after

    def _telemetry(self) -> Floats | None:
        terms = self.terms
        if terms.telemetry is None:
            return None
        sums: Floats = self._total[terms.dim :].astype(np.float64) * terms.grid.step
        return sums

    def _within(self, x: Floats) -> bool:
        """Whether learners will take it: finite as float32, and within the cap."""
        with np.errstate(over="ignore", invalid="ignore"):
            sent = x.astype(np.float32).astype(np.float64)
            return bool(np.sqrt(np.square(sent).sum()) <= self.terms.model_norm_cap)

    def roll_back(self, model: NDArray[np.float32]) -> None:
        """Go on from a published model; learners' rounds and prefixes, and the run's first model, stay."""
        x = model.astype(np.float64)
        self.state = replace(self.state, x=x, average=x.copy())

    def void(self, learner: str, why: str) -> None:
        """Never ask this learner again; its weight stays 1/n."""
        seat = self.seats[learner]
        seat.state, seat.why = "void", why

    def reset(self, learner: str) -> None:
        """Take this learner as it is at its next enrolment, whatever its epoch and round.

        If it is past its first round, its first release only says where it stands: what was counted
        before came from somebody else, and no difference to it means anything.
        """
        seat = self.seats[learner]
        seat.state, seat.why = "reset", ""


def _rounds_counted(seat: Seat) -> int:
    return 0 if seat.accepted is None else seat.accepted[0] + 1


def _check_same(seat: Seat, message: Message) -> None:
    """A round that was accepted may come again, with the same bytes."""
    if seat.accepted is None or (seat.epoch, seat.accepted[0]) != (message.epoch, message.round):
        return
    if seat.accepted[1] != message.hash:
        raise ProtocolError(
            f"learner {seat.name!r} has sent two different releases for its round {message.round}",
            "its noise may have been used twice: stop it, and look at its ledger",
        )
