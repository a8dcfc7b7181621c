"""The audit of the whole vector: gradient and telemetry, with the canary in both."""

from __future__ import annotations

import dataclasses
import re
from unittest.mock import patch

import numpy as np
import pytest
from studies.mutations.telemetry_bugs import (
    calibrated_for_the_gradient,
    less_noise,
    no_guard,
    thrice_in_the_step,
    unbounded,
)

from tests.audit.test_groups import contribution_power, noise_power
from veilstream.audit.checks import SMALL_DIM, small_checks
from veilstream.audit.deployed import Replaced, listen, twin_runs
from veilstream.audit.report import audit, auditable
from veilstream.audit.statistics import one_run
from veilstream.audit.statistics.check import alarming
from veilstream.audit.telemetry_canary import telemetry_runs, whole_reach
from veilstream.audit.transcript import law_of_terms
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, PrivacyError
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised
from veilstream.privacy.telemetry import Telemetry

TEXT = """
[learning]
rounds = 16
clip_norm = 0.7
[privacy]
epsilon = 2.0
delta = 1e-3
neighbours = "{neighbours}"
[telemetry]
metrics = {metrics}
scale = {scale}
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.1
"""
ALL = ["accuracy", "loss", "clipped", "present"]


def both(metrics=("accuracy",), dim=1, neighbours="replace-one", scale=0.3):
    text = TEXT.format(metrics=list(metrics), neighbours=neighbours, scale=scale)
    plan = auditable(Plan.parse(text))
    return plan, Terms.of(plan, dim)


@pytest.mark.parametrize(
    ("metrics", "neighbours"), [(["accuracy"], "replace-one"), (ALL, "replace-one"), (ALL, "zero-out")]
)
def test_the_whole_vector_uses_the_promise_and_no_more(metrics, neighbours):
    """20,000 runs: mu to about 3%; false alarms as stated by `many_run`."""
    plan, terms = both(metrics, neighbours=neighbours, scale=0.8)
    found, checks = telemetry_runs(plan, terms, 20_000, seed=1)
    assert not found.alarm
    assert not alarming(checks)
    assert 0.8 * found.expected < found.mu_lower
    without_present = "present" not in metrics or neighbours == "zero-out"
    expected = 1.0 if without_present else whole_reach(terms) / (2 * terms.guarantee.release_norm)
    assert found.expected / found.claim == pytest.approx(expected, rel=1e-5)


def test_the_reach_by_hand():
    _, terms = both(ALL, scale=0.4)
    width = 0.4 * 0.7
    assert whole_reach(terms) == pytest.approx(np.sqrt(1.4**2 + 3 * width**2))
    _, terms = both(ALL, neighbours="zero-out", scale=0.4)
    assert whole_reach(terms) == pytest.approx(np.sqrt(0.7**2 + 4 * (width / 2) ** 2))


def test_a_metric_outside_its_bound_is_refused_by_the_guard():
    with patch.object(Telemetry, "coordinates", unbounded), pytest.raises(PrivacyError, match="exceeds its bound"):
        telemetry_runs(*both(), 1000)


def test_a_metric_outside_its_bound_is_found_without_the_guard():
    with no_guard():
        found = telemetry_runs(*both(scale=0.8), 20_000, seed=2).many
    assert found.violation
    assert found.mu_lower > 1.1 * found.claim


def test_noise_for_the_gradient_alone_is_found():
    """Calibrated to B_g, as if telemetry cost nothing."""
    honest = both(scale=2.0)[1].noise_std
    with calibrated_for_the_gradient():
        plan, terms = both(scale=2.0)
        assert honest > 1.3 * terms.noise_std
        assert telemetry_runs(plan, terms, 20_000, seed=3).many.violation


PLANTED = {
    "half the noise": (less_noise(2), {"noise of telemetry's coordinates"}),
    "a fifth of the noise": (less_noise(5), {"noise of telemetry's coordinates"}),
    "metrics threefold": (thrice_in_the_step(), {"contributions to telemetry's coordinates"}),
}


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("bug", PLANTED)
def test_the_whole_audit_sees_what_is_wrong_with_telemetrys_coordinates(bug, scale):
    planted, names = PLANTED[bug]
    plan, _ = both(scale=scale)
    with planted:
        report = audit(plan, runs=20_000, coordinates=1000, draws=2000, federation=False)
    assert names <= {check.name for check in alarming(report.checks)}, report.verdict
    assert report.twins.alarm == (bug == "metrics threefold")


