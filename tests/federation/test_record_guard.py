"""The guard of records that keep coming: what it finds, how seldom it is wrong, and that it changes nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.federation.test_absent import ask
from tests.support.federation import World, rows_of, source_of, table_plan_of
from veilstream.federation.learner.local_account import LocalAccount, account_path
from veilstream.federation.learner.record_guard import FALSE_ALARMS, WINDOW, GuardWarning, RecordGuard
from veilstream.records.encoded_group import encode_group
from veilstream.records.schema import Categorical, Encoded, Label, Numeric, RecordSchema, Refusal
from veilstream.streams.table_source import RowCounts

_SCHEMA = RecordSchema(
    "who",
    Label("y", ("no", "yes")),
    (
        Numeric("age", 0.0, 110.0),
        Numeric("pressure", 0.0, 250.0),
        Numeric("income", 0.0, 1e6, missing="flag"),
        Categorical("ward", ("north", "south", "icu")),
        Categorical("sex", ("f", "m"), "refuse"),
    ),
)


def _rows(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    age, pressure = rng.integers(18, 95, count), rng.normal(130, 15, count)
    income, ward = (
        rng.lognormal(6, 1, count),
        rng.choice(["north", "south", "icu", "annex"], count, p=[0.5, 0.3, 0.18, 0.02]),
    )
    sex, y = rng.choice(["f", "m"], count), rng.choice(["no", "yes"], count, p=[0.73, 0.27])
    absent = rng.random(count) < 0.1
    return [
        {
            "who": "x",
            "age": int(age[i]),
            "pressure": float(pressure[i]),
            "income": None if absent[i] else float(income[i]),
            "ward": str(ward[i]),
            "sex": str(sex[i]) if rng.random() > 0.01 else "",
            "y": str(y[i]),
        }
        for i in range(count)
    ]


class _Watched:
    """A guard with records in groups, as an account gives them."""

    def __init__(self, seed: int, schema: RecordSchema = _SCHEMA) -> None:
        self.rng, self.counts, self.schema = np.random.default_rng(seed), RowCounts(), schema
        self.said: list[tuple[GuardWarning, bool]] = []
        self.guard = RecordGuard(schema, classifies=True, say=lambda *told: self.said.append(told), clock=lambda: 1e9)

    def give(self, rows: list[dict[str, Any]], *, wrong: float = 0.3) -> None:
        for first in range(0, len(rows), 250):
            some = rows[first : first + 250]
            group = encode_group(self.schema, some, str)
            records = [group.record(place) for place in range(len(some))]
            for record in records:
                self.counts.add(record)
            usable = [record.sample for record in records if isinstance(record, Encoded)]
            self.guard.passed(self.counts)
            if usable:
                targets = np.array([sample.target for sample in usable], np.float64)
                misses = self.rng.random(len(usable)) < wrong
                self.guard.predicted(np.where(misses, -targets, targets), targets)
                self.guard.took(np.stack([sample.features for sample in usable]), targets)

    def warned(self) -> set[tuple[str, str]]:
        return {(warning.column, warning.what) for warning in self.guard.warnings}


def test_false_alarms_are_as_rare_as_stated() -> None:
    """2,000 windows of records in no order, of many shapes: 0.2 false alarms are expected at most, and more than
    two have a chance of 1e-3."""
    rng, rows, said = np.random.default_rng(1), RowCounts(), []
    guard = RecordGuard(None, classifies=True, say=lambda warning, begins: said.append(warning))
    for _ in range(2000):
        columns = (
            rng.normal(size=WINDOW),
            rng.standard_cauchy(WINDOW),
            rng.integers(0, 3, WINDOW),
            rng.integers(0, 40, WINDOW),
            rng.random(WINDOW) < 0.03,
        )
        labels = np.where(rng.random(WINDOW) < 0.27, 1.0, -1.0)
        rows.rows += WINDOW
        for column, share in (("a", 0.01), ("b", 0.1), ("c", 0.4)):
            rows.refused[Refusal("missing", column)] += int(rng.binomial(WINDOW, share))
            rows.clamped[column] += int(rng.binomial(WINDOW, share))
        guard.passed(rows)
        guard.predicted(np.where(rng.random(WINDOW) < 0.2, -labels, labels), labels)
        guard.took(np.stack(columns, axis=1).astype(np.float64), labels)
    assert len(said) <= 2
    assert pytest.approx(0.2) == 2000 * FALSE_ALARMS


def _shrunk(*columns: str) -> Any:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        return row | {column: None if row[column] is None else row[column] / 1000 for column in columns}

    return change


_FAULTS: dict[str, tuple[Any, float, set[tuple[str, str]]]] = {
    "a column shrinks inside its range": (_shrunk("pressure"), 0.3, {("pressure", "values")}),
    "one that was near the low end already": (_shrunk("income"), 0.3, {("income", "values")}),
    "new spellings of a category": (lambda row: row | {"ward": f"ward {row['ward']}"}, 0.3, {("ward", "outside")}),
    "half of the spellings": (
        lambda row: row | ({"ward": "Nord"} if row["ward"] == "north" else {}),
        0.3,
        {("ward", "outside")},
    ),
    "new spellings of a refused category": (lambda row: row | {"sex": f"{row['sex']}."}, 0.3, {("sex", "refused")}),
    "new spellings of labels": (
        lambda row: row | {"y": {"no": "nein", "yes": "ja"}[row["y"]]},
        0.3,
        {("y", "refused")},
    ),
    "one value for all": (lambda row: row | {"age": 40}, 0.3, {("age", "values")}),
    "labels turned round": (lambda row: row | {"y": "no" if row["y"] == "yes" else "yes"}, 0.3, {("y", "values")}),
    "the model has become useless": (lambda row: row, 0.6, {("", "wrong")}),
}


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_faults_are_found_within_five_hundred_records(fault: str, seed: int) -> None:
    change, wrong, expected = _FAULTS[fault]
    watched = _Watched(100 + seed)
    watched.give(_rows(watched.rng, 3000))
    assert not watched.said
    watched.give([change(row) for row in _rows(watched.rng, 500)], wrong=wrong)
    assert expected <= watched.warned()
    (first, *_) = [warning for warning, _ in watched.said if (warning.column, warning.what) in expected]
    assert 3000 < first.since_record <= 3500
    assert first.text
    # It stays while the fault does, and ends when values are as before.
    watched.give([change(row) for row in _rows(watched.rng, 3000)], wrong=wrong)
    assert expected <= watched.warned()
    watched.give(_rows(watched.rng, 1000))
    assert not watched.warned()
    assert not watched.said[-1][1]


def test_what_a_person_accepts_is_usual_from_then_on() -> None:
    watched = _Watched(7)
    watched.give(_rows(watched.rng, 2000))
    watched.give([_shrunk("pressure")(row) for row in _rows(watched.rng, 500)])
    assert ("pressure", "values") in watched.warned()
    watched.guard.accept()
    watched.give([_shrunk("pressure")(row) for row in _rows(watched.rng, 3000)])
    assert not watched.warned()


def test_a_daily_rhythm_is_learned_as_usual() -> None:
    """Records in the order of time: two halves of a day that differ are no news after some days."""
    watched = _Watched(11)
    day = [row | {"age": min(row["age"], 40)} for row in _rows(watched.rng, 500)]
    night = [row | {"age": max(row["age"], 70)} for row in _rows(watched.rng, 500)]
    for _ in range(6):
        watched.give(day + night)
    before = len(watched.said)
    for _ in range(6):
        watched.give(day + night)
    assert not [said for said in watched.said[before:] if said[1]]


def test_it_goes_on_over_a_restart_with_bounded_memory() -> None:
    watched = _Watched(3)
    watched.give(_rows(watched.rng, 2500))
    size = len(json.dumps(watched.guard.kept))
    watched.give([_shrunk("pressure")(row) for row in _rows(watched.rng, 500)])
    again = _Watched(4)
    again.guard.resume(json.loads(json.dumps(watched.guard.kept)), watched.counts)
    again.counts = watched.counts
    assert again.guard.warnings == watched.guard.warnings
    again.give([_shrunk("pressure")(row) for row in _rows(again.rng, 500)])
    assert ("pressure", "values") in again.warned()
    again.give(_rows(again.rng, 20_000))
    assert len(json.dumps(again.guard.kept)) < 3 * size
    with pytest.raises(KeyError):
        again.guard.resume({}, RowCounts())


def test_records_without_a_schema_are_compared_number_by_number() -> None:
    rng, said = np.random.default_rng(5), []
    guard = RecordGuard(None, classifies=False, say=lambda warning, begins: said.append(warning.column))
    for count, scale in ((1500, 1.0), (300, 1e-3)):
        features = rng.normal(size=(count, 4)) * [1.0, 1.0, scale, 1.0]
        targets = rng.normal(size=count)
        guard.predicted(np.zeros(count), targets)
        guard.took(features, targets)
    assert set(said) == {"number 2"}


_DEPLOYED = table_plan_of(rounds=40, learners=1, learning={"local_steps": 50})


def _run(world: World, rows: list[dict[str, object]], rounds: int) -> tuple[LocalAccount, list[tuple[str, int]]]:
    """A deployed learner's replies, as the server sees them: kind and length."""
    daemon = world.start("a", source=source_of(rows), replies="when done")
    account = daemon.account = LocalAccount(daemon.learner, daemon._source, path=account_path(world.store("a")))
    return account, [(reply.kind, len(reply.body)) for reply in (ask(world, r) for r in range(rounds))]


