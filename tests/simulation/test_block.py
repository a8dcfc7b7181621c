"""A block of rounds: absent clients, averaging, clip norms of one's own, models of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gammaln

import veilstream as vs
from tests.simulation.test_algorithm_one import algorithm_1, entry, simulate
from tests.simulation.test_noise_source import threefry_draws
from veilstream.errors import InputError, UnknownName
from veilstream.learning.models.pytree import PytreeTask
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import main_method, prepare
from veilstream.simulation import engine as simulation_module
from veilstream.simulation.engine import Simulation
from veilstream.streams.pool import PoolStream

ROUNDS, LEARNERS, DIM = 6, 3, 5
FREE = {"name": "free", "kind": "noise-free", "step_size": 0.3, "server_step_size": 1.5}
TREE = entry("tree")


@dataclass(frozen=True)
class Shares:
    """So many clients for each learner, in the pool's order; the pool's first is nobody's."""

    sizes: tuple[int, ...]

    def __call__(self, labels, learners, rng):
        ends = 1 + np.cumsum([0, *self.sizes])
        return [np.arange(a, b, dtype=np.int32) for a, b in pairwise(ends)]


def pool(shares: tuple[int, ...], per_round: int, first: float = 2.0) -> PoolStream:
    """``first`` is every feature of the client that no learner meets."""
    rng = np.random.default_rng(8)
    features = rng.standard_normal((1 + sum(shares), DIM)).astype(np.float32)
    features[0] = first
    targets = np.where(rng.random(len(features)) < 0.5, -1.0, 1.0).astype(np.float32)
    return PoolStream(
        learners=LEARNERS,
        rounds=ROUNDS,
        per_round=per_round,
        features=features,
        targets=targets,
        held_features=features[1:9],
        held_targets=targets[1:9],
        split=Shares(shares),
        provenance="made up",
    )


def own_plan(methods: list[dict], *, tau: int = 1, clients: int = 1, **run) -> Plan:
    """Task and stream of one's own."""
    return Plan(
        learning={
            "rounds": ROUNDS,
            "local_steps": tau,
            "learners": LEARNERS,
            "clients_per_step": clients,
            "task": "custom",
        },
        data={"kind": "custom", "dim": DIM, "held_out": 8},
        privacy={"epsilon": 30.0, "delta": 1e-3},
        run={"seeds": 1, "evaluate_every": 2} | run,
        methods=methods,
    )


def run_own(plan: Plan, stream: PoolStream, **options) -> Simulation:
    return simulate(plan, seeds=(0,), task=Logistic(DIM), stream=stream, **options)


def round_by_round(plan: Plan, stream: PoolStream):
    """The simulation in blocks of one round, and the published models of all methods after each."""
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, (0,), task=Logistic(DIM), stream=stream, block_rounds=1)
    x = []
    while not simulation.done:
        simulation.advance()
        x.append(simulation.models()[:, 0])
    simulation.close()
    return simulation, x


@pytest.mark.parametrize(
    ("tau", "clients", "shares", "noise"),
    [
        (1, 1, (6, 2, 0), "host"),
        (2, 1, (12, 3, 1), "host"),  # one learner runs out in the middle of a round
        (2, 2, (24, 5, 0), "host"),  # and one in the middle of a step
        (2, 2, (24, 5, 0), "device"),
    ],
)
def test_absent_clients_have_gradient_zero_and_keep_their_noise(tau, clients, shares, noise):
    plan = own_plan([TREE, FREE], tau=tau, clients=clients, noise=noise)
    stream = pool(shares, tau * clients)
    models = run_own(plan, stream).models()
    options = {"stream": stream} | ({"xi_of": threefry_draws} if noise == "device" else {})
    for index in (0, 1):
        expected = algorithm_1(plan, index, 0, **options)
        np.testing.assert_allclose(models[index, 0], expected, atol=1e-5)


