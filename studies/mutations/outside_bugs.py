"""Bugs thought of by somebody who had not written the audit, planted before it was looked for them.

As in `path_bugs`, each is planted in the code of a deployed learner and looked for by the whole audit.
"""

from __future__ import annotations

import dataclasses
import threading
from contextlib import AbstractContextManager, ExitStack
from fractions import Fraction
from unittest.mock import patch

import numpy as np

from studies.mutations.findings import Finding, each_by_name
from studies.mutations.path_bugs import small_plan, whole_audit
from veilstream.deployment.client_steps import ClientSteps
from veilstream.deployment.epochs import EpochLedger
from veilstream.deployment.learner import Learner, Outcome
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.mechanisms.fine_normals import TILE
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import ClippedGradient, RawGradient, clip_onto_grid
from veilstream.privacy.grid import OnGrid
from veilstream.privacy.grid_noise import GridNoise
from veilstream.records.admission import Answer

_planned_places = Learner._planned_places
_write_steps = EpochLedger.write_steps
_draw = GridNoise._draw
_gradients = ClientSteps.gradients
_client_step = ClientSteps.noisy
_past_visits = Ledger.past_visits
_write = Ledger.write
_init = LocalRounds.__init__
_whole = LocalRounds.whole


def refused_takes_no_place() -> AbstractContextManager[object]:
    """A record that cannot be used is skipped: the next client moves up."""

    def skipping(self, group, places):
        outcomes = []
        for offered in group:
            if self._admission.admitted(offered.sample) is None:
                outcomes.append(Outcome(Answer.REFUSED, used=False))
            else:
                outcomes += _planned_places(self, [offered], places)
        return outcomes

    return patch.object(Learner, "_planned_places", skipping)


def last_of_a_write_forgotten() -> AbstractContextManager[object]:
    """The store is not told of the last client of each group, who can come again in a later round."""

    def forgetful(self, kind, body, keep, **clients):
        tags = list(clients.get("tags", ()))
        there = [place for place, tag in enumerate(tags) if tag is not None]
        if len(there) > 1:
            tags[there[-1]] = None
            clients["tags"] = tags
        return _write_steps(self, kind, body, keep, **clients)

    return patch.object(EpochLedger, "write_steps", forgetful)


def _drawn(change) -> AbstractContextManager[object]:
    """``change(self, z)`` of a step's fresh draws, in place."""

    def draw(self, row, out):
        for _ in _draw(self, row, out):
            pass
        change(self, out)
        for first in range(0, self._dim, TILE):
            yield slice(first, min(first + TILE, self._dim))

    return patch.object(GridNoise, "_draw", draw)


def backwards() -> AbstractContextManager[object]:
    """Every second step has the draws of the step before it, from the last to the first."""

    def change(self, z):
        if self.position % 2:
            z[...] = vars(self)["_before"][::-1]
        vars(self)["_before"] = z.copy()

    return _drawn(change)


def one_draw_left_out() -> AbstractContextManager[object]:
    """One number of each step has no fresh draw, another one every step."""

    def change(self, z):
        z[self.position * 7 % self._dim] = 0.0

    return _drawn(change)


def divided_by_who_came() -> AbstractContextManager[object]:
    """A step that is not full is an average of those who came, not of the plan's number."""

    came = threading.local()

    def noisy(self, local, clients, seed):
        came.share = Fraction(local.terms.clients_per_step, max(1, len(clients)))
        return _client_step(self, local, clients, seed)

    def average(self, gradient, values):
        units = gradient.reveal() * came.share.numerator // came.share.denominator
        return _whole(self, ClippedGradient(OnGrid(units)), values)

    steps, sums = patch.object(ClientSteps, "noisy", noisy), patch.object(LocalRounds, "whole", average)
    stack = ExitStack()
    stack.enter_context(steps)
    stack.enter_context(sums)
    return stack


def padding_counts() -> AbstractContextManager[object]:
    """Where a step is not full, the made-up records in the empty places count too."""

    def gradients(self, model, clients):
        rows = _gradients(self, model, clients).reveal()
        if self._many is not None and len(clients) < len(rows):
            rows[len(clients) :] = rows[: len(clients)].mean(axis=0)
        return RawGradient(rows)

    return patch.object(ClientSteps, "gradients", gradients)


