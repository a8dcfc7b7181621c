"""Parity: with the same draws, deployed learners release what the simulation computes.

    python -m studies.parity

A plan is simulated (`vs.run`, and a `Simulation` that is stopped after every round to see x^r).
Then the same learners run as deployed ones, on the plan's own clients, and the server's own fold
makes models of what they send: x ← x - η·η_g·(1/n)·Σ (difference of two prefixes). The only thing
that is replaced, in this study alone, is where a row of normals comes from: row `step` of learner i
is its part of the simulation's row, from the same keystream, with the further bits that a learner
reads.

**Why they may differ at all, and by how much** (`Allowance`; all norms are Euclidean, s is the
grid). After step t a learner's prefix differs from the simulation's sum of noisy gradients by

* at most √d·s for each client's share of a gradient, which is rounded towards zero (t + 1 of them, or
  that many times the clients of a step), and √d·s/2 for the prefix of the noise, rounded to nearest
  (rounding errors of earlier noise prefixes cancel);
* the noise itself: the learner draws and runs the mechanism in float64, in blocks of one step, and
  the simulation in float32, in blocks of many. Both are programs of one mechanism, calibrated each
  by itself; this difference is not bounded but computed, by running both on the same keystream
  (`test_parity.py` bounds it, for every mechanism);
* per gradient, what float32 does: (d + 16)·2^-24·(1 + ‖z‖) for the loss's own arithmetic, and for
  one that is clipped the margin (d + 13)·2^-23·B_g by which `clip_traced` stays below the bound;
* per gradient, L·‖difference of the local models‖, L = 1/4 for the logistic loss with features of
  norm one (clipping, a projection, adds nothing); local models differ by η times all of the above
  within the round, and by the difference of the models x^r that the round began with;
* float32 in the simulation's own sums: 2^-24 of each number added.

The models x^r then differ by η·η_g times the mean of the learners' differences.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import veilstream as vs
from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.federation.protocol.fold import ServerFold
from veilstream.learning.algorithm import StepRule, local_round
from veilstream.learning.tasks import Sample, Task
from veilstream.mechanisms.fine_normals import fine_row
from veilstream.mechanisms.keystream import NoiseKey, Row
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, prepare
from veilstream.plans.tasks import task_of
from veilstream.progress import progress
from veilstream.records.admission import Answer
from veilstream.simulation.engine import Simulation
from veilstream.simulation.noise_source import noise_seed

LEARNERS, DIM, SEED = 2, 8, 3
LOCAL_STEPS = (1, 3)
CLIP_NORM = 0.4  # no power of two, and short enough to be in play
STEP_SIZE, SERVER_STEP_SIZE = 0.2, 0.7
LIPSCHITZ = 0.25
UNIT = 2.0**-24

Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]


def parity_plan(
    mechanisms: Sequence[str], tau: int, rounds: int, metrics: Sequence[str] = (), clients_per_step: int = 1
) -> Plan:
    """One method a mechanism; a learner's plan has one. With ``metrics``, telemetry of these."""
    return Plan(
        name="parity",
        learning={
            "rounds": rounds,
            "local_steps": tau,
            "clients_per_step": clients_per_step,
            "learners": LEARNERS,
            "clip_norm": CLIP_NORM,
        },
        data={"dim": DIM},
        privacy={"epsilon": 4.0, "delta": 1e-5},
        telemetry={"metrics": metrics} if metrics else None,
        run={"seeds": 1, "first_seed": SEED, "noise": "host", "regret": False},
        methods=[
            {"name": name, "mechanism": name, "step_size": STEP_SIZE, "server_step_size": SERVER_STEP_SIZE}
            for name in mechanisms
        ],
    )


# --- the simulation ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated:
    """One method of the simulation."""

    models: Float32s
    """x^0 to x^R, (R + 1, d)."""
    final: Float32s
    """x^R as `vs.run` wrote it into its folder."""
    releases: Floats
    """ĝ of every round and learner, (R, n, d), and telemetry's numbers behind it."""
    noise: Floats
    """What was added at every step, of the same shape but for steps, (T, n, ...)."""


def simulated_models(plan: Plan, prepared: Sequence[Prepared]) -> Float32s:
    """x^0 to x^R of every method, (methods, R + 1, d)."""
    simulation = Simulation(plan, prepared, [plan.run.first_seed], block_rounds=1)
    try:
        models = [simulation.models()[:, 0]]
        while not simulation.done:
            simulation.advance()
            models.append(simulation.models()[:, 0])
    finally:
        simulation.close()
    return np.stack(models, axis=1)


