"""The engine against a literal, slow transcription of Algorithm 1, with explicit B and ξ."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

import veilstream as vs
from tests.conformance.test_factorizations import draws
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import PlanNotice, prepare
from veilstream.simulation.engine import Simulation
from veilstream.simulation.noise_source import noise_seed

MECHANISMS = [*vs.mechanisms.MECHANISMS, "rounds"]


def plan_of(tau: int, methods: list[dict], **learning) -> Plan:
    return Plan(
        **{
            "learning": {"rounds": 7, "local_steps": tau, "learners": 3} | learning,
            "data": {"dim": 6, "held_out": 50},
            "privacy": {"epsilon": 30.0, "delta": 1e-3},
            "run": {"seeds": 2, "evaluate_every": 3},
            "methods": methods,
        }
    )


def entry(mechanism: str, **more) -> dict:
    base = {"name": mechanism, "mechanism": mechanism, "step_size": 0.3, "server_step_size": 1.5}
    if mechanism == "rounds":
        base |= {"mechanism": "optimal", "objective": "rounds"}
    return base | more


def simulate(plan: Plan, seeds=(0, 1), **options) -> Simulation:
    simulation = Simulation(plan, [prepare(plan, m) for m in plan.methods], seeds, **options)
    while not simulation.done:
        simulation.advance()
    simulation.close()
    return simulation


def check_resumes(plan: Plan, blocks: int) -> None:
    """From a checkpoint after so many blocks of two rounds, to the numbers of a run in one go."""
    prepared = [prepare(plan, m) for m in plan.methods]
    begun = Simulation(plan, prepared, (0, 1), block_rounds=2)
    for _ in range(blocks):
        begun.advance()
    resumed = Simulation(plan, prepared, (0, 1), block_rounds=2)
    resumed.restore(copy.deepcopy(begun.state()))
    assert resumed.round == 2 * blocks
    begun.close()
    while not resumed.done:
        resumed.advance()
    whole = simulate(plan, block_rounds=2)
    np.testing.assert_array_equal(resumed.models(), whole.models())
    np.testing.assert_array_equal(resumed.history["loss"], whole.history["loss"])
    np.testing.assert_array_equal(resumed.held_out_accuracy, whole.held_out_accuracy)


def host_draws(T: int, width: int, seed: int, mechanism: str) -> np.ndarray:
    """ξ as `HostNoise` draws them: rows of the keystream of this seed and mechanism."""
    return draws(T, width, noise_seed(seed, mechanism))


def algorithm_1(
    plan: Plan, index: int, seed: int, *, xi_of=host_draws, stream=None, start=None, weights=None
) -> np.ndarray:
    """Lines 1 to 18 of the paper's listing, in float64, one learner and one client at a time.

    ``xi_of(T, n·d, seed, mechanism)`` are the draws; a place without a client has gradient zero.
    Around it the server's forgetting, which the paper has not, and ``weights`` (R, n)
    of releases in units of 1/n: a learner of weight zero is absent, and none of its steps is spent.
    """
    prepared = prepare(plan, plan.methods[index])
    method, gamma = prepared.plan, prepared.rule.gamma
    R, tau, n = plan.learning.rounds, plan.learning.local_steps, plan.learning.learners
    d, c = plan.data.dim, plan.learning.clients_per_step
    eta, eta_g = method.step_size, method.server_step_size
    if prepared.factorization is None:
        B, xi = np.zeros((R * tau, R * tau)), np.zeros((R * tau, n, d))
    else:
        B = np.cumsum(prepared.factorization.noising_matrix(), axis=0)  # rows b^{r,t}
        xi = xi_of(R * tau, n * d, seed, prepared.factorization.name)
        xi = prepared.noise_std * np.asarray(xi, np.float64).reshape(R * tau, n, d)
    stream = stream_of(plan) if stream is None else stream
    clip_norm = plan.clip_norm_of(method) if method.method.clips else np.inf
    x = np.zeros(d) if start is None else start.astype(float)
    x0 = x.copy()
    eta_tilde = eta * eta_g * tau
    gradients_so_far = np.zeros((n, d))
    last_sum = np.zeros((n, d))  # S_i^{r,t-1}; b^{0,-1} = 0
    weights = np.ones((R, n)) if weights is None else weights
    spent = np.zeros(n, int)  # steps of each learner
    for r in range(R):
        clients = stream.round(seed, r)
        g_hat = np.zeros((n, d))
        for i in np.flatnonzero(weights[r]):
            z = x.copy()
            for t in range(tau):
                gradient = np.zeros(d)
                for place in range(t * c, (t + 1) * c):
                    if clients.present is not None and not clients.present[i, place]:
                        continue
                    a = clients.features[i, place].astype(float)
                    y = float(clients.target[i, place])
                    g = -y * a / (1 + np.exp(y * (a @ z)))
                    if gamma is not None:
                        g = g / (np.linalg.norm(g) + gamma)
                    gradient += g * min(1.0, clip_norm / np.linalg.norm(g)) / c
                gradients_so_far[i] += gradient
                S = gradients_so_far[i] + B[spent[i]] @ xi[:, i]
                spent[i] += 1
                z = z - eta * (S - last_sum[i])
                last_sum[i] = S
            g_hat[i] = (x - z) / (eta * tau)
        x = x0 + method.forgetting * (x - x0) - eta_tilde * (weights[r] @ g_hat) / n
    return x


@pytest.mark.parametrize("tau", [1, 3])
def test_engine_is_algorithm_1_for_every_mechanism(tau):
    methods = [entry(name) for name in MECHANISMS]
    methods.append({"name": "free", "kind": "noise-free", "step_size": 0.3, "server_step_size": 1.5})
    plan = plan_of(tau, methods)
    models = simulate(plan).models()
    for index, method in enumerate(plan.methods):
        for s, seed in enumerate((0, 1)):
            expected = algorithm_1(plan, index, seed)
            scale = max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(models[index, s], expected, atol=1e-5 * scale, err_msg=method.name)


@pytest.mark.parametrize("tau", [1, 3])
def test_auto_is_algorithm_1_on_normalised_gradients_beside_methods_that_clip(tau):
    """Off is off to the bit: the method beside it has the numbers that it has alone."""
    auto = {"name": "auto", "kind": "auto", "newest_weight": 1.0}  # the newest model, no average
    beside = entry("buffered")
    plan = plan_of(tau, [auto, beside], clients_per_step=2)
    simulation = simulate(plan)
    for s, seed in enumerate((0, 1)):
        expected = algorithm_1(plan, 0, seed)
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(simulation.models()[0, s], expected, atol=1e-5 * scale)
    alone = simulate(plan_of(tau, [beside], clients_per_step=2))
    np.testing.assert_array_equal(simulation.models()[1], alone.models()[0])


MEMORIES = {
    "forgetting": {"forgetting": 0.8},
    "other": {"forgetting": 0.7, "objective": "published", "mechanism": "buffered"},
}


@pytest.mark.parametrize(("tau", "place"), [(3, "host"), (1, "device")])
def test_forgetting_is_the_servers_and_leaves_other_methods_alone(tau, place):
    """From a start that is not zero: what is forgotten is the distance to it."""
    plain = entry("optimal")
    methods = [plain] + [entry("optimal", name=name, objective="published") | more for name, more in MEMORIES.items()]
    plan = plan_of(tau, methods)
    start = np.linspace(-1.0, 1.0, 6).astype(np.float32)
    options = {"start": start, "block_rounds": 4}
    if place == "device":
        plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, noise="device"))
    found = simulate(plan, **options).models()
    if place == "host":
        for index, method in enumerate(plan.methods):
            expected = algorithm_1(plan, index, 1, start=start)
            np.testing.assert_allclose(found[index, 1], expected, atol=2e-5, err_msg=method.name)
    alone = dataclasses.replace(plan, methods=plan.methods[:1])
    np.testing.assert_array_equal(simulate(alone, **options).models()[0], found[0])


def test_a_checkpoint_goes_on_to_the_same_numbers():
    check_resumes(plan_of(3, [entry("buffered"), entry("tree")]), 1)
    check_resumes(plan_of(2, [entry("optimal", name=name) | more for name, more in MEMORIES.items()]), 1)


def test_an_exponential_average_is_published():
    plan = plan_of(1, [entry("optimal", newest_weight=0.3), entry("optimal", name="raw")])
    simulation = Simulation(plan, [prepare(plan, m) for m in plan.methods], (0,), block_rounds=1)
    average = None
    for r in range(7):
        simulation.advance()
        published, raw = simulation.models()[:, 0]
        share = max(0.3, 1 / (r + 1))
        average = raw if average is None else (1 - share) * average + share * raw
        np.testing.assert_allclose(published, average, atol=1e-6)


def test_several_clients_in_a_step_and_a_small_clip_norm():
    plan = plan_of(3, [entry("toeplitz")], clients_per_step=4, clip_norm=0.2)
    prepared = prepare(plan, plan.methods[0])
    assert prepared.guarantee.sensitivity == pytest.approx(2 * 0.2 / 4 * prepared.factorization.sensitivity())
    expected = algorithm_1(plan, 0, 1)
    np.testing.assert_allclose(simulate(plan).models()[0, 1], expected, atol=1e-5)


def test_two_runs_are_identical_to_the_bit():
    plan = plan_of(4, [entry("optimal"), entry("tree")])
    one, two = simulate(plan), simulate(plan)
    np.testing.assert_array_equal(one.models(), two.models())
    for name, values in one.history.items():
        np.testing.assert_array_equal(values, two.history[name])


def test_neither_blocks_nor_company_change_the_numbers():
    both = plan_of(4, [entry("optimal"), entry("tree")])
    whole = simulate(both)
    alone = simulate(plan_of(4, [entry("tree")]), seeds=(1,))
    np.testing.assert_allclose(alone.models()[0, 0], whole.models()[1, 1], atol=2e-6)
    small = simulate(both, block_rounds=2)
    np.testing.assert_allclose(small.models(), whole.models(), atol=2e-6)
    np.testing.assert_allclose(small.history["loss"], whole.history["loss"], atol=1e-5)


def test_number_of_devices_changes_nothing_beyond_rounding(tmp_path):
    plan = plan_of(4, [entry("optimal"), entry("tree")])
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    code = (
        "import numpy as np, jax; from veilstream.plans.plan import Plan;"
        "from tests.simulation.test_algorithm_one import simulate;"
        "assert len(jax.devices()) == 2;"
        f"models = simulate(Plan.load({str(tmp_path / 'plan.toml')!r})).models();"
        f"np.save({str(tmp_path / 'x.npy')!r}, models)"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **flags}, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "x.npy"), simulate(plan).models(), atol=2e-6)


def test_losses_are_those_of_the_released_model_before_learning():
    """The first round's loss is that of x⁰ = 0: ln 2, whatever the method."""
    simulation = simulate(plan_of(3, [entry("tree")]))
    np.testing.assert_allclose(simulation.history["loss"][0, :, 0], np.log(2), rtol=1e-6)