def test_when_everyone_has_been_met_only_noise_moves_the_model():
    _, x = round_by_round(own_plan([TREE, FREE]), pool((2, 1, 2), 1))
    moved = np.linalg.norm(np.diff(x, axis=0), axis=-1)  # (rounds 1 to 5, methods)
    assert moved[0, 1] > 1e-3
    assert (moved[1:, 1] == 0.0).all()
    assert (moved[:, 0] > 1e-3).all()


def test_what_stands_in_for_an_absent_client_changes_nothing():
    """An absent client is looked up somewhere in the pool: what is there must not count."""
    plan = own_plan([TREE, FREE])
    plain, loud = (run_own(plan, pool((6, 2, 0), 1, first)) for first in (0.0, 1e4))
    np.testing.assert_array_equal(plain.models(), loud.models())
    for name in ("loss", "accuracy"):
        np.testing.assert_array_equal(plain.history[name], loud.history[name])


def test_losses_are_means_over_those_who_are_there():
    plan = own_plan([FREE])
    stream = pool((6, 2, 0), 1)
    measured = run_own(plan, stream).history
    for r in (0, 4):  # two clients, then one; x⁰ and x⁴ from the literal algorithm
        x = np.zeros(DIM) if r == 0 else algorithm_1(shortened(plan, r), 0, 0, stream=stream)
        met = stream.round(0, r)
        there = met.present == 1
        assert there.sum() == (2 if r == 0 else 1)
        margin = met.target[there] * (met.features[there] @ x)
        assert measured["loss"][0, 0, r] == pytest.approx(np.logaddexp(0, -margin).mean(), rel=1e-4)
        right = np.where(met.features[there] @ x >= 0, 1.0, -1.0) == met.target[there]
        assert measured["accuracy"][0, 0, r] == pytest.approx(right.mean())


def test_rounds_without_anyone_are_left_out_of_every_mean(tmp_path):
    """Three rounds with clients, then three with none: no number, no accuracy, no divergence."""
    plan, stream = own_plan([TREE, FREE], memory_mib=4096), pool((3, 2, 0), 1)
    told = []
    run = vs.run(
        plan,
        tmp_path / "out",
        task=Logistic(DIM),
        stream=stream,
        on_progress=lambda progress: told.append(progress.accuracy),
    )
    assert told[-1] is None
    for name in ("tree", "free"):
        loss, final = run.history("loss")[name][0], run.summary["methods"][name]["final"]
        assert np.isfinite(loss[:3]).all()
        assert np.isnan(loss[3:]).all()
        assert final["average_loss"]["mean"] == pytest.approx(loss[:3].mean(), rel=1e-5)
        assert "remark" not in final


def shortened(plan: Plan, rounds: int) -> Plan:
    return Plan.parse(plan.to_toml(), {"learning.rounds": rounds})


def test_a_client_is_there_or_not_never_in_part(tmp_path):
    """A weight of two would move the model twice as far as the noise is made for."""

    class Twofold(Wandering):
        def round(self, seed: int, round_: int) -> Sample:
            met = super().round(seed, round_)
            return met._replace(present=2 * met.present) if round_ == 3 else met

    with pytest.raises(InputError, match="present = 0 or 1"):
        vs.run(own_plan([TREE]), tmp_path / "out", task=Logistic(DIM), stream=Twofold())


def test_a_method_may_average_a_rounds_clients_in_fewer_steps_than_others():
    """The same as a plan whose steps are so large, beside methods that take them one by one."""
    own = TREE | {"name": "own", "clients_per_step": 4}
    mixed = own_plan([TREE, own, FREE | {"clients_per_step": 2}], tau=4)
    alone = own_plan([TREE], tau=1, clients=4)
    assert [prepare(mixed, m).shape[:2] for m in mixed.methods] == [(4, 1), (1, 4), (2, 2)]
    ours, other = prepare(mixed, mixed.methods[1]), prepare(alone, alone.methods[0])
    assert ours.noise_std == other.noise_std
    assert ours.guarantee == other.guarantee
    stream = pool((24, 24, 24), 4)
    found = {name: run_own(plan, stream).models() for name, plan in (("mixed", mixed), ("alone", alone))}
    np.testing.assert_allclose(found["mixed"][1], found["alone"][0], atol=1e-6)
    assert np.abs(found["mixed"][1] - found["mixed"][0]).max() > 1e-3


