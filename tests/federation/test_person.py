"""Was this person used? Who may ask, what is answered, and where the tag is not."""

from __future__ import annotations

import json
import logging
import unicodedata
from urllib.parse import urlencode

import pytest

from tests.federation.test_learner_api import KEPT, TOKEN, served
from tests.federation.test_local_page import open_link
from tests.support.federation import plan_of
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import part_of_person
from veilstream.deployment.ledger.rescue import begin_again
from veilstream.errors import InputError

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
WHO = "Ann-secret-17"


def cookie_of(here) -> dict[str, str]:
    _, _, headers, _ = open_link(here)
    return {"Cookie": headers["Set-Cookie"].partition(";")[0]}


def form(here, headers, client=WHO, token=TOKEN):
    body = urlencode({"client": client, "token": token}).encode()
    return here.ask("POST", "/page/person", body, {**FORM, **headers})


def test_a_program_with_the_token_is_told_who_was_used_and_who_was_not(tmp_path):
    with served(tmp_path) as here:
        here.fill_round(WHO, "other")
        status, answer = here.post("/person", {"client": WHO})
        assert status == 200
        assert answer == {"used": True, "times": 1, "last_epoch": 0, "carried_over": False}
        assert here.post("/person", {"client": "nobody"})[1]["used"] is False
        assert here.post("/person", {"client": f" {WHO} "})[1]["used"] is True  # one spelling
        assert here.post("/person", {"client": WHO.lower()})[1]["used"] is False
        for wrong in ({"client": ""}, {"client": "a\nb"}, {"client": 7}, {}, {"client": "a", "b": 1}):
            status, answer = here.post("/person", wrong)
            assert (status, answer["answer"]) == (422, "refused")


def test_without_the_token_the_answer_is_the_same_for_everyone(tmp_path):
    """The cookie lets a browser ask; only the token in the form has it answered."""
    with served(tmp_path) as here:
        here.fill_round(WHO, "other")
        cookie = cookie_of(here)
        for shown in (None, "Bearer x", f"Bearer {TOKEN[:-1]}"):
            answers = {json.dumps(here.post("/person", {"client": c}, Authorization=shown)) for c in (WHO, "nobody")}
            assert len(answers) == 1
            assert "401" in answers.pop()
        told = set()
        for headers in ({}, cookie):
            for client in (WHO, "nobody", ""):
                for token in ("", "x" * 43, TOKEN[:-1], TOKEN + "x"):
                    status, _, body = form(here, headers, client, token)
                    assert status == 401
                    told.add((bool(headers), body))
        assert len(told) == 2  # one answer with the cookie, one without
        assert form(here, cookie)[0] == 200
        assert form(here, {})[0] == 401  # the token in a form does not stand for the cookie
        assert here.api.refusals["token"] >= 24


def test_the_form_answers_without_repeating_the_tag_and_nothing_logs_it(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with served(tmp_path) as here:
        here.fill_round(WHO, "other")
        cookie = cookie_of(here)
        status, headers, body = here.ask("GET", "/page/person", headers=cookie)
        assert status == 200
        assert b'method="post"' in body
        assert b"refresh" not in body.lower()  # what is typed is not lost by a reload
        assert "Refresh" not in headers
        assert "form-action 'self'" in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"
        same = {"Origin": f"http://127.0.0.1:{here.port}", "Sec-Fetch-Site": "same-origin"}
        status, _, body = form(here, {**cookie, **same})
        assert status == 200
        assert "Yes: this person took one place in steps of this learner" in body.decode()
        assert WHO not in body.decode()
        assert TOKEN not in body.decode()
        assert "No: this learner used no record" in form(here, cookie, "nobody")[2].decode()
        status, _, body = form(here, cookie, "a\x00b")
        assert status == 422
        assert "not shown" in body.decode()
    assert WHO not in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_sites_page_cannot_ask(changes, tmp_path):
    with served(tmp_path) as here:
        here.fill_round(WHO, "other")
        status, _, body = form(here, {**cookie_of(here), **changes})
        assert status in (401, 403)
        assert b"Yes" not in body


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"client=a", FORM, 400),
        (b"client=a&client=b&token=c", FORM, 400),
        (b"\xff", FORM, 400),
        (b"client=%ff&token=c", FORM, 400),
        (b"client=a&token=" + b"x" * 20_000, FORM, 413),
        (b"{}", KEPT | {"Authorization": ""}, 415),
    ],
)
def test_what_is_no_form_is_refused(body, kind, status, tmp_path):
    with served(tmp_path) as here:
        assert here.ask("POST", "/page/person", body, {**kind, **cookie_of(here)})[0] == status


def test_people_are_found_in_every_spelling_that_the_learner_equates(tmp_path):
    composed, apart = (unicodedata.normalize(form, "Zoë") for form in ("NFC", "NFD"))
    assert composed != apart
    with served(tmp_path) as here:
        here.fill_round(composed, "other")
        store = here.daemon.learner.ledger.path
        assert part_of_person(store, apart).used
        assert part_of_person(store, f"  {apart}").times == 1
    with pytest.raises(InputError) as error:
        part_of_person(store, "bad\ttag")
    assert "bad" not in str(error.value)


def test_someone_of_a_lost_store_is_known_to_have_taken_part(tmp_path):
    with served(tmp_path) as here:
        here.fill_round(WHO, "other")
        store = here.daemon.learner.ledger.path
    store.unlink()
    begin_again(store)
    found = part_of_person(store, WHO)
    assert (found.used, found.times, found.carried_over) == (True, 0, True)
    assert not part_of_person(store, "nobody").used
    from tests.support.federation import Plain

    with Learner(plan_of(learners=1), store, Plain()) as learner:
        assert not learner.may_take(WHO)
