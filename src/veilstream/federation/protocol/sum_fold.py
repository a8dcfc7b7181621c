"""The server's side of Algorithm 1 where it sees only sums over learners: one opened sum a round in, models out.

The update is `ServerFold`'s. What differs: no message of one learner exists, so none can be checked or left out. A sum
is refused whole where clipping and noise do not allow it, or where learners would refuse the model that it leads to;
the round is then closed with the model as it was. Within those bounds a learner that lies moves the sum as it likes.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.protocol.bounds import norm
from veilstream.federation.protocol.fold import ClosedRound, FoldState, ServerFold
from veilstream.federation.protocol.messages import Buffer
from veilstream.learning.telemetry_estimates import Span


class SumFold(ServerFold):
    """x, and up to which round each learner's noise is part of what was opened (`Seat.round`)."""

    _masked: frozenset[str] = frozenset()
    _opened: tuple[frozenset[str], str] = (frozenset(), "")
    refused_sum: str = ""
    """Why the sum of the last round was refused; empty where it counts."""

    @property
    def answered(self) -> tuple[str, ...]:
        """Whose masked message of the present attempt has come."""
        return tuple(sorted(self._masked))

    @property
    def answered_count(self) -> int:
        """How many have come."""
        return len(self._masked)

    @property
    def missing(self) -> tuple[str, ...]:
        """Whose has not, so far."""
        return tuple(sorted(set(self.seats) - self._masked))

    def masked(self, learners: Collection[str]) -> None:
        """Whose messages of the present attempt have come."""
        self._masked = frozenset(learners)

    def enrol(self, learner: str, epoch: int, round_: int) -> None:
        """A learner says where it stands; all rounds are on one clock, so it may be behind, and never ahead."""
        seat = self.seats[learner]
        if seat.state == "void":
            raise ProtocolError(
                f"learner {learner!r}, whose seat is void ({seat.why})",
                f"the server's operator may take it in again with --reset {learner}",
            )
        if epoch == seat.epoch and round_ > self.round + 1:
            raise ProtocolError(
                f"this server's folder (round {self.round}) is older than learner {learner!r} (round {round_})",
                "restore the newest copy of the run's folder",
            )
        if epoch < seat.epoch:
            raise ProtocolError(
                f"learner {learner!r} is at epoch {epoch}, and had come to epoch {seat.epoch}",
                "its store is an old copy: put the newest one back",
            )
        seat.epoch, seat.state = epoch, "open"

    def accept(self, learner: str, payload: Buffer, hashed: str | None = None) -> bool:
        """Refused: no message of one learner alone is wanted."""
        raise ProtocolError(f"a release of {learner!r} alone, where only sums are seen", "its plan is another")

    def take_sum(self, members: Collection[str], total: NDArray[np.int64], proof: str) -> None:
        """Count an opened sum of these learners' increments, in units of the grid; ``proof`` is its hash.

        One that no honest learners make together, but for a probability of 2^-40 in a whole run, counts as zero.
        """
        if total.shape != (self.terms.release_dim,):
            raise InputError("sum", total.shape, f"({self.terms.release_dim},)", "check the plan")
        self._opened, self.refused_sum = (frozenset(members), proof), ""
        rounds, bounds = self.round + 1, self.bounds
        self._total = total.astype(np.int64)
        if bounds is None:
            return
        begun = [self.seats[name].round for name in members]
        length, most = norm(total), sum(bounds.increment(before, rounds) for before in begun)
        told = np.abs(total[self.terms.dim :].astype(np.float64))
        most_told = sum(bounds.metric(before, rounds) for before in begun)
        if length > most or (len(told) and told.max() > most_told):
            self.refused_sum = (
                f"it is longer than {len(begun)} learners' clipped gradients and noise can make it: one of them masked "
                "wrongly, or lied"
            )

    def close_round(self) -> ClosedRound:
        """x^{r+1} = x^r - η·η_g/n·Σ increments, for the sum that was opened; `refused_sum` says why it is not."""
        state, (members, proof) = self.state, self._opened
        if self.refused_sum:
            self._total[:] = 0
        x = self._moved()
        if not self._within(x):
            self.refused_sum = f"it leads beyond learning.model_norm_cap = {self.terms.model_norm_cap:g}"
            self._total[:] = 0
            x = self._moved()
        weight = self.terms.method.blend(state.round)
        average = (1.0 - weight) * state.average + weight * x
        accepted: dict[str, tuple[int, int, str]] = {}
        spans: dict[str, Span] = {}
        for name in sorted(members):
            seat = self.seats[name]
            accepted[name] = (seat.epoch, state.round, proof)
            if not self.refused_sum:
                spans[name] = (seat.epoch, seat.round, state.round + 1)
            seat.round = state.round + 1
        missing = tuple(sorted(set(self.seats) - members))
        closed = ClosedRound(state.round, accepted, missing, (), self._telemetry(), spans)
        self.state = FoldState(state.round + 1, x, average, state.start)
        self._total, self._opened, self._masked = np.zeros_like(self._total), (frozenset(), ""), frozenset()
        return closed

    def reset(self, learner: str) -> None:
        """Take a learner in again; if its keys are not those of this run, from the next run on."""
        seat = self.seats[learner]
        seat.state, seat.why = "open", ""
