"""Records that callers send by named fields: encoded by the plan, refused by field and rule."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from tests.federation.test_learner_api import KEPT, served
from tests.support.federation import DIM, FEATURES, table_plan_of, wait_for
from veilstream.deployment.ledger.inspect import inspect
from veilstream.federation.learner.live_records import LiveRecords, RefusedRequest
from veilstream.federation.learner.local_account import LocalAccount
from veilstream.records.admission import Admission
from veilstream.records.cells import is_missing
from veilstream.records.schema import EACH_ROW, Categorical, Hashed, Label, Numeric, RecordSchema, Refusal

SCHEMA = RecordSchema(
    client="person",
    label=Label("ill", ("no", "yes")),
    features=(
        Numeric("age", 0.0, 120.0, outside="refuse"),
        Categorical("wind", ("N", "S"), unknown="refuse"),
        Hashed("town", 4, missing="flag"),
    ),
    bias=False,
    learner="clinic",
)
RECORD = {"age": 30, "wind": "S", "town": "Uppsala", "ill": "yes"}


def records(schema: RecordSchema | None = SCHEMA, width: int = 8) -> LiveRecords:
    return LiveRecords(Admission((width,), (-1.0, 1.0)), schema, "north")


def refused(call, *args) -> RefusedRequest:
    with pytest.raises(RefusedRequest) as error:
        call(*args)
    return error.value


def test_a_record_by_hand():
    """age -0.5, N/S, four buckets and a flag; over root 3, the most that three features can be."""
    found = records().observation({"client": 17, "record": RECORD})
    assert found.client == "17"
    features = found.sample.features * np.sqrt(3)
    assert features[:3].tolist() == pytest.approx([-0.5, 0.0, 1.0])
    assert sorted(features[3:]) == pytest.approx([0, 0, 0, 0, 1])
    assert found.sample.target == 1.0
    assert "Uppsala" not in repr(found)


def test_who_may_stand_in_the_record_or_beside_it_and_is_one_person():
    by_itself = {"record": {**RECORD, "person": " ann "}}
    assert records().observation(by_itself).client == "ann"
    both = {"client": "ann", **by_itself}
    assert records().observation(both).client == "ann"
    other = refused(records().observation, {"client": "bob", **by_itself})
    assert "record.person: expected the same person as client" in other.why
    assert "ann" not in other.why
    assert "record.person: " in refused(records().observation, {"record": RECORD}).why
    each = RecordSchema(client=EACH_ROW, label=SCHEMA.label, features=SCHEMA.features, bias=False)
    assert records(each).observation({"client": "visit 5", "record": RECORD}).client == "visit 5"
    assert "client: expected a text" in refused(records(each).observation, {"record": RECORD}).why


@pytest.mark.parametrize("empty", [None, "", "NA", " "])
def test_an_empty_field_beside_the_clients_name_is_no_other_person(empty):
    """Whether the record can be used or not: what it says does not decide whether its client takes a step."""
    said = {"client": "ann", "record": {**RECORD, "person": empty}}
    assert records().observation(said).client == "ann"
    assert refused(records().observation, {**said, "record": {**said["record"], "age": None}}).client == "ann"


@pytest.mark.parametrize(
    ("changes", "refusal", "why"),
    [
        ({"age": 130}, Refusal("out of range", "age"), "a number from 0 to 120"),
        ({"age": "old-secret"}, Refusal("not a number", "age"), "a number from 0 to 120"),
        ({"age": None}, Refusal("missing", "age"), "a number from 0 to 120"),
        ({"age": [30]}, Refusal("not readable", "age"), "no list or object"),
        ({"town": {"secret": 1}}, Refusal("not readable", "town"), "a text, or null"),
        ({"wind": "secret"}, Refusal("unknown category", "wind"), "one of N, S"),
        ({"ill": "secret"}, Refusal("unknown label", "ill"), "one of no, yes"),
        ({"ill": None}, Refusal("missing", "ill"), "one of no, yes"),
        ({"clinic": "secret"}, Refusal("other learner", "clinic"), "this learner's name"),
    ],
)
def test_a_refusal_names_field_and_rule_and_no_value(changes, refusal, why):
    error = refused(records().observation, {"client": "ann", "record": {**RECORD, **changes}})
    assert (error.record, error.status, error.reason) == (refusal, 422, "record")
    assert error.why.startswith(f"record.{refusal.column}: ")
    assert why in error.why
    assert "secret" not in error.why


def test_a_field_that_is_not_there_is_named_and_more_fields_are_not_looked_at():
    less = {k: v for k, v in RECORD.items() if k != "wind"}
    error = refused(records().observation, {"client": "ann", "record": less})
    assert error.record == Refusal("no column", "wind")
    more = {**RECORD, "comment": {"anything": []}, "clinic": "north"}
    records().observation({"client": "ann", "record": more})


NO_CLIENTS = [True, False, None, [], ["ann"], {}, {"a": 1}, "", " ", "ann\0", "a\x07b", 1.5, "NA", "null"]


@pytest.mark.parametrize("client", NO_CLIENTS, ids=map(str, range(len(NO_CLIENTS))))
def test_a_person_is_a_text_or_a_whole_number_in_every_form(client):
    forms = (
        {"client": client, "record": RECORD},
        {"record": {**RECORD, "person": client}},
        {"client": client, "features": [0.0] * 8, "target": 1},
    )
    in_the_record = "no client" if is_missing(client) else "not a client"
    for said, reason in zip(forms, ("no client", in_the_record, "no client"), strict=True):
        error = refused(records().observation, said)
        assert error.record is not None
        assert error.record.reason == reason
        rule = "nobody is named" if is_missing(client) else "without control characters"
        assert (rule if said is forms[1] else "without control characters") in error.why


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"client": "a", "record": RECORD, "more": 1}, "unknown field 'more'"),
        ({"tag": "a", "record": RECORD}, "unknown field 'tag'"),
        ({"client": "a", "record": RECORD, "target": 1}, "target: expected nothing beside record"),
        ({"client": "a", "record": [1]}, "record: expected an object"),
        ({"client": "a"}, "record: expected an object of the plan's fields by name"),
        ({"client": "a", "features": [1]}, "expected 8 numbers in features, and one of -1.0, 1.0 as"),
    ],
)
def test_what_does_not_go_together_is_refused(said, why):
    assert why in refused(records().observation, said).why


def test_a_long_list_of_words_is_shown_in_part():
    words = Categorical("wind", tuple(f"w{i}" for i in range(1000)), unknown="refuse")
    schema = RecordSchema(client=EACH_ROW, label=SCHEMA.label, features=(words,), bias=False)
    said = {"client": "a", "record": {"wind": "x", "ill": "no"}}
    why = refused(records(schema, 1000).observation, said).why
    assert why.endswith("w10, w11 or 988 more")


def test_a_plan_without_columns_says_what_to_send():
    why = refused(records(None).observation, {"client": "a", "record": RECORD}).why
    assert 'kind is not "table"' in why
    assert "features and target" in why


def test_predictions_need_neither_label_nor_client():
    asked = {k: v for k, v in RECORD.items() if k != "ill"}
    features = records().features({"record": asked})
    whole = records().observation({"client": "a", "record": RECORD}).sample.features
    np.testing.assert_array_equal(features, whole)
    error = refused(records().features, {"record": {**asked, "age": 130}})
    assert "record.age" in error.why
    assert "beside" in refused(records().features, {"record": asked, "features": [0] * 8}).why
    assert records().in_words(-1.0) == {"label": "no"}
    assert records().in_words([0.1, 0.9]) == {}


def row(person: object, label: str = "yes") -> dict[str, object]:
    return {"client": person, "record": {"y": label} | dict.fromkeys(FEATURES, 0.5)}


def test_the_api_takes_and_predicts_by_named_fields_and_counts_what_it_refuses(tmp_path, caplog):
    with served(tmp_path, plan=table_plan_of(learners=1)) as here:
        account = here.daemon.account = LocalAccount(here.daemon.learner, here.source)
        here.open_round()
        bad = row("bad", "secret-label")
        status, answer = here.post("/observe", bad)
        assert (status, answer["why"]) == (422, "record.y: the label is none of the plan's; expected one of no, yes")
        outside = row("ann")
        outside["record"]["x0"] = 99.0
        assert here.post("/observe", outside) == (200, {"answer": "taken"})
        wait_for(lambda: here.daemon.learner.round == 1)
        status, answer = here.post("/observe", b'{"client": "a", "client": "b", "record": {}}')
        assert (status, answer["why"]) == (400, "field 'client' appears twice in one object")
        asked = {"record": dict.fromkeys(FEATURES, 0.5)}
        said = here.post("/predict", asked)[1]
        assert (said["prediction"], said["label"]) in ((1.0, "yes"), (-1.0, "no"))
        status, answer = here.post("/predict", {"record": {"x0": 0.5}})
        assert (status, answer["why"][:10]) == (422, "record.x1:")
        shown = account.as_dict()
        assert shown["refused"] == {"y: unknown label": 1}  # a prediction is no record
        assert (shown["used"], shown["clamped"]) == (1, {"x0": 1})
        assert here.api.refusals == {"JSON": 1, "record": 2}
        local = json.loads(here.ask("GET", "/status", headers=KEPT)[2])["local"]
        assert local | {"seconds_left": 0} == account.as_dict() | {"seconds_left": 0}
        here._going.join(10)
        here.open_round()
        assert here.post("/observe", row("ann")) == (200, {"answer": "taken"})  # the same person
        assert here.daemon.learner.clients_wanted == 2
    assert "secret" not in caplog.text
    assert inspect(here.world.store("a")).clients >= 2


def test_own_code_encodes_what_callers_send(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from veilstream.learning.tasks import Logistic\n"
        f"def make_task(plan):\n    return Logistic(dim={DIM})\n"
        "def encode(row):\n"
        "    pixels = [float(p) for p in row['pixels']]\n"
        "    return pixels, 1.0 if row.get('y') == 'yes' else -1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = table_plan_of(
        learners=1,
        learning={"task": "mine:make_task"},
        data={"encode": "mine:encode", "features": (), "label": "y", "bias": True},
    )
    with served(tmp_path, plan=plan) as here:
        here.open_round()
        said = {"client": "ann", "record": {"pixels": [0.1] * DIM, "y": "yes"}}
        assert here.post("/observe", said) == (200, {"answer": "taken"})
        said["record"] = {"pixels": [0.1], "y": "yes"}
        assert here.post("/observe", said) == (
            422,
            {
                "answer": "refused",
                "why": "record: data.encode gave features of another shape than the task's; expected fields person",
            },
        )
        said["record"] = {"pixels": ["secret"]}
        assert "secret" not in here.post("/observe", said)[1]["why"]
    sys.modules.pop("mine", None)
