"""Strict JSON: every field once, finite numbers, UTF-8; the error quotes no value."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilstream.strict_json import MOST_NESTED, UNREADABLE, InvalidJson, is_nested_deep, read_json, read_values

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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('[{"client": "a", "record": {"x": 1, "t": %s}}, {"b": 2}]', [{"client": "a", "record": "x t"}, {"b": 2}]),
        ('{"client": "a", "record": {"t": %s, "x": 1}}', {"client": "a", "record": "t x"}),
        (' {"client": "q:,]\\"[{", "record": {"x": {"z": 1, "z": 2}, "t": 1}}', {"client": 'q:,]"[{', "record": "x t"}),
        ('{"client": "a", "record": {"x": 1, "x": 2, "t": "x"}}', {"client": "a", "record": "x t"}),
    ],
)
@pytest.mark.parametrize("depth", [MOST_NESTED + 1, 900, 5000])
def test_what_spoils_a_record_is_cut_out_of_it(text, value, depth):
    """The client and the other records of a list can still be told."""
    found, value = read_values(text.replace("%s", "[" * depth + "]" * depth).encode()), copy.deepcopy(value)
    requests = found if isinstance(found, list) else [found]
    for request, expected in zip(requests, value if isinstance(value, list) else [value], strict=True):
        if "record" in expected:
            record = request.pop("record")
            assert list(record) == expected.pop("record").split()
            assert UNREADABLE in record.values()
        assert request == expected


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": {"b": 1, "b": 2}}, bogus]',
        '{"record": {"a": 1, "a": 2}',
        '{"record": {"a": 1, "a": 2}}}',
        '[{"record": {"a": 1, "a": 2}}]x',
        '[{"record": {"a": 1, "a": 2}},]',
        '{"record": {"a": 1, "a": 2},}',
        'x{"record": {"a": 1, "a": 2}}',
        '[{"record": {"a": 1, "a": 2}} {"b": 1}]',
        '{"client": "a", "client": "b"}',
        "[" * 5000,
        "]" * 5000,
    ],
)
def test_what_is_no_json_is_not_cut_into_pieces(text):
    with pytest.raises(InvalidJson):
        read_values(text.encode())


def test_how_deep_a_record_may_be_does_not_depend_on_who_asks():
    assert not is_nested_deep(json.loads("[" * MOST_NESTED + "]" * MOST_NESTED))
    assert is_nested_deep(json.loads('{"a": ' * (MOST_NESTED + 1) + "1" + "}" * (MOST_NESTED + 1)))
    assert not is_nested_deep({"a": [1] * 1000})


@pytest.mark.parametrize("tail", ['"' + '\\"' * 500_000, '"' * 500_001 + "\\", "[]" * 300_000, "\\" * 500_000])
def test_what_has_no_end_is_read_once(tail):
    """In time that grows with its length: by backtracking, each of these would take hours."""
    with pytest.raises(InvalidJson):
        read_values(b'{"record": {"x": 1, "x": 2}, "t": ' + tail.encode())
