"""Bugs on paths that only production takes: groups of steps, later epochs, late steps, steps without clients.

Each is planted in the code of a deployed learner, and looked for by the whole audit: none of its
checks was written for one of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np

from studies.mutations.findings import Finding, each_by_name, plan_of
from veilstream.audit.programme import Programme
from veilstream.audit.report import run_programme
from veilstream.deployment.client_steps import ClientSteps
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.mechanisms.fine_normals import FineNormals
from veilstream.plans.plan import Plan, TelemetryPlan
from veilstream.privacy.gradient_types import ClippedGradient, Noised
from veilstream.privacy.grid import OnGrid
from veilstream.records.participation import Epochs, spent

_rows = FineNormals.rows
_noisy = LocalRounds.noisy
_client_step = ClientSteps.noisy
_whole = LocalRounds.whole
_fresh_seeds = Learner._fresh_seeds


def half_in_groups() -> AbstractContextManager[object]:
    return patch.object(FineNormals, "rows", lambda self, rows, std: 0.5 * _rows(self, rows, std))


def one_row_for_a_group() -> AbstractContextManager[object]:
    def shared(self, rows, std):
        drawn = _rows(self, rows, std)
        return np.broadcast_to(drawn[0], drawn.shape).copy()

    return patch.object(FineNormals, "rows", shared)


def twice_in_a_group() -> AbstractContextManager[object]:
    """Only what is stored is looked at, not who is in the group already."""

    def forgetful(self, tag, step, stored):
        past = [] if stored is None else [stored]
        return spent(past, step, self.plan.participation, Epochs(self.epoch)) is not None

    return patch.object(Learner, "_spent", forgetful)


def _altered(change) -> AbstractContextManager[object]:
    """``change(self, step, noise)`` in units of the grid, in place."""

    def noisy(self, gradient, secret):
        step, bare = self.noise.position, gradient.reveal()
        noise = np.array(_noisy(self, gradient, secret)) - bare
        change(self, step, noise)
        return Noised(noise + bare)

    return patch.object(LocalRounds, "noisy", noisy)


def _steps(self) -> int:
    return self.terms.rounds * self.terms.local_steps


def even_cells_later() -> AbstractContextManager[object]:
    def even(self, step, noise):
        if step >= 11:
            noise -= noise % 2

    return _altered(even)


def last_ten_bare_late() -> AbstractContextManager[object]:
    def bare(self, step, noise):
        if step >= _steps(self) * 7 // 8:
            noise[-10:] = 0

    return _altered(bare)


def last_bare_once() -> AbstractContextManager[object]:
    def bare(self, step, noise):
        if step == _steps(self) - 3:
            noise[-1] = 0

    return _altered(bare)


def third_epoch_repeats() -> AbstractContextManager[object]:
    def seeds(self, count):
        kept = self.__dict__.setdefault("_kept_seeds", {})
        first, drawn = self.local.step, _fresh_seeds(self, count)
        if self.epoch == 0:
            kept.update(enumerate(drawn, first))
        if self.epoch == 2:
            drawn = [kept.get(step, seed) for step, seed in enumerate(drawn, first)]
        return drawn

    return patch.object(Learner, "_fresh_seeds", seeds)


def seeds_from_the_store() -> AbstractContextManager[object]:
    def seeds(self, count):
        first = self.local.step
        texts = (f"{self.epoch}/{first + k}".encode() for k in range(count))
        return [hashlib.sha256(self.ledger.tag_key + text).digest() for text in texts]

    return patch.object(Learner, "_fresh_seeds", seeds)


def empty_steps_bare() -> AbstractContextManager[object]:
    def noisy(self, local, clients, seed):
        out = _client_step(self, local, clients, seed)
        return out if clients else Noised(local.nothing().reveal().copy())

    return patch.object(ClientSteps, "noisy", noisy)


def telemetry_a_little_low() -> AbstractContextManager[object]:
    def whole(self, gradient, values):
        units = np.array(_whole(self, gradient, values).reveal())
        if self.terms.telemetry is not None:
            last = len(units) // (1 + len(self.terms.telemetry.metrics)) if units.size != self.dim else 1
            units[-last:] = np.trunc(0.96 * units[-last:])
        return ClippedGradient(OnGrid(units))

    return patch.object(LocalRounds, "whole", whole)


PLANTED = {
    "half the noise in groups": half_in_groups,
    "one row of noise for a group": one_row_for_a_group,
    "one person twice in a group": twice_in_a_group,
    "even cells from step 11 on": even_cells_later,
    "the last ten coordinates bare from 7/8 of the steps on": last_ten_bare_late,
    "the last coordinate bare at one late step": last_bare_once,
    "a third epoch that repeats the first's seeds": third_epoch_repeats,
    "seeds from the store's key, epoch and step": seeds_from_the_store,
    "empty steps without noise": empty_steps_bare,
    "telemetry 4% low in one coordinate": telemetry_a_little_low,
}


def whole_audit(plan: Plan, seed: int = 5):
    """A quick audit, smaller still; the order in which clients come is fixed."""
    return run_programme(Programme.of(plan, runs=2000, coordinates=3000, draws=50_000, seed=seed, federation=False))


def small_plan(telemetry: bool = False, mechanism: str = "buffered") -> Plan:
    plan = plan_of(mechanism, rounds=32)
    return dataclasses.replace(plan, telemetry=TelemetryPlan(metrics=("accuracy", "present"))) if telemetry else plan


def found(bug: str) -> Finding:
    """Plant it, and run the whole audit."""
    with PLANTED[bug]():
        alarms = whole_audit(small_plan("telemetry" in bug)).alarms
    figure = alarms[0].replace("|", "/") if alarms else "nothing was found"
    return Finding(bug, "whole audit", bool(alarms), f"{len(alarms)} alarms; {figure}"[:300])


BUGS = each_by_name(PLANTED, found)
