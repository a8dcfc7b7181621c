"""The server's side of Algorithm 1, and nothing else: messages in, models out.

    fold = ServerFold(terms, x0, ["north", "south"])
    fold.announce("north")            its round, the model, what was accepted from it last
    fold.accept("north", payload)     the difference to its last prefix counts in this round
    fold.close_round()                x^{r+1}; fold.published is what leaves

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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import Message, decode
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.protocol.bounds import OutOfBounds, ReleaseBounds, largest_of, norm
from veilstream.federation.protocol.combine import Combine
from veilstream.federation.protocol.last_message import InMemory, LastMessage
from veilstream.federation.protocol.messages import Buffer, Sum
from veilstream.learning.algorithm import next_model, step_size
from veilstream.learning.telemetry_estimates import Span

if TYPE_CHECKING:
    from veilstream.deployment.terms import Terms


Floats = NDArray[np.float64]
Increment = NDArray[np.signedinteger]

SeatState = Literal["new", "open", "base", "reset", "held", "void"]
"""new: not enrolled in this run yet, so at any epoch. open: as usual. reset: the next enrolment is
taken as it is. base: its next release says where it stands, and adds nothing. held: not asked until
the operator decides. void: never asked again."""


@dataclass
class Seat:
    """A learner, as the server knows it."""

    name: str
    kept: LastMessage
    epoch: int = 0
    round: int = 0
    """Its own next round."""
    accepted: tuple[int, str] | None = None
    """Round and hash of its last accepted message."""
    state: SeatState = "new"
    why: str = ""
    """Of a seat that is held or void."""

    @property
    def asked(self) -> bool:
        """Whether this learner is asked for rounds."""
        return self.state not in ("held", "void")

    @property
    def prefix(self) -> NDArray[np.int64]:
        """Sum of its noisy steps so far, in units of the grid, as last accepted."""
        return self.kept.prefix()


@dataclass(frozen=True)
class Announcement:
    """What one learner is asked."""

    round: int
    """The learner's own: it counts those it took part in."""
    accepted: tuple[int, str] | None
    x: NDArray[np.float32]


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
    """What all messages that count have added to the sums of telemetry, in the units of gradients;
    None where the plan has none."""
    spans: Mapping[str, Span] = field(default_factory=dict)
    """Of each learner whose message counts: which of its own rounds it adds. None of them, from a
    round to the same, where it only said where it stands: its noise begins anew there."""


@dataclass(frozen=True)
class ServerMemory:
    """What a server with momentum or forgetting holds beside x."""

    start: NDArray[np.float32] | None = None
    """x⁰, the run's first model: what it forgets towards."""
    velocity: Floats | None = None
    """m."""


class OtherEpoch(ProtocolError):
    """A release of an epoch that the learner was not enrolled in: ask who it is now."""


