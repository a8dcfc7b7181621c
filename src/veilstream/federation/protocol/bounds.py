"""How large an honest learner's release can be, from the terms alone.

After s steps a release is a sum of s gradients of norm at most B_g (of the whole vector's norm,
where clients contribute telemetry beside them; d counts its coordinates), plus noise of standard
deviation V·‖b_s‖ in every coordinate, in units of the grid. Hence, but for an event of probability
2^-40 over all learners, rounds and coordinates of an epoch,

    every coordinate of a release     |p_j|     <= s·B_g + z·V·‖b_s‖ + 1
    what it adds to an earlier one    ‖p' - p‖  <= (s' - s)·B_g + (√d + z)·V·(‖b_s'‖ + ‖b_s‖) + √d

with z = √(2·ln(4·n·R²·d·2^40)): a coordinate leaves with probability at most 2·exp(-z²/2), a norm
of d Gaussians exceeds √d + z with at most exp(-z²/2) (Lipschitz concentration), and the noise of a
difference has at most the sum of both deviations, whatever its correlation.

A coordinate of telemetry has w/2 a step in the place of B_g, in a release and in what it adds:

    |p_k| <= s·w/2 + z·V·‖b_s‖ + 1      |p'_k - p_k| <= (s' - s)·w/2 + z·V·(‖b_s'‖ + ‖b_s‖) + 1

Where the order of records is secret, a step has any number of them: at most T·m in an epoch of T steps, m of them a
step on average, each in a step of its own. In s steps there are then at most K(s) = s·m + L/3 + √(L²/9 + 2·L·s·m) with
L = z²/2, but for a probability of exp(-L) (Bernstein), and K(s)/m stands in the place of s.

With m of them all alarms together have (2·n·R·d + n·R²/2 + n·R²·m)·exp(-z²/2), which is less than
the 4·n·R²·d·exp(-z²/2) that z is for; so have those of a secret order, n·R + n·R²/2 more.

No learner of this plan makes a release beyond them. One within them may still be a lie: bounds keep
one message from ruining a run, they do not make its content true.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError
from veilstream.mechanisms import StationaryFactorization

FALSE_ALARM = 2.0**-40
"""Probability that any release of honest learners is refused, in a whole epoch of all of them."""

_LARGEST_SUM = 2.0**62


class OutOfBounds(ProtocolError):
    """A release that no learner of this plan makes."""


class Deviations(Protocol):
    """Standard deviations of the noise in a release, by its learner's rounds."""

    def __getitem__(self, rounds: int, /) -> Any:
        """In units of the grid."""


@dataclass(frozen=True)
class EndlessDeviations:
    """For noise without an end: worked out when asked for, at any round."""

    mechanism: StationaryFactorization
    local_steps: int
    scale: float

    def __getitem__(self, rounds: int, /) -> float:
        """As `Deviations`; a millionth more, since the program rounds to float32."""
        variance = self.mechanism.prefix_variance(rounds * self.local_steps)
        return 1.000001 * self.scale * math.sqrt(variance)


