"""One local step, one local round, one server update, against float64 written by brute force.

The task is least squares: its gradient (a·x - y)·a needs no library.
"""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.learning import algorithm
from veilstream.learning.algorithm import LARGE, StepRule, local_round, local_step, moved, server_update
from veilstream.learning.tasks import LeastSquares, Sample

DIM = 5
TASK = LeastSquares(DIM)

RULES = {
    "clipped": StepRule(0.7),
    "unclipped": StepRule(1e6),
    "projected": StepRule(0.7, projection_radius=0.9),
    "unit-steps": StepRule(0.7, unit_steps=True),
    "all": StepRule(0.4, projection_radius=1.1, unit_steps=True),
}


def draw(rng, steps: int, clients: int, dim: int = DIM, *, absent: bool = False):
    """Model, clients (steps, clients, ...) and noise (steps, dim)."""
    x = rng.standard_normal(dim) / np.sqrt(dim)
    features = rng.standard_normal((steps, clients, dim)) / np.sqrt(dim)
    target = 2 * rng.standard_normal((steps, clients))
    present = (rng.random((steps, clients)) < 0.6).astype(np.float32) if absent else None
    noise = 0.3 * rng.standard_normal((steps, dim)) / np.sqrt(dim)
    sample = Sample(features.astype(np.float32), target.astype(np.float32), present)
    return x.astype(np.float32), sample, noise.astype(np.float32)


def at(clients: Sample, step: int) -> Sample:
    return jax.tree.map(lambda leaf: leaf[step], clients)


def slow_clip(gradient, bound) -> np.ndarray:
    if not np.isfinite(gradient).all():
        return np.zeros_like(gradient)
    length = np.linalg.norm(gradient)
    return gradient if length <= bound else gradient * (bound / length)


def slow_project(x, rule) -> np.ndarray:
    length = np.linalg.norm(x)
    radius = rule.projection_radius
    return x if radius is None or length <= radius else x * (radius / length)


def slow_step(rule, z, clients, noise, step_size):
    z, total, count = np.asarray(z, np.float64), np.zeros(len(z)), len(clients.target)
    for c in range(count):
        if clients.present is not None and not clients.present[c]:
            continue
        a, y = np.asarray(clients.features[c], np.float64), float(clients.target[c])
        with np.errstate(invalid="ignore"):
            total += slow_clip((a @ z - y) * a, float(rule.clip_norm))
    gradient = total / count
    if rule.unit_steps and gradient.any():
        gradient = gradient / np.linalg.norm(gradient)
    noisy = gradient + np.asarray(noise, np.float64)
    return slow_project(z - step_size * noisy, rule), noisy


def slow_round(rule, x, clients, noise, step_size) -> np.ndarray:
    z, total = np.asarray(x, np.float64), np.zeros(len(x))
    for step in range(len(noise)):
        z, noisy = slow_step(rule, z, at(clients, step), noise[step], step_size)
        total += noisy
    return total / len(noise)


def assert_near(found, expected, tolerance: float = 1e-5):
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    distance = np.linalg.norm(np.asarray(found, np.float64) - expected)
    assert distance <= tolerance * max(1.0, np.linalg.norm(expected))


@cache
def step_of(rule):
    return jax.jit(lambda *inputs: local_step(TASK, rule, *inputs))


@cache
def round_of(rule):
    return jax.jit(lambda *inputs: local_round(TASK, rule, *inputs))


@pytest.mark.parametrize(("clients", "name"), [(1, "clipped"), *((4, name) for name in RULES)])
def test_local_step_equals_brute_force(clients, name):
    rule = RULES[name]
    rng = np.random.default_rng(clients)
    for _ in range(8):
        z, met, noise = draw(rng, 1, clients, absent=True)
        found = step_of(rule)(z, at(met, 0), noise[0], 0.8)
        expected = slow_step(rule, z, at(met, 0), noise[0], 0.8)
        for ours, theirs in zip(found, expected, strict=True):
            assert_near(ours, theirs)


