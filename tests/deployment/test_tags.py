"""Spellings of a tag are one person."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.deployment.test_learner import Still, client, model, plan_of
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import inspect
from veilstream.deployment.ledger.visits import checked_tag, tag_of
from veilstream.errors import InputError
from veilstream.records.admission import Answer
from veilstream.records.client_names import LONGEST_NAME, normal_form

COMPOSED, DECOMPOSED = "Ren\u00e9", "Rene\u0301"
SPELLINGS = [COMPOSED, DECOMPOSED, f"  {COMPOSED}", f"{DECOMPOSED}\t\n", f"\u00a0{COMPOSED}\u2003"]
NO_TAGS = [
    "",
    " ",
    "\t\r\n",
    "\u00a0\u2003",
    b"",
    "x" * (LONGEST_NAME + 1),
    7,
    None,
    ["x"],
    "ann\0",
    "\0ann",
    "ann\x1blee",
    "ann\nlee",
    "ann\x7f",
    "ann\x85lee",
    "\ud800",
]


@given(some.text(some.characters(exclude_categories=("Cc", "Cs")), max_size=20))
def test_text_is_stored_in_its_normal_form(text):
    normal = normal_form(text)
    assert normal_form(normal) == normal == normal.strip()
    assert unicodedata.is_normalized("NFC", normal)
    assert tag_of(text) == (normal.encode() or None)


@given(some.binary(min_size=1, max_size=20))
def test_bytes_stay_as_they_are(data):
    assert tag_of(data) == data


def test_a_store_takes_each_person_once_however_the_tag_is_written(tmp_path):
    with Learner(plan_of(), tmp_path / "s.db", Still(), create=True) as learner:
        learner.begin_round(0, model(0))
        for spelling in SPELLINGS:
            assert learner.observe(spelling, client(0, 0)) is Answer.TAKEN
        assert inspect(tmp_path / "s.db").steps == 1
        learner.observe("Rene", client(0, 1))  # someone else
        assert inspect(tmp_path / "s.db").steps == 2


@pytest.mark.parametrize("tag", NO_TAGS)
def test_what_is_no_tag_is_refused_before_its_data_are_looked_at(tag, tmp_path):
    with Learner(plan_of(), tmp_path / "s.db", Still(), create=True) as learner:
        learner.begin_round(0, model(0))
        assert learner.observe(tag, client(0, 0)) is Answer.REFUSED
        assert learner.clients_wanted == 3
    assert (inspect(tmp_path / "s.db").steps, inspect(tmp_path / "s.db").clients) == (0, 0)
    with pytest.raises(InputError, match=r"tag = '<not shown>': .*not white space alone") as error:
        checked_tag(tag)
    assert "xxx" not in str(error.value)
