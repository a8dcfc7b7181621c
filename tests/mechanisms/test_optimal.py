"""`optimal` carries its own proof; here the proof is checked by other means."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream.mechanisms as m
from tests.support.catalogue import prefix_sums
from veilstream.errors import InputError, UnknownName


def dense_lower_bound(f) -> float:
    """The dual value of the certificate (u, v), from dense eigenvalues."""
    u, v = f.row_weights, f.multipliers
    M = np.sqrt(u)[:, None] * prefix_sums(f.horizon) * np.sqrt(v)
    return np.linalg.svd(M, compute_uv=False).sum() ** 2 / (u.sum() * v.sum())


def dense_value(f) -> float:
    """The error of the matrices that the program runs."""
    B, C = f.decoder_matrix(), f.strategy_matrix()
    rows = (B**2).sum(axis=1)
    error = rows.max() if f.objective == "max" else np.average(rows, weights=f.row_weights)
    return error * (C**2).sum(axis=0).max()


@pytest.mark.parametrize("T", [1, 2, 3, 4, 16, 37, 64, 256, 1024])
@pytest.mark.parametrize("objective", ["mean", "max"])
def test_is_certified_optimal_to_one_in_a_million(T, objective):
    f = m.optimal(T, objective=objective)
    bound = dense_lower_bound(f)
    assert f.lower_bound == pytest.approx(bound, rel=1e-9)
    assert dense_value(f) <= bound * (1 + 1e-6)
    assert -1e-9 <= f.duality_gap <= 1e-6


@pytest.mark.parametrize("T", [4, 24, 96])
def test_rounds_objective_is_certified_too(T):
    f = m.optimal(T, objective="rounds", local_steps=4)
    assert dense_value(f) <= dense_lower_bound(f) * (1 + 1e-6)
    assert f.duality_gap <= 1e-6


@pytest.mark.parametrize(("T", "mean", "largest"), [(4, 1.71854, 1.75860), (1024, 8.73470, 8.77027)])
def test_values_of_an_independent_implementation(T, mean, largest):
    assert m.optimal(T).mean_error() == pytest.approx(mean, abs=1e-5)
    assert m.optimal(T, objective="max").max_error() == pytest.approx(largest, abs=1e-5)


# PAPER-NOTES 15; at T = 2 the value is the square of the golden ratio.
@pytest.mark.parametrize(("T", "total"), [(2, (3 + 5**0.5) / 2), (8, 17.8662), (100, 499.744), (1000, 8690.97)])
def test_frobenius_norms_of_an_independent_implementation(T, total):
    assert m.optimal(T).mean_error() * T == pytest.approx(total, rel=3e-6)


def test_minimax_optimum_at_two_steps_is_four_thirds():
    assert m.optimal(2, objective="max").max_error() == pytest.approx(4 / 3, rel=1e-6)


def test_no_other_mechanism_beats_it():
    T = 90
    best, minimax = m.optimal(T).mean_error(), m.optimal(T, objective="max").max_error()
    for name in m.MECHANISMS:
        other = m.build(name, T)
        assert other.mean_error() >= best * (1 - 1e-6)
        assert other.max_error() >= minimax * (1 - 1e-6)


class TestRounds:
    def test_error_at_round_ends_falls_towards_that_of_the_rounds_alone(self):
        """As the inside of a round counts less, its end reaches the optimum for R steps."""
        T, tau = 64, 4
        errors = [m.optimal(T).round_error(tau)]
        for weight in (0.5, 0.1, 0.01, 0.001):
            f = m.optimal(T, objective="rounds", local_steps=tau, interior_weight=weight)
            errors.append(f.round_error(tau))
        assert errors == sorted(errors, reverse=True)
        limit = m.optimal(T // tau).mean_error()
        assert limit < errors[-1] < 1.03 * limit

    def test_full_interior_weight_is_the_mean_objective(self):
        f = m.optimal(24, objective="rounds", local_steps=4, interior_weight=1.0)
        assert f.mean_error() == pytest.approx(m.optimal(24).mean_error(), rel=1e-7)

    @pytest.mark.all
    def test_gain_at_the_papers_horizon(self):
        """At T = 4000, τ = 4 the default loses 14% of the error at round ends."""
        f = m.optimal(4000, objective="rounds", local_steps=4)
        assert f.round_error(4) < 0.86 * m.optimal(4000).round_error(4)
        assert f.duality_gap < 1e-6


def test_state_stays_small():
    assert m.optimal(1024).program.state_size <= 14


def test_bad_options_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'mean'"):
        m.optimal(8, objective="meen")
    with pytest.raises(InputError, match="divisor of the horizon 10"):
        m.optimal(10, objective="rounds", local_steps=4)
    with pytest.raises(InputError, match="interior_weight"):
        m.optimal(8, objective="rounds", local_steps=4, interior_weight=0)
    with pytest.raises(InputError, match="interior_weight"):
        m.optimal(8, objective="rounds", local_steps=4, interior_weight=2)


@pytest.mark.slow
def test_long_horizon_is_certified():
    f = m.optimal(4000)
    assert dense_value(f) <= dense_lower_bound(f) * (1 + 1e-6)
