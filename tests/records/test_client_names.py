"""Who a record is of: one rule, whatever the source."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from veilstream.deployment.ledger.visits import tag_of
from veilstream.records.cells import is_missing
from veilstream.records.client_names import LONGEST_NAME, client_name
from veilstream.records.schema import Encoded, Label, Numeric, RecordSchema, Refusal

NO_NAMES = [
    True,
    False,
    np.bool_(True),
    None,
    ["ann"],
    {"name": "ann"},
    ("ann",),
    b"\xff",
    17.5,
    float("nan"),
    float("inf"),
    2.0**53,
    10**LONGEST_NAME,
    Decimal("17.5"),
    "",
    "  ",
    "\ufeff",
    "x" * (LONGEST_NAME + 1),
    "ann\0",
    "\0",
    "a\x07b",
    "a\nb",
    "a\tb",
    "a\x9fb",
    "\udc80",
]
SCHEMA = RecordSchema(client="person", label=Label("y", ("no", "yes")), features=(Numeric("x", 0.0, 1.0),))


@pytest.mark.parametrize("told", NO_NAMES, ids=range(len(NO_NAMES)))
def test_what_is_no_name_is_refused_and_never_turned_into_one(told):
    assert client_name(told) is None
    row = {"person": told, "y": "no", "x": 0.5}
    reason = "no client" if is_missing(told) else "not a client"
    assert SCHEMA.encode(row) == Refusal(reason, "person")
    if isinstance(told, str):
        assert tag_of(told) is None


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (17, "17"),
        (17.0, "17"),
        ("17", "17"),
        (np.int64(17), "17"),
        (Decimal("17.0"), "17"),
        (np.float32(17.0), "17"),
        (-3, "-3"),
        (0, "0"),
        (2**80, str(2**80)),
        (" ann\n", "ann"),
        ("\ufeffann", "ann"),
        ("Rene\u0301", "Ren\u00e9"),
        ("ann lee", "ann lee"),
        ("a\u200bb", "a\u200bb"),
        (b"ann", "ann"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ],
)
def test_numbers_and_spellings_of_one_person_have_one_name(told, name):
    assert client_name(told) == name
    found = SCHEMA.encode({"person": told, "y": "no", "x": 0.5})
    assert isinstance(found, Encoded)
    assert found.client == name


@given(some.text(max_size=20))
def test_a_name_is_its_own_name_and_a_tag(text):
    name = client_name(text)
    if name is not None:
        assert client_name(name) == name
        assert tag_of(text) == name.encode()


@given(some.integers())
def test_a_whole_number_is_the_text_of_its_digits(number):
    assert client_name(number) == client_name(str(number)) == f"{number:d}"
