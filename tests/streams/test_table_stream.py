"""Records as a simulation's clients: order, people, the promise, and what is left out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.mechanisms.participation import Participation
from veilstream.records.schema import Label, Numeric, RecordSchema, Refusal
from veilstream.streams.table_stream import Dealing, table_stream
from veilstream.streams.tables import RowsTable

SCHEMA = RecordSchema("who", Label("y", ("0", "1")), (Numeric("x", 0.0, 100.0),), bias=False, learner="at", time="t")


def rows(count, people=None, learners=2):
    people = people or count
    return [
        {"who": f"p{i % people}-{i % learners}", "y": i % 2, "x": i, "at": f"l{i % learners}", "t": count - i}
        for i in range(count)
    ]


def stream(held, schema=SCHEMA, rounds=3, **options):
    dealing = Dealing(**({"learners": 2, "held_out_share": 0.0} | options))
    return table_stream([("file", RowsTable(iter(held)))], schema, dealing, rounds=rounds, per_round=2)


def values(sample):
    """x of each client again, from -1 to 1."""
    return np.round((sample.features[..., 0] + 1) * 50).astype(int).tolist()


def test_each_learner_meets_its_records_in_the_order_of_time():
    """t falls with the row, so the last row comes first."""
    made = stream(rows(20))
    assert made.names == ("l0", "l1")
    assert values(made.round(0, 0)) == [[18, 16], [19, 17]]
    assert values(made.round(7, 1)) == [[14, 12], [15, 13]]  # whatever the seed


def test_people_who_return_under_once_are_refused_with_a_way_out():
    with pytest.raises(InputError, match=r"at least 4: 4 people.*participations = 4"):
        stream(rows(16, people=4))


def test_or_only_their_first_records_are_used():
    made = stream(rows(16, people=4), returning="first")
    assert (made.report.used, made.report.too_often) == (4, 12)
    assert values(made.round(0, 0)) == [[14, 12], [15, 13]]


def test_visits_that_come_too_soon_are_left_out():
    """Two people a learner in turn: with at least three steps between, someone always waits."""
    made = stream(rows(16, people=4), participation=Participation(4, 3))
    taken = [made.features[i, 0] for i in range(made.report.used)]
    assert made.report.too_soon > 0
    assert made.report.used + made.report.too_soon == 16
    assert len(taken) == made.report.used


def test_a_person_at_two_learners_is_refused():
    held = rows(8)
    held[3]["who"] = held[2]["who"]
    with pytest.raises(InputError, match="one learner each"):
        stream(held)


def test_held_out_people_are_never_learned_from():
    wide = dataclasses.replace(SCHEMA, features=(Numeric("x", 0.0, 399.0),))
    made = stream(rows(400), wide, rounds=100, held_out_share=0.3)
    learned = set(made.features[:, 0].tolist())
    held = set(made.held_out(0, 1000, 0).features[:, 0].tolist())
    assert held
    assert not learned & held
    assert 60 < made.report.held_out < 180  # 0.3 of 400, five standard deviations either way
    assert made.report.used + made.report.held_out == 400


def test_what_is_refused_is_counted():
    held = rows(10)
    held[0]["x"], held[1]["y"], held[2]["t"], held[3]["at"] = "?", 7, None, " "
    held[4]["x"] = 101
    report = stream(held).report
    assert report.refused == {
        Refusal("missing", "x"): 1,
        Refusal("unknown label", "y"): 1,
        Refusal("missing", "t"): 1,
        Refusal("missing", "at"): 1,
    }
    assert report.clamped == {"x": 1}
    assert (report.rows, report.used) == (10, 6)


def test_nothing_usable_says_why():
    held = [row | {"y": "maybe"} for row in rows(4)]
    with pytest.raises(InputError, match=r"of 4 rows none can \(y: unknown label: 4\)"):
        stream(held)


def test_another_number_of_learners_is_named():
    with pytest.raises(InputError, match=r"learning.learners = 3.*2 \(l0, l1\)"):
        stream(rows(8), learners=3)
