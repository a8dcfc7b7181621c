"""Child processes: who can read their logs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.federation import wait_for
from veilstream.federation.processes import Child


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_log_is_for_its_owner_alone_whatever_the_umask(tmp_path, umask):
    log = tmp_path / "a.log"
    child = Child([sys.executable, "-c", "print('records used: 17')"], log)
    before = os.umask(umask)
    try:
        child.start()
    finally:
        os.umask(before)
    wait_for(lambda: not child.running)
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text() == "records used: 17\n"


def test_a_log_that_everyone_could_read_is_closed_to_others_when_it_is_written_on(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("before\n")
    log.chmod(0o644)
    child = Child([sys.executable, "-c", "print('after')"], log)
    child.start()
    wait_for(lambda: not child.running)
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text() == "before\nafter\n"


@pytest.mark.parametrize("umask", ["000", "022", "777"])
def test_no_other_account_may_write_to_a_commands_folders_whatever_the_umask(tmp_path, umask):
    words = [sys.executable, "-m", "veilstream", "keys", "make", "keys", "--host", "127.0.0.1", "--learner", "a"]
    done = subprocess.run(["sh", "-c", f'umask {umask}; exec "$@"', "sh", *words], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    for path in [*tmp_path.rglob("*")]:
        mode = path.stat().st_mode & 0o777
        assert not mode & 0o022, (path, oct(mode))
        assert mode & 0o600 == 0o600
