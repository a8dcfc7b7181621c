"""Guesses of who, when, where and what; and what is said of them."""

from __future__ import annotations

import pytest

from veilstream.plans.column_profile import profile
from veilstream.plans.proposal import data_table as proposal
from veilstream.streams.tables import RowsTable

ROWS = 60


def found(**columns):
    """A profile of columns, each a function of the row's number."""
    rows = [{name: make(i) for name, make in columns.items()} for i in range(ROWS)]
    return profile([RowsTable(iter(rows), "visits.csv")])


def well(i):
    return "yn"[i % 2]


def hour(i):
    return i % 24


def test_a_column_that_tells_rows_apart_is_the_client_and_never_a_feature():
    held = found(badge=lambda i: f"x{i:03d}", hour=hour, well=well)
    assert held.roles.client == "badge"
    assert any("guess from its cells" in remark for remark in held.roles.remarks)
    assert 'client = "badge"' in proposal(held, "visits.csv")
    assert 'name = "badge"' not in proposal(held, "visits.csv")


def test_beside_a_named_client_it_is_left_out_and_said():
    held = found(patient=lambda i: f"p{i % 9}", email=lambda i: f"a{i}@b.org", hour=hour, well=well)
    assert held.roles.client == "patient"
    assert held.roles.left_out == ("email",)
    assert 'name = "email"' not in proposal(held, "visits.csv")
    assert any("different in nearly every row" in remark for remark in held.roles.remarks)


def test_a_number_of_rows_that_is_called_id_is_doubted():
    held = found(id=lambda i: i, hour=hour, well=well)
    assert held.roles.client == "id"
    assert any("hides people who return" in remark for remark in held.roles.remarks)


def test_nobody_named_is_said():
    held = found(hour=hour, score=lambda i: i / 3, well=well)
    assert held.roles.client == "#row"
    assert any("If people return" in remark for remark in held.roles.remarks)
    assert 'name = "score"' in proposal(held, "visits.csv")  # a measurement may differ everywhere


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("Patientennummer", "client"),
        ("patientId", "client"),
        ("Kunde", "client"),
        ("id_paciente", "client"),
        ("Identité personne", "client"),
    ],
)
def test_names_in_other_languages(name, role):
    held = found(**{name: lambda i: f"p{i % 9}", "hour": hour, "well": well})
    assert held.roles.as_dict()[role] == name


@pytest.mark.parametrize("name", ["Klinik", "clinic", "Standort", "Hôpital", "station_name"])
def test_places_are_learners_with_a_word_of_doubt(name):
    columns = {"person": lambda i: f"p{i}", name: lambda i: f"k{i % 3}", "hour": hour, "well": well}
    held = found(**columns)
    assert held.roles.learner == name
    assert any("each of its 3 words would be a learner" in r for r in held.roles.remarks)
    rows = [{c: make(i) for c, make in columns.items()} for i in range(ROWS)]
    tables = [RowsTable(iter(rows), "a.csv"), RowsTable(iter(rows), "b.csv")]
    assert profile(tables).roles.learner is None  # each file is one


def test_dates_are_times_whatever_they_are_called():
    held = found(person=lambda i: f"p{i}", visto=lambda i: f"2026-03-{1 + i % 20:02d}", well=well)
    assert held.roles.time == "visto"
    held = found(person=lambda i: f"p{i}", Datum=lambda i: f"{1 + i % 20}.3.2026", well=well)
    assert held.roles.time == "Datum"
    assert not any("two ways" in remark for remark in held.roles.remarks)  # 3.3.2026 can only be in March
    assert 'time = "Datum"' in proposal(held, "visits.csv")
    held = found(person=lambda i: f"p{i}", Datum=lambda i: f"{1 + i % 20}/3/2026", well=well)
    assert any("two ways" in remark for remark in held.roles.remarks)
    assert "time = " not in proposal(held, "visits.csv")
    assert found(person=lambda i: f"p{i}", hour=hour, well=well).roles.time is None


def test_files_that_were_put_together_and_headers_that_are_none():
    rows = [{"who": "ann", "x": "1"}] * 9 + [{"who": "who", "x": "x"}]
    assert "1 more time" in profile([RowsTable(iter(rows), "a.csv")]).doubts_of_header[0]
    held = profile([RowsTable(iter([{"ann": "bob", "1.5": "2"}] * 5), "a.csv")])
    assert "1 name of 2 in its first line" in held.doubts_of_header[0]
    assert "1.5" not in held.doubts_of_header[0]
    assert not found(hour=hour, well=well).doubts_of_header