@dataclass(frozen=True)
class ReleaseBounds:
    """Bounds in units of the grid."""

    dim: int
    local_steps: int
    clip: float
    """B_g, or the norm of a client's whole vector."""
    deviations: Deviations
    """Standard deviation of the noise in a release after so many rounds; 0 after none."""
    quantile: float
    """z."""
    metrics: int = 0
    """How many of the coordinates, the last ones, are telemetry."""
    half_width: float = 0.0
    """w/2, the most that a client adds to one of those."""
    spread: int | None = None
    """Clients of a step on average, where any number may come to one; None where no more come than are counted on."""
    horizon: int = 0
    """Steps of an epoch."""

    @classmethod
    def of(cls, terms: Terms) -> ReleaseBounds:
        """What these terms allow; `InputError` if sums over all learners might not fit into 64 bits."""
        scale = terms.noise_std / terms.grid.step
        if isinstance(terms.mechanism, StationaryFactorization):
            deviations: Deviations = EndlessDeviations(terms.mechanism, terms.local_steps, scale)
        else:
            ends = terms.mechanism.row_norms_squared()[terms.local_steps - 1 :: terms.local_steps]
            deviations = np.concatenate([[0.0], scale * np.sqrt(ends)])
        cases = 4.0 * terms.learners * terms.rounds**2 * terms.release_dim
        clip, told = terms.grid.clip_norm, terms.telemetry
        if told is not None:
            clip = told.release_norm(clip)
        bounds = cls(
            terms.release_dim,
            terms.local_steps,
            clip / terms.grid.step,
            deviations,
            math.sqrt(2.0 * math.log(cases / FALSE_ALARM)),
            0 if told is None else len(told.metrics),
            0.0 if told is None else 0.5 * told.width / terms.grid.step,
            terms.clients_per_step if terms.plan.order == "secret" else None,
            terms.rounds * terms.local_steps,
        )
        largest = max(2.0 * bounds.coordinate(terms.rounds), bounds.increment(0, terms.rounds))
        if largest * terms.learners >= _LARGEST_SUM:
            raise InputError(
                "learning.learners",
                terms.learners,
                f"at most {int(_LARGEST_SUM / largest)}, whose sums fit into 64 bits",
                "plan fewer rounds or learners",
            )
        return bounds

    def steps(self, rounds: int) -> float:
        """How many full steps' worth of clients come in so many rounds, at most."""
        steps = rounds * self.local_steps
        if self.spread is None or not steps:
            return steps
        mean, rare = steps * self.spread, 0.5 * self.quantile**2
        most = mean + rare / 3 + math.sqrt(rare * rare / 9 + 2 * rare * mean)
        return min(most / self.spread, self.horizon)

    def coordinate(self, rounds: int) -> float:
        """Largest coordinate of a release after so many rounds of its learner."""
        noise = self.quantile * float(self.deviations[rounds])
        return self.steps(rounds) * self.clip + noise + 1.0

    def increment(self, before: int, rounds: int) -> float:
        """Largest norm of what it adds to the release after ``before`` rounds."""
        noise = float(self.deviations[before] + self.deviations[rounds])
        root = math.sqrt(self.dim)
        return self.steps(rounds - before) * self.clip + (root + self.quantile) * noise + root

    def metric(self, before: int, rounds: int) -> float:
        """Most that a release has added to a sum of telemetry since ``before`` rounds; 0 for all."""
        noise = self.quantile * float(self.deviations[before] + self.deviations[rounds])
        return self.steps(rounds - before) * self.half_width + noise + 1.0

    def check_prefix(self, learner: str, rounds: int, prefix: NDArray[np.int64]) -> None:
        """Refuse a release with a coordinate out of bounds."""
        split = self.dim - self.metrics
        for what, part, bound in (
            ("a coordinate", prefix[:split], self.coordinate(rounds)),
            ("a sum of telemetry", prefix[split:], self.metric(0, rounds)),
        ):
            if largest_of(part) > bound:
                raise OutOfBounds(
                    f"a release of learner {learner!r} with {what} of {largest_of(part)} units, "
                    f"over {bound:.0f}, which clipping and noise allow after {rounds} rounds",
                    _WAY_OUT.format(learner=learner),
                )

    def check_increment(
        self, learner: str, before: int, rounds: int, increment: NDArray[np.signedinteger], length: float
    ) -> None:
        """Refuse what a release adds if it is too long (its norm), or too much of telemetry."""
        told, most = largest_of(increment[self.dim - self.metrics :]), self.metric(before, rounds)
        if told > most:
            raise OutOfBounds(
                f"a release of learner {learner!r} that adds {told} units to a sum of telemetry, "
                f"over {most:.0f}, which clients and noise allow from round {before} to {rounds}",
                _WAY_OUT.format(learner=learner),
            )
        bound = self.increment(before, rounds)
        if not length <= bound:
            raise OutOfBounds(
                f"a release of learner {learner!r} that adds {length:.0f} units, over {bound:.0f}, "
                f"which clipping and noise allow from round {before} to {rounds}",
                _WAY_OUT.format(learner=learner),
            )


def largest_of(units: NDArray[np.signedinteger]) -> int:
    """Largest absolute value, exactly; 0 of none."""
    return max(int(units.max()), -int(units.min())) if len(units) else 0


def norm(increment: NDArray[np.int64]) -> float:
    """Euclidean norm of whole numbers; without BLAS, which would start threads for it."""
    exact = increment.astype(np.float64)
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.square(exact, out=exact).sum()))


_WAY_OUT = (
    "honest learners send such a thing with probability 2^-40; its seat is held until the server "
    "is started with --reset {learner} or --void {learner}"
)
