"""Bugs of a secret order: each makes steps known, dealt out, drawn twice, or told by the time that a round takes."""

from __future__ import annotations

import dataclasses
import re
import secrets
from contextlib import AbstractContextManager
from functools import cache
from unittest.mock import patch

import numpy as np

from studies.mutations.findings import Finding, each_by_name
from veilstream.audit.programme import auditable
from veilstream.audit.secret_order import clients_of, mixture_checks, order_checks
from veilstream.audit.statistics.check import Check, alarming
from veilstream.deployment import epoch_records, window_records
from veilstream.deployment.client_steps import ClientSteps
from veilstream.deployment.epochs import ORDER_SECRET
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.step_index import IndexWriter
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised
from veilstream.records.secret_order import chosen_steps

ROUNDS, MANY = 16, 60
_add = IndexWriter.add
_blob = Ledger.blob
_noisy = LocalRounds.noisy


@cache
def secret_plan(window: int | None = None) -> tuple[Plan, Terms]:
    """A small plan, as an audit takes it, and its terms."""
    plan = auditable(
        Plan(
            learning={"rounds": ROUNDS, "clients_per_step": MANY, "model_norm_cap": 1e30},
            data={"dim": 4},
            privacy={"epsilon": 2.0, "delta": 1e-3, "order": "secret", "window": window},
            methods=[{"name": "ours", "mechanism": "independent", "step_size": 0.1}],
        )
    )
    terms = Terms.of(plan, 1)
    return plan, dataclasses.replace(terms, dim=clients_of(terms))


def checks(seed: int = 0, window: int | None = None) -> list[Check]:
    """What an audit checks of a secret order."""
    plan, terms = secret_plan(window)
    return [*order_checks(plan, terms, seed=seed), *mixture_checks(plan, terms, 8000, seed=seed)]


def order_known() -> AbstractContextManager[object]:
    """The choice is a function of the client's name alone, which anybody can work out."""

    def known(secret, tags, steps):
        return chosen_steps(bytes(32), tags, steps)

    return patch.object(epoch_records, "chosen_steps", known)


def _placed_by(step_of_row) -> AbstractContextManager[object]:
    def add(self, tags, steps, rows):
        _add(self, tags, step_of_row(self, np.arange(self._rows, self._rows + len(tags))), rows)

    return patch.object(IndexWriter, "add", add)


def order_by_file() -> AbstractContextManager[object]:
    """Steps are filled one after the other, as the records lie."""
    return _placed_by(lambda writer, rows: np.minimum(rows // MANY, writer._steps - 1))


def permutation() -> AbstractContextManager[object]:
    """Every step has as many: whoever knows where all others went knows where the last one is."""

    def dealt(writer, rows):
        rng = np.random.default_rng(int.from_bytes(writer._secret, "big"))
        return rng.permutation(writer._steps * MANY)[rows] // MANY

    return _placed_by(dealt)


def redrawn_after_a_crash() -> AbstractContextManager[object]:
    """The secret is in memory only, so a learner that is started again has another."""

    def blob(self, name):
        if name != ORDER_SECRET:
            return _blob(self, name)
        return vars(self).setdefault("in_memory", secrets.token_bytes(32))

    return patch.object(Ledger, "blob", blob)


def time_tells_the_count() -> AbstractContextManager[object]:
    """A round takes as long as its records need."""
    return patch.object(ClientSteps, "fill_up", lambda self, local, clients, steps: None)


def noise_of_a_step_with_nobody() -> AbstractContextManager[object]:
    """Half the noise, which no check of where records are would see."""

    def noisy(self, gradient, secret):
        noise = np.array(_noisy(self, gradient, secret)) - gradient.reveal()
        return Noised(noise // 2 + gradient.reveal())

    return patch.object(LocalRounds, "noisy", noisy)


def used_as_they_arrived() -> AbstractContextManager[object]:
    """In a window, steps follow the order in which people come, by the numbers that an audit gives them."""

    def in_turn(secret, tags, steps):
        return np.array([int(re.findall(rb"\d+", tag)[-1]) // MANY % steps for tag in tags], np.int64)

    return patch.object(window_records, "chosen_steps", in_turn)


def used_at_once() -> AbstractContextManager[object]:
    """A record is used in the window in which it arrives, at whatever step is left of it."""
    records = window_records.WindowRecords._rows

    def early(self, window):
        return records(self, window + 1)

    return patch.object(window_records.WindowRecords, "_rows", early)


PLANTED_IN_WINDOWS = {
    "used in the order of arrival": used_as_they_arrived,
    "used in the window of arrival": used_at_once,
    "time tells the count": time_tells_the_count,
}
PLANTED = {
    "order known": order_known,
    "order by file": order_by_file,
    "permutation instead of independent choices": permutation,
    "choice redrawn after a crash": redrawn_after_a_crash,
    "time tells the count": time_tells_the_count,
    "half the noise under a secret order": noise_of_a_step_with_nobody,
}


def found(bug: str) -> Finding:
    """Plant it, and make the checks of a secret order."""
    secret_plan()
    with PLANTED[bug]():
        alarms = alarming(checks())
    figure = f"{alarms[0].name}: {alarms[0].figure}" if alarms else "nothing was found"
    return Finding(bug, "secret order", bool(alarms), f"{len(alarms)} alarms; {figure}"[:300])


BUGS = each_by_name(PLANTED, found)
