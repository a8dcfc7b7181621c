"""Keys that others can read, and a second server in one folder or on one port: refused, at once."""

from __future__ import annotations

import os
import socket
import time

import pytest

from tests.support.federation import Plain, plan_of
from veilstream.errors import InputError, RunBusy
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.server.process import ServerService
from veilstream.federation.server.run_files import lock_run


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_private_key_that_others_can_read_is_refused_with_the_command(tmp_path, mode):
    from veilstream.federation.direct import DirectNode, DirectServer
    from veilstream.federation.keys.new_keys import renew_server

    make_keys(tmp_path, ["127.0.0.1"], ["north"])
    server, north = tmp_path / "server", tmp_path / "learners/north"
    tries = {
        server / "identity.key": lambda: ServerKeys.load(server),
        north / "identity.key": lambda: LearnerKeys.load(north),
        server / "tls.key": lambda: DirectServer(server, ("127.0.0.1", 0), dim=1),
        north / "tls.key": lambda: DirectNode(north, bytes, ("127.0.0.1", 1), dim=1),
        tmp_path / "ca/ca.key": lambda: renew_server(tmp_path, [], days=1),
    }
    for path, use in tries.items():
        path.chmod(mode)
        with pytest.raises(InputError, match=f"chmod 600 {path}"):
            use()
        path.chmod(0o600)
        use()
        path.chmod(0o400)
        use()
        path.chmod(0o600)


def test_a_second_server_in_one_folder_ends_at_once_and_names_the_first(tmp_path):
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "c"])
    first = lock_run(tmp_path / "run")
    service = ServerService(plan_of(), tmp_path / "keys/server", tmp_path / "run", ("127.0.0.1", 0), task=Plain())
    with pytest.raises(RunBusy, match=f"held by process {os.getpid()}: a run has one server"):
        service.run()
    assert RunBusy.exit_code == 6
    first.close()
    lock_run(tmp_path / "run").close()
    (tmp_path / "run/server.lock").unlink()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run/server.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match="not a link"):
        lock_run(tmp_path / "run")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_second_server_on_one_port_says_so_at_once(tmp_path, caplog):
    from veilstream.federation.direct import DirectServer

    make_keys(tmp_path, ["127.0.0.1"], [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = DirectServer(tmp_path / "server", taken.getsockname()[:2], dim=1)
        began = time.monotonic()
        with pytest.raises(InputError, match=r"--listen.*an address that is free"):
            server.start()
        assert time.monotonic() - began < 5
    assert "Address already in use; waiting 1 s" in caplog.text
