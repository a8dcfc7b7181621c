"""Spellings of a tag are one person, in new stores and in old ones."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.deployment.test_learner import D, Still, client, model, plan_of
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import inspect
from veilstream.deployment.ledger.tags import LONGEST_TAG, checked_tag, tag_forms
from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.records.admission import Answer
from veilstream.records.client_names import normal_form

COMPOSED, DECOMPOSED = "Ren\u00e9", "Rene\u0301"
SPELLINGS = [COMPOSED, DECOMPOSED, f"  {COMPOSED}", f"{DECOMPOSED}\t\n", f"\u00a0{COMPOSED}\u2003"]
NO_TAGS = [
    "",
    " ",
    "\t\r\n",
    "\u00a0\u2003",
    b"",
    "x" * (LONGEST_TAG + 1),
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
def test_the_normal_form_is_normal_and_is_stored_first(text):
    normal = normal_form(text)
    assert normal_form(normal) == normal == normal.strip()
    assert unicodedata.is_normalized("NFC", normal)
    forms = tag_forms(text)
    inside = any(unicodedata.category(character) in ("Cc", "Cs") for character in normal)
    assert bool(forms) == (bool(normal) and not inside)
    if forms:
        assert forms[0] == normal.encode(errors="surrogatepass")
        assert text.encode(errors="surrogatepass") in forms
        assert len(set(forms)) == len(forms)


@given(some.binary(min_size=1, max_size=20))
def test_bytes_stay_as_they_are(data):
    assert tag_forms(data) == (data,)


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


def as_before(learner, tag, step):
    """A visit as versions before 0.4 stored it: under the text as it came."""
    ledger = learner.ledger
    ledger.write("step", {"epoch": 0, "step": step}, tag=ledger.keyed(tag.encode()))
    ledger.witness()


@pytest.mark.parametrize("stored", [DECOMPOSED, f" {COMPOSED}", f"{DECOMPOSED} "])
def test_a_person_in_a_store_from_before_is_known_under_either_form(stored, tmp_path):
    with Learner(plan_of(), tmp_path / "s.db", Still(), create=True) as learner:
        learner.begin_round(0, model(0))
        as_before(learner, stored, 0)
        before = inspect(tmp_path / "s.db").steps
        assert learner.observe(stored, client(0, 0)) is Answer.TAKEN
        if stored.strip() == stored:  # white space that is no longer given cannot be guessed
            for spelling in SPELLINGS:
                assert learner.observe(spelling, client(0, 0)) is Answer.TAKEN
        assert inspect(tmp_path / "s.db").steps == before


def test_visits_under_both_forms_are_counted_together(tmp_path):
    """Two times are allowed, two steps apart: one from before and one now are two."""
    plan = Plan(
        learning={"rounds": 4, "local_steps": 3, "learners": 1},
        data={"dim": D},
        privacy={"epsilon": 4.0, "delta": 1e-3, "participations": 2, "min_separation": 2},
        methods=[{"name": "ours", "mechanism": "banded", "step_size": 0.1}],
    )
    store = tmp_path / "s.db"
    with Learner(plan, store, Still(), create=True) as learner:
        for r in range(2):
            learner.begin_round(r, model(r))
            learner.finish_round()
        learner.begin_round(2, model(2))
        as_before(learner, DECOMPOSED, 3)
        before = inspect(store).steps
        assert learner.observe(COMPOSED, client(0, 0)) is Answer.TAKEN
        assert inspect(store).steps == before + 1  # the second time
        for t in range(2):
            learner.observe(f"other {t}", client(0, t))
        learner.finish_round()
        learner.begin_round(3, model(3))
        before = inspect(store).steps
        for spelling in SPELLINGS:
            assert learner.observe(spelling, client(0, 0)) is Answer.TAKEN
        assert inspect(store).steps == before
