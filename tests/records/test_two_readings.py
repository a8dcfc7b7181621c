"""Numbers and times that could be read in two ways are refused or remarked upon, not guessed."""

from __future__ import annotations

import pytest

from tests.cli.test_plan import veilstream
from veilstream.records.cells import TimeOrder, as_number, has_two_readings, with_decimal_point
from veilstream.records.schema import Label, Numeric, RecordSchema, Refusal


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        ("1.300", None),
        ("-12.345.678", None),
        ("1.300,5", 1300.5),
        ("1,3", 1.3),
        ("1.3", 1.3),
        ("1.30", 1.3),
        ("1234.567", 1234.567),
        (1.3, 1.3),
    ],
)
def test_thousands_beside_decimal_commas(cell, number):
    assert as_number(cell, decimal_comma=True) == number
    assert has_two_readings(cell, decimal_comma=True) == (number is None)
    said = with_decimal_point(cell)
    assert as_number(said) == number


def test_where_points_are_decimal_there_is_one_reading():
    assert as_number("1.300") == 1.3
    assert not has_two_readings("1.300", decimal_comma=False)


def test_the_record_is_refused_with_the_reason_and_keeps_its_client():
    schema = RecordSchema("who", Label("y", ("no", "yes")), (Numeric("x", 0.0, 2000.0),))
    found = schema.encode({"who": "ann", "y": "yes", "x": "1.300"}, decimal_comma=True)
    assert found == Refusal("two readings", "x")
    assert found.client == "ann"


def test_times_of_several_zones_are_remarked_upon():
    order = TimeOrder()
    for when in ("2026-01-31T12:00:00+02:00", "2026-01-31T11:00:00Z", "2026-01-31 11:30", "2026-02-01T10:00+0000", 7.0):
        order.add("", when)
    (remark,) = order.remark_on_zones("at")
    assert "have 3 time zones (UTC 2, +02:00 1, none 1)" in remark
    one = TimeOrder()
    for when in ("2026-01-31", "2026-01-31T12:00Z", "2026-02-01T12:00:00.5+00:00"):
        one.add("", when)
    assert one.remark_on_zones("at") == []


PLAN = """
name = "small"
[learning]
rounds = 2
local_steps = 2
learners = 1
[data]
kind = "table"
client = "#row"
time = "at"
label = "y"
labels = ["no", "yes"]
[[data.features]]
name = "x"
low = 0.0
high = 2000.0
[privacy]
epsilon = 4.0
delta = 1e-3
[[methods]]
name = "a"
kind = "auto"
"""
ROWS = "".join(
    f"p{i % 8};{x};{('no', 'yes')[i % 2]};2026-01-{i + 1:02}T12:00{zone}\n"
    for i, (x, zone) in enumerate([("1,5", "Z"), ("1.300", "+02:00"), ("2,5", "Z"), ("7", "Z")] * 4)
)


def test_a_check_says_all_of_it(tmp_path):
    (tmp_path / "v.csv").write_text("patient;x;y;at\n" + ROWS)
    (tmp_path / "plan.toml").write_text(PLAN)
    checked = veilstream("data", "check", tmp_path / "v.csv", "--plan", tmp_path / "plan.toml").stdout
    assert "4 rows (25.0%) refused in x: the number can be read in two ways (1.300 beside decimal commas)" in checked
    assert "16 rows, each taken for another person" in checked
    assert "column patient looks like who: 8 people, 8 of them return, one up to 2 times" in checked
    assert 'set client = "patient"' in checked
    assert "the times in at have 2 time zones (UTC 12, +02:00 4)" in checked
    found = veilstream("data", "check", tmp_path / "v.csv").stdout
    assert "4 cells in x can be read in two ways" in found
