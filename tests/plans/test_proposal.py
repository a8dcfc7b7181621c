"""A proposed plan: valid TOML, no cell of a record in it, and it loads once its marked places are filled in."""

from __future__ import annotations

import csv
import re
import tomllib

import pytest
from studies.ten_minutes import filled_in

from tests.support.strangers_tables import patients, rooms, stations
from veilstream.plans.column_profile import profile
from veilstream.plans.data_check import check_data
from veilstream.plans.plan import Plan
from veilstream.plans.proposal import whole_plan
from veilstream.plans.schema import PlanError
from veilstream.streams.tables import open_table

KNOWN = {"label": "Came back", "client": "Patient No"}


def proposed(path, known=None) -> str:
    return whole_plan(profile([open_table(path)], known), str(path), "mine")


def test_every_marked_place_is_named_with_its_line_at_once(tmp_path):
    text = proposed(patients(tmp_path / "visits.csv", 900), KNOWN)
    assert tomllib.loads(text)
    marked = [i for i, line in enumerate(text.splitlines(), 1) if '= "?"' in line]
    assert len(marked) == 5
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    told = [int(re.search(r"\(line (\d+)\)", each.field)[1]) for each in caught.value.together]
    assert told == marked
    assert all("fill it in" in each.way_out for each in caught.value.together)


def test_filled_in_it_uses_every_record_and_its_rounds_are_fed(tmp_path):
    path = patients(tmp_path / "visits.csv", 3000)
    plan = Plan.parse(filled_in(proposed(path, KNOWN)))
    assert (plan.learning.task, plan.learning.learners, plan.data.client) == ("logistic", 3, "Patient No")
    assert [feature.missing for feature in plan.data.features] == ["refuse", "refuse", "flag"]
    assert plan.remarks() == []
    checked = check_data([path], plan)
    assert checked.report.used == 3000
    assert checked.run_refuses is None
    needed = plan.learning.rounds * plan.learning.local_steps * plan.learning.clients_per_step
    assert min(checked.learned.values()) >= needed >= 0.5 * max(checked.learned.values())


def test_no_cell_is_in_it(tmp_path):
    path = patients(tmp_path / "visits.csv", 900)
    text = proposed(path, KNOWN).replace(str(path), "")
    with path.open(encoding="utf-8-sig") as file:
        cells = {cell for row in csv.DictReader(file) for cell in row.values() if len(cell) > 4}
    assert cells
    assert not [cell for cell in cells if cell.lower() in text.lower()]
    one_more = tmp_path / "more.csv"  # another extreme and another word change nothing
    one_more.write_text(
        path.read_text(encoding="utf-8-sig") + '"P9","1.1.2022","North","250","attic","999","Perhaps"\n'
    )
    assert proposed(one_more, KNOWN).replace(str(one_more), "").count("?") >= text.count("?")
    for private in ("250", "999", "attic", "perhaps"):
        assert private not in proposed(one_more, KNOWN).lower().replace(str(one_more), "")


@pytest.mark.parametrize(
    ("make", "label", "task"),
    [(stations, "verbrauch", "huber"), (rooms, "use", "softmax"), (patients, "Came back", "logistic")],
)
def test_the_task_follows_from_the_label(tmp_path, make, label, task):
    path = make(tmp_path / "records.csv", 600)
    text = proposed(path, {"label": label})
    assert f'task = "{task}"' in text
    assert ('label_range = "?"' in text) == (task == "huber")
