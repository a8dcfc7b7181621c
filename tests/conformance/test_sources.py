"""What every source of clients must do; for one of your own, add a maker to `SOURCES`.

A maker gets a folder and people's names, and gives a source that offers one record of each, in that
order, and then nobody. What a record holds does not matter here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support.federation import DIM, table_plan_of
from veilstream.learning.tasks import Sample
from veilstream.plans.data_source import open_source
from veilstream.plans.records import schema_of
from veilstream.records.admission import Admission, Answer
from veilstream.streams.intake import ClientSource, Offered, SourceBookmark
from veilstream.streams.iterator_source import IteratorSource
from veilstream.streams.table_source import TableSource
from veilstream.streams.waiting_source import LiveSource, WaitingRecord, WaitingSource

RECORD = Sample(np.zeros(DIM, np.float32), 1.0)
PEOPLE = [f"p{i}" for i in range(10)]


def sample_of(name: str) -> Sample:
    return Sample(np.full(DIM, int(name[1:]) / 100, np.float32), 1.0)


def a_file(folder: Path, people: list[str]) -> ClientSource:
    header = ",".join(["person", "y", *(f"x{i}" for i in range(DIM))])
    lines = [",".join([name, "yes", *["0.5"] * DIM]) for name in people]
    (folder / "records.csv").write_text("\n".join([header, *lines]) + "\n")
    return open_source(str(folder / "records.csv"), table_plan_of(), whole=True)


def a_table(folder: Path, people: list[str]) -> ClientSource:
    import sqlite3

    columns = ["person", "y", *(f"x{i}" for i in range(DIM))]
    path = folder / "records.sqlite"
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE records ({', '.join(columns)})")
        marks = ", ".join("?" * len(columns))
        rows = [(name, "yes", *[0.5] * DIM) for name in people]
        db.executemany(f"INSERT INTO records VALUES ({marks})", rows)
    db.close()
    plan = table_plan_of(data={"query": "SELECT * FROM records ORDER BY rowid"})
    return open_source(str(path), plan, whole=True)


def an_iterator(folder: Path, people: list[str]) -> ClientSource:
    def records(consumed: int) -> Iterator[tuple[str, Sample]]:
        for name in people[consumed:]:
            yield name, sample_of(name)

    return IteratorSource(records, name="here:records", patience_s=0.2)


def people_who_call(folder: Path, people: list[str]) -> ClientSource:
    source = LiveSource(0.2)
    assert source.put([WaitingRecord(Offered(name, sample_of(name))) for name in people])
    return source


SOURCES: dict[str, Callable[[Path, list[str]], ClientSource]] = {
    "file": a_file,
    "table": a_table,
    "iterator": an_iterator,
    "live": people_who_call,
}


@pytest.fixture(params=SOURCES)
def make(request, tmp_path):
    made: list[ClientSource] = []

    def make(people: list[str] = PEOPLE) -> ClientSource:
        made.append(SOURCES[request.param](tmp_path, list(people)))
        return made[-1]

    yield make
    for source in made:
        if isinstance(source, WaitingSource):
            source.close()


class Round:
    """What a learner does with a source, and all that it was handed."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.got: list[Offered] = []

    def observe(self, clients) -> list[Answer]:
        """Consume no more than the round can use."""
        fresh = [Offered(*given) for given in islice(iter(clients), self.wanted - len(self.got))]
        self.got += fresh
        return [Answer.TAKEN] * len(fresh)

    def serve(self, source: ClientSource, r: int = 0) -> list[str]:
        source.serve(r, self.observe, lambda: self.wanted - len(self.got))
        return [str(offered.tag) for offered in self.got]


def everybody(_: str | bytes) -> bool:
    return True


def test_records_come_in_order_each_once_over_many_rounds(make):
    source, came = make(), []
    for r in range(5):
        assert source.ready(1, 3, everybody) == (r < 4)
        came += Round(3).serve(source, r)
    assert came == PEOPLE


def test_a_round_gets_no_more_than_it_wants_and_the_rest_is_not_lost(make):
    source = make()
    assert Round(4).serve(source) == PEOPLE[:4]
    assert Round(4).serve(source, 1) == PEOPLE[4:8]


def test_being_asked_whether_it_is_ready_uses_nothing(make):
    source = make()
    for _ in range(3):
        assert source.ready(2, 4, everybody)
    assert Round(10).serve(source) == PEOPLE


def test_it_is_ready_only_for_as_many_people_as_may_be_taken(make):
    source = make([*PEOPLE[:3], *PEOPLE[:3]])
    assert source.ready(3, 6, everybody)
    assert not source.ready(4, 6, everybody)  # three people, twice each
    assert not make(PEOPLE[:3]).ready(3, 6, lambda tag: tag != "p1")


