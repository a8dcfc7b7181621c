"""`veilstream server`, `learner` and `federation demo`, as a user runs them: what is refused."""

from __future__ import annotations

import pytest

from tests.cli.test_plan import veilstream
from tests.support.federation import plan_of

COMMANDS = [
    ["server"],
    ["learner", "--id", "a", "--server", "127.0.0.1:8400", "--data", "plan:0"],
    ["federation", "demo"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_flare_starts_only_where_it_is_trusted_and_the_error_says_why(command, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_of().to_toml())
    more = [] if command[0] == "federation" else ["--plan", str(plan)]
    done = veilstream(*command, *more, "--engine", "flare", cwd=tmp_path)
    assert done.returncode == 2
    assert "can read the learner's files" in done.stderr
    assert "the server, another learner and any local account" in done.stderr
    assert "--trust-engine" in done.stderr
    assert "--engine direct" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"plan.toml"}


@pytest.mark.parametrize("command", COMMANDS[:2], ids=lambda c: c[0])
def test_with_trust_the_next_thing_that_is_missing_is_named(command, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_of().to_toml())
    done = veilstream(
        *command, "--plan", str(plan), "--engine", "flare", "--trust-engine", cwd=tmp_path
    )
    assert done.returncode != 0
    assert "--trust-engine" not in done.stderr
    assert "keys" in done.stderr


def test_a_reply_before_the_end_of_the_window_is_refused(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_of(federation={"patience_s": 30.0}).to_toml())
    from veilstream.federation.identity import make_keys

    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "c"])
    done = veilstream(
        "learner", "--id", "a", "--plan", str(plan), "--server", "127.0.0.1:8400",
        "--data", "live", "--learner-api", "127.0.0.1:0", "--reply-after", "3", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--reply-after = 3.0: expected >= 30 seconds" in done.stderr
    assert not (tmp_path / "a.db").exists()


def test_a_server_refuses_what_an_operator_cannot_mean_and_a_folder_that_is_taken(tmp_path):
    from veilstream.federation.identity import make_keys
    from veilstream.federation.services.run_lock import RunLock

    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "c"])
    (tmp_path / "plan.toml").write_text(plan_of().to_toml())
    server = ["server", "--plan", "plan.toml", "--out", "run", "--listen", "127.0.0.1:0"]
    done = veilstream(*server, "--void", "aa", cwd=tmp_path)
    assert done.returncode == 2
    words = "--void = 'aa': expected one of a, b, c (did you mean 'a'?)"
    assert words in " ".join(done.stderr.split())
    held = RunLock(tmp_path / "run")
    done = veilstream(*server, cwd=tmp_path)
    held.close()
    assert done.returncode == 6
    assert "a run has one server" in " ".join(done.stderr.split())