def _people(count: int, low: int = 0) -> list[dict[str, object]]:
    return rows_of([f"person {i}" for i in range(low, low + count)])


def test_a_warning_changes_nothing_that_the_server_sees(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = {}
    for world_name, spoilt in (("usual", False), ("spoilt", True)):
        rows = _people(1000) + [row | ({"y": "Perhaps"} if spoilt else {}) for row in _people(1000, 1000)]
        with World(tmp_path / world_name, _DEPLOYED, names=("a",)) as world, caplog.at_level(logging.WARNING):
            caplog.clear()
            account, seen[world_name] = _run(world, rows, 40)
            assert bool(account.warnings) == spoilt, account.line()
            assert any("y: 100% refused" in record.getMessage() for record in caplog.records) == spoilt
            assert not account.paused
            shown = account.as_dict()
            assert [warning["column"] for warning in shown["warnings"]] == (["y"] if spoilt else [])
    assert seen["usual"] == seen["spoilt"] == [("release", seen["usual"][0][1])] * 40


def test_a_persons_pause_sits_rounds_out_also_after_a_restart(tmp_path: Path) -> None:
    with World(tmp_path, _DEPLOYED, names=("a",)) as world:
        account, seen = _run(world, _people(1000), 2)
        account.pause_rounds()
        assert ask(world, 2).kind == "absent"
        steps = world.daemons["a"].learner.ledger.chain.standing.steps
        world.stop("a")
        account, _ = _run(world, _people(1000), 0)
        assert account.paused
        assert ask(world, 2).kind == "absent"
        assert world.daemons["a"].learner.ledger.chain.standing.steps == steps == 100
        account.go_on()
        assert ask(world, 2).kind == "release"
    assert {kind for kind, _ in seen} == {"release"}


def test_a_guard_that_fails_stops_no_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a cell of somebody")

    with World(tmp_path, _DEPLOYED, names=("a",)) as world, caplog.at_level(logging.WARNING):
        account, _ = _run(world, _people(500), 1)
        account.guard.took = fails  # type: ignore[method-assign]
        assert [ask(world, r).kind for r in range(1, 4)] == ["release"] * 3
    assert sum("guard" in record.getMessage() for record in caplog.records) == 1
    assert "somebody" not in caplog.text
