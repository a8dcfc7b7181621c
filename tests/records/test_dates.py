"""Dates as people write them: those with one meaning sort as time."""

from __future__ import annotations

import datetime
import random

import pytest

from veilstream.records.cells import time_of
from veilstream.records.schema import Label, RefusedRecord


@pytest.mark.parametrize(
    "written", ["%d.%m.%Y", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m-%d", "%d.%m.%Y %H:%M", "%d.%m.%Y, %H:%M:%S"]
)
def test_they_sort_as_the_calendar_does(written):
    dice = random.Random(1)
    days = [datetime.datetime(2019, 1, 1) + datetime.timedelta(hours=dice.randrange(60_000)) for _ in range(300)]
    if "%H" not in written:
        days = [day.replace(hour=0) for day in days]
    by_text = sorted(days, key=lambda day: time_of(day.strftime(written)))
    assert by_text == sorted(days)


def test_without_leading_zeros_too():
    assert time_of("1.2.2026") == time_of("01.02.2026") == "2026-02-01"
    assert time_of("1.2.2026 9:05") == "2026-02-01 09:05"


@pytest.mark.parametrize("text", ["3/4/2026", "03-04-2026", "31.13.2026", "1.2.26", "soon"])
def test_what_has_two_meanings_or_none_stays_as_it_is(text):
    assert time_of(text) == text


def test_a_label_is_read_in_any_case_unless_the_plan_tells_cases_apart():
    label = Label("came", ("no", "yes"))
    assert [label.read(text, decimal_comma=False)[0] for text in ("yes", "Yes", "YES", "No")] == [1.0, 1.0, 1.0, -1.0]
    told_apart = Label("came", ("a", "A"))
    assert [told_apart.read(text, decimal_comma=False)[0] for text in ("a", "A")] == [-1.0, 1.0]
    with pytest.raises(RefusedRecord):
        Label("came", ("a", "A", "b"), signed=False).read("B", decimal_comma=False)