def release_dim(plan: Plan) -> int:
    """Numbers of a release: the model's, and telemetry's behind them."""
    return DIM + (len(plan.telemetry.metrics) if plan.telemetry else 0)


def simulated_noise(plan: Plan, prepared: Prepared, dim: int) -> Floats:
    """As `HostNoise` makes it and a block scales it, (T, n, numbers of a release)."""
    factorization, n = prepared.factorization, plan.learning.learners
    assert factorization is not None
    seed = noise_seed(plan.run.first_seed, factorization.name)
    unit = factorization.noise(std=1.0, dim=n * dim, seed=seed).take(factorization.horizon).reshape(-1, n, dim)
    return np.asarray(unit * np.float32(prepared.noise_std), np.float64)


def local_rounds(plan: Plan, task: Task) -> Callable[..., Any]:
    """The simulation's own local round, for all learners at once; compiled once for all methods."""
    import jax

    rule = StepRule(CLIP_NORM, telemetry=plan.telemetry_of(plan.methods[0]))

    def one(x: Any, clients: Sample, noise: Any) -> Any:
        return local_round(task, rule, x, clients, noise, np.float32(STEP_SIZE))

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))


def simulated_releases(plan: Plan, rounds_of: Callable[..., Any], models: Float32s, noise: Floats) -> Floats:
    """What is released at the simulation's own models, (R, n, numbers of a release).

    The model's part of it leads from each model to the next.
    """
    import jax

    stream, tau = stream_of(plan), plan.learning.local_steps
    released = []
    for r in range(plan.learning.rounds):
        met = stream.round(SEED, r)
        steps = (LEARNERS, tau, plan.learning.clients_per_step)
        clients = Sample(met.features.reshape(*steps, DIM), met.target.reshape(steps))
        w = noise[r * tau : (r + 1) * tau].transpose(1, 0, 2).astype(np.float32)
        with jax.default_matmul_precision("highest"):
            released.append(np.asarray(rounds_of(models[r], clients, w), np.float64))
    moved = STEP_SIZE * SERVER_STEP_SIZE * tau * np.mean(released, axis=1)[:, :DIM]
    size = np.abs(models).max() + np.abs(moved).max()
    assert np.abs(models[1:] - (models[:-1] - moved)).max() < 8 * UNIT * size, "not its releases"
    return np.stack(released)


def simulate(plan: Plan, folder: Path) -> dict[str, Simulated]:
    """All methods of a plan."""
    prepared = [prepare(plan, method) for method in plan.methods]
    run = vs.run(plan, out=folder)
    models = simulated_models(plan, prepared)
    rounds_of = local_rounds(plan, task_of(plan))
    found = {}
    for own, p in zip(models, prepared, strict=True):
        noise = simulated_noise(plan, p, release_dim(plan))
        releases = simulated_releases(plan, rounds_of, own, noise)
        found[p.plan.name] = Simulated(own, run.model(p.plan.name), releases, noise)
    return found


# --- the deployment ------------------------------------------------------------------------------


class Given(Row):
    """In place of a row of keystream: the normals themselves."""

    def __init__(self, draws: Floats) -> None:
        self.draws = draws

    def open(self, stream: int = 0, block: int = 0) -> NoReturn:
        """A cell that float64 cannot tell would need it: with these seeds there is none."""
        raise AssertionError("given normals have no further bits")


def given_normals(row: Row, out: Floats, scale: float) -> Iterator[slice]:
    """A row's normals as they are."""
    assert isinstance(row, Given)
    np.multiply(row.draws, scale, out=out)
    yield slice(0, len(out))


class GivenRounds(LocalRounds):
    """Rounds whose normals are the simulation's, at one learner's place."""

    def __init__(self, terms: Terms, epoch: int, place: int) -> None:
        super().__init__(terms, epoch, given_normals)
        self.place = place

    def row(self, step: int, secret: bytes) -> Given:
        terms = self.terms
        key = NoiseKey.from_seed(noise_seed(terms.plan.run.first_seed, terms.mechanism.name))
        row = fine_row(Row(key.secret, step), terms.learners * self.dim)
        return Given(row.reshape(terms.learners, self.dim)[self.place])


