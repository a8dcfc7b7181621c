"""Bounded numbers beside a gradient: what they cost, and that they keep their bounds."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import veilstream as vs
from veilstream.errors import InputError, PrivacyError
from veilstream.privacy.gradient_types import MetricValues, RawGradient, clip_onto_grid, extend_on_grid
from veilstream.privacy.grid import Grid, grid_for
from veilstream.privacy.noise_law import calibrate_release
from veilstream.privacy.telemetry import METRIC_NAMES, Telemetry, extended

BUDGET = vs.Budget(2.0, 1e-3)
ONE = Telemetry(("accuracy",), 0.3)


def test_one_metric_of_width_three_tenths_costs_one_point_one_percent():
    """√(2² + 0.3²)/2 = 1.01119, by hand."""
    mechanism = vs.mechanisms.toeplitz(64)
    plain, _ = vs.calibrate(BUDGET, mechanism, 1.0)
    std, guarantee = vs.calibrate(BUDGET, mechanism, 1.0, telemetry=ONE)
    assert std / plain == pytest.approx(math.sqrt(4.09) / 2.0, rel=1e-12)
    assert guarantee.release_norm == pytest.approx(1.0111874, abs=1e-7)
    assert "telemetry (accuracy) of width 0.3, which costs 1.1% more noise" in str(guarantee)
    told = guarantee.as_dict()
    assert told["telemetry"]["metrics"] == ["accuracy"]
    assert told["telemetry"]["noise_price"] == pytest.approx(0.0111874, abs=1e-7)


@pytest.mark.parametrize("neighbours", ["replace-one", "zero-out"])
@pytest.mark.parametrize("metrics", [("accuracy",), ("loss", "clipped", "present")])
def test_sensitivity_equals_brute_force_over_neighbours(neighbours, metrics):
    """Extreme vectors of one client, in every step, through the dense C."""
    clip_norm, telemetry = 0.7, Telemetry(metrics, 0.4)
    mechanism = vs.mechanisms.tree(6)
    _, guarantee = vs.calibrate(BUDGET, mechanism, clip_norm, neighbours=neighbours, telemetry=telemetry)
    corners = itertools.product([-clip_norm, clip_norm], *[[0.0, 1.0]] * len(metrics))
    vectors = [extended(np.array([g]), np.array(v), telemetry) for g, *v in corners]
    others = vectors if neighbours == "replace-one" else [np.zeros(1 + len(metrics))]
    apart = max(np.linalg.norm(one - other) for one in vectors for other in others)
    columns = np.linalg.norm(mechanism.strategy_matrix(), axis=0)
    assert guarantee.sensitivity == pytest.approx(apart * columns.max(), rel=1e-9)
    assert guarantee.sensitivity >= apart * columns.max() * (1.0 - 1e-12)


def test_without_telemetry_a_guarantee_says_what_it_said():
    _, guarantee = vs.calibrate(BUDGET, vs.mechanisms.tree(8), 1.0)
    assert not {"telemetry", "release_norm"} & set(guarantee.as_dict())
    assert "telemetry" not in str(guarantee)


def test_what_is_sent_is_charged_for_its_further_coordinates():
    mechanism = vs.mechanisms.buffered(32)
    three = Telemetry(("accuracy", "clipped", "present"), 0.3)
    plain = calibrate_release(BUDGET, mechanism, 1.0, 7)
    wider = calibrate_release(BUDGET, mechanism, 1.0, 10)
    told = calibrate_release(BUDGET, mechanism, 1.0, 7, telemetry=three)
    assert told.charge.delta == wider.charge.delta > plain.charge.delta
    assert told.std / wider.std == pytest.approx(math.sqrt(1.0 + 3 * 0.15**2), rel=1e-9)


@given(st.lists(st.floats(width=64), min_size=4, max_size=4), st.floats(1e-3, 10.0))
def test_no_value_leaves_the_ball(values, width):
    telemetry = Telemetry(METRIC_NAMES, width)
    coordinates = telemetry.coordinates(np.array(values))
    assert (np.abs(coordinates) <= width / 2).all()
    grid = grid_for(1.0, 2.0)
    gradient = clip_onto_grid(RawGradient(np.full(3, 9.0, np.float32)), grid)
    whole = extend_on_grid(gradient, MetricValues(np.array(values)), telemetry, grid).reveal()
    assert len(whole) == 7
    assert whole.dtype == np.int64
    length = math.sqrt(sum(int(n) ** 2 for n in whole)) * grid.step
    assert length <= math.sqrt(1.0 + 4 * (width / 2) ** 2) * (1.0 + 1e-12)


def test_a_step_without_a_client_is_the_zero_vector():
    grid = grid_for(1.0, 2.0)
    nothing = clip_onto_grid(RawGradient(np.zeros(3, np.float32)), grid)
    assert not extend_on_grid(nothing, None, ONE, grid).reveal().any()


class Unbounded(Telemetry):
    """Forgets the bound."""

    def coordinates(self, values):
        return (values - 0.5) * self.width


def test_a_metric_outside_its_bound_is_refused_before_it_is_released():
    grid = grid_for(1.0, 2.0)
    gradient = clip_onto_grid(RawGradient(np.zeros(3, np.float32)), grid)
    broken = Unbounded(("loss",), 0.3)
    assert extend_on_grid(gradient, MetricValues(np.array([1.0])), broken, grid).reveal()[-1] > 0
    for value in (1.001, -0.2, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="exceeds its bound: nothing was released"):
            extend_on_grid(gradient, MetricValues(np.array([value])), broken, grid)


def test_averages_are_the_metrics_again():
    telemetry = Telemetry(METRIC_NAMES, 0.3, loss_cap=2.0)
    clients = np.array([[1.0, 0.2, 0.0, 1.0], [0.0, 0.4, 0.0, 1.0], [1.0, 0.9, 1.0, 1.0]])
    sums = telemetry.coordinates(clients).sum(axis=0)
    assert telemetry.averages(sums, 3) == pytest.approx([2 / 3, 2.0 * 0.5, 1 / 3, 1.0])
    # A fourth step, without a client: half-way, and 0 of `present`.
    assert telemetry.averages(sums, 4) == pytest.approx([2.5 / 4, 2.0 * 2.0 / 4, 1.5 / 4, 3 / 4])
    assert telemetry.deviations(0.6, 4) == pytest.approx([0.5, 1.0, 0.5, 1.0])


@pytest.mark.parametrize("metrics", [(), ("speed",), ("loss", "loss")])
def test_unknown_metrics_are_refused(metrics):
    with pytest.raises(InputError, match=r"telemetry\.metrics"):
        Telemetry(metrics, 0.3)


def test_widths_of_any_real_type_are_held_in_full_precision():
    """float32's 0.3 is 0.300000011920929: R must be that of it, and not of float32 arithmetic."""
    given = Telemetry(("accuracy",), np.float32(0.3), np.float32(2.0))
    assert type(given.width) is type(given.loss_cap) is float
    exact = 1 + Fraction(float(np.float32(0.3))) ** 2 / 4
    assert Fraction(given.release_norm(1.0)) ** 2 >= exact
    assert Fraction(given.release_norm(1.0)) ** 2 <= exact * (1 + Fraction(1, 10**14))


