"""Logs of the long-lived commands: levels, two forms, nothing on stdout, no values."""

from __future__ import annotations

import json
import logging
import re
import warnings

import pytest

from tests.cli.test_plan import veilstream
from tests.support.federation import plan_of
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.logs import Format, Level, configure_logs

NAME = "veilstream.federation.server.coordinator"


@pytest.fixture
def restored(monkeypatch):
    """What configuring changes is as it was, for other tests."""
    ours = logging.getLogger("veilstream")
    handlers, level, propagate = ours.handlers[:], ours.level, ours.propagate
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    yield ours
    ours.handlers[:], ours.propagate = handlers, propagate
    ours.setLevel(level)


def test_text_has_time_level_name_and_message(restored, capsys):
    configure_logs()
    logging.getLogger(NAME).warning("learner %s refuses: %s", "north", "no clients")
    logging.getLogger(NAME).debug("not shown")
    shown = capsys.readouterr()
    assert shown.out == ""
    line = rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING {re.escape(NAME)}: "
    assert re.fullmatch(line + "learner north refuses: no clients\n", shown.err)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (Level.DEBUG, ["debug", "info", "warning", "error"]),
        (Level.INFO, ["info", "warning", "error"]),
        (Level.WARNING, ["warning", "error"]),
        (Level.ERROR, ["error"]),
    ],
)
def test_json_is_one_object_a_line_from_the_level_on(restored, capsys, level, shown):
    configure_logs(level, Format.JSON)
    log = logging.getLogger(NAME)
    for name in ("debug", "info", "warning", "error"):
        log.log(getattr(logging, name.upper()), "two\nlines, %s", name)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == shown
    assert all(line["logger"] == NAME for line in lines)
    assert lines[0]["message"] == f"two\nlines, {shown[0]}"


def test_json_says_which_learner_round_and_event_a_line_is_about(restored, capsys):
    configure_logs(form=Format.JSON, learner="north")
    log = logging.getLogger(NAME)
    log.info("sealed", extra={"event": "round sealed", "round": 7, "secret": "not shown"})
    log.info("away", extra={"event": "away", "learner": "south"})
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["learner"], first["round"], first["event"]) == ("north", 7, "round sealed")
    assert set(first) == {"time", "level", "logger", "message", "learner", "round", "event"}
    assert (second["learner"], second["event"]) == ("south", "away")
    assert "round" not in second


def test_warnings_of_python_are_log_lines(restored, capsys):
    configure_logs(form=Format.JSON)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logs(form=Format.JSON)
        warnings.warn("the disk is slow", stacklevel=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "the disk is slow"
    assert json.loads(line)["level"] == "warning"


@pytest.mark.parametrize("form", Format)
def test_an_exception_in_the_log_quotes_no_values(restored, capsys, form):
    configure_logs(form=form)
    try:
        raise ValueError("record 1234.5")
    except ValueError:
        logging.getLogger(NAME).exception("it failed")
    shown = capsys.readouterr().err
    assert "ValueError" in shown
    assert "it failed" in shown
    assert "1234.5" not in shown.replace('raise ValueError("record 1234.5")', "").replace(
        r"raise ValueError(\"record 1234.5\")", ""
    )


def test_a_server_logs_json_on_stderr_and_refuses_an_unknown_level(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_of().to_toml())
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "c"])
    command = ["server", "--plan", str(plan), "--listen", "192.0.2.1:0", "--insecure", "--log-format", "json"]
    done = veilstream(*command, cwd=tmp_path)
    assert done.returncode == 2  # after the guarantee, at an address beyond loopback
    assert done.stdout == ""
    first = json.loads(done.stderr.splitlines()[0])
    assert first["level"] == "info"
    assert first["logger"] == "veilstream.federation.server.process"
    assert first["message"].startswith("guarantee: ")
    quiet = veilstream(*command, "--log-level", "warning", "--out", "other", cwd=tmp_path)
    assert "guarantee" not in quiet.stderr
    loud = veilstream(*command, "--log-level", "loud", cwd=tmp_path)
    assert loud.returncode == 2
    assert "--log-level" in loud.stderr
