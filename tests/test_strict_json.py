"""Strict JSON: every field once, finite numbers, UTF-8; the error quotes no value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilstream.strict_json import InvalidJson, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(VALUES)
def test_what_json_writes_is_read(value):
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"client": 1, "a": [{"x": "secret", "x": "secret"}]}', "field 'x' appears twice"),
        ('{"é": 1, "é": 2}', r"field '\\xe9' appears twice"),
        ("[NaN]", "NaN"),
        ("-Infinity", "Infinity"),
        ("1e999", "too large"),
        ("", "malformed"),
        ("{}{}", "malformed"),
        ("[" * 100_000, "malformed"),
        (b'"\xff"', "malformed"),
        ('"a"'.encode("utf-16"), "malformed"),
        (b'"\xed\xa0\x80"', "malformed"),  # half of a surrogate pair
        ("1" * 5000, "malformed"),
    ],
)
def test_anything_else_is_refused_without_quoting_a_value(text, why):
    with pytest.raises(InvalidJson, match=why) as refused:
        read_json(text)
    assert "secret" not in str(refused.value)


def test_files_of_records_may_hold_what_python_writes_for_a_missing_number():
    assert read_json('{"a": Infinity}', finite=False) == {"a": float("inf")}
    with pytest.raises(InvalidJson):
        read_json('{"a": NaN, "a": 1}', finite=False)