def test_liu_takes_one_step_on_the_whole_mini_batch():
    """x¹ by hand: the mean of all clipped gradients at x⁰, plus the round's noise."""
    liu = {"name": "liu", "kind": "liu", "step_size": 0.5, "server_step_size": 2.0}
    plan = plan_of(4, [liu], rounds=1)
    prepared = prepare(plan, plan.methods[0])
    assert prepared.factorization.horizon == 1
    assert prepared.guarantee.sensitivity == pytest.approx(2 / 4)
    clients = stream_of(plan).round(0, 0)
    gradients = -0.5 * clients.target[..., None] * clients.features  # norm 1/2: not clipped
    noise = prepared.noise_std * draws(1, 18, noise_seed(0, "independent")).reshape(3, 6)
    expected = -0.5 * 2.0 * (gradients.mean(axis=1) + noise).mean(axis=0)
    np.testing.assert_allclose(simulate(plan).models()[0, 0], expected, atol=1e-5)


def test_gao_takes_steps_of_unit_length():
    gao = {"name": "gao", "kind": "gao", "step_size": 0.25}
    plan = plan_of(1, [gao], learners=1, rounds=1)
    model = simulate(plan).models()[0, 0]
    assert np.linalg.norm(model) == pytest.approx(0.25, rel=1e-5)