@pytest.mark.parametrize("width", [np.float32("nan"), np.float32(-1.0), np.float64("inf"), 0, True, "0.3", None])
def test_a_width_that_is_no_positive_number_is_refused(width):
    with pytest.raises(InputError, match=r"telemetry width = .*a finite number > 0"):
        Telemetry(("accuracy",), width)


def test_norms_at_the_ends_of_floating_point():
    """Squares of 1e200 and of 1e-200 are beyond it; their norms are not."""
    for size in (1e200, 1e-200):
        found = Telemetry(("accuracy",), 0.3 * size).release_norm(size)
        assert found / size == pytest.approx(math.sqrt(1.0225), rel=1e-12)
    with pytest.raises(InputError, match=r"clip_norm = .*finite with telemetry"):
        Telemetry(("accuracy",), 1.7e308).release_norm(1.7e308)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 4))
def test_the_norm_is_never_rounded_down(clip_norm, width, count):
    found = Telemetry(METRIC_NAMES[:count], width).release_norm(clip_norm)
    assert Fraction(found) ** 2 >= Fraction(clip_norm) ** 2 + count * Fraction(width) ** 2 / 4


def test_on_a_coarse_grid_all_right_is_all_right():
    """0.15 in steps of 1/16 is 2 units of it: w is 0.25 there, and dividing by 0.3 says 0.917."""
    grid = Grid(1.0 / 16.0, 1.0)
    gradient = clip_onto_grid(RawGradient(np.zeros(1)), grid)
    units = extend_on_grid(gradient, MetricValues(np.ones(1)), ONE, grid).reveal()[1:]
    assert units.tolist() == [2]
    on_grid = ONE.on_grid(grid.step)
    assert on_grid.averages(100 * units * grid.step, 100) == pytest.approx(1.0)
    assert ONE.averages(100 * units * grid.step, 100) == pytest.approx(11 / 12)
    with pytest.raises(InputError, match=r"telemetry width = 0\.3: .*larger telemetry\.scale"):
        ONE.on_grid(0.25)