def magnitudes_again() -> AbstractContextManager[object]:
    """Every second step has the sizes of the draws before it, with fresh signs."""

    def change(self, z):
        if self.position % 2:
            np.copysign(vars(self)["_before"], z, out=z)
        vars(self)["_before"] = z.copy()

    return _drawn(change)


def pairs_of_one_size() -> AbstractContextManager[object]:
    """Neighbouring draws have one size, and signs of their own."""

    def change(self, z):
        last = len(z) // 2 * 2
        z[1:last:2] = np.copysign(z[:last:2], z[1:last:2])

    return _drawn(change)


def clipped_as_one() -> AbstractContextManager[object]:
    """The step's average is clipped, not each client's gradient: who comes alone counts for all."""

    def clip(self, raw):
        whole = np.atleast_2d(raw.reveal()).sum(axis=0, dtype=np.float32)
        return clip_onto_grid(RawGradient(whole), self.grid, self.terms.gamma)

    return patch.object(LocalRounds, "clip", clip)


def forgotten_by_a_restart() -> AbstractContextManager[object]:
    """A learner knows whom it took since its start alone."""

    def past_visits(self, tags):
        began = vars(self).setdefault("_began", self.chain.length)
        known = _past_visits(self, tags)
        if began <= 1:
            return known
        return {tag: visit for tag, visit in known.items() if tag in vars(self).setdefault("_seen", set())}

    def write(self, kind, body, *, tag=None, tags=(), **others):
        vars(self).setdefault("_began", self.chain.length)
        vars(self).setdefault("_seen", set()).update(each for each in (tag, *tags) if each)
        return _write(self, kind, body, tag=tag, tags=tags, **others)

    stack = ExitStack()
    stack.enter_context(patch.object(Ledger, "past_visits", past_visits))
    stack.enter_context(patch.object(Ledger, "write", write))
    return stack


def telemetry_shares_noise() -> AbstractContextManager[object]:
    """Telemetry's first metric has the noise of the first coordinate."""

    def change(self, z):
        z[-2] = z[0]

    return _drawn(change)


def later_epochs_weaker() -> AbstractContextManager[object]:
    """Every epoch after the first has 4% less noise."""

    def init(self, terms, epoch, draw=None):
        weaker = dataclasses.replace(terms, noise_std=terms.noise_std * (0.96 if epoch else 1.0))
        _init(self, weaker, epoch, draw)

    return patch.object(LocalRounds, "__init__", init)


PLANTED = {
    "a refused record takes no place": refused_takes_no_place,
    "the last client of a write is not stored": last_of_a_write_forgotten,
    "every second step has the draws before it, backwards": backwards,
    "one number of each step without a fresh draw": one_draw_left_out,
    "a step that is not full is divided by who came": divided_by_who_came,
    "made-up records in empty places of a step count": padding_counts,
    "every second step has the sizes of the draws before it": magnitudes_again,
    "neighbouring draws have one size": pairs_of_one_size,
    "a step is clipped as one": clipped_as_one,
    "who took part is forgotten by a restart": forgotten_by_a_restart,
    "telemetry shares a coordinate's noise": telemetry_shares_noise,
    "later epochs have 4% less noise": later_epochs_weaker,
}
_BATCHES = {
    "a step that is not full is divided by who came",
    "made-up records in empty places of a step count",
    "a step is clipped as one",
}


def plan_for(bug: str) -> Plan:
    """With several clients a step, where the bug needs it."""
    plan = small_plan("telemetry" in bug)
    if bug not in _BATCHES:
        return plan
    return dataclasses.replace(plan, learning=dataclasses.replace(plan.learning, clients_per_step=4))


def found(bug: str) -> Finding:
    """Plant it, and run the whole audit."""
    with PLANTED[bug]():
        alarms = whole_audit(plan_for(bug)).alarms
    figure = alarms[0].replace("|", "/") if alarms else "nothing was found"
    return Finding(bug, "whole audit", bool(alarms), f"{len(alarms)} alarms; {figure}"[:300])


BUGS = each_by_name(PLANTED, found)
