"""The simulation engine, listened to: what its learners release, under seeded noise.

One learner, so that the server's model tells its releases: with x⁰ = 0, x^{r} = -η·η_g·(sum of all
noisy steps). Each seed's coordinates are columns of one audit, or runs with a canary if d = 1.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.statistics import Law, ManyRun, OneRun, law_of, many_run, one_run
from veilstream.audit.transcript import reach_of
from veilstream.deployment.terms import Terms
from veilstream.learning.tasks import FromLoss, Sample
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.privacy.gaussian import mu_for
from veilstream.simulation.engine import Simulation

if TYPE_CHECKING:
    from jax import Array


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class _Given(FromLoss):
    """Gradients are what the clients say; with an adaptive server, against where x is."""

    classifies = False

    def __init__(self, dim: int) -> None:
        self.dim, self.features_shape = dim, (dim,)

    def loss(self, params: Array, sample: Sample) -> Array:
        value: Array = sample.features @ params
        return value

    def gradient(self, params: Array, sample: Sample) -> Array:
        import jax.numpy as jnp

        return sample.features + sample.target * jnp.sign(params)

    def predict(self, params: Array, features: Array) -> Array:
        return features @ params


@dataclasses.dataclass(frozen=True)
class _Clients:
    gradients: NDArray[np.float32]
    loud: float
    local_steps: int
    first_seed: int
    provenance: str = "an audit's own clients"

    def round(self, seed: int, round_: int) -> Sample:
        here = slice(round_ * self.local_steps, (round_ + 1) * self.local_steps)
        features = self.gradients[seed - self.first_seed, here][None]
        return Sample(features, np.full(features.shape[:2], self.loud, np.float32))

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        d = self.gradients.shape[-1]
        return Sample(np.zeros((1, d), np.float32), np.zeros(1, np.float32))


def simulated_one_run(plan: Plan, *, dim: int, seeds: int, adaptive: bool = False, first_seed: int = 0) -> OneRun:
    """Audit ``dim`` coordinates of each of some seeds, all known gradients subtracted."""
    terms = Terms.of(plan, dim)
    T, B = terms.rounds * terms.local_steps, terms.grid.clip_norm
    rng = np.random.default_rng(first_seed)
    long = 50.0 * B * rng.choice([-1.0, 1.0], (seeds, T, dim))
    if adaptive:
        long = np.zeros((seeds, T, dim))
    prefixes, models = _releases(plan, terms, long.astype(np.float32), 3.0 * B if adaptive else 0.0, first_seed)
    if adaptive:  # with one step a round, everyone sees the model that they were asked about
        raw = 3.0 * B * np.sign(models)
        length = np.linalg.norm(raw, axis=-1, keepdims=True)
        used = raw * np.minimum(1.0, B / np.where(length > 0.0, length, 1.0))
    else:
        used = long / np.linalg.norm(long, axis=-1, keepdims=True) * B
    ends = np.cumsum(used, axis=1)[:, terms.local_steps - 1 :: terms.local_steps]
    residuals = np.moveaxis(prefixes - ends, 1, 0).reshape(terms.rounds, -1)
    return one_run(residuals, _law(plan))


def simulated_many_run(plan: Plan, runs: int, *, first_seed: int = 0) -> ManyRun:
    """A canary in each of many seeds, dimension one."""
    terms, law = Terms.of(plan, 1), _law(plan)
    second = np.random.default_rng([first_seed, 1]).integers(0, 2, runs).astype(bool)
    gradients = np.zeros((runs, terms.rounds * terms.local_steps, 1), np.float32)
    B = terms.grid.clip_norm
    gradients[:, law.worst, 0] = 3.0 * np.where(second, B, B - law.reach)
    prefixes, _ = _releases(plan, terms, gradients, 0.0, first_seed)
    assert law.expected is not None
    return many_run(
        prefixes[:, :, 0].T,
        second,
        law,
        delta=terms.guarantee.delta,
        expected=float(law.expected[law.worst]),
        centre=B - 0.5 * law.reach,
    )


def _law(plan: Plan) -> Law:
    """Of the simulation's own blocks of noise, which round a little apart from a learner's."""
    terms = Terms.of(plan, 1)
    prepared = prepare(_alone(plan), terms.method)
    assert prepared.factorization is not None
    promise = terms.guarantee
    return law_of(
        prepared.factorization.noising_matrix(),
        std=prepared.noise_std,
        reach=reach_of(terms),
        claim=mu_for(promise.epsilon, promise.delta) * (1.0 + 1e-6),
        local_steps=terms.local_steps,
    )


def _alone(plan: Plan) -> Plan:
    method = dataclasses.replace(
        Terms.of(plan, 1).method, averaging=None, newest_weight=None, step_decay=0.0, forgetting=1.0
    )
    learning = dataclasses.replace(plan.learning, learners=1, projection_radius=None)
    run = dataclasses.replace(plan.run, evaluate_every=learning.rounds, regret=False)
    return dataclasses.replace(plan, learning=learning, run=run, methods=(method,))


def _releases(
    plan: Plan, terms: Terms, gradients: NDArray[np.float32], loud: float, first_seed: int
) -> tuple[Floats, Floats]:
    """(seeds, R, d): prefix sums of noisy steps, and the models that each round began with."""
    alone = _alone(plan)
    # The noise of the plan's own method, which may be made for what that one publishes.
    prepared = dataclasses.replace(prepare(alone, terms.method), plan=alone.methods[0])
    count, _, dim = gradients.shape
    clients = _Clients(gradients, loud, terms.local_steps, first_seed)
    seeds = range(first_seed, first_seed + count)
    simulation = Simulation(alone, [prepared], seeds, task=_Given(dim), stream=clients, block_rounds=1)
    models = [np.zeros((count, dim))]
    try:
        for _ in range(terms.rounds):
            simulation.advance()
            models.append(simulation.models()[0].astype(np.float64))
    finally:
        simulation.close()
    x = np.stack(models, axis=1)
    return -x[:, 1:] / (prepared.plan.local_step_size * prepared.plan.server_step_size), x[:, :-1]
