"""Who may use a learner's socket, and what one can do there."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.federation import options, wait_for
from tests.support.flower import open_folder
from veilstream.errors import InputError
from veilstream.federation.flower import carrier_socket
from veilstream.federation.flower.carrier_socket import CarrierSocket
from veilstream.federation.protocol import frames
from veilstream.federation.protocol.messages import MAGIC

DIM = 6
CLOSED = r"closed without an answer|reset|Broken pipe"
REQUEST = MAGIC + b" a request"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another account")
OTHER = 61184

# As another account, and with nothing of this process's interpreter: it may be out of its reach.
ASK = """
import socket, struct, sys
def ask(path, content):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(struct.pack("<Q", len(content)) + content)
        return s.recv(100)[8:]
sys.stdout.buffer.write(ask(sys.argv[1], sys.argv[2].encode()))
"""


@pytest.fixture
def folder():
    with open_folder() as above:
        shared = above / "shared"
        shared.mkdir()
        if os.geteuid() == 0:
            os.chown(shared, -1, OTHER)
        shared.chmod(0o2750)
        yield shared


@pytest.fixture
def opened(folder):
    sides = []

    def start(trusted: bool = True, handle=lambda request: b"re: " + request) -> CarrierSocket:
        side = CarrierSocket(handle, folder / "s.sock", dim=DIM, trust_own_account=trusted)
        side.start()
        sides.append(side)
        return side

    yield start
    for side in sides:
        side.close()


def ask_as(uid: int, path: Path, content: str = REQUEST.decode()) -> bytes:
    done = subprocess.run(
        ["/usr/bin/python3", "-c", ASK, str(path), content],
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        timeout=20,
    )
    return done.stdout


def said(side: CarrierSocket) -> str:
    found: list[str] = []
    wait_for(lambda: found.append(side.supervise() or "") or any(found))
    return "".join(found)


def test_a_process_of_the_daemons_account_is_refused_and_the_log_says_why(opened):
    side = opened(trusted=False)
    with pytest.raises(OSError, match=CLOSED):
        frames.ask(side.path, REQUEST, 5.0)
    line = said(side)
    assert "learner's own account" in line
    assert "records, store and keys" in line
    assert "--trust-carrier" in line


def test_a_process_of_the_daemons_account_is_answered_if_it_is_trusted(opened):
    assert frames.ask(opened().path, REQUEST, 5.0) == b"re: " + REQUEST


@ROOT_ONLY
def test_another_account_is_answered_if_its_group_may_enter(opened, folder):
    side = opened(trusted=False)
    assert side.path.stat().st_gid == OTHER
    assert ask_as(OTHER, side.path) == b"re: " + REQUEST
    assert ask_as(OTHER + 1, side.path) == b""
    assert side.supervise() is None


@ROOT_ONLY
def test_root_is_answered_by_a_daemon_of_another_account_which_says_what_that_means(opened, monkeypatch):
    side = opened(trusted=False)
    monkeypatch.setattr(carrier_socket.os, "geteuid", lambda: OTHER)
    assert frames.ask(side.path, REQUEST, 5.0) == b"re: " + REQUEST
    assert "root, which can read" in said(side)


@ROOT_ONLY
def test_a_second_account_is_refused_while_the_first_is_connected(opened):
    side = opened()
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(str(side.path))
        frames.send(first, REQUEST)
        assert frames.receive(first) is not None
        assert ask_as(OTHER, side.path) == b""
        assert f"account {OTHER} calls while" in said(side)
    wait_for(lambda: ask_as(OTHER, side.path) != b"")


def test_a_frame_is_limited_by_the_models_size(opened):
    seen = []
    side = opened(handle=lambda request: seen.append(request) or b"")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(side.path))
        connection.sendall((carrier_socket.request_limit(DIM) + 1).to_bytes(8, "little"))
        connection.settimeout(5.0)
        assert connection.recv(1) == b""
    assert "at most" in said(side)
    assert not seen


def test_what_is_not_a_request_is_not_answered(opened):
    seen = []
    side = opened(handle=lambda request: seen.append(request) or b"")
    for junk in (b"", b"cat /etc/passwd", b"S\x00\x00", bytes(1000)):
        with pytest.raises(OSError, match=CLOSED):
            frames.ask(side.path, junk, 5.0)
    assert "not a request" in said(side)
    assert not seen


def test_a_trickling_carrier_is_cut_off(opened, monkeypatch):
    monkeypatch.setattr(carrier_socket, "_FRAME_WITHIN_S", 0.3)
    side = opened()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(side.path))
        connection.sendall(len(REQUEST).to_bytes(8, "little"))
        began = time.monotonic()
        with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
            for byte in REQUEST * 10:
                time.sleep(0.05)
                connection.sendall(bytes([byte]))
        assert time.monotonic() - began < 3.0
    assert "silent for too long" in said(side)


def test_connections_are_bounded(opened):
    side = opened()
    calls = [socket.socket(socket.AF_UNIX) for _ in range(6)]
    for call in calls:
        call.connect(str(side.path))
        call.settimeout(5.0)
    assert "4 connections" in said(side)
    assert [call.recv(1) for call in calls[4:]] == [b"", b""]
    frames.send(calls[0], REQUEST)
    assert frames.receive(calls[0]) == b"re: " + REQUEST
    for call in calls:
        call.close()
    wait_for(lambda: not side._open)
    assert frames.ask(side.path, REQUEST, 5.0) == b"re: " + REQUEST


def test_a_handler_that_raises_says_nothing_of_its_text(opened):
    def handle(request: bytes) -> bytes:
        raise ValueError("someone's data")

    side = opened(handle=handle)
    with pytest.raises(OSError, match=CLOSED):
        frames.ask(side.path, REQUEST, 5.0)
    line = said(side)
    assert "ValueError" in line
    assert "someone" not in line


@pytest.mark.parametrize("name", ["s.sock", ".s.sock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_what_stands_at_the_path_is_neither_followed_nor_removed(folder, kind, name):
    target, path = folder / "target", folder / name
    if kind != "dangling":
        target.write_text("precious")
    path.write_text("precious") if kind == "file" else path.symlink_to(target)
    with pytest.raises(InputError, match=r"--socket.*not a socket"):
        CarrierSocket(lambda _: b"", folder / "s.sock", dim=DIM).start()
    assert path.is_symlink() == (kind != "file")
    if kind != "dangling":
        assert path.read_text() == "precious"
    else:
        assert not target.exists()


def test_a_socket_of_an_earlier_start_is_replaced_and_its_mode_is_for_owner_and_group(opened):
    opened()
    side = opened()
    assert stat.S_IMODE(side.path.stat().st_mode) == 0o660
    assert frames.ask(side.path, REQUEST, 5.0) == b"re: " + REQUEST


def test_too_long_a_path_names_the_option(tmp_path):
    with pytest.raises(InputError, match=r"--socket.*too long a name"):
        CarrierSocket(lambda _: b"", tmp_path / ("s" * 90), dim=DIM).start()


def test_a_folder_that_no_carrier_can_enter_is_named(tmp_path, caplog):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    side = CarrierSocket(lambda _: b"", closed / "s.sock", dim=DIM)
    side.start()
    side.close()
    assert "no other account can enter its folder" in caplog.text


def test_the_learner_serves_its_socket_and_starts_no_other_process(tmp_path):
    from veilstream.federation.demo import demo_plan
    from veilstream.federation.keys.new_keys import make_keys

    make_keys(tmp_path / "keys", ["127.0.0.1"], ["north"])
    (tmp_path / "plan.toml").write_text(demo_plan(1, 3).to_toml())
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "veilstream", "learner", "--new-store"),
                *options(plan="plan.toml", keys="keys/learners/north", data="plan:0", socket="north.sock"),
            ],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        )
    try:
        wait_for((tmp_path / "north.sock").exists, 30.0)
        with pytest.raises(OSError, match=CLOSED):
            frames.ask(tmp_path / "north.sock", REQUEST, 5.0)
        wait_for(lambda: "learner's own account" in (tmp_path / "log").read_text(), 10.0)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        assert children == ""
    finally:
        process.terminate()
        process.wait(10)
    assert not (tmp_path / "north.sock").exists()