class GivenNoise(Learner):
    """A learner whose normals are the simulation's. **Study only**: such noise protects no one."""

    place = 0
    """Which of the learners it is."""
    Rounds = GivenRounds

    @classmethod
    def at(cls, place: int) -> type[GivenNoise]:
        """Such learners at this place."""
        return type(cls.__name__, (cls,), {"place": place})

    def __init__(
        self, plan: Plan, store: Path, task: Task, *, witness: Path | None = None, create: bool = False
    ) -> None:
        self.parts = LearnerParts(rounds=self.rounds)
        super().__init__(plan, store, task, witness=witness, create=create, parts=self.parts)

    def rounds(self, terms: Terms, epoch: int) -> GivenRounds:
        return self.Rounds(terms, epoch, self.place)


@dataclass(frozen=True)
class Deployed:
    """What learners sent and a server made of it."""

    models: Floats
    """x^0 to x^R, (R + 1, d)."""
    prefixes: Floats
    """At the end of every round, in numbers, (R, n, d)."""
    noise: Floats
    """What a learner's program adds at every step, before it is rounded, (T, n, d)."""
    grid: float
    clients_per_step: int = 1


def deploy(plan: Plan, folder: Path, task: Task, make: type[GivenNoise] = GivenNoise) -> Deployed:
    """Learners with stores of their own, and the server's fold of what they send."""
    stream, a_round = stream_of(plan), plan.learning.local_steps * plan.learning.clients_per_step
    seed, names = plan.run.first_seed, [str(place) for place in range(plan.learning.learners)]
    learners = [make.at(place)(plan, folder / f"{name}.db", task, create=True) for place, name in enumerate(names)]
    start = np.asarray(task.init(seed), np.float32)
    fold = ServerFold(learners[0].terms, start, names)
    models, prefixes = [start], []
    try:
        for r in range(plan.learning.rounds):
            met = stream.round(seed, r)
            for i, learner in enumerate(learners):
                learner.begin_round(r, fold.x.astype(np.float32))
                there = range(a_round) if met.present is None else np.flatnonzero(met.present[i])
                came = [(f"{r}/{t}", Sample(met.features[i, t], met.target[i, t])) for t in there]
                assert learner.observe_many(came) == [Answer.TAKEN] * len(came)
                fold.accept(names[i], learner.finish_round().payload)
            fold.close_round()
            models.append(fold.published)
            prefixes.append([seat.prefix * learners[0].grid.step for seat in fold.seats.values()])
        noise = np.stack([_program_noise(learner) for learner in learners], axis=1)
        return Deployed(
            np.array(models, np.float64),
            np.array(prefixes),
            noise,
            learners[0].grid.step,
            plan.learning.clients_per_step,
        )
    finally:
        for learner in learners:
            learner.close()


def _program_noise(learner: GivenNoise) -> Floats:
    """The increments of a learner's program once more, (T, d)."""
    again = learner.rounds(learner.terms, learner.epoch)
    prefixes = [np.zeros(again.dim)]
    for step in range(again.terms.mechanism.horizon):
        again.noise.step(again.row(step, b""))
        prefixes.append((again.noise.cells + again.noise.fraction) * again.grid.step)
    return np.diff(np.array(prefixes), axis=0)


# --- the difference ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allowance:
    """How far a deployment may be from the simulation, as the module's text derives it."""

    prefixes: Floats
    """(R, n)."""
    models: Floats
    """(R + 1,)."""


def allowance(simulated: Simulated, deployed: Deployed, tau: int) -> Allowance:
    """Follow both runs step by step and add up what may set them apart."""
    root = np.sqrt(simulated.noise.shape[-1])
    s = deployed.grid
    apart = np.cumsum(deployed.noise - simulated.noise, axis=0)
    noise_apart = np.linalg.norm(apart, axis=-1)  # of prefixes, (T, n)
    size = np.linalg.norm(simulated.noise, axis=-1) + CLIP_NORM
    rounds, n, _ = simulated.releases.shape
    gradients = np.zeros(n)  # in the sum of all gradients so far
    sums = np.zeros(n)  # float32 in the simulation's sums
    model = 0.0
    prefixes, models = [], [0.0]
    for r in range(rounds):
        z = np.full(n, model)
        z_size = float(np.linalg.norm(simulated.models[r]))
        for t in range(r * tau, (r + 1) * tau):
            own = (DIM + 16) * UNIT * (1.0 + z_size) + (DIM + 13) * 2 * UNIT * CLIP_NORM
            gradient = LIPSCHITZ * z + own + root * s * deployed.clients_per_step
            before = noise_apart[t - 1] if t else np.zeros(n)
            rounded = noise_apart[t] + before + root * s
            sums += 4 * UNIT * tau * size[t]
            z_size += STEP_SIZE * float(size[t].max())
            z = z + STEP_SIZE * (gradient + rounded) + 4 * UNIT * (z_size + STEP_SIZE * size[t])
            gradients += gradient
        prefixes.append(gradients + sums + noise_apart[(r + 1) * tau - 1] + root * s / 2)
        rounding = 4 * UNIT * (r + 1) * (float(np.linalg.norm(simulated.models[r + 1])) + z_size)
        model = STEP_SIZE * SERVER_STEP_SIZE * float(prefixes[-1].mean()) + rounding
        models.append(model)
    return Allowance(np.array(prefixes), np.array(models))


