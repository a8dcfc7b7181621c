"""The learner's page: who may see it, what it shows, and that it is the account of /status."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pytest

from tests.cli.test_plan import veilstream
from tests.federation.test_learner_api import KEPT, TOKEN, served
from tests.federation.test_live_records import row
from tests.support.federation import table_plan_of
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.learner.access import page_link
from veilstream.federation.learner.local_account import LocalAccount, account_path
from veilstream.federation.learner.local_page import LINK_S, SESSION_S, LocalPage
from veilstream.federation.learner.prequential_score import RECENT_RECORDS, Score, ScoreHistory
from veilstream.records.schema import Refusal
from veilstream.reports.charts import unpack
from veilstream.reports.learner_page import status_html, status_state

WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


def embedded(page: str) -> dict:
    """The state that a page's script draws, always as text."""
    return json.loads(re.search(r'id="state">(.*?)</script>', page, re.S)[1])


def lines(state: dict) -> dict[str, str]:
    """Every labelled value of a page."""
    return {fact["label"]: fact["value"] for group in state["facts"] for fact in group["rows"]}


def open_link(here, headers=None):
    link = page_link(("127.0.0.1", here.port), TOKEN)
    path = link.removeprefix(f"http://127.0.0.1:{here.port}")
    return path, *here.ask("GET", path, headers=headers or {})


def test_a_link_opens_the_page_once_and_leaves_a_cookie_for_it_alone(tmp_path):
    with served(tmp_path) as here:
        path, status, headers, _ = open_link(here)
        assert (status, headers["Location"]) == (303, "/page")
        cookie, *attributes = [part.strip() for part in headers["Set-Cookie"].split(";")]
        assert set(attributes) == {"HttpOnly", "SameSite=Strict", "Path=/page", "Max-Age=43200"}
        assert cookie.startswith(f"veilstream_page_{here.port}=")
        assert TOKEN not in headers["Set-Cookie"] + path
        assert here.ask("GET", path)[0] == 401  # used up
        shown = {"Cookie": cookie}
        assert here.ask("GET", "/page", headers=shown)[0] == 200
        assert here.ask("GET", "/page", headers={"Cookie": cookie[:-1]})[0] == 401
        for method, other in (
            ("GET", "/status"),
            ("POST", "/page"),
            ("POST", "/page/link"),
            ("POST", "/observe"),
            ("POST", "/predict"),
            ("GET", "/page/"),
            ("GET", "/page/link"),
        ):
            assert here.ask(method, other, b"{}", {**KEPT, **shown, "Authorization": ""})[0] == 401


def test_only_the_token_makes_links_and_it_opens_the_page_as_well(tmp_path):
    with served(tmp_path) as here:
        assert here.ask("POST", "/page/link")[0] == 401
        for path in ("/page", "/page?once=", "/page?once=x", "/page?once=%00"):
            assert here.ask("GET", path)[0] == 401
        status, headers, body = here.ask("GET", "/page", headers=WITH_TOKEN)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b"Learner a" in body


@pytest.mark.parametrize(
    "changes",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # a page of another port of this machine
    ],
)
def test_a_page_of_another_origin_gets_nothing_and_uses_up_no_link(changes, tmp_path):
    with served(tmp_path) as here:
        path, _, headers, _ = open_link(here)
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert here.ask("GET", "/page", headers=cookie | changes)[0] in (401, 403)
        path = here.api._page.new_link("h")["link"].removeprefix("http://h")
        assert here.ask("GET", path, headers=changes)[0] in (401, 403)
        assert here.ask("GET", path, headers={"Sec-Fetch-Site": "none"})[0] == 303


def test_links_and_sessions_end():
    now = [0.0]
    page = LocalPage(None, lambda: now[0])

    def new_code() -> str:
        return page.new_link("127.0.0.1")["link"].partition("once=")[2]

    def lets_in(cookies=None, code=None) -> bool:
        return page.lets_in("GET", "/page", {}, cookies or {}, code)

    early, late = new_code(), new_code()
    name, _, session = page.enter(early, 8490).partition(";")[0].partition("=")
    assert page.enter(early, 8490) is None
    now[0] = LINK_S
    assert page.enter(late, 8490) is None
    assert lets_in({name: session})
    now[0] = SESSION_S
    assert not lets_in({name: session})
    codes = [new_code() for _ in range(20)]
    assert sum(lets_in(code=code) for code in codes) == 8  # the oldest go
    assert lets_in(code=codes[-1])
    assert len(set(codes)) == 20