class ServerFold:
    """x, each learner's last accepted prefix, and the round in flight."""

    def __init__(
        self,
        terms: Terms,
        x0: NDArray[np.float32],
        learners: Iterable[str],
        combine: Combine | None = None,
        kept: Mapping[str, LastMessage] | None = None,
        *,
        bounded: bool = True,
    ) -> None:
        """``kept`` is where each learner's last message goes; None: in memory.

        ``bounded=False`` takes releases of any size: for audits, which look at what is wrong.
        """
        x = x0.astype(np.float64)
        memory = ServerMemory(x0, np.zeros(len(x)) if terms.method.memory[0] else None)
        seats = {name: Seat(name, InMemory(terms.release_dim) if kept is None else kept[name]) for name in learners}
        self._set(terms, 0, x, x.copy(), seats, combine, bounded, memory)

    @classmethod
    def resumed(
        cls,
        terms: Terms,
        round_: int,
        x: Floats,
        average: Floats,
        seats: dict[str, Seat],
        combine: Combine | None = None,
        memory: ServerMemory | None = None,
    ) -> ServerFold:
        """As it stood between two rounds; ``memory`` where the method has any."""
        fold = cls.__new__(cls)
        fold._set(terms, round_, x, average, seats, combine, True, memory or ServerMemory())
        return fold

    def _set(
        self,
        terms: Terms,
        round_: int,
        x: Floats,
        average: Floats,
        seats: dict[str, Seat],
        combine: Combine | None,
        bounded: bool,
        memory: ServerMemory,
    ) -> None:
        momentum, forgets = terms.method.memory
        if (momentum and memory.velocity is None) or (forgets and memory.start is None):
            raise InputError(
                "run folder",
                "no momentum, or no first model",
                "what the plan's server remembers",
                "go on with the plan that the run was begun with",
            )
        self._memory = memory
        if len(x) != terms.dim:
            raise InputError("x", f"{len(x)} numbers", f"{terms.dim}", "check the task")
        self.terms = terms
        self._round, self._x, self._average, self._seats = round_, x, average, seats
        self._combine = combine or Combine()
        self.bounds = ReleaseBounds.of(terms) if bounded else None
        self._total = np.zeros(terms.release_dim, np.int64)  # of this round's increments, for a mean
        self._increments: dict[str, Increment] = {}  # each of them, for what is not a mean
        self._lengths: dict[str, float] = {}  # of those that count
        self._sums: list[tuple[tuple[str, ...], NDArray[np.int64], float]] = []  # of aggregators
        self._accepted: dict[str, tuple[int, int, str]] = {}
        self._spans: dict[str, Span] = {}

    # --- where it stands -------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds that are closed."""
        return self._round

    @property
    def finished(self) -> bool:
        """Whether all rounds are closed."""
        return self._round == self.terms.rounds

    @property
    def x(self) -> Floats:
        """x^r, which learners are asked to start from."""
        return self._x

    @property
    def average(self) -> Floats:
        """x^r itself, or the plan's average of all so far."""
        return self._average

    @property
    def velocity(self) -> Floats | None:
        """m, where the server has momentum."""
        return self._memory.velocity

    @property
    def published(self) -> NDArray[np.float32]:
        """The model that leaves: `average`, in the form in which it is kept and served."""
        return self._average.astype(np.float32)

    @property
    def seats(self) -> Mapping[str, Seat]:
        """Every learner that the plan names."""
        return self._seats

    @property
    def answered(self) -> tuple[str, ...]:
        """Whose message counts in the round in flight."""
        return tuple(sorted(self._accepted))

    @property
    def answered_count(self) -> int:
        """How many."""
        return len(self._accepted)

    @property
    def missing(self) -> tuple[str, ...]:
        """Whose does not, so far."""
        return tuple(sorted(set(self._seats) - set(self._accepted)))

    # --- a round ---------------------------------------------------------------------------------

    def announce(self, learner: str) -> Announcement:
        """What this learner is asked: its own next round, from the model as it is now."""
        seat = self._seats[learner]
        return Announcement(seat.round, seat.accepted, self._x.astype(np.float32))

    def enrol(self, learner: str, epoch: int, round_: int) -> None:
        """A learner says where it stands.

        The first time in a run it may be in any epoch. Then only the next one is taken: its epoch
        has ended, or its store was lost, and its sums begin at zero again. Whoever has stolen a key
        can therefore not put a seat beyond its learner's reach.

        Raises:
            ProtocolError: it stands behind what it had come to, so its store is an old copy; it is
                more than one epoch ahead; or its seat is void.

        """
        seat = self._seats[learner]
        if seat.state == "void":
            raise ProtocolError(
                f"learner {learner!r}, whose seat is void ({seat.why})",
                f"the server's operator may take it in again with --reset {learner}",
            )
        if seat.state == "reset":
            self._begin(seat, epoch)
            seat.round, seat.state = round_, "base" if round_ else "open"
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

        ``hashed`` is its SHA-256, where it has been computed.

        Raises:
            InputError: these bytes are no message.
            OtherEpoch: the learner has begun another epoch and must be enrolled in it first.
            OutOfBounds: a message that no learner of this plan makes; its seat is held.
            ProtocolError: a message that was not asked for, or a second one for one round.

        """
        seat, message = self._seats[learner], decode(payload, hashed)
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
        if learner in self._lengths:
            raise ProtocolError(
                f"a second release of {learner!r} in one round of the server",
                "it is asked for its next one when this round is closed",
            )
        if seat.accepted is not None and not seat.kept.held:
            raise ProtocolError(
                f"a release of {learner!r}, whose last message an aggregator holds",
                f"let it connect there; or start the server with --reset {learner}",
            )
        increment, length = self._increment(seat, message)
        seat.kept.keep(payload)  # first: it may fail, and then nothing of the message counts
        if self._combine.is_mean:
            self._total += increment
        else:
            self._increments[learner] = increment
        self._lengths[learner] = length
        first = seat.round + 1 if seat.state == "base" else _counted(seat)
        self._spans[learner] = (seat.epoch, first, seat.round + 1)
        self._accepted[learner] = (message.epoch, message.round, message.hash)
        seat.accepted = (message.round, message.hash)
        seat.round, seat.state = seat.round + 1, "open"
        return True

    def accept_sum(self, said: Sum) -> bool:
        """Count what several learners' messages add, summed up on the way; False for one again.

        What the aggregator was sent is checked there; here, that each part begins where its seat
        stands, and that the sum is no longer than all of them could be together.

        Raises:
            ProtocolError: a part that was not asked for or begins elsewhere; then none counts.
            OutOfBounds: a sum that no learners of this plan make.

        """
        seats = [self._seats[part.learner] for part in said.parts]
        ends = [(part.round, part.hash) for part in said.parts]
        if all(seat.accepted == end for seat, end in zip(seats, ends, strict=True)):
            return False
        bound, most = 0.0, 0.0
        for part, seat in zip(said.parts, seats, strict=True):
            asked = (seat.epoch, seat.round, seat.accepted)
            if (part.epoch, part.round, part.base) != asked or not seat.asked:
                refusal = ProtocolError if part.epoch == seat.epoch else OtherEpoch
                raise refusal(
                    f"a sum of {said.aggregator!r} with epoch {part.epoch}, round {part.round} of {part.learner!r}",
                    f"epoch {seat.epoch}, round {seat.round} was asked for",
                )
            if part.learner in self._lengths or seat.round >= self.terms.rounds:
                raise ProtocolError(
                    f"a second release of {part.learner!r} in one round of the server",
                    "it is asked for its next one when this round is closed",
                )
            if self.bounds is not None:
                bound += self.bounds.increment(_counted(seat), seat.round + 1)
                most += self.bounds.metric(_counted(seat), seat.round + 1)
        if len({part.learner for part in said.parts}) < len(seats) or not (
            self._combine.is_mean and len(said.total) == 8 * self.terms.release_dim
        ):
            raise ProtocolError(f"a sum of {said.aggregator!r} of another form", "check its plan and version")
        total = np.frombuffer(said.total, "<i8").astype(np.int64)
        length = norm(total)
        if self.bounds is not None and not length <= bound:
            raise OutOfBounds(
                f"a sum of {said.aggregator!r} of {length:.0f} units, over {bound:.0f}, which "
                f"{len(seats)} learners could add together",
                "look at the aggregator's machine",
            )
        told = largest_of(total[self.terms.dim :])
        if self.bounds is not None and told > most:
            raise OutOfBounds(
                f"a sum of {said.aggregator!r} that adds {told} units to telemetry, over "
                f"{most:.0f}, which {len(seats)} learners could add together",
                "look at the aggregator's machine",
            )
        self._total += total
        self._sums.append((tuple(part.learner for part in said.parts), total, length))
        for part, seat in zip(said.parts, seats, strict=True):
            self._lengths[part.learner] = 0.0  # together they are in `_sums`
            base = part.base is None and part.round > 0  # it only said where it stands
            first = seat.round + 1 if base else _counted(seat)
            self._spans[part.learner] = (seat.epoch, first, seat.round + 1)
            self._accepted[part.learner] = (part.epoch, part.round, part.hash)
            seat.kept.forget()
            seat.accepted = (part.round, part.hash)
            seat.round, seat.state = seat.round + 1, "open"
        return True

    def _increment(self, seat: Seat, message: Message) -> tuple[Increment, float]:
        """What a message adds to the last one, and how long that is, in units of the grid.

        Nothing if it only says where it stands. One that is out of bounds holds its seat.
        """
        rounds, bounds, before = seat.round + 1, self.bounds, _counted(seat)
        base = seat.state == "base"
        try:
            if bounds is not None:
                bounds.check_prefix(seat.name, rounds, message.prefix)
            increment = message.prefix - (message.prefix if base else seat.prefix)
            length = norm(increment)
            if bounds is not None and not base:
                bounds.check_increment(seat.name, before, rounds, increment, length)
        except OutOfBounds as error:
            seat.state, seat.why = "held", error.what
            raise
        if self._combine.is_mean or bounds is None or bounds.increment(before, rounds) >= 2.0**31:
            return increment, length
        return increment.astype(np.int32), length  # each is held until the round is closed

    def _leave_out_worst(self) -> tuple[tuple[str, ...], float]:
        """Undo the longest increment; whose it was, and how long.

        Of a sum, all that are in it: an equal share of its length counts for each.
        """
        worst = max(self._lengths, key=self._lengths.__getitem__)
        length = self._lengths[worst]
        longest = max(self._sums, key=lambda entry: entry[2] / len(entry[0]), default=None)
        if longest is not None and longest[2] / len(longest[0]) >= length:
            self._sums.remove(longest)
            self._total -= longest[1]
            for name in longest[0]:
                del self._lengths[name]
            return longest[0], longest[2]
        del self._lengths[worst]
        if not self._combine.is_mean:
            self._increments.pop(worst)
        elif length:
            self._total -= self._seats[worst].kept.increment()
        return (worst,), length

    def close_round(self) -> ClosedRound:
        """x^{r+1} = x^r - η·η_g/n·Σ increments (eq-comp-alg, η̃·ĝ with ĝ the mean over τ).

        Learners refuse a model beyond `model_norm_cap`, so one is never made: the longest
        increments are left out until x stays within, and their seats are held.
        """
        r, method = self._round, self.terms.method
        (x, memory), dropped = self._moved(), []
        while not self._within(x) and self._lengths:
            names, length = self._leave_out_worst()
            for name in names:
                dropped.append(name)
                self._spans.pop(name, None)
                seat = self._seats[name]
                seat.state, seat.why = (
                    "held",
                    (
                        f"its release of round {seat.round - 1}, of norm "
                        f"{length * self.terms.grid.step:.3g}, would have led x "
                        f"beyond learning.model_norm_cap = {self.terms.model_norm_cap:g}"
                    ),
                )
            x, memory = self._moved()
        self._x, self._memory = x, memory
        weight = method.blend(r)
        self._average = (1.0 - weight) * self._average + weight * self._x
        missing = tuple(sorted(set(self._seats) - set(self._accepted)))
        closed = ClosedRound(r, self._accepted, missing, tuple(dropped), self._telemetry(), self._spans)
        self._round, self._accepted, self._spans = r + 1, {}, {}
        self._total = np.zeros_like(self._total)
        self._increments, self._lengths, self._sums = {}, {}, []
        return closed

    def _moved(self) -> tuple[Floats, ServerMemory]:
        """x^{r+1} from the increments that count, and what is remembered with it."""
        terms, method = self.terms, self.terms.method
        if self._combine.is_mean or not self._increments:
            direction = self._total[: terms.dim] / terms.learners
        else:
            moves = [increment[: terms.dim] for increment in self._increments.values()]
            direction = self._combine(moves, terms.learners)
        size = step_size(method.local_step_size * method.server_step_size, method.step_decay, self._round)
        memory = self._memory
        after, velocity = next_model(
            self._x,
            direction * terms.grid.step,
            size,
            terms.projection_radius,
            velocity=memory.velocity,
            momentum=method.momentum,
            start=memory.start if method.memory[1] else None,
            forgetting=method.forgetting,
        )
        return after, ServerMemory(memory.start, velocity)

    def _telemetry(self) -> Floats | None:
        """The sum of what the messages that count have added.

        Also where gradients are combined by a median or a trimmed mean: those are biased, and
        nobody knows their noise.
        """
        terms = self.terms
        if terms.telemetry is None:
            return None
        units = self._total[terms.dim :].copy()
        for increment in self._increments.values():
            units += increment[terms.dim :]
        sums: Floats = units.astype(np.float64) * terms.grid.step
        return sums

    def _within(self, x: Floats) -> bool:
        """Whether learners will take it: finite as float32, and within the cap."""
        with np.errstate(over="ignore", invalid="ignore"):
            sent = x.astype(np.float32).astype(np.float64)
            return bool(np.sqrt(np.square(sent).sum()) <= self.terms.model_norm_cap)

    # --- what the server's operator decides between rounds ---------------------------------------

    def roll_back(self, model: NDArray[np.float32]) -> None:
        """Go on from a model that was published; learners' rounds and prefixes stay as they are.

        Momentum begins anew; what the server forgets towards is still the run's first model.
        """
        self._x = model.astype(np.float64)
        self._average = self._x.copy()
        if self._memory.velocity is not None:
            self._memory = ServerMemory(self._memory.start, np.zeros_like(self._x))

    def void(self, learner: str, why: str) -> None:
        """Never ask this learner again; its weight stays 1/n."""
        seat = self._seats[learner]
        seat.state, seat.why = "void", why

    def reset(self, learner: str) -> None:
        """Take this learner as it is at its next enrolment, whatever its epoch and round.

        If it is past its first round, its first release only says where it stands: what was counted
        before came from somebody else, and no difference to it means anything.
        """
        seat = self._seats[learner]
        seat.state, seat.why = "reset", ""


def _counted(seat: Seat) -> int:
    """How many of a learner's rounds its last accepted message covers."""
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