def test_a_step_takes_a_whole_part_of_a_rounds_clients():
    with pytest.raises(InputError, match=r"methods\[0\].clients_per_step = 3: .* divisor of 4"):
        own_plan([TREE | {"clients_per_step": 3}], tau=4)


@pytest.mark.parametrize("power", [0.0, 3.0])
def test_published_models_are_polynomial_averages_of_the_trained_ones(power):
    """Model k of K weighs Γ(k + p)/Γ(k), about k^p; training itself knows nothing of it."""
    plain, averaged = TREE, TREE | {"name": "averaged", "averaging": power}
    plan = own_plan([plain, averaged, FREE])
    stream = pool((6, 6, 6), 1)
    simulation, models = round_by_round(plan, stream)
    x, published = [m[0].astype(float) for m in models], [m[1] for m in models]
    for K in range(1, ROUNDS + 1):
        k = np.arange(1, K + 1)
        weights = np.exp(gammaln(k + power) - gammaln(k))
        expected = (weights / weights.sum()) @ np.array(x[:K])
        np.testing.assert_allclose(published[K - 1], expected, atol=1e-5)
    for r in range(1, ROUNDS):  # prequential: of what was published before the round
        met, model = stream.round(0, r), published[r - 1].astype(float)
        there = met.present.ravel() > 0
        margins = (met.target.ravel() * (met.features.reshape(-1, DIM) @ model))[there]
        losses = np.logaddexp(0.0, -margins)
        assert simulation.history["loss"][1, 0, r] == pytest.approx(losses.mean(), rel=1e-5)
        assert simulation.history["accuracy"][1, 0, r] == pytest.approx((margins > 0).mean())
    np.testing.assert_allclose(x[-1], algorithm_1(plan, 0, 0, stream=stream), atol=1e-5)
    held_out = simulation.held_out_accuracy
    assert held_out.shape == (3, 1, 4)
    answers = np.where(stream.held_out(0, 8, 0).features @ published[3] >= 0, 1.0, -1.0)
    right = (answers == stream.held_out(0, 8, 0).target).mean()
    assert held_out[1, 0, 2] == pytest.approx(right)  # before round 4: what round 3 published


def test_rounds_apart_are_rounds_in_a_loop(monkeypatch):
    """Large models on a CPU run round by round; small ones in one loop: the same numbers."""
    plan = own_plan([TREE | {"averaging": 2.0}, FREE], tau=2)
    stream = pool((12, 3, 1), 2)
    looped = run_own(plan, stream, block_rounds=4)
    assert not looped._rounds_apart
    monkeypatch.setattr(simulation_module, "LARGE", 1)
    apart = run_own(plan, stream, block_rounds=4)
    assert apart._rounds_apart
    np.testing.assert_allclose(apart.models(), looped.models(), atol=2e-6)
    np.testing.assert_array_equal(apart.held_out_accuracy, looped.held_out_accuracy)
    for name, values in looped.history.items():
        np.testing.assert_allclose(apart.history[name], values, atol=1e-5)


def test_distance_is_to_the_same_method_without_noise():
    """The same steps on gradients clipped alike; a method with no such twin has no distance."""
    slow = FREE | {"name": "slow", "step_size": 0.03}
    narrow = TREE | {"name": "narrow", "clip_norm": 0.05}
    plan = own_plan([slow, TREE, FREE, narrow])
    simulation, models = round_by_round(plan, pool((6, 6, 6), 1))
    x = [np.zeros((4, DIM)), *models]
    measured = simulation.history["distance"][:, 0]
    apart = [np.linalg.norm(models[1] - models[2]) for models in x[:-1]]
    np.testing.assert_allclose(measured[1], apart, atol=1e-5)
    assert apart[-1] > 0.1
    assert (measured[[0, 2]] == 0.0).all()
    assert np.isnan(measured[3]).all()