def test_the_page_is_the_account_that_status_shows_and_loads_nothing(tmp_path):
    plan = table_plan_of(learners=1)
    with served(tmp_path, plan=plan) as here:
        account = LocalAccount(here.daemon.learner, here.source, path=account_path(tmp_path / "a"))
        here.daemon.account = account
        here.open_round()
        bad = row("secret-person", "secret-label")
        assert here.post("/observe", bad)[0] == 422
        assert here.post("/observe", row("ann"))[0] == 200  # the other place is that of the refused record
        here._going.join(10)
        account.pause = "<b>fewer</b> wait"
        status = json.loads(here.ask("GET", "/status", headers=KEPT)[2])
        _, headers, body = here.ask("GET", "/page", headers=WITH_TOKEN)
        page = body.decode()
        state = embedded(page)
        said = lines(state)
        assert "epoch 0, 1 of 6 rounds sealed" in state["subtitle"]
        shown = {
            "records used": "1",
            "steps without a client": "0",
            "y: unknown label": "1",
            "record": "1",
            "rounds": "5",
            "places for people, one per step": "10",
            "clipped gradients": "0.0 %",
            "head of the chain": f"{status['ledger']['head'][:16]}…",
        }
        assert {label: said[label] for label in shown} == shown
        assert "<b>fewer</b> wait" in state["notices"]
        assert state["results"]["rows"][-1][0] == "since the start, 1 records"
        assert status["local"]["places_left"] == 10
        assert status["local"]["refused"] == {"y: unknown label": 1}
        assert "secret" not in page
        assert "<b>" not in page
        assert [link["href"] for link in state["links"]] == ["/page/person", "/page?still=1"]
        assert headers["Refresh"] == "10"
        _, quiet, _ = here.ask("GET", "/page?still=1", headers=WITH_TOKEN)
        assert quiet["Refresh"] is None
        assert status["ledger"]["promise"] == "(4, 0.001)"
        # Only the page's own style and scripts run, and nothing is loaded.
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "connect-src 'none'" in policy
        assert not re.search(r"<[^>]+ (src|srcset|onload|onclick|style)=", page.split("<script>")[0])
        inline = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page, re.S)
        assert len(inline) == 3
        for text in inline:
            digest = hashlib.sha256(text.encode()).digest()
            assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
        assert policy.count("sha256-") == 3
        kept = {name: headers[name] for name in ("Cache-Control", "X-Frame-Options")}
        assert kept == {"Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        # and `ledger status` shows the same, from the file
        account.save()
        shown = json.loads(account_path(tmp_path / "a").read_text())["shown"]
        free = {"seconds_left": 0}
        assert shown | free == status["local"] | free


def test_a_page_without_an_account_says_so():
    status = {
        "learner": "<a>",
        "state": "waiting",
        "epoch": 0,
        "round": 0,
        "rounds": 6,
        "refusals": {"<i>": 2},
        "local": None,
    }
    page = status_html(status)
    state = embedded(page)
    assert "This learner counts nothing." in state["notices"]
    assert lines(state) == {"<i>": "2"}
    assert state["title"] == "Learner <a>"
    assert "<i>" not in page
    assert "<title>Learner &lt;a&gt; · veilstream</title>" in page


def test_the_command_prints_a_link_that_opens_the_page(tmp_path):
    with served(tmp_path) as here:
        (tmp_path / "a.token").write_text(TOKEN)
        (tmp_path / "a.token").chmod(0o600)
        at = f"127.0.0.1:{here.port}"
        done = veilstream("ledger", "page", str(tmp_path / "a.db"), "--learner-api", at)
        assert done.returncode == 0, done.stderr
        assert here.ask("GET", done.stdout.strip().removeprefix(f"http://{at}"))[0] == 303
        with pytest.raises(ProtocolError, match=r"refused the token \(HTTP 401\)"):
            page_link(("127.0.0.1", here.port), "x" * 43)
    with pytest.raises(ProtocolError, match="no learner API answers"):
        page_link(("127.0.0.1", here.port), TOKEN)
    with pytest.raises(InputError, match="loopback"):
        page_link(("192.0.2.1", 8490), TOKEN)


def test_the_command_says_where_a_token_comes_from(tmp_path):
    done = veilstream("ledger", "page", str(tmp_path / "none.db"))
    assert done.returncode == 2
    assert "none.token" in done.stderr
    assert "started with --learner-api" in done.stderr
    assert "Traceback" not in done.stderr


def course(rounds: int, per_round: int = 2) -> tuple[Score, ScoreHistory, list[int]]:
    """A model that is right in the second half; whether it was wrong, record by record."""
    score, wrong = Score(), []
    history = ScoreHistory(score)
    for r in range(rounds):
        for i in range(per_round):
            target = 1.0 if (r + i) % 3 else -1.0
            right = r >= rounds // 2
            score.take(target if right else -target, target, classifies=True)
            wrong.append(not right)
        history.round_ends(r + 1, score)
    return score, history, wrong


@pytest.mark.parametrize("rounds", [1, 7, 399, 400, 401, 2000])
def test_a_course_has_every_record_in_bounded_memory(rounds):
    score, history, wrong = course(rounds)
    kept = history.kept
    assert len(kept) <= 400
    assert sum(int(stretch[1]) for stretch in kept) == len(wrong) == score.records
    assert sum(stretch[2] for stretch in kept) == sum(wrong)
    points = history.points(classifies=True, unit=1.0)
    assert len(points) <= 62
    assert points[-1]["round"] == rounds
    total = sum(point["model"] * point["records"] for point in points)
    assert total == pytest.approx(len(wrong) - sum(wrong))
    again = ScoreHistory(score, json.loads(json.dumps(kept)))
    assert again.kept == kept


def test_the_current_model_is_scored_by_the_last_records():
    _, history, wrong = course(400)
    recent = history.recent(classifies=True, unit=1.0)
    assert recent["records"] == RECENT_RECORDS
    assert recent["model"] == 1.0
    score, history, wrong = course(60)  # all of them, and twenty of the first half
    recent = history.recent(classifies=True, unit=1.0)
    last = wrong[-recent["records"] :]
    assert recent["model"] == pytest.approx(1 - sum(last) / len(last))
    assert score.shown(classifies=True, unit=1.0)["model"] == 0.5


def status_of(score: dict) -> dict:
    counts = ("used", "returning", "other_learners", "empty_steps", "metrics_failed", "not_admitted")
    unknown = ("clipped_share", "places_left", "rows_left_about", "rounds_left", "seconds_left")
    local = dict.fromkeys(counts, 0) | dict.fromkeys(unknown) | {"refused": {}, "clamped": {}, "notices": []}
    where = {"learner": "a", "state": "open", "epoch": 0, "round": 3, "rounds": 6, "refusals": {}}
    return where | {"local": local | {"score": score}}


def test_the_chart_has_the_model_and_two_baselines_as_the_account_has_them():
    score, history, _ = course(400)
    points = history.points(classifies=True, unit=1.0)
    shown = score.shown(classifies=True, unit=1.0)
    recent = history.recent(classifies=True, unit=1.0)
    told = {"kind": "accuracy", "records": 800, **shown, "recent": recent, "over_rounds": points}
    state = status_state(status_of(told), still=True)
    (chart,) = state["charts"]["learning"]
    assert set(chart["series"]) == {"published model", "always the commonest label", "repeating the last label"}
    np.testing.assert_allclose(unpack(chart["series"]["published model"]), [[p["model"] for p in points]], atol=1e-4)
    assert chart["x"] == [p["round"] for p in points]
    figure = state["headline"]["figures"][0]
    assert figure["value"] == "1.000"
    assert "of the published model on the last 100 records" in figure["label"]
    assert [each["label"] for each in figure["compared"]] == ["always the commonest label", "repeating the last label"]
    assert status_state(status_of(told | {"over_rounds": points[:1]}), still=True)["charts"]["learning"] == []
    numbers = [{"round": r, "records": 9, "model": 3.0, "mean": 3.0, "no_change": 3.0} for r in (1, 2)]
    told = {"kind": "root mean squared error", "recent": {"records": 0}, "over_rounds": numbers, **numbers[0]}
    assert status_state(status_of(told | {"label": "minutes"}), still=True)["headline"]["figures"][0] == {
        "value": "3",
        "label": "root mean squared error (minutes) of the published model on the last 9 records, before it learned "
        "from them",
        "compared": [{"label": "always the mean", "value": "3"}, {"label": "repeating the last label", "value": "3"}],
    }


def test_a_model_that_never_says_yes_is_seen_by_its_recall():
    """Right for 73 of 100 and finds nobody who is ill: balanced accuracy says so."""
    score = Score()
    for i in range(100):
        score.take(-1.0, 1.0 if i < 27 else -1.0, classifies=True)
    assert score.by_label() == {-1.0: (73, 73), 1.0: (27, 0)}
    shown = score.shown(classifies=True, unit=1.0)
    told = {"kind": "accuracy", "records": 100, **shown, "recent": {"records": 0}, "over_rounds": []}
    told["by_label"] = {"no": [73, 73], "yes": [27, 0]}
    state = status_state(status_of(told), still=True)
    assert [figure["value"] for figure in state["headline"]["figures"]] == ["0.730", "0.500"]
    assert state["headline"]["better"] is not True
    assert lines(state)["“yes”, of 27 records"] == "0.000"
    begun_before = Score(records=10, model=2.0, labels=score.labels)  # by a version that did not count right ones
    assert begun_before.by_label() == {}


def test_refusals_of_callers_are_kept_over_a_restart(tmp_path):
    with served(tmp_path) as here:
        path = tmp_path / "a.local.json"
        first = LocalAccount(here.daemon.learner, here.source, path=path)
        first.looked_at(Refusal("missing", "age"))
        first.save()
        second = LocalAccount(here.daemon.learner, here.source, path=path)
        second.looked_at(Refusal("missing", "age"))
        assert second.as_dict()["refused"] == {"age: missing": 2}


def test_what_was_used_is_known_after_a_kill_without_the_accounts_file(tmp_path):
    with served(tmp_path) as here:
        here.fill_round("u", "v")
        account = LocalAccount(here.daemon.learner, here.source, path=tmp_path / "lost.local.json")
        assert account.as_dict()["used"] == 2
