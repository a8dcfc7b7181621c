"""`veilstream server`, `learner` and `federation demo`, as a user runs them: what is refused."""

from __future__ import annotations

import importlib
import tomllib
import warnings
from types import SimpleNamespace

import pytest

from tests.cli.test_plan import veilstream
from tests.support.federation import options, plan_of
from veilstream.federation.demo import demo_plan


def test_a_learner_that_dials_needs_to_know_where(tmp_path):
    from veilstream.federation.keys.new_keys import make_keys

    plan = tmp_path / "plan.toml"
    plan.write_text(demo_plan(1, 2).to_toml())
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"])
    done = veilstream(
        "learner", "--keys", "keys/learners/a", "--data", "plan:0", "--plan", str(plan), "--new-store", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "--server" in done.stderr


def test_a_reply_before_the_end_of_the_window_is_refused(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_of(federation={"patience_s": 30.0}).to_toml())
    from veilstream.federation.keys.new_keys import make_keys

    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "c"])
    done = veilstream(
        "learner",
        *options(keys="keys/learners/a", plan=plan, server="127.0.0.1:8400", data="live"),
        *options(learner_api="127.0.0.1:0", reply_after=3),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "--reply-after = 3.0: expected >= 30 seconds" in done.stderr
    assert not (tmp_path / "a.db").exists()


def test_a_server_refuses_what_an_operator_cannot_mean_and_a_folder_that_is_taken(tmp_path):
    from veilstream.federation.keys.new_keys import make_keys
    from veilstream.federation.server.run_files import lock_run

    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "c"])
    (tmp_path / "plan.toml").write_text(plan_of().to_toml())
    server = ["server", "--plan", "plan.toml", "--out", "run", "--listen", "127.0.0.1:0"]
    done = veilstream(*server, "--void", "aa", cwd=tmp_path)
    assert done.returncode == 2
    words = "--void = 'aa': expected one of a, b, c (did you mean 'a'?)"
    assert words in " ".join(done.stderr.split())
    held = lock_run(tmp_path / "run")
    done = veilstream(*server, cwd=tmp_path)
    held.close()
    assert done.returncode == 6
    assert "a run has one server" in " ".join(done.stderr.split())


def test_a_live_page_needs_an_address_where_it_is_published(tmp_path):
    (tmp_path / "plan.toml").write_text(plan_of().to_toml())
    for option in ("--publish", "--publish-names"):
        done = veilstream("server", "--plan", "plan.toml", option, cwd=tmp_path)
        assert done.returncode == 2
        assert "--model-api 127.0.0.1:8480" in " ".join(done.stderr.split())
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("host", "names", "named"), [("127.0.0.1", False, True), ("0.0.0.0", False, False), ("0.0.0.0", True, True)]
)
def test_learners_are_named_where_nobody_else_listens_or_the_operator_says_so(host, names, named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from veilstream.cli.server import _live  # loads click, which warns of its own names

    made = _live((host, 8480), True, names=names)
    assert made.keywords == {"path": "/live", "named": named}


def test_new_writes_a_flower_app_beside_the_plan(tmp_path):
    done = veilstream("new", "my air", "--flower", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = tomllib.loads((tmp_path / "my air/plan.toml").read_text())["learning"]["learners"]
    assert f"flwr run . --federation-config 'num-supernodes={asked}'" in done.stdout  # Flower's own default is 2
    app = tomllib.loads((tmp_path / "my air/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    for name, part in (("serverapp", "server_app"), ("clientapp", "client_app")):
        assert app["components"][name] == f"my_air_app.{part}:app"
        assert (tmp_path / f"my air/my_air_app/{part}.py").exists()
    here = str(tmp_path / "my air")
    assert {key: app["config"][key] for key in ("out", "sites", "records")} == {
        key: f"{here}/{key}" for key in ("out", "sites", "records")
    }
    assert {path.stem for path in (tmp_path / "my air/records").iterdir()} == set(app["config"]["learners"].split(","))
    assert veilstream("new", "my air", "--flower", cwd=tmp_path).returncode == 2


@pytest.mark.filterwarnings("ignore")
def test_the_flower_app_lets_nothing_but_releases_leave(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    from flwr.app import ConfigRecord, MetricRecord, RecordDict

    from veilstream.plans.new_project import new_flower_app

    new_flower_app(tmp_path / "leaks")
    monkeypatch.syspath_prepend(str(tmp_path / "leaks"))
    client_app = importlib.import_module("leaks_app.client_app")

    def passes(**records) -> bool:
        reply = SimpleNamespace(content=RecordDict(records), has_content=lambda: True)
        return client_app.only_releases(None, None, lambda *_: reply) is reply

    release = ConfigRecord({"reply": b"bytes"})
    assert passes(veilstream=release)
    for leak in (MetricRecord({"loss": 0.5}), MetricRecord({"num-examples": 12})):
        with pytest.raises(ValueError, match=r"may not leave: \[telemetry\]"):
            passes(veilstream=release, metrics=leak)


@pytest.mark.filterwarnings("ignore")
def test_what_goes_wrong_at_a_site_is_told_in_its_own_log_alone(tmp_path, monkeypatch, caplog):
    """Flower sends the text of an exception to the server."""
    pytest.importorskip("flwr")
    from veilstream.plans.new_project import new_flower_app

    new_flower_app(tmp_path / "fails")
    monkeypatch.syspath_prepend(str(tmp_path / "fails"))
    client_app = importlib.import_module("fails_app.client_app")
    here = {"name": "north", "data": str(tmp_path / "secret.csv"), "store": str(tmp_path / "north.db")}
    message = SimpleNamespace(content={"veilstream": {"request": b""}})
    client_app.log.propagate = True
    with pytest.raises(RuntimeError) as told:
        client_app.answer(message, SimpleNamespace(node_config=here, run_config={}))
    assert "secret.csv" not in str(told.value)
    assert told.value.__cause__ is None
    assert "secret.csv" in caplog.text