def test_a_ball_beside_correlated_noise_gets_a_warning():
    plan = plan_of(1, [entry("optimal")], projection_radius=0.5)
    with pytest.warns(PlanNotice, match=r"projection_radius = 0\.5 beside correlated noise.*cancelled"):
        prepare(plan, plan.methods[0])
    plan = plan_of(1, [entry("independent")], projection_radius=0.5)
    prepare(plan, plan.methods[0])  # warnings are errors


def test_projection_and_decay():
    free = {"name": "free", "kind": "noise-free", "step_size": 5.0, "server_step_size": 1.0}
    model = simulate(plan_of(2, [free], projection_radius=0.1)).models()
    assert np.linalg.norm(model, axis=-1).max() <= 0.1 * (1 + 1e-5)
    fast = simulate(plan_of(1, [free | {"step_decay": 30.0}])).models()
    once = simulate(plan_of(1, [free], rounds=1)).models()
    np.testing.assert_allclose(fast, once, atol=1e-5)


def test_nonconvex_regret_stays_below_the_theory():
    """Ripple with a fixed target: alpha, mu, L known, C_R = 0; lem-u with the run's own B_g."""
    from veilstream.learning.tasks import Ripple
    from veilstream.research import theory

    eta_tilde, tau, n, R, d = 0.01, 2, 4, 60, 5
    step = eta_tilde / (tau * 2.0)
    methods = [
        {"name": name, "mechanism": name, "step_size": step, "server_step_size": 2.0}
        for name in ("tree", "toeplitz", "optimal")
    ]
    plan = Plan(
        **{
            "learning": {"rounds": R, "local_steps": tau, "learners": n, "task": "ripple", "clip_norm": 8.0},
            "data": {"kind": "ripple", "dim": d, "walk": 0.0, "held_out": 1},
            "privacy": {"epsilon": 20.0, "delta": 1e-3},
            "run": {"seeds": 8},
            "methods": methods,
        }
    )
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = simulate(plan, seeds=range(8))
    for index, p in enumerate(prepared):
        measured = simulation.history["loss"][index].astype(float).mean()
        constants = theory.Constants(
            smoothness=Ripple.smoothness,
            regularity=1.0,
            alpha=Ripple.alpha,
            mu=Ripple.mu,
            gradient_bound=8.0,
            dim=d,
            learners=n,
            local_steps=tau,
            rounds=R,
            step_size=step,
            server_step_size=2.0,
            path_variation=0.0,
            initial_distance_squared=0.25 * d,
            noise_std=p.noise_std,
            row_norms_squared=p.factorization.row_norms_squared(),
        )
        bound = theory.dynamic_regret_bound(constants)
        assert bound.holds
        assert measured < bound.total
