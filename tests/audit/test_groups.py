"""Telemetry's coordinates as a group: p-values of a law that numpy draws, and what shifts them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import chi2, kstest

from veilstream.audit.statistics import law_of
from veilstream.audit.statistics.check import FALSE_ALARMS, alarming
from veilstream.audit.statistics.groups import CoordinateGroup

LAW = law_of(np.eye(6) - 0.5 * np.eye(6, k=-1), std=2.0, reach=1.0, claim=1.0)
GRID = 2.0**-14


def noise_power(numbers: int, variance: float, *, level: float = FALSE_ALARMS / 40) -> float:
    """Probability that noise with this share of its variance raises an alarm, up or down.

    ``level`` is the alarm's for one of forty checks.
    """
    low, high = chi2.ppf(0.5 * level, numbers), chi2.isf(0.5 * level, numbers)
    return float(chi2.cdf(low / variance, numbers) + chi2.sf(high / variance, numbers))


def contribution_power(size: float, times: float, *, level: float = FALSE_ALARMS / 40) -> float:
    """Probability that ``times`` the due contributions raise an alarm, where ‖K‖ = ``size``."""
    shift, needed = abs(times - 1.0) * size, -float(ndtri(0.5 * level))
    return float(ndtr(shift - needed) + ndtr(-shift - needed))


def noise(random, numbers):
    """Rounded to the grid, in its units; by numpy's own multivariate normal."""
    drawn = random.multivariate_normal(np.zeros(6), LAW.covariance, numbers).T
    return np.rint(drawn / GRID).astype(np.int64)


def group_of(units, known, grid=GRID, **options):
    group = CoordinateGroup("telemetry's coordinates", LAW, grid, **options)
    for columns in np.array_split(np.arange(units.shape[1]), 3):  # runs come one after the other
        group.add(units[:, columns], known[:, columns])
    return group.checks()


def test_p_values_of_correct_noise_are_uniform():
    """300 repeats of a fixed seed; Kolmogorov-Smirnov, false alarms 1e-3 for each of two tests."""
    random = np.random.default_rng(16)
    found = []
    for _ in range(300):
        known = random.integers(-2000, 2001, (6, 40)).cumsum(axis=0)
        found.append([check.p for check in group_of(noise(random, 40), known)])
    for ps in np.array(found).T:
        assert kstest(ps, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("share", [0.98, 1.02])
def test_two_percent_of_the_noise_missing_or_too_much_is_found(share):
    """60,000 numbers: 4% of the variance is 6.9 standard errors; power below by another formula."""
    units = np.rint(share * noise(np.random.default_rng(1), 10_000)).astype(np.int64)
    (found,) = alarming(group_of(units, np.ones_like(units)))
    assert found.name == "noise of telemetry's coordinates"
    assert noise_power(60_000, share**2, level=1e-6 / 2) > 0.9


def test_threefold_contributions_are_found_where_their_noise_hides_them():
    """Each is a hundredth of the noise: the variance does not show it, the sum does."""
    random = np.random.default_rng(2)
    due = np.full((6, 10_000), 330).cumsum(axis=0)  # about 0.02, with noise of 2
    (found,) = alarming(group_of(noise(random, 10_000) + 2 * due, due))
    assert found.name == "contributions to telemetry's coordinates"
    white = np.linalg.solve(np.linalg.cholesky(LAW.covariance), due * GRID)
    assert contribution_power(float(np.linalg.norm(white)), 3.0) > 0.99


def test_rounding_to_a_coarse_grid_raises_no_alarm():
    """Whole numbers of 2, the noise's own size: the residual is far from Gaussian, and known so."""
    random = np.random.default_rng(3)
    drawn = random.multivariate_normal(np.zeros(6), LAW.covariance, 20_000).T
    units = np.rint(drawn / 2.0).astype(np.int64)
    assert not alarming(group_of(units, np.ones_like(units), grid=2.0))


def test_nobody_came_and_too_few_came_is_said():
    units = noise(np.random.default_rng(4), 40)
    checks = group_of(units, np.zeros_like(units), messages={0})
    assert [check.name for check in checks] == [
        "noise of telemetry's coordinates",
        "cells of telemetry's coordinates, message 1",
    ]
    assert "NOT LOOKED AT: 40 draws" in checks[1].figure
