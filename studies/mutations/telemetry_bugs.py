"""Bugs in telemetry: metrics outside their bound, with too little noise, or not calibrated for.

All are planted in code that a deployed learner runs.
"""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest

from studies.mutations.findings import Finding, both
from veilstream.audit.deployed import twin_runs
from veilstream.audit.statistics.check import alarming
from veilstream.audit.telemetry_canary import telemetry_runs
from veilstream.deployment import terms as terms_module
from veilstream.deployment.client_steps import ClientSteps
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.errors import PrivacyError
from veilstream.plans.plan import Plan, TelemetryPlan
from veilstream.privacy.gradient_types import ClippedGradient, Noised
from veilstream.privacy.grid import OnGrid
from veilstream.privacy.telemetry import Telemetry

RUNS = 20_000


def told(scale: float, dim: int = 1) -> tuple[Plan, Terms]:
    plan = dataclasses.replace(both()[0], telemetry=TelemetryPlan(scale=scale))
    return plan, Terms.of(plan, dim)


def unbounded(self, values):
    return 3.0 * (values - 0.5) * self.width


def thrice(gradient: ClippedGradient, dim: int) -> ClippedGradient:
    honest = gradient.reveal()
    return ClippedGradient(OnGrid(np.concatenate([honest[:dim], 3 * honest[dim:]])))


def no_guard():
    """Whole numbers are what an unbounded metric would be, and nothing looks at them."""
    whole = LocalRounds.whole

    def unseen(self, gradient, values):
        return thrice(whole(self, gradient, values), len(gradient.reveal()))

    return patch.object(LocalRounds, "whole", unseen)


def thrice_in_the_step():
    """A deployed learner's step adds its metrics threefold; all that it calls is correct."""
    noisy = ClientSteps.noisy

    def wrong(self, local, sample, seed):
        whole = local.whole
        local.whole = lambda g, v: thrice(whole(g, v), local.terms.dim)
        try:
            return noisy(self, local, sample, seed)
        finally:
            del local.whole

    return patch.object(ClientSteps, "noisy", wrong)


def less_noise(divisor: int):
    """Metrics' coordinates get a part of their noise; the gradient's all of it."""
    noisy = LocalRounds.noisy

    def quieter(self, gradient, secret):
        out, raw = np.array(noisy(self, gradient, secret)), gradient.reveal()
        if self.terms.telemetry is not None:
            behind = slice(self.terms.dim, None)
            out[behind] = raw[behind] + (out - raw)[behind] // divisor
        return Noised(out)

    return patch.object(LocalRounds, "noisy", quieter)


def calibrated_for_the_gradient():
    real = terms_module.calibrate_release

    def cheap(*args, telemetry, **named):
        return real(*args, telemetry=None, **named)

    return patch.object(terms_module, "calibrate_release", cheap)


def metric_outside_its_bound() -> Finding:
    plan, terms = told(0.8)
    with patch.object(Telemetry, "coordinates", unbounded), pytest.raises(PrivacyError, match="exceeds its bound"):
        telemetry_runs(plan, terms, RUNS)
    with no_guard():
        found = telemetry_runs(plan, terms, RUNS, seed=1).many
    return Finding(
        "a metric outside its bound",
        "many runs",
        found.violation,
        f"mu >= {found.mu_lower:.3f} of {found.claim:.3f}",
        "the grid refuses the coordinate",
    )


def noise_for_the_gradient_alone() -> Finding:
    with calibrated_for_the_gradient():
        plan, terms = told(2.0)
        found = telemetry_runs(plan, terms, RUNS, seed=2).many
    return Finding(
        "telemetry that was not calibrated for",
        "many runs",
        found.violation,
        f"mu >= {found.mu_lower:.3f} of {found.claim:.3f}",
    )


def half_the_noise_of_metrics() -> Finding:
    """At the default scale, where the whole vector's mu hardly moves."""
    with less_noise(2):
        found = telemetry_runs(*told(0.3), RUNS, seed=3)
    noise = [check for check in alarming(found.checks) if check.name.startswith("noise of")]
    return Finding(
        "half the noise in telemetry's coordinates",
        "coordinates",
        bool(noise),
        f"{found.checks[0].figure}; p = {found.checks[0].p:.1g}",
    )


def metrics_sent_threefold() -> Finding:
    with thrice_in_the_step():
        twins = twin_runs(*told(0.3, dim=50), at=2)
        found = telemetry_runs(*told(0.3), RUNS, seed=4)
    added = found.checks[1]
    return Finding(
        "metrics sent threefold by the learner's step",
        "same draws",
        twins.alarm and added in alarming(found.checks),
        f"{twins.unexplained_units:,} units unexplained; {added.figure}",
    )


BUGS = (metric_outside_its_bound, noise_for_the_gradient_alone, half_the_noise_of_metrics, metrics_sent_threefold)