def test_a_method_has_a_clip_norm_of_its_own():
    """Noise is calibrated to it, gradients are held to it; the others keep the plan's."""
    narrow = TREE | {"name": "narrow", "clip_norm": 0.05}
    held = FREE | {"name": "held", "clip_norm": 0.05, "server_step_size": 1.0}
    plan = own_plan([TREE, narrow, held, FREE])
    prepared = [prepare(plan, m) for m in plan.methods]
    assert prepared[1].noise_std == pytest.approx(0.05 * prepared[0].noise_std)
    assert prepared[1].guarantee.clip_norm == 0.05
    assert prepared[0].guarantee.clip_norm == 1.0
    stream = pool((6, 6, 6), 1)
    models = run_own(plan, stream).models()
    for index in range(4):
        expected = algorithm_1(plan, index, 0, stream=stream)
        np.testing.assert_allclose(models[index, 0], expected, atol=1e-5)
    # Six rounds of the mean of three gradients of norm at most 0.05, with eta = 0.3.
    assert 1e-3 < np.linalg.norm(models[2, 0]) <= 6 * 0.3 * 0.05 * (1 + 1e-6)
    assert np.linalg.norm(models[3, 0]) > 6 * 0.3 * 0.05


def test_undeclared_has_the_noise_of_a_clip_norm_that_it_does_not_keep(tmp_path):
    """The paper's reading without clipping: shown, and called what it is in every file."""
    undeclared = TREE | {"name": "undeclared", "kind": "undeclared", "clip_norm": 0.05}
    kept = TREE | {"name": "kept", "clip_norm": 0.05}
    plan = own_plan([undeclared, FREE, kept])
    prepared = [prepare(plan, m) for m in plan.methods]
    assert prepared[0].noise_std == prepared[2].noise_std > 0
    assert prepared[0].guarantee is None
    assert main_method(prepared) == 2
    stream = pool((6, 6, 6), 1)
    run = vs.run(plan, tmp_path / "out", task=Logistic(DIM), stream=stream)
    expected = algorithm_1(plan, 0, 0, stream=stream)  # does not clip where the method does not
    np.testing.assert_allclose(run.model("undeclared"), expected, atol=1e-5)
    assert np.abs(run.model("undeclared") - run.model("kept")).max() > 0.05
    told = run.guarantees["undeclared"]
    assert told["guarantee"] is None
    assert told["protects"] == "nothing: not private, gradients not clipped"
    assert run.guarantees["kept"]["guarantee"]["clip_norm"] == 0.05
    summary = run.summary
    assert summary["main_method"] == "kept"
    assert summary["methods"]["undeclared"]["guarantee"] is None
    assert summary["methods"]["undeclared"]["protects"].startswith("nothing")
    assert summary["methods"]["undeclared"]["noise_std"] == prepared[0].noise_std
    assert summary["final"] == summary["methods"]["kept"]["final"]


def network_init(seed: int) -> dict:
    return {"w": np.zeros(DIM - 1, np.float32), "b": np.zeros((), np.float32)}


def network_loss(params, features, target):
    score = features[1:] @ params["w"] + features[0] * params["b"]
    return jnp.logaddexp(0.0, -target * score)


def network_predict(params, features):
    score = features[:, 1:] @ params["w"] + features[:, 0] * params["b"]
    return jnp.where(score >= 0, 1.0, -1.0)


def own_task() -> PytreeTask:
    """Logistic regression as a pytree; the first feature belongs to "b", which comes first."""
    return PytreeTask(network_loss, network_init, network_predict, classifies=True)


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """Two methods with names that a careless writer of arrays would take for its own options."""
    plan = own_plan([TREE | {"name": "file"}, FREE | {"name": "allow_pickle"}], seeds=2, first_seed=7)
    out = tmp_path_factory.mktemp("own") / "out"
    return vs.run(plan, out, task=own_task(), stream=pool((6, 4, 6), 1))


