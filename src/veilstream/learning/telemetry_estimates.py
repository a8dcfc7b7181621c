"""Estimates from noisy sums of telemetry, over windows of rounds, with exact error bars.

The server has, after every round, the sum over all learners of what they contributed, noise
included, and knows how many rounds each has taken: all of this is post-processing. Over a window it
takes the difference of two such sums. Its noise is Gaussian with a variance that the mechanism
states: for each learner that of b_hi - b_lo (`mechanisms.window_noise`), learners and epochs being
independent.

    estimate ± 1.96·(standard deviation of that noise)

is a 95% interval for the *realised* average over the clients that were met in the window. How far
those were typical is sampling error, `sampling`, which for N values in [0, 1] of mean p has a
standard deviation of at most √(p·(1 - p)/N), and exactly that for shares.

The plain average is over *steps*, of which an empty one counts as half-way. Where clients
contribute `present` as well, their number is known with noise: N = 2P/w from its sum P, and a
metric's sum S gives the average over *clients*, 1/2 + S/(2P), whose deviation to first order (the
delta method) is σ/(2P)·√(1 + (S/P)²). Where P is within five deviations of zero, that is no
approximation of anything, and the average over steps is given (`Estimate.average` says which).
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

Floats = NDArray[np.float64]

NORMAL_95 = 1.959963984540054  # A standard normal lies within this with probability 95%

TELEMETRY_COLUMNS = ("round", "metric", "estimate", "low", "high", "window", "steps", "sampling", "average")
"""Columns of telemetry.csv that simulations and federations share."""

OVER_STEPS, OVER_CLIENTS = "plain mean over steps", "plain mean over clients"
"""What an estimate averages over: all steps, empty ones as half-way (as 0 of `present`); or the
clients that were there. Every learner's step or client weighs the same."""

_KNOWN = 5.0  # Standard deviations above zero at which the number of clients may be divided by

Span = tuple[int, int, int]
"""Of one learner: its epoch, and from how many of its rounds to how many. From a number to the same
says that what comes next is another copy of the learner, with noise of its own."""


@dataclass(frozen=True)
class Estimate:
    """One metric over one window."""

    round: int  # Rounds that were closed
    metric: str
    estimate: float  # Not cut to what the metric can be, so that it is unbiased
    low: float
    high: float
    window: int  # Rounds that it averages over
    steps: int  # Clients' steps of all learners in them
    sampling: float
    """Standard deviation that drawing so many clients has by itself, never 0; of a loss, and where
    steps were empty, the most that it can be."""
    average: str = OVER_STEPS  # Or `OVER_CLIENTS`

    @property
    def bar(self) -> float:
        """Half of a 95% interval for what other clients would have said: noise and sampling."""
        return math.hypot(self.high - self.estimate, NORMAL_95 * self.sampling)

    def cells(self) -> list[str]:
        """Under `TELEMETRY_COLUMNS`, as a run folder's telemetry.csv has them."""
        numbers = [f"{number:.7g}" for number in (self.estimate, self.low, self.high)]
        about = [str(self.window), str(self.steps), f"{self.sampling:.4g}", self.average]
        return [str(self.round), self.metric, *numbers, *about]


class RoundNoise:
    """Who took part in every round, and how much noise the sum over some rounds carries.

    ``alike`` is how many learners each name stands for, where many take part in the same rounds.
    """

    def __init__(self, mechanism: Factorization | None, noise_std: float, local_steps: int, alike: int = 1) -> None:
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
        """The next round: which of its own rounds each counted message covers; several where a learner was late."""
        self._spans.append(dict(spans))
        taken = sum(hi - lo for _, lo, hi in spans.values())
        self._steps.append(self._steps[-1] + self._alike * self._tau * taken)

    def steps(self, first: int, end: int) -> int:
        """Of all learners together, in the rounds from ``first`` to before ``end``."""
        return self._steps[end] - self._steps[first]

    def deviation(self, first: int, end: int) -> float:
        """Standard deviation of the noise in the sum over these rounds.

        Spans of a learner that are not adjacent (one between them does not count) have noise that
        is correlated: their deviations are added, which is never too little. So are those before
        and after a learner was taken in again as another copy of itself.
        """
        if self._noise is None:
            return 0.0
        if (first, end) not in self._known:
            pieces: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
            for of_round in self._spans[first:end]:
                for name, (epoch, lo, hi) in of_round.items():
                    of_learner = pieces[name, epoch]
                    if of_learner and of_learner[-1][1] == lo < hi:
                        of_learner[-1][1] = hi
                    else:
                        of_learner.append([lo, hi])
            variance, tau = 0.0, self._tau
            for spans in pieces.values():
                each = [math.sqrt(self._noise.variance(lo * tau, hi * tau)) for lo, hi in spans if lo < hi]
                variance += sum(each) ** 2
            self._known[first, end] = self._std * math.sqrt(self._alike * variance)
        return self._known[first, end]


class TelemetrySums:
    """Sums of telemetry by round, and `estimates` of any window of them; several runs may share a ``noise``."""

    def __init__(self, telemetry: Telemetry, noise: RoundNoise, clients_per_step: int = 1) -> None:
        self.telemetry, self._noise = telemetry, noise
        self._per_step = clients_per_step
        self._prefix = [np.zeros(len(telemetry.metrics))]

    @property
    def rounds(self) -> int:
        """How many are known."""
        return len(self._prefix) - 1

    def add(self, sums: Floats) -> None:
        """What all learners together added in the next round, in the units of gradients."""
        self._prefix.append(self._prefix[-1] + np.asarray(sums, np.float64))

    def estimates(self, window: int, end: int | None = None) -> list[Estimate]:
        """One for each metric, over the last ``window`` of the first ``end`` rounds; none where nobody took part."""
        end = self.rounds if end is None else end
        first = max(0, end - window)
        steps = self._noise.steps(first, end)
        if not steps:
            return []
        sums, std = self._prefix[end] - self._prefix[first], self._noise.deviation(first, end)
        there = self._steps_with_clients(sums, std)
        found = []
        for place, name in enumerate(self.telemetry.metrics):
            of_clients = there is not None and name != "present"
            count = there if there is not None and of_clients else float(steps)
            mean = float(self.telemetry.averages(sums, count)[place])
            spread = float(self.telemetry.deviations(std, count)[place])
            if of_clients:
                spread *= math.hypot(1.0, float(sums[place] / self._present(sums)))
            found.append(
                Estimate(
                    end,
                    name,
                    mean,
                    mean - NORMAL_95 * spread,
                    mean + NORMAL_95 * spread,
                    end - first,
                    steps,
                    self._sampling(name, mean, spread, count),
                    OVER_CLIENTS if of_clients else OVER_STEPS,
                )
            )
        return found

    def _present(self, sums: Floats) -> float:
        return float(sums[self.telemetry.metrics.index("present")])

    def _steps_with_clients(self, sums: Floats, std: float) -> float | None:
        """How many steps had a client, as an estimate; None where nothing good enough says so."""
        if "present" not in self.telemetry.metrics:
            return None
        total = self._present(sums)
        return 2.0 * total / self.telemetry.width if total > _KNOWN * std else None

    def _sampling(self, name: str, mean: float, spread: float, steps: float) -> float:
        """For a mean that is at least its own noise, and half a client, away from either end."""
        unit = self.telemetry.loss_cap if name == "loss" else 1.0
        clients = max(1.0, steps * self._per_step)
        edge = min(0.5, max(0.5 / clients, spread / unit))
        share = min(1.0 - edge, max(edge, mean / unit))
        return unit * math.sqrt(share * (1.0 - share) / clients)