def test_nobody_is_offered_after_the_end_and_it_is_not_ready(make):
    source = make(PEOPLE[:2])
    assert Round(5).serve(source) == PEOPLE[:2]
    assert not source.ready(1, 5, everybody)
    assert Round(5).serve(source, 1) == []


def test_what_was_handed_over_does_not_come_again_after_a_restart(make):
    """Behind the bookmark of the last record that was stored; one that has none forgets."""
    first = Round(4)
    first.serve(make())
    marks = [offered.bookmark for offered in first.got if offered.bookmark is not None]
    again = make()
    if isinstance(again, LiveSource):
        assert marks == []  # callers who were not answered call again
        return
    assert isinstance(again, TableSource | IteratorSource)
    assert len(marks) == 4
    again.resume(marks[-1:])
    assert Round(10).serve(again) == PEOPLE[4:]


def test_bookmarks_of_other_sources_mean_nothing(make):
    source = make()
    if isinstance(source, TableSource | IteratorSource):
        source.resume([SourceBookmark("another", "7")])
    assert Round(10).serve(source) == PEOPLE


def test_a_failure_of_the_learner_goes_through_and_its_records_are_consumed(make):
    source = make()

    def failing(clients) -> list[Answer]:
        list(islice(iter(clients), 2))
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        source.serve(0, failing, lambda: 2)
    assert Round(10).serve(source, 1) == PEOPLE[2:]


def test_people_who_call_wait_for_their_answer():
    source = LiveSource(patience_s=5.0)
    assert source.offer("early", sample_of("p0"), timeout_s=0.05) is None  # no round came
    assert source.waiting == 0
    here = Round(3)
    serving = threading.Thread(target=here.serve, args=(source,))
    serving.start()
    for name in PEOPLE[:3]:
        assert source.offer(name, sample_of(name)) is Answer.TAKEN
    serving.join(5)
    assert [offered.tag for offered in here.got] == PEOPLE[:3]


def test_whoever_is_in_a_group_that_fails_is_not_told_that_it_was_taken():
    source, told = LiveSource(patience_s=0.1), []
    source.put([WaitingRecord(Offered(name, sample_of(name)), told.append) for name in PEOPLE])

    def failing(clients) -> list[Answer]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        source.serve(0, failing, lambda: 3)
    assert told == [None] * 3
    source.close()
    assert told == [None] * 10


def test_an_iterator_that_blocks_holds_up_no_round_beyond_its_patience():
    here = threading.Event()

    def records(consumed: int) -> Iterator[tuple[str, Sample]]:
        yield "p0", sample_of("p0")
        here.wait(20)

    source = IteratorSource(records, name="slow", patience_s=0.1)
    assert Round(2).serve(source) == ["p0"]
    assert not source.ready(1, 2, everybody)
    assert not source.exhausted
    here.set()


def test_an_iterator_that_fails_ends_and_its_error_is_logged_without_its_text(caplog):
    def records(consumed: int) -> Iterator[tuple[str, Sample]]:
        yield "p0", sample_of("p0")
        raise ValueError("secret 1234")

    source = IteratorSource(records, name="bad", patience_s=5.0)
    assert Round(2).serve(source) == ["p0"]
    assert source.exhausted
    assert "ValueError" in caplog.text
    assert "1234" not in caplog.text


def waiting(source, *tags):
    """These people call and wait, each answered into a list of its own."""
    told = {tag: [] for tag in tags}
    for tag in tags:
        source.put([WaitingRecord(Offered(tag, RECORD), told[tag].append)])
    return told


@pytest.mark.parametrize("alone", ["new", "old"])
def test_whoever_calls_alone_hears_the_same_whether_or_not_they_took_part(alone):
    """The round is begun for the new one only, and nobody can tell from the answer."""
    source = LiveSource(patience_s=0.2)
    told = waiting(source, alone)
    begun = source.ready(1, 5, lambda tag: tag == "new")
    assert begun is (alone == "new")
    if begun:
        source.serve(0, lambda clients: [Answer.TAKEN for _ in clients], iter([1, 0]).__next__)
    assert told[alone] == [Answer.TAKEN]
    assert source.waiting == 0
    assert source.told_without_a_round == (alone == "old")


@pytest.mark.parametrize("second", ["new", "old"])
def test_too_few_wait_whoever_they_are(second):
    source = LiveSource(patience_s=0.2)
    told = waiting(source, "first", second)
    assert not source.ready(3, 5, lambda tag: tag != "old")
    assert told == {"first": [], second: []}
    assert source.waiting == 2


