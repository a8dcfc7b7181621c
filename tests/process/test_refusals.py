"""A record's content never decides what the server sees: the study's short form, and sabotages that it finds."""

from __future__ import annotations

import math

import numpy as np
from studies import refusals
from studies.refusals import BestTest, plan_of, study

from veilstream.records.schema import Encoded
from veilstream.streams.intake import Offered
from veilstream.streams.table_source import TableSource


def test_one_record_decides_neither_number_nor_order_nor_size_of_the_messages():
    """False alarms: at most 1e-6, by the guesses alone; the messages must be equal."""
    found = study(pairs=8)
    assert found.alike
    assert not found.alarm
    assert {name: counts["release"] for name, counts in found.messages.items() if name != "blank row"} == dict.fromkeys(
        refusals.COMPARED, refusals.ROUNDS
    )
    assert found.messages["blank row"] == {"enrolled": 1, "release": refusals.ROUNDS - 1, "absent": 1}


def test_the_study_finds_a_learner_that_skips_what_it_refuses(monkeypatch):
    def skipping(self):
        while self._held or self._hold_one():
            item = self._pass()
            if isinstance(item.record, Encoded):
                yield Offered(item.record.client, item.record.sample, self.bookmark)

    monkeypatch.setattr(TableSource, "_clients", skipping)
    found = study(pairs=0)
    assert not found.alike
    assert found.alarm


def test_the_best_test_tells_the_worlds_apart_where_there_is_too_little_noise(monkeypatch):
    """It is a test: a wrong guess has probability Φ(-mu/2) < 0.05, so 5 of 12 fail by chance less than 3e-4."""
    monkeypatch.setattr(refusals, "EPSILON", 60.0)
    assert BestTest(plan_of()).mu > 3.3
    found = study(pairs=6)
    assert (found.guesses, found.right >= 8) == (12, True)


def test_the_distance_of_the_worlds_is_within_the_promise():
    """A record is replaced by an empty one: half the way of two opposite gradients, by the mechanism's own matrix."""
    test = BestTest(plan_of())
    c = np.asarray(test.terms.mechanism.strategy_matrix())
    most = 2.0 * refusals.CLIP_NORM * math.sqrt((c**2).sum(0).max()) / test.terms.noise_std
    assert 0.0 < test.mu <= most / 2.0 * (1.0 + 1e-9)
