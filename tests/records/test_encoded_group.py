"""Records encoded together are what `RecordSchema.encode` makes of each, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veilstream.records.encoded_group import encode_group
from veilstream.records.schema import EACH_ROW, Categorical, Encoded, Hashed, Label, Numeric, RecordSchema, Refusal

_NUMBERS = st.one_of(
    st.floats(-200, 200, allow_nan=False).map(lambda x: f"{x:.2f}"),
    st.integers(-300, 300),
    st.floats(allow_nan=True, allow_infinity=True),
)
_ODD: st.SearchStrategy[Any] = st.sampled_from(
    ["", "na", " 7 ", "1_0", "1,5", "x", None, True, "nan", "inf", "1e999", 10**400, b"3", [1], "\u0663", "-0"]
)
_WORDS = st.sampled_from(["north", " south", "North", "", 1, 1.0, "1", None, True, "\u00e9", "e\u0301"])
_LABELS = st.sampled_from(["no", "yes", "yes ", "maybe", 0, 1, "", "0"])
_WHO = st.one_of(st.sampled_from(["", None, "na", "a\nb", 4, 4.0, True, "\u00e9"]), st.integers(0, 9).map("P{}".format))


def _schemas() -> list[RecordSchema]:
    yes_no = Label("y", ("no", "yes"))
    number = Label("y", None, low=0.0, high=10.0)
    both = (Numeric("a", -100.0, 50.0), Categorical("c", ("north", "south", "1")))
    return [
        RecordSchema("who", yes_no, both),
        RecordSchema(EACH_ROW, number, (Numeric("a", 0.0, 1.0, "refuse"), *both[1:])),
        RecordSchema("who", Label("y", ("0", "1", "no"), signed=False), both, interactions=(("a", "c"),), fit="clip"),
        RecordSchema(
            "who",
            number,
            (
                Numeric("a", 0.0, 1.0, missing="flag"),
                Categorical("c", ("north",), "zero", "flag"),
                Hashed("h", 5, "zero"),
            ),
            fit="clip",
            norm=1.1,
            bias=False,
        ),
        RecordSchema("who", yes_no, (Numeric("a", 0.0, 1.0, missing="zero"), Categorical("c", ("1",), "refuse"))),
    ]


def _same(one: Encoded | Refusal, other: Encoded | Refusal) -> None:
    assert type(one) is type(other)
    assert one.client == other.client
    if isinstance(one, Refusal) or isinstance(other, Refusal):
        assert one == other
        return
    assert one.clamped == other.clamped
    assert np.asarray(one.sample.features).tobytes() == np.asarray(other.sample.features).tobytes()
    assert np.float32(one.sample.target).tobytes() == np.float32(other.sample.target).tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), comma=st.booleans(), which=st.integers(0, 4))
def test_a_group_is_encoded_as_each_record_alone(data: st.DataObject, comma: bool, which: int) -> None:
    schema = _schemas()[which]
    odd = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    row = st.fixed_dictionaries(
        {
            "who": _WHO if odd else st.integers(0, 99).map("P{}".format),
            "a": st.one_of(_NUMBERS, _ODD) if odd else _NUMBERS,
            "c": _WORDS,
            "h": _WORDS,
            "y": st.one_of(_LABELS, _NUMBERS, _ODD) if odd else _LABELS,
        }
    )
    rows = data.draw(st.lists(st.none() | row if odd == 1.0 else row, min_size=2, max_size=12))
    group = encode_group(schema, rows, "row {}".format, decimal_comma=comma)
    usable = []
    for place, cells in enumerate(rows):
        alone: Encoded | Refusal = Refusal("not readable", client=f"row {place}")
        if cells is not None:
            alone = schema.encode(cells, row_name=f"row {place}", decimal_comma=comma)
        _same(group.record(place), alone)
        assert group.clients[place] == alone.client
        usable += [place] if isinstance(alone, Encoded) else []
    each = [group.record(place) for place in usable]
    clamped = group.clamped_counts(usable)
    assert sum(clamped.values()) == sum(len(one.clamped) for one in each if isinstance(one, Encoded))
    assert sum(group.targets_of(usable).values()) == len(usable)


@pytest.mark.parametrize("which", range(5))
def test_plain_records_take_the_short_way(which: int) -> None:
    schema = _schemas()[which]
    rows = [{"who": f"P{i}", "a": f"0.{i}", "c": "1", "h": "w", "y": str(i % 2)} for i in range(9)]
    if schema.label.classes == ("no", "yes"):
        rows = [row | {"y": "yes"} for row in rows]
    assert not encode_group(schema, rows, str).others


def test_a_column_that_is_not_in_every_row_leaves_each_row_to_itself() -> None:
    schema = _schemas()[0]
    rows = [{"who": "a", "a": 1, "c": "north", "y": "no"}, {"who": "b", "c": "north", "y": "no"}]
    group = encode_group(schema, rows, str)
    assert isinstance(group.record(0), Encoded)
    assert str(group.record(1)) == "a: no column"
    assert group.clients == ["a", "b"]
