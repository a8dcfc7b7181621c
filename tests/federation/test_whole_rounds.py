"""A learner beside a file or an iterator begins a round when it can be full, if the plan says nothing else."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator

import numpy as np
import pytest

from tests.federation.test_bad_data import PEOPLE, Beside
from tests.support.federation import csv_of, rows_of, table_plan_of
from veilstream.federation.learner.local_account import read_account
from veilstream.learning.tasks import Sample
from veilstream.streams.iterator_source import IteratorSource
from veilstream.streams.waiting_source import LiveSource

ROWS = rows_of(PEOPLE)


def default_plan(**changes):
    """Rounds of two steps of two clients each."""
    plan = table_plan_of(learners=1, learning={"clients_per_step": 2}, federation={"min_clients": None}, **changes)
    assert plan.federation.min_clients is None
    return plan


@pytest.fixture
def beside(tmp_path):
    return Beside(tmp_path, default_plan())


def kinds(beside, *rounds):
    return [beside.ask(r).kind for r in rounds]


def test_a_file_that_grows_slowly_spends_no_step_on_nobody(beside, caplog):
    beside.write(csv_of(ROWS[:3]))
    with caplog.at_level(logging.INFO), beside.running():
        assert kinds(beside, 0, 0, 0) == ["absent"] * 3
        for at in range(3, 11):
            with beside.file.open("a") as file:
                file.write(csv_of(ROWS[at : at + 1]).partition("\n")[2])
            assert kinds(beside, at // 4) == ["release" if at % 4 == 3 else "absent"]
    assert beside.clients() == 8
    assert read_account(beside.store)["empty_steps"] == 0
    assert "a round begins when 4 records of people who may take part wait" in caplog.text
    assert "records.csv has ended, and 3 records of a round's 4 wait" in caplog.text


def test_the_last_records_of_a_file_that_is_whole_are_used(beside):
    beside.write(csv_of(ROWS[:6]))
    with beside.running(end_with_file=True) as thread:
        assert kinds(beside, 0, 1) == ["release", "release"]
        thread.join(20)
        assert not thread.is_alive()
    assert (beside.clients(), read_account(beside.store)["empty_steps"]) == (6, 1)


@pytest.mark.parametrize("given", [0, 1, 3])
def test_the_plan_may_say_how_many_must_wait(tmp_path, given):
    plan = table_plan_of(learners=1, learning={"clients_per_step": 2}, federation={"min_clients": given})
    beside = Beside(tmp_path, plan).write(csv_of(ROWS[:2]))
    with beside.running():
        assert kinds(beside, 0) == ["absent" if given == 3 else "release"]


def test_a_record_that_cannot_be_used_waits_like_any_other(beside):
    """What a record says must not decide when a round begins."""
    rows = [dict(row) for row in ROWS[:4]]
    for row in rows:
        row |= {"x0": "no number", "y": "unheard of"}
    beside.write(csv_of(rows))
    with beside.running():
        assert kinds(beside, 0) == ["release"]
    assert beside.clients() == 4


def test_people_who_return_fill_a_round_as_often_as_it_takes_them(tmp_path):
    plan = default_plan(privacy={"participations": 6, "min_separation": 1})
    again = [row | {"person": "ann"} for row in ROWS[:8]]
    beside = Beside(tmp_path, plan).write(csv_of(again[:3]))
    with beside.running():
        assert kinds(beside, 0) == ["absent"]  # two steps take two of hers
        with beside.file.open("a") as file:
            file.write(csv_of([*ROWS[1:3], *again[3:]]).partition("\n")[2])
        assert kinds(beside, 0) == ["release"]


def test_rows_of_a_sqlite_file_fill_rounds_while_they_come(tmp_path):
    beside = Beside(tmp_path, default_plan())
    beside.file = tmp_path / "records.sqlite"

    def insert(rows):
        with sqlite3.connect(beside.file) as db:
            db.execute(f"CREATE TABLE IF NOT EXISTS records ({', '.join(ROWS[0])})")
            db.executemany(
                f"INSERT INTO records VALUES ({', '.join('?' * len(ROWS[0]))})", [(*r.values(),) for r in rows]
            )
        db.close()

    insert(ROWS[:10])
    with beside.running():
        assert kinds(beside, 0, 1, 2) == ["release", "release", "absent"]
        insert(ROWS[10:13])
        assert kinds(beside, 2, 3) == ["release", "absent"]
    assert beside.clients() == 12
    with beside.running():
        insert(ROWS[13:16])
        assert kinds(beside, 3) == ["release"]
    assert beside.clients() == 16


def everybody(_):
    return True


def an_iterator(tags, **more):
    def records(consumed: int) -> Iterator[tuple[str, Sample]]:
        for tag in tags:
            yield tag, Sample(np.zeros(2, np.float32), 1.0)

    return IteratorSource(records, name="here", patience_s=0.2, **more)


def test_an_iterator_waits_for_a_whole_round_and_its_end_is_not_waited_for():
    source = an_iterator(f"p{i}" for i in range(3))
    assert not source.ready(4, 4, everybody)
    source.least_at_last = 1
    assert source.ready(4, 4, everybody)


def test_an_iterator_of_people_who_were_there_before_does_not_get_stuck():
    """Its queue would be full of people who may not come again."""
    tags = ["old"] * 5000 + [f"p{i}" for i in range(4)]
    source = an_iterator(tags)
    for _ in range(30):
        if source.ready(4, 4, lambda tag: tag != "old"):
            break
    else:
        pytest.fail("stuck")
    assert source.told_without_a_round > 4000
    source.close()


def test_what_waiting_costs_where_people_call_is_said(tmp_path, caplog):
    from veilstream.federation.learner.source_start import least_clients

    class Learner:
        takes_whole_sources = False

        class terms:  # noqa: N801
            local_steps, clients_per_step = 5, 87

    with caplog.at_level(logging.INFO):
        assert least_clients(default_plan(), Learner, LiveSource(30.0)) == 1
    assert (
        "at most 435 clients in 31 s (federation.patience_s and a second to reply): 14 clients a second" in caplog.text
    )


def test_the_default_is_no_number_in_a_plan():
    assert "min_clients" not in json.dumps(default_plan().to_toml())