def test_a_task_and_a_stream_of_ones_own_run_as_algorithm_1(own_run):
    plan, stream = own_run.plan, pool((6, 4, 6), 1)
    for index, name in enumerate(("file", "allow_pickle")):
        for seed in (7, 8):
            expected = algorithm_1(plan, index, seed, stream=stream)
            np.testing.assert_allclose(own_run.model(name, seed), expected, atol=1e-5)
    assert own_run.summary["data"] == "made up"
    assert own_run.summary["comparators"] is None


def test_the_model_of_a_run_is_the_main_methods_first_seed(own_run):
    model = own_run.model()
    np.testing.assert_array_equal(model, own_run.model("file", 7))
    assert np.abs(model - own_run.model("file", 8)).max() > 1e-3
    task, stream = own_task(), pool((6, 4, 6), 1)
    assert set(task.unflatten(model)) == {"w", "b"}
    held_out = stream.held_out(7, 8, 0)
    right = (np.asarray(task.predict(model, held_out.features)) == held_out.target).mean()
    assert own_run.summary["final"]["accuracy"]["seeds"][0] == pytest.approx(right)


def test_a_model_that_is_not_there_is_refused_by_name(own_run, tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'file'"):
        own_run.model("fil")
    with pytest.raises(InputError, match=r"seed = 0: expected one of \[7, 8\]"):
        own_run.model(seed=0)
    for name in ("plan.toml", "summary.json"):
        (tmp_path / name).write_bytes((own_run.path / name).read_bytes())
    with pytest.raises(InputError, match="a run that keeps its models"):
        vs.Run(tmp_path).model()


def test_many_large_models_are_not_kept(tmp_path, monkeypatch):
    from veilstream.simulation import seed_batches

    monkeypatch.setattr(seed_batches, "_MODELS_BYTES", 2 * 4 * DIM - 1)  # two methods, one seed
    plan = own_plan([TREE, FREE])
    run = vs.run(plan, tmp_path / "out", task=own_task(), stream=pool((6, 6, 6), 1))
    assert run.summary["complete"]
    assert not (run.path / "models.npz").exists()


@pytest.mark.parametrize(
    ("overrides", "given", "message"),
    [
        ({}, {}, r'task = None: .* learning.task is "custom" \(run\(plan, task=...\)\)'),
        ({}, {"task"}, r'stream = None: .* data.kind is "custom" \(run\(plan, stream=...\)\)'),
        (
            {"learning.task": "logistic"},
            {"task", "stream"},
            r"task = 'PytreeTask': .*\(learning.task = \"custom\", or leave task out\)",
        ),
        (
            {"data.kind": "synthetic"},
            {"task", "stream"},
            r"stream = 'PoolStream': .*\(data.kind = \"custom\", or leave stream out\)",
        ),
    ],
)
def test_custom_and_what_is_given_must_agree(overrides, given, message, tmp_path):
    plan = Plan.parse(own_plan([TREE]).to_toml(), overrides)
    things = {"task": own_task(), "stream": pool((6, 6, 6), 1)}
    with pytest.raises(InputError, match=message):
        vs.run(plan, tmp_path / "out", **{name: things[name] for name in given})
    assert not (tmp_path / "out").exists()


class Wandering:
    """A stream that is no pool, with absent clients: learner 2 meets no one in odd rounds."""

    provenance = "made up"

    def round(self, seed: int, round_: int) -> Sample:
        rng = np.random.default_rng([seed, round_])
        features = rng.standard_normal((LEARNERS, 1, DIM)).astype(np.float32)
        present = np.ones((LEARNERS, 1), np.float32)
        present[2] = round_ % 2 == 0
        return Sample(features, np.sign(features[..., 0]), present)

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        features = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
        return Sample(features, np.sign(features[:, 0]))


def test_streams_that_are_no_pools_may_have_absent_clients_too(tmp_path):
    plan = own_plan([TREE, FREE])
    run = vs.run(plan, tmp_path / "out", task=Logistic(DIM), stream=Wandering())
    for index, name in enumerate(("tree", "free")):
        expected = algorithm_1(plan, index, 0, stream=Wandering())
        np.testing.assert_allclose(run.model(name), expected, atol=1e-5)
    assert json.loads((run.path / "versions.json").read_text())["noise"] == "host"
