"""Bugs in telemetry: a metric outside its bound, and noise measured out for the gradient alone."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest

from studies.mutations.findings import Finding, both
from veilstream.audit.telemetry_canary import telemetry_runs
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.errors import PrivacyError
from veilstream.plans.plan import TelemetryPlan
from veilstream.privacy.gradient_types import ClippedGradient
from veilstream.privacy.grid import OnGrid
from veilstream.privacy.telemetry import Telemetry

RUNS = 20_000


def told(scale: float) -> Terms:
    plan, _ = both()
    return Terms.of(dataclasses.replace(plan, telemetry=TelemetryPlan(scale=scale)), 1)


def unbounded(self, values):
    return 3.0 * (values - 0.5) * self.width


class NoGuard(LocalRounds):
    """Its whole numbers are what an unbounded metric would be, and nothing looks at them."""

    def whole(self, gradient, values):
        honest = super().whole(gradient, values).reveal()
        return ClippedGradient(OnGrid(np.concatenate([honest[:1], 3 * honest[1:]])))


def metric_outside_its_bound() -> Finding:
    terms = told(0.8)
    with (
        patch.object(Telemetry, "coordinates", unbounded),
        pytest.raises(PrivacyError, match="exceeds its bound"),
    ):
        telemetry_runs(terms, RUNS)
    found = telemetry_runs(terms, RUNS, make=NoGuard, seed=1)
    return Finding(
        "a metric outside its bound", "many runs", found.violation,
        f"mu >= {found.mu_lower:.3f} of {found.claim:.3f}", "the grid refuses the coordinate",
    )  # fmt: skip


def noise_for_the_gradient_alone() -> Finding:
    terms = told(2.0)
    plan, _ = both()
    cheap = dataclasses.replace(terms, noise_std=Terms.of(plan, 1).noise_std)
    found = telemetry_runs(cheap, RUNS, seed=2)
    return Finding(
        "telemetry that was not calibrated for", "many runs", found.violation,
        f"mu >= {found.mu_lower:.3f} of {found.claim:.3f}",
    )  # fmt: skip


BUGS = (metric_outside_its_bound, noise_for_the_gradient_alone)
