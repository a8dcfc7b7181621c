"""The server's side of Algorithm 1, and nothing else: messages in, models out.

    fold = ServerFold(terms, x0, ["north", "south"])
    fold.announce("north")            its round, the model, what was accepted from it last
    fold.accept("north", payload)     the difference to its last prefix counts in this round
    fold.close_round()                x^{r+1}; fold.published is what leaves

Learners have constant weights, 1/n of those that the plan names, whoever answers: otherwise the
correlated noise would no longer cancel. A learner's message is the prefix sum of all its noisy
steps; the fold keeps the last one that it accepted and takes the difference, so a reply that was
lost or late is made good by the next. A learner's own round advances only when it takes part.

No clocks, sockets or files: the coordinator, the audit, studies and tests drive this one object.
Nothing here imports noise or clients' data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import Message, decode
from veilstream.errors import InputError, ProtocolError
from veilstream.learning.algorithm import blend, moved, step_size

if TYPE_CHECKING:
    from veilstream.deployment.terms import Terms

__all__ = [
    "Announcement",
    "ClosedRound",
    "InMemory",
    "LastMessage",
    "OtherEpoch",
    "Seat",
    "ServerFold",
]

Floats = NDArray[np.float64]


class LastMessage(Protocol):
    """Where the last accepted message of one learner is kept."""

    def prefix(self) -> NDArray[np.int64]:
        """The message's; zeros without one."""

    def keep(self, payload: bytes) -> None:
        """Take this message for the last one."""

    def forget(self) -> None:
        """There is none any more."""


class InMemory:
    """A `LastMessage` in memory: for studies, the audit and tests."""

    def __init__(self, dim: int) -> None:
        self._prefix = self._nothing = np.zeros(dim, np.int64)

    def prefix(self) -> NDArray[np.int64]:
        """The message's; zeros without one."""
        return self._prefix

    def keep(self, payload: bytes) -> None:
        """Take this message for the last one."""
        self._prefix = decode(payload).prefix

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
    """Its own next round."""
    accepted: tuple[int, str] | None = None
    """Round and hash of its last accepted message."""

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


class OtherEpoch(ProtocolError):
    """A release of an epoch that the learner was not enrolled in: ask who it is now."""


class ServerFold:
    """x, each learner's last accepted prefix, and the round in flight."""

    def __init__(
        self, terms: Terms, x0: NDArray[np.float32], learners: Iterable[str],
        kept: Mapping[str, LastMessage] | None = None,
    ) -> None:  # fmt: skip
        """``kept`` is where each learner's last message goes; None: in memory."""
        x = x0.astype(np.float64)
        seats = {
            name: Seat(name, InMemory(len(x)) if kept is None else kept[name]) for name in learners
        }
        self._set(terms, 0, x, x.copy(), seats)

    @classmethod
    def resumed(
        cls, terms: Terms, round_: int, x: Floats, average: Floats, seats: dict[str, Seat]
    ) -> ServerFold:
        """As it stood between two rounds."""
        fold = cls.__new__(cls)
        fold._set(terms, round_, x, average, seats)
        return fold

    def _set(
        self, terms: Terms, round_: int, x: Floats, average: Floats, seats: dict[str, Seat]
    ) -> None:
        if len(x) != terms.dim:
            raise InputError("x", f"{len(x)} numbers", f"{terms.dim}", "check the task")
        self.terms = terms
        self._round, self._x, self._average, self._seats = round_, x, average, seats
        self._total = np.zeros(terms.dim, np.int64)  # of this round's increments
        self._accepted: dict[str, tuple[int, int, str]] = {}

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

        One in a later epoch lost its store, or ended its epoch: its sums begin at zero again.

        Raises:
            ProtocolError: it stands behind what it had come to, so its store is an old copy.

        """
        seat = self._seats[learner]
        if epoch > seat.epoch:
            seat.epoch, seat.round, seat.accepted = epoch, 0, None
            seat.kept.forget()
        elif epoch < seat.epoch or round_ < seat.round:
            raise ProtocolError(
                f"learner {learner!r} is at epoch {epoch}, round {round_}, and had come to epoch "
                f"{seat.epoch}, round {seat.round}",
                "its store is an old copy: put the newest one back",
            )

    def accept(self, learner: str, payload: bytes) -> bool:
        """Count a message in this round; False for one that was counted before.

        Raises:
            InputError: these bytes are no message.
            OtherEpoch: the learner has begun another epoch and must be enrolled in it first.
            ProtocolError: a message that was not asked for, or a second one for one round.

        """
        seat, message = self._seats[learner], decode(payload)
        if (message.epoch, message.round) < (seat.epoch, seat.round):
            _check_same(seat, message)
            return False
        given = (message.epoch, message.round, message.grid, len(message.prefix))
        if given != (seat.epoch, seat.round, self.terms.grid.step, self.terms.dim):
            refusal = ProtocolError if message.epoch == seat.epoch else OtherEpoch
            raise refusal(
                f"a release of epoch {message.epoch}, round {message.round} from {learner!r}",
                f"epoch {seat.epoch}, round {seat.round} was asked for",
            )
        if learner in self._accepted:
            raise ProtocolError(
                f"a second release of {learner!r} in one round of the server",
                "it is asked for its next one when this round is closed",
            )
        self._total += message.prefix
        self._total -= seat.prefix
        self._accepted[learner] = (message.epoch, message.round, message.hash)
        seat.kept.keep(payload)
        seat.accepted = (message.round, message.hash)
        seat.round += 1
        return True

    def close_round(self) -> ClosedRound:
        """x^{r+1} = x^r - η·η_g/n·Σ increments (eq-comp-alg, η̃·ĝ with ĝ the mean over τ)."""
        terms, method, r = self.terms, self.terms.method, self._round
        mean = self._total * (terms.grid.step / terms.learners)
        size = step_size(method.step_size * method.server_step_size, method.step_decay, r)
        self._x = moved(self._x, mean, size, terms.projection_radius)
        weight = blend(method.averaging, r)
        self._average = (1.0 - weight) * self._average + weight * self._x
        closed = ClosedRound(r, self._accepted, self.missing)
        self._round, self._accepted = r + 1, {}
        self._total = np.zeros_like(self._total)
        return closed


def _check_same(seat: Seat, message: Message) -> None:
    """A round that was accepted may come again, with the same bytes."""
    if seat.accepted is None or (seat.epoch, seat.accepted[0]) != (message.epoch, message.round):
        return
    if seat.accepted[1] != message.hash:
        raise ProtocolError(
            f"learner {seat.name!r} has sent two different releases for its round {message.round}",
            "its noise may have been used twice: stop it, and look at its ledger",
        )
