"""`veilstream server` after the last round, and `veilstream model`: as processes, over TLS."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

from tests.cli.test_plan import veilstream
from tests.support.direct import DirectWorld
from tests.support.federation import DIM, Plain, World, options, plan_of, wait_for
from veilstream.federation.addresses import free_port
from veilstream.federation.server.process import ServerService
from veilstream.runs.model_download import fetch_model
from veilstream.runs.released_model import ReleasedModel

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with keys, a plan and the finished run of its server."""
    root = tmp_path_factory.mktemp("finished")
    with World(root, plan_of(rounds=2)).start_all() as world:
        (root / "plan.toml").write_text(world.plan.to_toml())
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        assert coordinator.finished
    return root


@pytest.fixture
def here(monkeypatch, capsys):
    """The command in this process: exit code, stdout and stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about click
        from veilstream.cli.app import main

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["veilstream", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def command(*more: str) -> list[str]:
    at = f"127.0.0.1:{free_port()}"
    return ["server", *options(plan="plan.toml", keys="keys/server", out="run", listen=at), *more]


@contextmanager
def serving(root):
    """A server on the finished run, once its models can be fetched: process and address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "veilstream", *command("--model-api", "127.0.0.1:0")],
        cwd=root,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"models are published at (https://\S+)/model/latest", line):
                yield process, found[1]
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.communicate()


def test_a_finished_run_is_served_until_the_server_is_stopped(finished, tmp_path, here):
    with serving(finished) as (process, url):
        out, ca = tmp_path / "model.npz", finished / "keys/server/ca.pem"
        fetch = ["model", "fetch", url, "--ca", str(ca), "--out", str(out)]
        done = veilstream(*fetch, "--expect-plan", str(finished / "plan.toml"), "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["round"], said["rounds"], said["dim"]) == (2, 2, DIM)
        kept = np.fromfile(finished / "run/models.f32", "<f4").reshape(-1, DIM)
        np.testing.assert_array_equal(ReleasedModel.load(out).model, kept[2])

        written = out.stat().st_mtime_ns  # what is there already is not written again
        assert here(*fetch)[0] == 0
        assert out.stat().st_mtime_ns == written

        code, _, why = here("model", "fetch", url, "--out", str(tmp_path / "other.npz"))
        assert (code, "--ca" in why) == (7, True)
        other = tmp_path / "other.toml"
        other.write_text(plan_of(rounds=3).to_toml())
        code, _, why = here(*fetch[:-1], str(tmp_path / "other.npz"), "--expect-plan", str(other))
        assert (code, "a model of another plan" in why) == (7, True)
        assert not (tmp_path / "other.npz").exists()

        process.send_signal(signal.SIGTERM)
        out_text, err_text = process.communicate(timeout=20)
        assert process.returncode == 0, err_text
        assert "2 rounds" in out_text
        assert "serving until stopped" in err_text
        assert "Traceback" not in err_text

    code, shown, _ = here("model", "show", str(out))
    assert code == 0
    assert "after 2 of 2 rounds" in shown
    assert "epsilon 4.0" in shown


def test_a_script_may_have_it_exit_when_done(finished):
    done = veilstream(*command("--exit-when-done", "--json"), cwd=finished)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2


def test_what_is_no_model_is_refused_by_name(tmp_path, here):
    file = tmp_path / "x.npz"
    file.write_bytes(b"no")
    for path in (file, tmp_path / "none.npz"):
        code, _, why = here("model", "show", str(path))
        assert (code, path.name in why) == (2, True)
    code, _, why = here("model", "fetch", "https://127.0.0.1:1", "--out", str(file))
    assert code == 2  # somebody's file is not written over
    assert file.read_bytes() == b"no"


def test_models_stay_and_learners_stay_connected_after_the_last_round(tmp_path, monkeypatch):
    """Over the direct transport; the coordinator is asked again and again to see to the end."""
    from veilstream.federation.server.coordinator import Coordinator

    asked = []
    monkeypatch.setattr(Coordinator, "after_end", lambda _, transport: asked.append(transport.nodes()), raising=False)
    world = DirectWorld(tmp_path, plan_of(rounds=2))
    world.port, at, stop = free_port(), ("127.0.0.1", free_port()), threading.Event()
    service = ServerService(
        world.plan, tmp_path / "keys/server", tmp_path / "run", ("127.0.0.1", world.port), model_api=at, task=Plain()
    )
    ended = []
    running = threading.Thread(target=lambda: ended.append(service.run(stop=stop)), daemon=True)
    running.start()
    try:
        world.start_all()
        wait_for(lambda: {"a", "b", "c"} in asked, 20)
        ca = tmp_path / "keys/server/ca.pem"
        assert fetch_model(f"https://127.0.0.1:{at[1]}", ca=ca).round == 2
        seen = len(asked)
        wait_for(lambda: len(asked) > seen + 2)
    finally:
        stop.set()
        running.join(20)
        world.close()
    (coordinator,) = ended
    assert coordinator.finished