def quiet_step(bound, clients: Sample, z=None) -> np.ndarray:
    """The clipped mean alone."""
    z = np.zeros(DIM, np.float32) if z is None else z
    nothing = np.zeros(DIM, np.float32)
    return np.asarray(step_of(StepRule(bound))(z, clients, nothing, 0.1)[1], np.float64)


@pytest.mark.parametrize("kind", [np.float32, bool, np.int32])
@pytest.mark.parametrize("here", [1, 2, 4])
def test_absent_clients_leave_the_weight_of_others_alone(here, kind):
    """One of four weighs a quarter, however few have come; else it could move the mean by 2B."""
    features = np.tile(np.eye(DIM, dtype=np.float32)[0], (4, 1))
    present = (np.arange(4) < here).astype(kind)
    met = Sample(features, np.full(4, 100.0, np.float32), present)
    found = quiet_step(0.5, met)
    np.testing.assert_allclose(found, [-0.5 * here / 4, 0, 0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_one_client_moves_the_mean_by_at_most_twice_the_bound_over_the_clients(clients):
    """Replaced by anyone, or gone, whoever the others are and whether they come or not."""
    rng, bound, worst = np.random.default_rng(7), 0.6, 0.0
    for _ in range(12):
        z, met, _ = draw(rng, 1, clients, absent=True)
        here = Sample(*(np.array(leaf[0]) for leaf in met))
        pull = rng.standard_normal(DIM).astype(np.float32)
        means = []
        for features, target, present in (
            (pull, 1e4, 1),
            (pull, -1e4, 1),
            (pull, 1e4, 0),
            (1e30 * pull, 1, 1),
            (np.nan * pull, 1, 1),
            (pull, np.inf, 0),
            (1e-3 * pull, 0, 1),
        ):
            here.features[0], here.target[0], here.present[0] = features, target, present
            means.append(quiet_step(bound, here, z))
        moves = [np.linalg.norm(a - b) for a in means for b in means]
        worst = max(worst, *moves)
    assert worst <= 2 * bound / clients * (1 + 1e-6)
    assert worst >= 2 * bound / clients * (1 - 1e-4)


@pytest.mark.parametrize("unit_steps", [False, True])
@pytest.mark.parametrize("clients", [1, 3])
def test_a_step_that_meets_no_one_is_noise_and_nothing_else(clients, unit_steps):
    """Whatever stands at the empty places."""
    z, met, noise = draw(np.random.default_rng(8), 1, clients)
    for empty in (0.0, 1.0, 1e30, np.nan):
        mask = np.zeros(clients, np.float32)
        nobody = Sample(met.features[0] * np.float32(empty), met.target[0], mask)
        rule = StepRule(1.0, unit_steps=unit_steps)
        after, noisy = step_of(rule)(z, nobody, noise[0], 0.5)
        np.testing.assert_array_equal(noisy, noise[0])
        np.testing.assert_allclose(after, z - 0.5 * noise[0], rtol=1e-6)


def test_no_mask_means_that_all_are_present():
    z, met, noise = draw(np.random.default_rng(9), 1, 3)
    found = step_of(StepRule(0.5))(z, at(met, 0), noise[0], 0.5)
    masked = at(met, 0)._replace(present=np.ones(3, np.float32))
    same = step_of(StepRule(0.5))(z, masked, noise[0], 0.5)
    expected = slow_step(StepRule(0.5), z, at(met, 0), noise[0], 0.5)
    for ours, mask, theirs in zip(found, same, expected, strict=True):
        np.testing.assert_allclose(ours, mask, rtol=1e-6, atol=1e-7)
        assert_near(ours, theirs)


def test_a_traced_clip_norm_equals_a_fixed_one():
    """Also mapped: methods with bounds of their own are one program."""
    x, met, noise = draw(np.random.default_rng(10), 2, 3, absent=True)
    bounds = np.array([0.05, 3.0], np.float32)

    def release(bound):
        return local_round(TASK, StepRule(bound, projection_radius=1.0), x, met, noise, 0.5)

    traced, mapped = jax.jit(release), jax.jit(jax.vmap(release))(bounds)
    rules = [StepRule(float(bound), projection_radius=1.0) for bound in bounds]
    expected = [np.asarray(round_of(rule)(x, met, noise, 0.5)) for rule in rules]
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    for i, bound in enumerate(bounds):
        np.testing.assert_allclose(traced(bound), expected[i], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mapped[i], expected[i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", [0, -1.0, 1e-16, 1e16, np.inf, np.nan])
def test_clip_norms_that_float32_cannot_keep_are_refused(bound):
    with pytest.raises(InputError) as refusal:
        StepRule(bound)
    assert refusal.value.field == "clip_norm"


@pytest.mark.parametrize(("steps", "name"), [(1, "all"), *((5, name) for name in RULES)])
def test_local_round_equals_brute_force(steps, name):
    rule = RULES[name]
    rng = np.random.default_rng(steps)
    for _ in range(6):
        x, met, noise = draw(rng, steps, 3, absent=True)
        found = round_of(rule)(x, met, noise, 0.8)
        assert_near(found, slow_round(rule, x, met, noise, 0.8))


def test_a_round_of_one_step_equals_the_loop():
    """Once through a loop of one; once as two equal steps that do not move."""
    x, met, noise = draw(np.random.default_rng(11), 1, 3, absent=True)
    rule = RULES["unit-steps"]
    found = round_of(rule)(x, met, noise, 0.8)
    _, noisy = jax.lax.scan(lambda z, step: local_step(TASK, rule, z, *step, 0.8), x, (met, noise))
    np.testing.assert_allclose(found, noisy[0], rtol=1e-6, atol=1e-7)
    twice = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=0), (met, noise))
    np.testing.assert_allclose(found, round_of(rule)(x, *twice, 0.0), rtol=1e-6, atol=1e-7)


def test_far_models_do_not_swallow_small_steps():
    """(x - z)/(ητ) would be zero here: the noisy gradients themselves are averaged."""
    x, met, noise = draw(np.random.default_rng(12), 3, 2)
    x = x * np.float32(1e6)
    assert (x - np.float32(1e-3) * noise[0] == x).mean() > 0.5
    found = round_of(StepRule(0.7))(x, met, noise, 1e-3)
    assert_near(found, slow_round(StepRule(0.7), x, met, noise, 1e-3))


def test_learners_are_rounds_of_their_own():
    """Mapped over learners that share x, as the simulation does."""
    rng = np.random.default_rng(13)
    drawn = [draw(rng, 2, 2, absent=True) for _ in range(3)]
    x, rule = drawn[0][0], StepRule(0.5, projection_radius=1.0)
    met = jax.tree.map(lambda *leaves: np.stack(leaves), *(d[1] for d in drawn))
    noise = np.stack([d[2] for d in drawn], axis=1)  # (steps, learners, d)

    def learner(x, met, noise):
        return local_round(TASK, rule, x, met, noise, 0.8)

    releases = jax.jit(jax.vmap(learner, in_axes=(None, 0, 1)))(x, met, noise)
    for release, (_, own, its_noise) in zip(releases, drawn, strict=True):
        assert_near(release, slow_round(rule, x, own, its_noise, 0.8))


def lowered(dim: int, steps: int):
    task, rule = LeastSquares(dim), StepRule(0.7, projection_radius=0.9)
    x, met, noise = draw(np.random.default_rng(14), steps, 2, dim, absent=True)
    learner = jax.jit(lambda *inputs: local_round(task, rule, *inputs, 0.8))
    return learner.lower(x, met, noise), (x, met, noise), rule


@pytest.mark.parametrize(
    ("dim", "steps", "loops"),
    [(LARGE - 1, 3, True), (LARGE, 3, False), (LARGE, 4, False), (LARGE, 5, True), (LARGE - 1, 1, False)],
)
def test_large_models_with_few_steps_and_single_steps_have_no_loop(dim, steps, loops):
    program, _, _ = lowered(dim, steps)
    assert ("stablehlo.while" in program.as_text()) == loops


def test_unrolled_rounds_equal_loops_and_brute_force(monkeypatch):
    """Just below and at the size that unrolls, and the same size with a loop."""
    for dim in (LARGE - 1, LARGE):
        program, inputs, rule = lowered(dim, 3)
        unrolled = program.compile()(*inputs)
        # Clipping in float32 stays 4e-5 below the bound at this size.
        assert_near(unrolled, slow_round(rule, *inputs, 0.8), 1e-4)
    monkeypatch.setattr(algorithm, "LARGE", LARGE + 1)
    loop, _, _ = lowered(LARGE, 3)
    assert "stablehlo.while" in loop.as_text()
    np.testing.assert_allclose(loop.compile()(*inputs), unrolled, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("radius", [None, 0.9, 50.0])
@pytest.mark.parametrize("learners", [1, 2, 7])
def test_server_update_equals_brute_force(learners, radius):
    rng, rule = np.random.default_rng(learners), StepRule(1.0, projection_radius=radius)
    for _ in range(5):
        x = rng.standard_normal(DIM).astype(np.float32)
        releases = rng.standard_normal((learners, DIM)).astype(np.float32)
        mean = sum(release.astype(np.float64) for release in releases) / learners
        assert_near(server_update(rule, x, releases, 0.8), slow_project(x - 0.8 * mean, rule))


def test_every_enrolled_learner_weighs_the_same_even_a_silent_one():
    """1/n each: a silent learner's weight goes to no one."""
    x, one = np.zeros(3, np.float32), np.array([3.0, -6.0, 9.0], np.float32)
    for place in range(3):
        releases = np.zeros((3, 3), np.float32)
        releases[place] = one
        found = server_update(StepRule(1.0), x, releases, 1.0)
        np.testing.assert_allclose(found, -one / 3, rtol=1e-6)


def test_the_server_does_not_clip_again():
    releases = np.full((2, 3), 100.0, np.float32)
    found = server_update(StepRule(1.0), np.zeros(3, np.float32), releases, 1.0)
    np.testing.assert_allclose(found, [-100.0] * 3, rtol=1e-6)


@pytest.mark.parametrize("radius", [0.25, 2.0])
def test_projection_keeps_the_inside_and_the_direction(radius):
    """Zero stays zero, inner models stay bit for bit, outer ones land on the sphere."""
    rule, nothing = StepRule(1.0, projection_radius=radius), np.zeros((1, DIM), np.float32)
    direction = np.random.default_rng(15).standard_normal(DIM)
    direction /= np.linalg.norm(direction)
    for scale in (0.0, 1e-6, 0.5, 0.999):
        x = (scale * radius * direction).astype(np.float32)
        np.testing.assert_array_equal(server_update(rule, x, nothing, 0.1), x)
    for scale in (1.001, 3.0, 1e6, 1e15):
        x = (scale * radius * direction).astype(np.float32)
        found = server_update(rule, x, nothing, 0.1)
        np.testing.assert_allclose(found, radius * direction, rtol=1e-5)


@pytest.mark.parametrize("radius", [None, 0.5, 100.0])
def test_a_deployed_model_moves_as_a_simulated_one(radius):
    """One function for both: NumPy arrays stay as they are, with the same numbers."""
    rng = np.random.default_rng(0)
    x, direction = rng.standard_normal((2, 7)).astype(np.float32)
    size = np.float32(0.3)
    deployed = moved(x, direction, size, radius)
    simulated = moved(jax.numpy.asarray(x), jax.numpy.asarray(direction), size, radius)
    assert type(deployed) is np.ndarray
    assert deployed.dtype == np.float32
    np.testing.assert_allclose(deployed, np.asarray(simulated), rtol=1e-6)
    if radius == 0.5:
        assert np.linalg.norm(deployed) == pytest.approx(0.5, rel=1e-6)
    else:
        np.testing.assert_array_equal(deployed, x - size * direction)
    zero = np.zeros(3)
    np.testing.assert_array_equal(moved(zero, zero, 1.0, radius), zero)