@pytest.mark.parametrize("divisor", [2, 5])
def test_plain_learners_show_it_too(divisor):
    """Without `ApartWithTelemetry`: few numbers, and enough to see half of the noise missing."""
    plan, terms = both(dim=SMALL_DIM)
    assert not alarming(small_checks(plan, terms))
    with less_noise(divisor):
        found = alarming(small_checks(plan, terms))
    assert "noise of telemetry's coordinates, all learners" in {check.name for check in found}


def test_the_variance_that_is_seen_is_the_one_that_was_sent():
    """A quarter of it, and clients' contributions as they should be; to 5 standard errors."""
    with less_noise(2):
        noise, added, *_ = telemetry_runs(*both(), 2000, seed=4).checks
    share = float(re.search(r"have ([\d.]+) of their variance", noise.figure)[1])
    assert share == pytest.approx(0.25, abs=5 * 0.25 * np.sqrt(2 / 32_000))
    assert not alarming([added])


def test_power_of_the_group_as_documented():
    """One metric, 100,000 runs of 64 rounds: by the normal approximation, 7.7 standard errors."""
    assert noise_power(6_400_000, 1.0 + 8.0 * np.sqrt(2 / 6_400_000)) > 0.99
    assert noise_power(6_400_000, 1.0 - 8.0 * np.sqrt(2 / 6_400_000)) > 0.99
    assert noise_power(6_400_000, 1.0) == pytest.approx(1e-6 / 40, rel=1e-6)
    assert noise_power(288, 0.25) > 0.999
    assert contribution_power(100.0, 1.08) > 0.99
    assert contribution_power(100.0, 1.0) == pytest.approx(1e-6 / 40, rel=1e-6)


def test_cells_of_telemetry_are_looked_at():
    """Right variance, wrong cells: an odd number is never sent."""
    noisy = LocalRounds.noisy

    def even(self, gradient, secret):
        out = np.array(noisy(self, gradient, secret))
        behind = slice(self.terms.dim, None)
        out[behind] += (self.prefix[behind] - gradient.reveal()[behind] + out[behind]) % 2
        return Noised(out)

    with patch.object(LocalRounds, "noisy", even):
        found = telemetry_runs(*both(), 20_000, seed=5)
    assert {check.name for check in alarming(found.checks)} >= {"cells of telemetry's coordinates, message 1"}


def test_the_same_draws_flip_every_metric():
    _, terms = both(ALL, dim=16)
    first, second = (Replaced(terms, 3, sign) for sign in (-1.0, 1.0))
    moved = []
    for task in (first, second):
        task.host_gradient(np.zeros(16, np.float32), task.sample(3))
        moved.append(task.known[16:])
    half = int(terms.telemetry.width / 2 / terms.grid.step)
    assert (moved[1] - moved[0]).tolist() == [2 * half, 2 * half, 2 * half, 0]


def test_one_long_run_knows_what_telemetry_adds():
    plan, terms = both(ALL, dim=400)
    heard = listen(plan, terms, restarts={5})
    assert heard.prefixes.shape == (16, 404)
    assert not one_run(heard.residuals, law_of_terms(terms)).alarm
    # All known: what is left of telemetry's coordinates is noise, not clients' metrics.
    law = law_of_terms(terms)
    sd = np.sqrt(law.covariance[-1, -1])
    assert np.abs(heard.residuals[-1, 400:]).max() < 5 * sd
    assert np.abs(heard.known[-1, 400:]).min() > 0


def test_the_same_draws_with_one_client_replaced():
    plan, terms = both(ALL, dim=16)
    assert not twin_runs(plan, terms, at=3, adaptive=True).alarm


def test_the_whole_audit_has_a_part_for_telemetry():
    plan, _ = both(["accuracy", "present"])
    report = audit(plan, runs=2000, coordinates=300, draws=2000, federation=True)
    assert not report.alarms, report.verdict
    assert report.as_dict()["telemetry"]["runs"] >= 2000  # as many as one coordinate's variance needs
    assert report.telemetry.expected < report.telemetry.claim


def test_without_telemetry_there_is_no_such_part():
    plan, terms = both()
    with pytest.raises(InputError, match="a plan with telemetry"):
        telemetry_runs(plan, dataclasses.replace(terms, telemetry=None), 1000)
