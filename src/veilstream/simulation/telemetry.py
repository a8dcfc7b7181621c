"""What each method and seed released as telemetry, which a deployed server would see too, and its estimates."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.telemetry_estimates import TELEMETRY_COLUMNS, RoundNoise, TelemetrySums
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared
from veilstream.privacy.telemetry import Telemetry
from veilstream.simulation.attendance import Attendance

Floats = NDArray[np.float64]


class SimulatedTelemetry:
    """Averaged releases of telemetry, (methods, seeds, rounds, metrics)."""

    def __init__(self, plan: Plan, prepared: Sequence[Prepared], seeds: Sequence[int], telemetry: Telemetry) -> None:
        self._plan, self._prepared, self._seeds = plan, list(prepared), list(seeds)
        self.telemetry = telemetry  # Of the first method; others differ by their width alone
        shape = (len(self._prepared), len(self._seeds))
        rounds = plan.learning.rounds
        self.releases = np.full((*shape, rounds, len(telemetry.metrics)), np.nan, np.float64)
        self._noise = NoiseOfRuns(plan)

    @classmethod
    def of(cls, plan: Plan, prepared: Sequence[Prepared], seeds: Sequence[int]) -> SimulatedTelemetry | None:
        """None where the plan has none."""
        telemetry = plan.telemetry_of(prepared[0].plan)
        return None if telemetry is None else cls(plan, prepared, seeds, telemetry)

    def record(self, methods: Sequence[int], first: int, released: NDArray[Any]) -> None:
        """What methods released in rounds from ``first``, (rounds, methods, seeds, metrics)."""
        moved = np.moveaxis(np.asarray(released, np.float64), 0, 2)
        self.releases[np.asarray(methods), :, first : first + moved.shape[2]] = moved

    def sums(self, method: int, seed: int, rounds: int) -> TelemetrySums:
        """Of the first rounds of one method and seed, by their places."""
        return self._noise.sums(self._prepared[method], self._seeds[seed], self.releases[method, seed, :rounds])


class NoiseOfRuns:
    """From averaged releases to sums whose noise is known; seeds that are alike share the work."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._attendance = plan, Attendance.of(plan)
        self._known: dict[object, RoundNoise] = {}

    def sums(self, prepared: Prepared, seed: int, releases: Floats) -> TelemetrySums:
        """Of one method and seed; ``releases`` is (rounds, metrics), averaged over n and τ."""
        telemetry = self._plan.telemetry_of(prepared.plan)
        assert telemetry is not None
        sums = TelemetrySums(telemetry, self._noise(prepared, seed), prepared.clients)
        for released in releases:
            sums.add(released * (self._plan.learning.learners * prepared.steps))
        return sums

    def _noise(self, prepared: Prepared, seed: int) -> RoundNoise:
        key = (prepared.plan.name, None if self._attendance is None else seed)
        if key not in self._known:
            self._known[key] = self._worked_out(prepared, seed)
        return self._known[key]

    def _worked_out(self, prepared: Prepared, seed: int) -> RoundNoise:
        learning = self._plan.learning
        n, rounds = learning.learners, learning.rounds
        noise = prepared.factorization, prepared.noise_std, prepared.steps
        if self._attendance is None:
            all_alike = RoundNoise(*noise, alike=n)
            for r in range(rounds):
                all_alike.add({"each": (0, r, r + 1)})
            return all_alike
        found, taken = RoundNoise(*noise), np.zeros(n, np.int64)
        for there in self._attendance.taking_part([seed], 0, rounds)[:, 0]:
            found.add({str(i): (0, int(taken[i]), int(taken[i]) + 1) for i in np.flatnonzero(there)})
            taken += there
        return found


def telemetry_csv(
    plan: Plan, prepared: Sequence[Prepared], seeds: Sequence[int], releases: Floats, ends: Sequence[int]
) -> str:
    """Estimates after some rounds; ``releases`` is (methods, seeds, rounds, metrics)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "seed", *TELEMETRY_COLUMNS])
    noise, window = NoiseOfRuns(plan), plan.telemetry_window
    for m, method in enumerate(prepared):
        for s, seed in enumerate(seeds):
            sums = noise.sums(method, seed, releases[m, s])
            for end in ends:
                for estimate in sums.estimates(window, end):
                    writer.writerow([method.plan.name, seed, *estimate.cells()])
    return out.getvalue()
