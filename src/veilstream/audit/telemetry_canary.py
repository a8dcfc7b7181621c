"""A canary in the whole vector: gradient and telemetry move together, as far as they may.

Each run has a vector of 1 + m numbers, m metrics behind a gradient of one number. The canary's two
neighbouring records are as far apart as clipping and the metrics' bounds let them be, in every
coordinate at once: along that direction the runs are judged like those of `canary`. What a client
contributes is made by the deployed code, one client at a time (`ClientTelemetry`, `LocalRounds`);
noise, grid and messages of all runs are those of one `LocalRounds` with so many coordinates, which
it treats alike and apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.statistics import Law, ManyRun, law_of, many_run
from veilstream.audit.statistics.law import patterns
from veilstream.audit.transcript import law_of_terms, reach_of
from veilstream.deployment.client_telemetry import ClientTelemetry
from veilstream.deployment.local_rounds import LocalRounds, model_hash
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.privacy.gradient_types import ClippedGradient, Hidden, RawGradient
from veilstream.privacy.grid import OnGrid
from veilstream.privacy.guarantee import Neighbours

__all__ = ["TelemetryTask", "telemetry_runs", "whole_reach"]

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_RIGHT, _WRONG = 0.0, 1.0


class TelemetryTask:
    """A task that predicts 0 of everyone: who has 0 as target is right, at a great loss."""

    classifies = True

    def predict(self, params: object, features: NDArray[np.floating]) -> Floats:
        """Zeros."""
        return np.zeros(len(features))

    def loss(self, params: object, sample: Sample) -> float:
        """Beyond every cap for who is right, nothing for the others."""
        return np.inf if float(sample.target) == _RIGHT else 0.0


class _OneNumber(TelemetryTask):
    dim, labels = 1, None
    features_shape = ()


def whole_reach(terms: Terms) -> float:
    """How far neighbours' whole vectors are apart, worked out apart from what calibrates.

    Where a record is replaced, a client is there before and after: `present` does not move.
    """
    told = terms.telemetry
    assert told is not None
    replaced = terms.guarantee.neighbours is Neighbours.REPLACE_ONE
    moving = [name for name in told.metrics if not (replaced and name == "present")]
    each = told.width if replaced else told.width / 2
    return float(np.hypot(reach_of(terms), each * np.sqrt(len(moving))))


def telemetry_runs(
    terms: Terms,
    runs: int,
    *,
    make: Callable[[Terms, int], LocalRounds] = LocalRounds,
    seed: int | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> ManyRun:
    """Run, collect every message of every run, and judge; ``seed`` is of the coins.

    ``make`` makes the object that a client's vector comes from; studies plant their bugs there.
    """
    told = terms.telemetry
    if told is None:
        raise InputError("telemetry", None, "a plan with telemetry", "add [telemetry]")
    numbers, tau = 1 + len(told.metrics), terms.local_steps
    first, second, other = _vectors(dataclasses.replace(terms, dim=1), make)
    law = _law(terms)
    visits = patterns(terms.rounds * tau, terms.guarantee.participation)[law.worst]
    coins = np.random.default_rng(seed).integers(0, 2, runs).astype(bool)
    canary = np.where(coins[:, None], second, first).ravel()
    nobody_special = np.tile(other, runs)
    local = LocalRounds(dataclasses.replace(terms, dim=runs * numbers, telemetry=None), 0)
    x = np.zeros(runs * numbers, np.float32)
    # From theory: the direction in which the two worlds differ, and the point half-way.
    direction, centre = _between(terms)
    known, transcripts = np.zeros(numbers), np.empty((terms.rounds, runs))
    for r in range(terms.rounds):
        local.pin(x, model_hash(x))
        for step in range(r * tau, (r + 1) * tau):
            vector = canary if step in visits else nobody_special
            known = known + (0.0 if step in visits else 1.0) * other
            local.apply(local.noisy(ClippedGradient(OnGrid(vector)), fresh_secret()))
        release = local.message()
        local.seal(release)
        message = decode(release.payload)
        rows = message.prefix.reshape(runs, numbers) - known
        transcripts[r] = (rows * message.grid) @ direction
        tick(1)
    assert law.expected is not None
    return many_run(
        transcripts, coins, law, delta=terms.guarantee.delta,
        expected=float(law.expected[law.worst]), centre=centre,
    )  # fmt: skip


def _law(terms: Terms) -> Law:
    plain = law_of_terms(terms)
    return law_of(
        terms.mechanism.noising_matrix(), std=terms.noise_std, reach=whole_reach(terms),
        claim=plain.claim, local_steps=terms.local_steps,
        participation=terms.guarantee.participation,
    )  # fmt: skip


def _vectors(
    terms: Terms, make: Callable[[Terms, int], LocalRounds]
) -> tuple[Integers, Integers, Integers]:
    """Of the canary in both worlds, and of everyone else, in units of the grid."""
    told, B = terms.telemetry, terms.grid.clip_norm
    assert told is not None
    task: Any = _OneNumber()
    local, metrics = make(terms, 0), ClientTelemetry(task, told, B)
    metrics.check()
    begun = Hidden(np.zeros(1, np.float32))

    def vector(gradient: float, target: float) -> Integers:
        raw = RawGradient(np.array([gradient], np.float32))
        sample = Sample(np.zeros((), np.float32), target)
        return local.whole(local.clip(raw), metrics.values(begun, sample, raw)).reveal()

    second = vector(3.0 * B, _RIGHT)  # three times too long, so clipped; right, at a great loss
    if terms.guarantee.neighbours is Neighbours.REPLACE_ONE:
        # Just within the bound, so not clipped; wrong, at no loss.
        first = vector(-B * (1.0 - 2.0**-20), _WRONG)
    else:
        first = local.nothing().reveal()
    return first, second, vector(0.0, _WRONG)


def _between(terms: Terms) -> tuple[Floats, float]:
    """Unit vector from the first world to the second, and half their sum along it; by hand."""
    told, B = terms.telemetry, terms.grid.clip_norm
    assert told is not None
    half = told.width / 2
    second = np.array([B] + [half] * len(told.metrics))
    first = np.zeros_like(second)
    if terms.guarantee.neighbours is Neighbours.REPLACE_ONE:
        first = np.array([-B] + [half if m == "present" else -half for m in told.metrics])
    direction = (second - first) / np.linalg.norm(second - first)
    return direction, float(0.5 * (first + second) @ direction)
