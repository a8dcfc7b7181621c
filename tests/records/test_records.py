"""Records: columns by name in, samples of bounded norm out, and a reason for what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veilstream.errors import InputError
from veilstream.records.cells import as_number
from veilstream.records.encoded_group import encode_group
from veilstream.records.schema import (
    EACH_ROW,
    REASONS,
    Categorical,
    Encoded,
    Hashed,
    Label,
    Numeric,
    RecordSchema,
    Refusal,
)

SCHEMA = RecordSchema(
    client="person",
    label=Label("late", ("no", "yes")),
    features=(
        Numeric("hour", 0.0, 24.0, outside="refuse"),
        Numeric("degrees", -10.0, 30.0, missing="flag"),
        Categorical("wind", ("N", "S"), unknown="other"),
        Hashed("origin", 8, missing="zero"),
    ),
    interactions=(("hour", "wind"),),
)
ROW = {"person": "ann", "late": "yes", "hour": "6", "degrees": "10", "wind": "S", "origin": "LGA"}


def encoded(row, schema=SCHEMA):
    result = schema.encode(row)
    assert isinstance(result, Encoded), result
    return result


def test_a_record_by_hand():
    """hour, degrees + flag, wind N/S/other, eight buckets, hour times wind, bias; over root 6."""
    features = encoded(ROW).sample.features * math.sqrt(6)
    assert SCHEMA.width == 1 + 2 + 3 + 8 + 3 + 1 == len(features)
    assert features[0] == pytest.approx(-0.5)  # 6 of 0 to 24
    assert features[1:3].tolist() == pytest.approx([0.0, 0.0])
    assert features[3:6].tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert sorted(features[6:14]) == pytest.approx([0] * 7 + [1])
    assert features[14:17].tolist() == pytest.approx([0.0, -0.5, 0.0])
    assert features[17] == pytest.approx(1.0)
    assert encoded(ROW).sample.target == 1.0
    assert encoded(ROW).client == "ann"


def test_columns_are_found_by_name():
    turned = dict(reversed(list(ROW.items()))) | {"more": "x"}
    assert encoded(turned).sample.features.tolist() == encoded(ROW).sample.features.tolist()


def test_a_hash_is_the_same_on_every_machine():
    """blake2b with a fixed key, not Python's own hash: the place of "LGA" among eight."""
    assert np.argmax(encoded(ROW).sample.features[6:14]) == 3


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"hour": "x"}, Refusal("not a number", "hour")),
        ({"hour": "1_0"}, Refusal("not a number", "hour")),
        ({"hour": "inf"}, Refusal("not a number", "hour")),
        ({"hour": "25"}, Refusal("out of range", "hour")),
        ({"hour": ""}, Refusal("missing", "hour")),
        ({"hour": "NA"}, Refusal("missing", "hour")),
        ({"late": "maybe"}, Refusal("unknown label", "late")),
        ({"late": ""}, Refusal("missing", "late")),
        ({"person": "  "}, Refusal("no client", "person")),
        ({"person": None}, Refusal("no client", "person")),
    ],
)
def test_what_is_refused_says_which_rule_and_column(change, refusal):
    result = SCHEMA.encode(ROW | change)
    assert result == refusal
    assert result.reason in REASONS


def test_a_column_that_is_not_there():
    row = {key: cell for key, cell in ROW.items() if key != "wind"}
    assert SCHEMA.encode(row) == Refusal("no column", "wind")


def test_missing_cells_may_be_features():
    features = encoded(ROW | {"degrees": "", "origin": None}).sample.features * math.sqrt(6)
    assert features[1:3].tolist() == pytest.approx([0.0, 1.0])
    assert not features[6:14].any()


def test_numbers_outside_are_clamped_and_counted():
    result = encoded(ROW | {"degrees": "99"})
    assert result.clamped == ("degrees",)
    assert result.sample.features[1] * math.sqrt(6) == pytest.approx(1.0)


@pytest.mark.parametrize("told", ["1", 1, 1.0, "1.0", True])
def test_labels_of_zero_and_one(told):
    """0 and 1 are -1 and +1: the second label counts as positive, however it is written."""
    schema = RecordSchema("who", Label("y", ("0", "1")), (Numeric("x", 0, 1),))
    assert encoded({"who": "a", "y": told, "x": 0.5}, schema).sample.target == 1.0
    assert encoded({"who": "a", "y": 0, "x": 0.5}, schema).sample.target == -1.0


