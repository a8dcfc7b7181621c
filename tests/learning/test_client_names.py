"""Who a client is: one rule for files, callers and simulations."""

from __future__ import annotations

import decimal
import uuid

import numpy as np
import pytest

from veilstream.deployment.ledger.tags import tag_forms
from veilstream.learning.client_names import client_name
from veilstream.learning.records import Label, Numeric, RecordSchema, Refusal

SCHEMA = RecordSchema("who", Label("y", ("0", "1")), (Numeric("x", 0.0, 1.0),))


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("ann", "ann"), (" ann ", "ann"), ("\ufeffann\u200b", "ann"), ("e\u0301", "\u00e9"),
        (7, "7"), (7.0, "7"), (np.int64(7), "7"), (decimal.Decimal("7"), "7"), (b"ann", "ann"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"), ("ann\n", "ann"),
    ],
)  # fmt: skip
def test_text_and_whole_numbers_name_a_client(cell, name):
    assert client_name(cell) == name
    assert tag_forms(name)


@pytest.mark.parametrize(
    "cell",
    [True, False, np.bool_(1), {"id": 7}, ["ann"], ("ann",), 7.5, float("inf"), float("nan"), None,
     decimal.Decimal("7.5"), decimal.Decimal("NaN"), decimal.Decimal("Infinity"), b"\xff",
     "a\x00b", "a\tb", "a\nb", "a\x85b", "\ud800", "x" * 1025, "", "  "],
)  # fmt: skip
def test_everything_else_names_nobody(cell):
    assert client_name(cell) is None
    if isinstance(cell, str):
        assert not tag_forms(cell)


def test_a_record_of_such_a_client_is_refused_for_that_reason():
    for cell in (True, {"id": 7}, ["ann"], "a\x00b"):
        row = {"who": cell, "y": 1, "x": 0.5}
        assert SCHEMA.encode(row) == Refusal("not a client", "who")
    assert SCHEMA.encode({"who": None, "y": 1, "x": 0.5}) == Refusal("no client", "who")
