"""`veilstream server`, `learner` and `federation demo`, as a user runs them: what is refused."""

from __future__ import annotations

import warnings

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
