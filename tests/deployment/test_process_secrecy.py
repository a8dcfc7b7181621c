"""Nothing of a learner's memory reaches a core file, an error report or a log."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback

import numpy as np
import pytest

from tests.deployment.test_learner import D, Still, model, plan_of
from veilstream.deployment.learner import Learner
from veilstream.deployment.process_secrecy import shown_without_values, without_values
from veilstream.errors import LedgerError, PrivacyError
from veilstream.learning.tasks import Sample

SECRET = 0.123456789
TAG = "alice-of-the-test"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )


def with_locals(error: BaseException) -> str:
    """As error collectors print it, with the frames of this file left out."""
    report = traceback.TracebackException.from_exception(error, capture_locals=True)
    text, each = "", report
    while each is not None:
        inner = [frame for frame in each.stack if "test_process_secrecy" not in frame.filename]
        text += "".join(f"{frame.name} {frame.locals}" for frame in inner) + str(each)
        each = each.__cause__ or each.__context__
    return text


def test_a_learner_s_exceptions_carry_no_values(tmp_path, monkeypatch):
    """A failure in the deepest place, reported with locals: neither record, tag, seed nor key."""
    with Learner(plan_of(), tmp_path / "s.db", Still(), create=True) as learner:
        learner.begin_round(0, model(0))
        key = learner.ledger.tag_key

        def fails(*_):
            seed, record = key, SECRET
            assert seed
            assert record
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("os.fsync", fails)
        with pytest.raises(PrivacyError) as caught:
            learner.observe(TAG, Sample(np.full(D, SECRET), 1.0))
    text = with_locals(caught.value)
    assert "observe" in text  # the place is still shown
    for secret in (str(SECRET), "0.1234567", TAG, repr(key), key.hex()):
        assert secret not in text, secret


def test_what_the_caller_was_handling_keeps_its_own_variables():
    @without_values
    def inner():
        raise KeyError("inner")

    def outer():
        mine = 42
        raise ValueError(mine)

    frames = []
    try:
        outer()
    except ValueError as handled:
        frames.append(handled.__traceback__.tb_next.tb_frame)
        with pytest.raises(KeyError):
            inner()
    assert frames[0].f_locals == {"mine": 42}


def test_reports_of_this_process_show_places_and_only_our_own_texts():
    def place():
        try:
            float("record 0.25")
        except ValueError as error:
            raise LedgerError("the store is old", "put the newest back") from error

    with pytest.raises(LedgerError) as caught:
        place()
    text = shown_without_values(caught.value)
    assert "record 0.25'" not in text
    assert "ValueError (its text is not shown)" in text
    assert "LedgerError: the store is old" in text
    assert "in place" in text


@pytest.mark.parametrize("where", ["main", "thread", "finalizer"])
def test_an_uncaught_exception_does_not_quote_data(where):
    done = python(f"""
        import threading
        from veilstream.deployment.process_secrecy import terse_tracebacks
        terse_tracebacks()
        number = 41
        def fails():
            float("record-%d" % (number + 1))
        class Late:
            def __del__(self):
                fails()
        if "{where}" == "main":
            fails()
        elif "{where}" == "thread":
            thread = threading.Thread(target=fails)
            thread.start()
            thread.join()
        else:
            Late()
    """)
    assert "ValueError (its text is not shown)" in done.stderr
    assert "record-42" not in done.stderr + done.stdout
    assert done.returncode == (1 if where == "main" else 0)


def test_a_learner_s_process_leaves_no_core_dump(tmp_path):
    """Also where cores go to a program; what it starts is an ordinary process again."""
    done = python(f"""
        import ctypes, resource, subprocess, sys
        from tests.deployment.test_learner import Still, plan_of
        from veilstream.deployment.learner import Learner
        prctl = ctypes.CDLL(None).prctl
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
        before = prctl(3, 0, 0, 0, 0)
        Learner(plan_of(), {str(tmp_path / "s.db")!r}, Still(), create=True).close()
        print(before, prctl(3, 0, 0, 0, 0), *resource.getrlimit(resource.RLIMIT_CORE))
        look = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
        print(subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout)
    """)
    assert done.returncode == 0, done.stderr
    before, after, soft, hard, child = done.stdout.split()
    assert (before, after, soft, hard, child) == ("1", "0", "0", "0", "1")


def test_the_learner_command_shows_no_data_when_it_fails(tmp_path):
    """An exception that nobody foresaw, through the command itself: no locals, no quoted record."""
    (tmp_path / "plan.toml").write_text(plan_of().to_toml())
    done = python(f"""
        import sys
        from veilstream.cli import main
        from veilstream.federation.learner import process as service

        def fails(self, *_):
            record = "alice" + "-0.25"
            raise RuntimeError(record)

        service.LearnerService.run = fails
        sys.argv = ["veilstream", "learner", "--server", "127.0.0.1:1", "--keys", "keys/learners/north",
                    "--plan", {str(tmp_path / "plan.toml")!r}, "--data", "plan:0"]
        main()
    """)
    assert done.returncode == 1
    assert "RuntimeError (its text is not shown)" in done.stderr
    assert "in fails" in done.stderr
    assert "alice-0.25" not in done.stderr + done.stdout
