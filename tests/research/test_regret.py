"""Regret and its optima: scipy, a second linear program and closed forms are the references."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog, minimize

from veilstream.errors import InputError, SolverError
from veilstream.research import optima
from veilstream.research.optima import (
    least_squares_optimum,
    logistic_optimum,
    offline_least_squares_optimum,
    offline_logistic_optimum,
)
from veilstream.research.regret import average_regret, path_variation

LOG2 = math.log(2.0)


def loss(x, a, y, ridge=0.0):
    return np.logaddexp(0.0, -y * (a @ x)).mean() + 0.5 * ridge * x @ x


def gradient(x, a, y, ridge=0.0):
    p = 1.0 / (1.0 + np.exp(y * (a @ x)))
    return -(p * y) @ a / len(y) + ridge * x


def scipy_minimum(a, y, ridge=0.0):
    start = np.zeros(a.shape[1])
    found = minimize(loss, start, (a, y, ridge), "BFGS", jac=gradient, options={"gtol": 1e-9, "maxiter": 5000})
    return found.fun, found.x


def reference_class(a, y):
    """Separable, quasi or overlapping, by two linear programs other than the one in the source."""
    z = y[:, None] * a
    free = [(None, None)] * a.shape[1]
    strict = linprog(np.zeros(a.shape[1]), A_ub=-z, b_ub=-np.ones(len(z)), bounds=free)
    if strict.status == 0:
        return "separable"
    box = [(-1.0, 1.0)] * a.shape[1]
    weak = linprog(-z.sum(axis=0), A_ub=-z, b_ub=np.zeros(len(z)), bounds=box)
    return "quasi" if -weak.fun > 1e-6 else "overlapping"


def verdict(optimum, problem=0):
    if optimum.separable[problem]:
        assert not optimum.attained[problem]
        assert optimum.value[problem] == 0.0
        assert optimum.gradient_norm[problem] == 0.0
        assert np.isnan(optimum.minimiser[problem]).all()
        return "separable"
    if optimum.attained[problem]:
        assert np.isfinite(optimum.minimiser[problem]).all()
        assert optimum.gradient_norm[problem] <= 1e-8
        return "overlapping"
    assert np.isnan(optimum.minimiser[problem]).all()
    return "quasi"


def solve_one(a, y, **options):
    return logistic_optimum(np.asarray(a, float)[None], np.asarray(y, float)[None], **options)


def random_labels(rng, *shape):
    return np.where(rng.random(shape) < 0.5, 1.0, -1.0)


@pytest.mark.parametrize(
    ("samples", "dim", "ridge"), [(60, 5, 0.0), (40, 1, 0.0), (30, 6, 0.1), (12, 20, 0.05), (8, 8, 1.0), (1, 3, 0.3)]
)
def test_logistic_optimum_equals_scipy(samples, dim, ridge):
    rng = np.random.default_rng(samples)
    a, y = rng.standard_normal((4, samples, dim)), random_labels(rng, 4, samples)
    optimum = logistic_optimum(a, y, ridge)
    assert optimum.attained.all()
    for i in range(4):
        value, x = scipy_minimum(a[i], y[i], ridge)
        assert optimum.value[i] == pytest.approx(value, abs=1e-10)
        assert optimum.value[i] <= value + 1e-12
        np.testing.assert_allclose(optimum.minimiser[i], x, atol=1e-5)
        own = gradient(optimum.minimiser[i], a[i], y[i], ridge)
        assert np.linalg.norm(own) <= 1e-8
        assert optimum.gradient_norm[i] == pytest.approx(np.linalg.norm(own), abs=1e-12)


def test_one_feature_has_the_closed_form_log_odds():
    a, y = np.ones((10, 1)), np.array([1.0] * 7 + [-1.0] * 3)
    optimum = solve_one(a, y, tolerance=1e-12)
    assert optimum.minimiser[0, 0] == pytest.approx(math.log(7 / 3), abs=1e-10)
    entropy = -0.7 * math.log(0.7) - 0.3 * math.log(0.3)
    assert optimum.value[0] == pytest.approx(entropy, abs=1e-13)


@pytest.mark.parametrize(
    ("a", "y"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [1, -1]),
        ([[1.0], [2.0], [-3.0]], [1, 1, -1]),
        ([[1.0, 2.0]] * 5, [1] * 5),
        ([[1.0, 5.0], [1.0, -7.0], [1.0, 0.1]], [1, 1, 1]),
        ([[1.0, 1e-6], [1.0, -1e-6], [1.0, 2e-6]], [1, -1, 1]),
        ([[3.0]], [-1]),
    ],
    ids=["axes", "line", "repeated", "all one label", "narrow", "single"],
)
def test_separable_rounds_have_infimum_zero_and_no_minimiser(a, y):
    assert verdict(solve_one(a, y)) == "separable"


def test_paper_setting_of_80_points_in_100_dimensions_is_always_separable():
    rng = np.random.default_rng(4)
    a, y = rng.standard_normal((500, 80, 100)), random_labels(rng, 500, 80)
    assert logistic_optimum(a, y).separable.all()


def test_all_one_label_overlaps_when_the_points_surround_the_origin():
    optimum = solve_one([[1.0, 0.0], [-1.0, 1.0], [0.0, -1.0]], [1, 1, 1])
    assert verdict(optimum) == "overlapping"
    np.testing.assert_allclose(optimum.minimiser[0], 0.0, atol=1e-8)
    assert optimum.value[0] == pytest.approx(LOG2, abs=1e-15)


@pytest.mark.parametrize(
    ("a", "y", "infimum"),
    [
        # The same point twice with opposite labels costs log 2 each; the rest is free.
        ([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [1, -1, 1], 2 * LOG2 / 3),
        # A sample without features costs log 2, whatever the model.
        ([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]], [1, 1, 1], LOG2 / 3),
        # A feature that only samples of one label have, as in the margins of an image.
        (
            [[1.0, 0.0]] * 10 + [[1.0, 1.0], [1.0, 3.0]],
            [1] * 7 + [-1] * 3 + [1, 1],
            10 / 12 * (-0.7 * math.log(0.7) - 0.3 * math.log(0.3)),
        ),
        # N < d: two opposite copies in five dimensions, and one free point.
        (np.eye(5)[[0, 0, 1]], [1, -1, -1], 2 * LOG2 / 3),
        # The free row is very near to the span of the others.
        ([[1.0, 0.0], [1.0, 0.0], [1.0, 1e-5]], [1, -1, 1], 2 * LOG2 / 3),
    ],
    ids=["opposite", "empty sample", "one-sided feature", "wide", "thin"],
)
def test_quasi_separable_rounds_have_a_positive_infimum_and_no_minimiser(a, y, infimum):
    optimum = solve_one(a, y)
    assert reference_class(np.asarray(a), np.asarray(y, float)) == "quasi"
    assert verdict(optimum) == "quasi"
    assert optimum.value[0] == pytest.approx(infimum, abs=1e-10)
    assert optimum.gradient_norm[0] <= 1e-8


def test_zero_features_cost_log_two_at_the_zero_model():
    optimum = solve_one(np.zeros((3, 4)), [1, -1, 1])
    assert verdict(optimum) == "overlapping"
    assert optimum.value[0] == pytest.approx(LOG2, abs=1e-15)
    np.testing.assert_array_equal(optimum.minimiser[0], 0.0)


@pytest.mark.parametrize(("samples", "dim"), [(16, 8), (18, 8), (14, 8), (6, 3), (5, 3), (10, 12)])
def test_verdicts_agree_with_another_linear_program_near_the_threshold(samples, dim):
    rng = np.random.default_rng(100 * samples + dim)
    a, y = rng.standard_normal((60, samples, dim)), random_labels(rng, 60, samples)
    optimum = logistic_optimum(a, y)
    expected = [reference_class(a[i], y[i]) for i in range(60)]
    assert [verdict(optimum, i) for i in range(60)] == expected
    if samples in (16, 6):  # Cover: half of these are separable
        assert 10 <= expected.count("separable") <= 50


def test_verdicts_agree_with_another_linear_program_on_small_integers():
    # Small integers make repeated, opposite, collinear and zero points; all three classes are rife.
    rng = np.random.default_rng(8)
    a = rng.integers(-2, 3, (400, 5, 2)).astype(float)
    y = random_labels(rng, 400, 5)
    optimum = logistic_optimum(a, y)
    expected = [reference_class(a[i], y[i]) for i in range(400)]
    assert [verdict(optimum, i) for i in range(400)] == expected
    assert min(expected.count(kind) for kind in ("separable", "quasi", "overlapping")) >= 20
    for i in range(0, 400, 8):
        value, _ = scipy_minimum(a[i], y[i])  # an upper bound that BFGS brings near the infimum
        assert optimum.value[i] <= value + 1e-12
        assert optimum.value[i] == pytest.approx(value, abs=1e-5)


def test_each_verdict_is_reached_by_the_linear_program_alone():
    cases = {
        "separable": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
        "quasi": [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]],
        "overlapping": [[1.0, 0.0], [-1.0, 1.0], [0.0, -1.0]],
    }
    free = {kind: optima._separated_rows(np.array(z))[0].tolist() for kind, z in cases.items()}
    assert free == {"separable": [True] * 3, "quasi": [False, False, True], "overlapping": [False] * 3}


def test_a_sample_far_on_the_right_side_does_not_hide_the_minimum():
    # Its weight is exp(-100): the certificate must not need it.
    a = np.array([[1.0], [1.0], [1.0], [100.0]])
    y = np.array([1.0, 1.0, -1.0, 1.0])
    optimum = solve_one(a, y)
    assert verdict(optimum) == "overlapping"
    assert optimum.value[0] == pytest.approx(scipy_minimum(a, y)[0], abs=1e-10)


def test_the_minimiser_has_least_norm_when_the_features_are_rank_deficient():
    rng = np.random.default_rng(5)
    basis = np.linalg.qr(rng.standard_normal((7, 3)))[0]
    coordinates, y = rng.standard_normal((50, 3)), random_labels(rng, 50)
    optimum = solve_one(coordinates @ basis.T, y)
    value, x = scipy_minimum(coordinates, y)
    assert verdict(optimum) == "overlapping"
    assert optimum.value[0] == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(optimum.minimiser[0], basis @ x, atol=1e-6)


def test_features_of_very_different_scale_lose_no_digits():
    rng = np.random.default_rng(6)
    a, y = rng.standard_normal((50, 3)), random_labels(rng, 50)
    plain, scaled = solve_one(a, y), solve_one(a * np.array([1e-5, 1.0, 1e4]), y)
    assert verdict(scaled) == "overlapping"
    assert scaled.value[0] == pytest.approx(plain.value[0], rel=1e-13)


def test_steps_are_damped_where_plain_newton_diverges():
    # Heavy tails: the first full step is ruled by few large samples and overshoots for the rest.
    rng = np.random.default_rng(19)
    size = np.exp(3.0 * rng.standard_normal((50, 60, 1)))
    a, y = size * rng.standard_normal((50, 60, 5)), random_labels(rng, 50, 60)
    optimum = logistic_optimum(a, y)
    for i in range(50):
        assert verdict(optimum, i) == reference_class(a[i], y[i]) == "overlapping"
        offline = offline_logistic_optimum(in_chunks(a[i], y[i], 25), 5)
        for x in (optimum.minimiser[i], offline.minimiser):
            with np.errstate(over="ignore"):
                assert np.linalg.norm(gradient(x, a[i], y[i])) <= 1e-8 + 1e-14 * size[i].max()
            assert loss(x, a[i], y[i]) <= LOG2


def test_margins_count_only_beyond_their_rounding_error():
    rounding_only = np.array([[[0.1, 0.2, -0.3]]])
    assert (rounding_only @ np.ones(3)).item() > 0.0  # 5.6e-17, where the truth is 0
    assert not optima._separates(rounding_only, np.ones((1, 1)), np.ones((1, 3)))[0]
    # Margins 0.9 and 1.1, though norms alone would allow an error of 9.
    scaled = np.array([[[1e-8, 1e8], [1e-8, -1e8]]])
    assert optima._separates(scaled, np.ones((1, 2)), np.array([[1e8, 1e-9]]))[0]


def test_a_short_newton_step_proves_nothing_where_rounding_made_it():
    def proved(rise, flattest):
        return optima._attained(np.array([rise]), np.diag([1.0, flattest])[None], 100)[0]

    assert proved(0.1, 1e-6)
    assert not proved(1.0, 1e-6)
    assert not proved(0.1, 1e-16)


def test_a_separable_round_that_newton_leaves_open_is_settled_by_the_linear_program(monkeypatch):
    rng = np.random.default_rng(20)
    a = rng.standard_normal((20, 40, 3))
    y = np.sign(a @ np.array([1.0, 2.0, 3.0]))
    monkeypatch.setattr(optima, "_ITERATIONS", 0)
    monkeypatch.setattr(optima, "_least_norm_fit", lambda a, y: np.zeros((len(a), a.shape[2])))
    assert logistic_optimum(a, y).separable.all()


def test_separability_is_blind_to_the_scale_of_features():
    rng = np.random.default_rng(18)
    a, y = rng.standard_normal((100, 20, 10)), random_labels(rng, 100, 20)
    plain, scaled = logistic_optimum(a, y), logistic_optimum(a * 10.0 ** np.linspace(-6, 6, 10), y)
    assert 20 < plain.separable.sum() < 80
    np.testing.assert_array_equal(scaled.separable, plain.separable)
    np.testing.assert_array_equal(scaled.attained, plain.attained)
    np.testing.assert_allclose(scaled.value, plain.value, atol=1e-9)


def test_batches_and_precision_of_input_do_not_change_the_answer(monkeypatch):
    rng = np.random.default_rng(7)
    a = rng.standard_normal((30, 12, 5)).astype(np.float32)
    y = random_labels(rng, 30, 12).astype(np.int8)
    whole = logistic_optimum(a, y)
    assert 0 < whole.separable.sum() < 30
    monkeypatch.setattr(optima, "_BATCH_NUMBERS", 400)
    assert len(list(optima._batches(a.shape))) > 3
    split = logistic_optimum(a.astype(float), y.astype(float))
    np.testing.assert_array_equal(whole.separable, split.separable)
    np.testing.assert_allclose(whole.value, split.value, rtol=1e-12)
    np.testing.assert_allclose(whole.minimiser, split.minimiser, rtol=1e-6)
    empty = logistic_optimum(a[:0], y[:0])
    assert empty.value.shape == (0,)
    assert empty.minimiser.shape == (0, 5)


def test_ridge_makes_separable_rounds_attain_their_minimum():
    a, y = np.array([[1.0], [2.0]]), np.ones(2)
    optimum = solve_one(a, y, ridge=0.5)
    assert verdict(optimum) == "overlapping"
    assert not optimum.separable[0]
    assert optimum.value[0] == pytest.approx(scipy_minimum(a, y, 0.5)[0], abs=1e-12)


def test_a_solver_that_runs_out_of_iterations_says_so(monkeypatch):
    monkeypatch.setattr(optima, "_ITERATIONS", 1)
    rng = np.random.default_rng(9)
    with pytest.raises(SolverError, match="gradient norm"):
        logistic_optimum(rng.standard_normal((1, 30, 3)), random_labels(rng, 1, 30), ridge=1e-3)


@pytest.mark.parametrize(("samples", "dim", "rank"), [(20, 6, 6), (5, 9, 5), (20, 6, 3), (4, 4, 4)])
def test_least_squares_equals_the_pseudoinverse(samples, dim, rank):
    rng = np.random.default_rng(dim)
    a = rng.standard_normal((5, samples, rank)) @ rng.standard_normal((5, rank, dim))
    y = rng.standard_normal((5, samples))
    optimum = least_squares_optimum(a, y)
    assert optimum.attained.all()
    assert not optimum.separable.any()
    for i in range(5):
        x = np.linalg.lstsq(a[i], y[i], rcond=1e-10)[0]
        np.testing.assert_allclose(optimum.minimiser[i], x, atol=1e-9)
        assert optimum.value[i] == pytest.approx(0.5 * np.mean((a[i] @ x - y[i]) ** 2), abs=1e-12)
        assert optimum.gradient_norm[i] < 1e-12


def test_ridge_least_squares_solves_its_normal_equations():
    rng = np.random.default_rng(11)
    a, y = rng.standard_normal((3, 7, 10)), rng.standard_normal((3, 7))
    optimum = least_squares_optimum(a, y, ridge=0.2)
    for i in range(3):
        x = np.linalg.solve(a[i].T @ a[i] / 7 + 0.2 * np.eye(10), a[i].T @ y[i] / 7)
        np.testing.assert_allclose(optimum.minimiser[i], x, atol=1e-12)
        value = 0.5 * np.mean((a[i] @ x - y[i]) ** 2) + 0.1 * x @ x
        assert optimum.value[i] == pytest.approx(value, abs=1e-13)


def in_chunks(a, y, size=7):
    calls = []

    def chunks():
        calls.append(1)
        return ((a[i : i + size], y[i : i + size]) for i in range(0, len(a), size))

    chunks.calls = calls
    return chunks


@pytest.mark.parametrize(("samples", "dim", "ridge"), [(200, 4, 0.0), (60, 5, 0.1), (6, 10, 0.2), (300, 1, 0.0)])
def test_offline_logistic_optimum_equals_scipy(samples, dim, ridge):
    rng = np.random.default_rng(samples + dim)
    a, y = rng.standard_normal((samples, dim)), random_labels(rng, samples)
    chunks = in_chunks(a, y)
    optimum = offline_logistic_optimum(chunks, dim, ridge)
    value, x = scipy_minimum(a, y, ridge)
    assert optimum.attained
    assert not optimum.separable
    assert optimum.samples == samples
    assert optimum.value == pytest.approx(value, abs=1e-10)
    np.testing.assert_allclose(optimum.minimiser, x, atol=1e-5)
    assert np.linalg.norm(gradient(optimum.minimiser, a, y, ridge)) <= 1e-8
    assert optimum.gradient_norm <= 1e-8
    assert len(chunks.calls) <= 12


def test_offline_separable_stream_has_infimum_zero():
    rng = np.random.default_rng(12)
    a = rng.standard_normal((300, 6))
    optimum = offline_logistic_optimum(in_chunks(a, np.sign(a @ np.arange(1.0, 7.0))), 6)
    assert optimum.separable
    assert not optimum.attained
    assert optimum.value == 0.0
    assert np.isnan(optimum.minimiser).all()


def test_offline_quasi_separable_stream_has_the_infimum_of_the_other_rows():
    a = np.array([[1.0, 0.0]] * 10 + [[1.0, 1.0], [1.0, 3.0]])
    y = np.array([1.0] * 7 + [-1.0] * 3 + [1.0, 1.0])
    optimum = offline_logistic_optimum(in_chunks(a, y), 2)
    assert not optimum.attained
    assert not optimum.separable
    entropy = -0.7 * math.log(0.7) - 0.3 * math.log(0.3)
    assert optimum.value == pytest.approx(10 / 12 * entropy, abs=1e-8)
    assert np.isnan(optimum.minimiser).all()


def test_offline_minimum_is_proved_beside_far_samples_and_dead_features():
    rng = np.random.default_rng(13)
    a, y = rng.standard_normal((400, 3)), random_labels(rng, 400)
    value, x = scipy_minimum(a, y)
    far = np.vstack([a, 1e4 * x[None]])
    optimum = offline_logistic_optimum(in_chunks(np.hstack([far, np.zeros((401, 2))]), np.append(y, 1.0)), 5)
    assert optimum.attained
    assert optimum.value == pytest.approx(400 / 401 * value, abs=1e-10)
    np.testing.assert_array_equal(optimum.minimiser[3:], 0.0)


@pytest.mark.parametrize("samples", [8, 12, 16])
def test_offline_and_round_verdicts_agree(samples):
    rng = np.random.default_rng(samples)
    a, y = rng.standard_normal((25, samples, 6)), random_labels(rng, 25, samples)
    rounds = logistic_optimum(a, y)
    for i in range(25):
        optimum = offline_logistic_optimum(in_chunks(a[i], y[i]), 6)
        assert optimum.separable == rounds.separable[i]
        assert optimum.attained == rounds.attained[i]
        assert optimum.value == pytest.approx(rounds.value[i], abs=1e-10)


@pytest.mark.parametrize(("samples", "ridge"), [(50, 0.0), (50, 0.3), (3, 0.0), (3, 0.3)])
def test_offline_least_squares_equals_the_batch_answer(samples, ridge):
    rng = np.random.default_rng(samples)
    a, y = rng.standard_normal((samples, 5)), rng.standard_normal(samples)
    optimum = offline_least_squares_optimum(in_chunks(a, y, 4), 5, ridge)
    if ridge:
        x = np.linalg.solve(a.T @ a / samples + ridge * np.eye(5), a.T @ y / samples)
    else:
        x = np.linalg.pinv(a) @ y
    np.testing.assert_allclose(optimum.minimiser, x, atol=1e-12)
    value = 0.5 * np.mean((a @ x - y) ** 2) + 0.5 * ridge * x @ x
    assert optimum.value == pytest.approx(value, abs=1e-13)
    assert optimum.gradient_norm < 1e-13
    assert optimum.samples == samples


def test_a_stream_that_can_be_read_only_once_is_refused():
    rng = np.random.default_rng(14)
    once = iter([(rng.standard_normal((20, 2)), random_labels(rng, 20))])
    with pytest.raises(InputError, match="same 20 samples"):
        offline_logistic_optimum(lambda: once, 2)


def test_regret_by_hand():
    found = average_regret([[3.0, 2.0, 4.0], [1.0, 1.0, 1.0]], [1.0, 0.0, 1.0])
    np.testing.assert_allclose(found, [[2.0, 2.0, 7 / 3], [0.0, 0.5, 1 / 3]])


def test_dynamic_regret_is_the_double_sum_of_the_paper():
    rng = np.random.default_rng(15)
    learners, rounds, steps = 3, 4, 5
    losses, best = rng.random((learners, rounds, steps)), rng.random(rounds)
    expected = sum(
        (losses[i, r, t] - best[r]) / learners for i in range(learners) for r in range(rounds) for t in range(steps)
    )
    found = average_regret(losses.mean(axis=(0, 2)), best)
    assert found[-1] == pytest.approx(expected / (rounds * steps))


def test_dynamic_regret_of_separable_rounds_is_the_loss():
    rng = np.random.default_rng(16)
    a, y = rng.standard_normal((5, 8, 10)), random_labels(rng, 5, 8)
    losses = np.array([0.7, 0.6, 0.5, 0.4, 0.3])
    found = average_regret(losses, logistic_optimum(a, y).value)
    np.testing.assert_allclose(found, np.cumsum(losses) / np.arange(1, 6))


def test_static_regret_is_zero_for_its_own_comparator_and_below_the_dynamic_one():
    rng = np.random.default_rng(17)
    a, y = rng.standard_normal((6, 40, 3)), random_labels(rng, 6, 40)
    offline = offline_logistic_optimum(lambda: zip(a, y, strict=True), 3)
    comparator = np.array([loss(offline.minimiser, a[r], y[r]) for r in range(6)])
    assert comparator.mean() == pytest.approx(offline.value)
    assert average_regret(comparator, comparator)[-1] == 0.0
    zero_model = np.full(6, LOG2)
    static = average_regret(zero_model, comparator)[-1]
    dynamic = average_regret(zero_model, logistic_optimum(a, y).value)[-1]
    assert 0.0 < static < dynamic


def test_path_variation_by_hand():
    minimisers = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    assert path_variation(minimisers, np.ones(2)) == (1.0 + 2.0 + 0.0, "")


def test_path_variation_of_a_separable_round_is_undefined_and_says_why():
    rounds = logistic_optimum(np.array([[[1.0], [1.0]], [[1.0], [2.0]]]), [[1, -1], [1, 1]])
    value, reason = path_variation(rounds.minimiser, np.zeros(1))
    assert math.isnan(value)
    assert "1 of 2 rounds (first: 1)" in reason
    assert "whole stream" in path_variation(np.ones((1, 1)), np.full(1, np.nan))[1]


def test_numbers_that_are_none_are_refused_by_name():
    good, labels = np.ones((2, 3, 4)), np.ones((2, 3))
    nan = np.where(np.arange(24).reshape(2, 3, 4) == 5, np.nan, 1.0)
    calls = {
        "features": (
            lambda: logistic_optimum(nan, labels),
            lambda: logistic_optimum(good * np.inf, labels),
            lambda: least_squares_optimum(nan, labels),
            lambda: offline_logistic_optimum(lambda: [(nan[0], labels[0])], 4),
        ),
        "labels": (
            lambda: logistic_optimum(good, labels * 0),
            lambda: logistic_optimum(good, labels * np.nan),
            lambda: offline_logistic_optimum(lambda: [(good[0], labels[0] * 2)], 4),
        ),
        "targets": (lambda: least_squares_optimum(good, labels * np.nan),),
        "chunks": (lambda: offline_logistic_optimum(list, 4), lambda: offline_least_squares_optimum(list, 4)),
        "losses": (lambda: average_regret([1.0, math.nan], [0.0, 0.0]), lambda: average_regret([1.0], [math.nan])),
        "comparator_losses": (
            lambda: average_regret([1.0, 2.0], [0.0]),
            lambda: average_regret([[1.0, 2.0]], [[0.0, 0.0]]),
        ),
    }
    for field, refused in calls.items():
        for call in refused:
            with pytest.raises(InputError) as refusal:
                call()
            assert refusal.value.field == field
