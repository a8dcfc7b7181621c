"""What noisy sums of telemetry say: estimates over windows, with error bars that are known exactly.

The server has, after every round, the sum over all learners of what they contributed, noise
included, and knows how many rounds each of them has taken. Over a window it takes the difference of
two such sums. Its noise is Gaussian with a variance that the mechanism states: for each learner
that of b_hi - b_lo (`mechanisms.window_noise`), learners and epochs being independent.

    estimate ± 1.96·(standard deviation of that noise)

is a 95% interval for the *realised* average over the clients that were met in the window. It says
nothing about clients who were not: how far those were typical is sampling error, `sampling`, which
for a share p of N clients has a standard deviation of √(p·(1 - p)/N).

Post-processing of what the server has anyway: it costs no privacy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.window_noise import WindowNoise
from veilstream.privacy.telemetry import Telemetry

__all__ = [
    "NORMAL_95",
    "TELEMETRY_COLUMNS",
    "Estimate",
    "RoundNoise",
    "Span",
    "TelemetrySums",
]

Floats = NDArray[np.float64]

NORMAL_95 = 1.959963984540054
"""Of a standard normal, 95% lie within this."""

TELEMETRY_COLUMNS = ("round", "metric", "estimate", "low", "high", "window", "steps", "sampling")
"""Of telemetry.csv, as far as simulations and federations have the same."""

Span = tuple[int, int, int]
"""Of one learner: its epoch, and from how many of its rounds to how many."""


@dataclass(frozen=True)
class Estimate:
    """One metric over one window."""

    round: int
    """Rounds that were closed."""
    metric: str
    estimate: float
    """Not cut to what the metric can be, so that it is unbiased."""
    low: float
    high: float
    window: int
    """Rounds that it averages over."""
    steps: int
    """Clients' steps of all learners in them."""
    sampling: float
    """Standard deviation that drawing so many clients would have by itself; 0 where the estimate
    leaves nothing to draw. NaN for a loss, whose spread nobody knows."""

    def cells(self) -> list[str]:
        """Under `TELEMETRY_COLUMNS`, as a run folder's telemetry.csv has them."""
        numbers = [f"{number:.7g}" for number in (self.estimate, self.low, self.high)]
        drawn = "" if math.isnan(self.sampling) else f"{self.sampling:.4g}"
        return [str(self.round), self.metric, *numbers, str(self.window), str(self.steps), drawn]


class RoundNoise:
    """Who took part in every round, and how much noise the sum over some rounds carries.

    Args:
        mechanism: that makes the noise; None for none.
        noise_std: V.
        local_steps: τ, steps of a learner's round.
        alike: how many learners each name stands for, where many take part in the same rounds.

    """

    def __init__(
        self, mechanism: Factorization | None, noise_std: float, local_steps: int, alike: int = 1
    ) -> None:
        self._noise = None if mechanism is None or not noise_std else WindowNoise(mechanism)
        self._std, self._tau, self._alike = noise_std, local_steps, alike
        self._spans: list[dict[str, Span]] = []
        self._steps = [0]
        self._known: dict[tuple[int, int], float] = {}

    @property
    def rounds(self) -> int:
        """How many are known."""
        return len(self._spans)

    def add(self, spans: Mapping[str, Span]) -> None:
        """The next round, by learner: which of its own rounds its message covers.

        One that was late covers several; one whose message does not count is left out.
        """
        self._spans.append(dict(spans))
        taken = sum(hi - lo for _, lo, hi in spans.values())
        self._steps.append(self._steps[-1] + self._alike * self._tau * taken)

    def steps(self, first: int, end: int) -> int:
        """Of all learners together, in the rounds from ``first`` to before ``end``."""
        return self._steps[end] - self._steps[first]

    def deviation(self, first: int, end: int) -> float:
        """Standard deviation of the noise in the sum over these rounds.

        Spans of a learner that are not adjacent (one between them does not count) have noise that
        is correlated: their deviations are added, which is never too little.
        """
        if self._noise is None:
            return 0.0
        if (first, end) not in self._known:
            pieces: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
            for of_round in self._spans[first:end]:
                for name, (epoch, lo, hi) in of_round.items():
                    of_learner = pieces[name, epoch]
                    if of_learner and of_learner[-1][1] == lo:
                        of_learner[-1][1] = hi
                    else:
                        of_learner.append([lo, hi])
            variance, tau = 0.0, self._tau
            for spans in pieces.values():
                each = [math.sqrt(self._noise.variance(lo * tau, hi * tau)) for lo, hi in spans]
                variance += sum(each) ** 2
            self._known[first, end] = self._std * math.sqrt(self._alike * variance)
        return self._known[first, end]


class TelemetrySums:
    """Sums of telemetry by round; `estimates` of any window of them.

    Args:
        telemetry: what clients contribute.
        noise: of the same rounds; several runs may share one.

    """

    def __init__(self, telemetry: Telemetry, noise: RoundNoise) -> None:
        self.telemetry, self._noise = telemetry, noise
        self._prefix = [np.zeros(len(telemetry.metrics))]

    @property
    def rounds(self) -> int:
        """How many are known."""
        return len(self._prefix) - 1

    def add(self, sums: Floats) -> None:
        """What all learners together added in the next round, in the units of gradients."""
        self._prefix.append(self._prefix[-1] + np.asarray(sums, np.float64))

    def estimates(self, window: int, end: int | None = None) -> list[Estimate]:
        """One for each metric, over the last ``window`` of the first ``end`` rounds.

        None where nobody took part in them.
        """
        end = self.rounds if end is None else end
        first = max(0, end - window)
        steps = self._noise.steps(first, end)
        if not steps:
            return []
        means = self.telemetry.averages(self._prefix[end] - self._prefix[first], steps)
        spread = self.telemetry.deviations(self._noise.deviation(first, end), steps)
        return [
            Estimate(
                end, name, float(mean), float(mean - NORMAL_95 * std),
                float(mean + NORMAL_95 * std), end - first, steps, _sampling(name, mean, steps),
            )
            for name, mean, std in zip(self.telemetry.metrics, means, spread, strict=True)
        ]  # fmt: skip


def _sampling(name: str, mean: float, steps: int) -> float:
    if name == "loss":
        return math.nan
    share = min(1.0, max(0.0, mean))
    return math.sqrt(share * (1.0 - share) / steps)
