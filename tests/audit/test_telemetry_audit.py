"""The audit of the whole vector: gradient and telemetry, with the canary in both."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from veilstream.audit.deployed import listen
from veilstream.audit.report import audit, auditable
from veilstream.audit.statistics import one_run
from veilstream.audit.telemetry_canary import telemetry_runs, whole_reach
from veilstream.audit.transcript import law_of_terms
from veilstream.audit.twins import twin_runs
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, PrivacyError
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import ClippedGradient
from veilstream.privacy.grid import OnGrid
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
    ("metrics", "neighbours"),
    [(["accuracy"], "replace-one"), (ALL, "replace-one"), (ALL, "zero-out")],
)
def test_the_whole_vector_uses_the_promise_and_no_more(metrics, neighbours):
    """20,000 runs: mu to about 3%; false alarms as stated by `many_run`."""
    _, terms = both(metrics, neighbours=neighbours, scale=0.8)
    found = telemetry_runs(terms, 20_000, seed=1)
    assert not found.alarm
    assert 0.9 * found.expected < found.mu_lower < found.claim
    without_present = "present" not in metrics or neighbours == "zero-out"
    expected = 1.0 if without_present else whole_reach(terms) / (2 * terms.guarantee.release_norm)
    assert found.expected / found.claim == pytest.approx(expected, rel=1e-5)


def test_the_reach_by_hand():
    _, terms = both(ALL, scale=0.4)
    width = 0.4 * 0.7
    assert whole_reach(terms) == pytest.approx(np.sqrt(1.4**2 + 3 * width**2))
    _, terms = both(ALL, neighbours="zero-out", scale=0.4)
    assert whole_reach(terms) == pytest.approx(np.sqrt(0.7**2 + 4 * (width / 2) ** 2))


class Unbounded(Telemetry):
    """The mutation: a metric outside its bound, three times."""

    def coordinates(self, values):
        return 3.0 * (values - 0.5) * self.width


class WithoutGuard(LocalRounds):
    """The same with the guard taken away: whole numbers beyond half the width."""

    def whole(self, gradient, values):
        honest = super().whole(gradient, values).reveal()
        return ClippedGradient(OnGrid(np.concatenate([honest[:1], 3 * honest[1:]])))


def test_a_metric_outside_its_bound_is_refused_by_the_guard():
    _, terms = both()
    broken = Unbounded(terms.telemetry.metrics, terms.telemetry.width)
    with pytest.raises(PrivacyError, match="exceeds its bound"):
        telemetry_runs(dataclasses.replace(terms, telemetry=broken), 1000)


def test_a_metric_outside_its_bound_is_found_without_the_guard():
    _, terms = both(scale=0.8)
    found = telemetry_runs(terms, 20_000, make=WithoutGuard, seed=2)
    assert found.violation
    assert found.mu_lower > 1.1 * found.claim


def test_noise_for_the_gradient_alone_is_found():
    """Calibrated to B_g, as if telemetry cost nothing."""
    plan, terms = both(scale=2.0)
    plain = Terms.of(dataclasses.replace(plan, telemetry=None), 1)
    assert terms.noise_std > 1.3 * plain.noise_std
    cheap = dataclasses.replace(terms, noise_std=plain.noise_std)
    assert telemetry_runs(cheap, 20_000, seed=3).violation


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
    assert report.as_dict()["telemetry"]["runs"] == 2000
    assert report.telemetry.expected < report.telemetry.claim


def test_without_telemetry_there_is_no_such_part():
    _, terms = both()
    with pytest.raises(InputError, match="a plan with telemetry"):
        telemetry_runs(dataclasses.replace(terms, telemetry=None), 1000)