@dataclass(frozen=True)
class Comparison:
    """One mechanism and number of local steps."""

    mechanism: str
    local_steps: int
    grid_over_clip_norm: float
    prefix_units: float
    """Largest difference of a released number, in units of the grid."""
    prefix_relative: float
    """The largest of these differences over the largest released number."""
    noise_units: float
    """Of that, what float32 and float64 programs of the noise differ by (largest, in units)."""
    model_units: float
    final_units: float
    """Of x^R against the run folder's."""
    used: float
    """Largest share of the allowance that was used, of prefixes and models."""
    largest_units: float
    """Size of what is compared: the largest released number, in units of the grid."""


def compare(
    mechanism: str, tau: int, simulated: Simulated, deployed: Deployed, honest: Deployed | None = None
) -> Comparison:
    """Differences, and how much of what is allowed they are (to ``honest``, if another run)."""
    s = deployed.grid
    expected = np.cumsum(simulated.releases * tau, axis=0)
    prefix = deployed.prefixes - expected
    model = deployed.models - simulated.models
    allowed = allowance(simulated, honest or deployed, tau)
    final = deployed.models[-1] - simulated.final
    used = [
        (np.linalg.norm(prefix, axis=-1) / allowed.prefixes).max(),
        (np.linalg.norm(model, axis=-1)[1:] / allowed.models[1:]).max(),
        np.linalg.norm(final) / allowed.models[-1],
    ]
    largest = np.abs(deployed.prefixes).max()
    noise = np.cumsum(deployed.noise - simulated.noise, axis=0)
    return Comparison(
        mechanism,
        tau,
        s / CLIP_NORM,
        prefix_units=float(np.abs(prefix).max() / s),
        prefix_relative=float(np.abs(prefix).max() / largest),
        noise_units=float(np.abs(noise).max() / s),
        model_units=float(np.abs(model).max() / s),
        final_units=float(np.abs(final).max() / s),
        used=float(max(used)),
        largest_units=float(largest / s),
    )


def study(rounds: int, mechanisms: Sequence[str] = ()) -> list[Comparison]:
    """Every mechanism, with every number of local steps."""
    names = list(mechanisms or vs.mechanisms.MECHANISMS)
    folder = Path(tempfile.mkdtemp(prefix="parity-"))
    found = []
    try:
        with progress("running learners twice", len(LOCAL_STEPS) * len(names)) as tick:
            for tau in LOCAL_STEPS:
                plan = parity_plan(names, tau, rounds)
                simulated = simulate(plan, folder / f"run-{tau}")
                task = task_of(plan)
                for name in names:
                    own = parity_plan([name], tau, rounds)
                    deployed = deploy(own, folder / f"{name}-{tau}", task)
                    found.append(compare(name, tau, simulated[name], deployed))
                    tick(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Deployed learners against the simulation.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    found = study(options.rounds)
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    print(
        "                          largest difference of a release noise    of a model  used of\n"
        "mechanism            tau  grid units       of the largest  share    grid units  allowed"
    )
    for c in found:
        print(
            f"{c.mechanism:20} {c.local_steps:3d}  {c.prefix_units:10.2f}  "
            f"{c.prefix_relative:19.1e}  {c.noise_units:5.2f}  {c.model_units:12.2f}  {c.used:7.0%}"
        )
    print(
        f"{options.rounds} rounds, {LEARNERS} learners, d = {DIM}: largest difference "
        f"{max(c.prefix_units for c in found):.2f} grid units, at most "
        f"{max(c.used for c in found):.0%} of what rounding explains; "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