def test_people_who_have_left_do_not_count_towards_the_minimum():
    source = LiveSource(patience_s=1.0)
    gone = [WaitingRecord(Offered(tag, RECORD)) for tag in ("a", "b")]
    assert source.put(gone)
    found = []
    asking = threading.Thread(target=lambda: found.append(source.ready(3, 5, lambda _: True)))
    asking.start()
    time.sleep(0.2)
    source.withdraw(gone)
    waiting(source, "c")
    asking.join(10)
    assert found == [False]


def test_records_of_an_iterator_that_the_task_does_not_take_wait_like_others_without_a_sample(caplog):
    def bad(consumed):
        for i in range(20):
            yield f"p{i}", Sample(np.full(3, np.nan), 1.0)
        yield "good", Sample(np.zeros(3), 1.0)

    source = IteratorSource(bad, name="m:bad", patience_s=0.5)
    source.admission = Admission((3,), (-1.0, 1.0))
    assert source.ready(21, 21, lambda _: True)
    assert source.not_admitted == 20
    offered = [record.offered for record in source._queue]
    assert [each.tag for each in offered if each.sample is None] == [f"p{i}" for i in range(20)]
    assert offered[-1].tag == "good"
    assert "3 finite numbers as features, and one of -1.0, 1.0 as target" in caplog.text
    source.close()


def test_rows_of_an_iterator_are_encoded_by_the_plan_and_a_refused_one_keeps_its_place(caplog):
    good = {"person": "ann", "y": "yes"} | {f"x{i}": 0.5 for i in range(DIM)}

    def rows(consumed):
        yield good
        yield good | {"person": "bob", "x0": "no number"}
        yield good | {"person": ""}
        yield ("cyd", sample_of("p1"))

    source = IteratorSource(rows, name="m:rows", patience_s=0.5)
    source.schema = schema_of(table_plan_of())
    got = Round(5)
    got.serve(source)
    assert [(str(each.tag), each.sample is None) for each in got.got] == [
        ("ann", False),
        ("bob", True),
        ("m:rows:3", True),  # somebody whose name is missing
        ("cyd", False),
    ]
    assert [each.bookmark.text for each in got.got] == ["1", "2", "3", "4"]
    np.testing.assert_array_equal(got.got[0].sample.features, source.schema.features_of(good))
    source.close()
    without = IteratorSource(rows, name="m:rows", patience_s=0.5)
    assert Round(5).serve(without) == []
    assert "since [data] has no columns" in caplog.text


def test_whatever_an_iterator_yields_takes_a_step():
    """A record's content, its shape or an unreadable name must not decide how many steps the server sees."""
    good = {"person": "ann", "y": "yes"} | {f"x{i}": 0.5 for i in range(DIM)}
    given = [
        good,
        {},
        {"person": None},
        None,
        17,
        "ab",
        ("bob",),
        ("cyd", sample_of("p1"), "more", "still more"),
        (None, sample_of("p1")),
        (b"\xff", None),
        (b"", None),
        (17, sample_of("p1")),
        ("\ud800", sample_of("p1")),
        (Decimal("sNaN"), sample_of("p1")),
        good | {"person": Decimal("sNaN")},
        good | {"person": Fraction(10**400, 3)},
    ]
    source = IteratorSource(lambda consumed: iter(given), name="m:rows", patience_s=0.5)
    source.schema = schema_of(table_plan_of())
    got = Round(len(given))
    got.serve(source)
    nobody = [f"m:rows:{number}" for number in range(1, len(given) + 1)]
    named = {0: "ann", 9: b"\xff", 11: "17"}
    assert [each.tag for each in got.got] == [named.get(place, nobody[place]) for place in range(len(given))]
    source.close()


def test_of_a_file_with_a_column_of_learners_only_blank_rows_and_those_of_others_are_skipped(tmp_path):
    plan = table_plan_of(learners=2, data={"learner": "site"})
    header = ["site", "person", "y", *(f"x{i}" for i in range(DIM))]
    good = ["north", "{}", "yes", *["0.5"] * DIM]
    rows = [
        [good[0], "ann", *good[2:]],
        ["", "bob", *good[2:]],
        [*good, "one cell more"],
        ["north", "cyd", "yes", "1" * 200_000, *["0.5"] * (DIM - 1)],
        ["south", "dan", *good[2:]],
        [""] * len(good),
        ["", "", *good[2:]],
        ["north", "eve", *good[2:]],
    ]
    (tmp_path / "r.csv").write_text("\n".join(",".join(row) for row in [header, *rows]) + "\n")
    got = Round(8)
    got.serve(open_source(str(tmp_path / "r.csv"), plan, "north", whole=True))
    assert [(each.tag, each.sample is not None) for each in got.got] == [
        ("ann", True),
        ("bob", False),
        ("r.csv:2", False),
        ("r.csv:3", False),
        ("r.csv:6", False),
        ("eve", True),
    ]