def test_numbers_as_labels_have_a_range():
    schema = RecordSchema("who", Label("y", None, low=0.0, high=10.0), (Numeric("x", 0, 1),))
    result = encoded({"who": "a", "y": 12, "x": 0}, schema)
    assert (result.sample.target, result.clamped) == (1.0, ("y",))
    assert schema.label.in_units(0.5) == 7.5


def test_each_row_is_someone_else():
    schema = RecordSchema(EACH_ROW, Label("y", ("0", "1")), (Numeric("x", 0, 1),))
    result = schema.encode({"y": 0, "x": 0}, row_name="file:7")
    assert isinstance(result, Encoded)
    assert result.client == "file:7"


def test_decimal_commas():
    assert as_number("3,5", decimal_comma=True) == 3.5
    assert as_number("3,5") is None
    assert as_number("1,234,5", decimal_comma=True) is None


cells = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.just(object()),
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(ROW, cells)), st.sampled_from(["scale", "clip"]))
def test_whatever_a_record_holds_the_norm_is_bounded_or_it_is_refused(row, fit):
    import dataclasses

    result = dataclasses.replace(SCHEMA, fit=fit, norm=0.7).encode(row)
    if isinstance(result, Refusal):
        assert result.reason in REASONS
        return
    assert np.linalg.norm(result.sample.features.astype(np.float64)) <= 0.7 * (1 + 1e-6)
    assert "ann" not in repr(result)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Numeric("x", 1.0, 1.0),
        lambda: Numeric("x", 0.0, math.inf),
        lambda: Categorical("x", ()),
        lambda: Categorical("x", ("1", "1.0"[:1])),
        lambda: Hashed("x", 0),
        lambda: Label("y", ("yes",)),
        lambda: Label("y", ("a", "b", "c"), signed=True),
        lambda: Label("y", None, low=1.0, high=0.0),
        lambda: RecordSchema("who", Label("y", ("0", "1")), ()),
        lambda: RecordSchema("x", Label("y", ("0", "1")), (Numeric("x", 0, 1),)),
        lambda: RecordSchema("w", Label("y", ("0", "1")), (Numeric("x", 0, 1),), (("x", "z"),)),
    ],
)
def test_a_schema_that_cannot_be_is_refused(make):
    with pytest.raises(InputError):
        make()


def test_true_and_false_are_no_numbers_whatever_the_file():
    schema = RecordSchema("person", Label("y", ("no", "yes")), (Numeric("x", 0.0, 1.0),))
    for cell in (True, False, np.bool_(True), "true"):
        assert schema.encode({"person": "p", "y": "no", "x": cell}) == Refusal("not a number", "x")


@pytest.mark.parametrize(("unknown", "place"), [("other", 2), ("zero", None)])
def test_a_word_that_the_vocabulary_lacks_is_counted(unknown, place):
    colour = Categorical("colour", ("red", "blue"), unknown=unknown)
    schema = RecordSchema("person", Label("y", ("no", "yes")), (colour,), bias=False)
    found = schema.encode({"person": "p", "y": "no", "colour": "grey"})
    assert found.clamped == ("colour",)
    assert list(np.flatnonzero(found.sample.features)) == ([] if place is None else [place])
    assert schema.encode({"person": "p", "y": "no", "colour": "red"}).clamped == ()


@pytest.mark.parametrize("row", [{"person": ""}, {"person": None}, {"person": ["ann"]}, {}])
def test_a_row_that_names_nobody_stands_for_a_client_of_its_own_unless_it_is_blank(row):
    """Else an empty cell would decide whether a step is taken, and move everyone behind."""
    full = {**{name: value for name, value in ROW.items() if name != "person"}, **row}
    alone, together = SCHEMA.encode(full, row_name="f:7"), encode_group(SCHEMA, [full, full], "f:{}".format)
    assert (type(alone), alone.client) == (Refusal, "f:7")
    assert together.clients == ["f:0", "f:1"]
    assert SCHEMA.encode(full).client is None  # a caller's record, which has no place in a file
    assert SCHEMA.encode(dict.fromkeys(ROW, " "), row_name="f:7").client is None
