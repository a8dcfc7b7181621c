"""Flower on this machine, by its own commands: a SuperLink, SuperNodes with keys and TLS, and `flwr run`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomli_w

from veilstream.federation.addresses import free_port
from veilstream.federation.processes import Child
from veilstream.plans.plan import Plan

ROOT = Path(__file__).parents[2]
_HERE = "here"


class Flower:
    """One SuperLink; ``simulation`` has Ray in the place of SuperNodes."""

    def __init__(self, folder: Path, keys: Path, *, simulation: bool = False) -> None:
        self._folder, self._keys, self._simulation = folder, keys, simulation
        folder.mkdir(parents=True)
        self.port = free_port()
        self._children: dict[str, Child] = {}
        (folder / "config.toml").write_text(
            tomli_w.dumps(
                {
                    "superlink": {
                        _HERE: {"address": f"127.0.0.1:{self.port}", "root-certificates": str(keys / "server/ca.pem")}
                    }
                }
            )
        )

    def start(self) -> Flower:
        server = self._keys / "server"
        options: dict[str, object] = {"host": "127.0.0.1", "port": self.port, "database": self._folder / "state.db"}
        for option, file in (("ca-certfile", "ca.pem"), ("certfile", "tls.pem"), ("keyfile", "tls.key")):
            options[f"ssl-{option}"] = server / file
        flags = ["--simulation" if self._simulation else "--enable-supernode-auth"]
        child = self._start("flower-superlink", options, [*flags, "--disable-runtime-dependency-installation"])
        until = time.monotonic() + 90.0
        while not _listens(self.port):
            assert child.running, self.logs()
            assert time.monotonic() < until, self.logs()
            time.sleep(0.1)
        return self

    def start_supernode(self, name: str, **config: object) -> Child:
        """A site's SuperNode; ``config`` says where its things are."""
        keys = self._keys / "learners" / name
        if f"flower-supernode {name}" not in self._children:
            self.flwr("supernode", "register", str(self._keys / f"server/nodes/{name}.pub"), _HERE)
        words = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        options = {
            "superlink": f"127.0.0.1:{self.port}",
            "root-certificates": keys / "ca.pem",
            "auth-supernode-private-key": keys / "node.key",
            "host": "127.0.0.1",
            "port": free_port(),
            "node-config": words,
        }
        return self._start("flower-supernode", options, [], name)

    def run(self, app: Path, within_s: float, *options: str) -> None:
        """Submit an app, and wait for its end."""
        self.wait(self.submit(app, *options), within_s)

    def submit(self, app: Path, *options: str) -> str:
        """`flwr run`; the run's number."""
        return str(self.flwr("run", str(app), _HERE, *options)["run-id"])

    def wait(self, run: str, within_s: float) -> None:
        """Until this run has completed."""
        until = time.monotonic() + within_s
        while not (status := self.status(run)).startswith("finished"):
            assert time.monotonic() < until, self.logs()
            time.sleep(0.5)
        assert status == "finished:completed", self.logs()

    def status(self, run: str) -> str:
        return str(self.flwr("list", _HERE, "--run-id", run)["runs"][0]["status"])

    def flwr(self, *words: str) -> dict[str, Any]:
        command = [program("flwr"), *words, "--format", "json"]
        done = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, env=os.environ | self._settings()
        )
        try:
            said = json.loads(done.stdout)
        except ValueError:
            said = {}
        assert said.get("success"), (words, done.stdout[-2000:], done.stderr[-2000:])
        return dict(said)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("*.log")))

    def close(self) -> None:
        for child in reversed(self._children.values()):
            child.end(5.0)

    def _start(self, name: str, options: dict[str, Any], flags: list[str], who: str = "") -> Child:
        command = [
            program(name),
            *(str(word) for pair in options.items() for word in (f"--{pair[0]}", pair[1])),
            *flags,
        ]
        child = Child(command, self._folder / f"{name}-{who}.log", self._settings(who), self._folder)
        child.start()
        self._children[f"{name} {who}".strip()] = child
        return child

    def _settings(self, who: str = "") -> dict[str, str]:
        """Flower writes only here, fetches and reports nothing; apps find this checkout and its studies."""
        home = self._folder / "homes" / who if who else self._folder
        home.mkdir(parents=True, exist_ok=True)
        return {
            "FLWR_HOME": str(home),
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def program(name: str) -> str:
    """One of Flower's commands, of this interpreter's installation where it has them."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def write_app(folder: Path, plan: Plan, *, given: bool = False, **config: str) -> Path:
    """The shipped app with this plan and these settings; ``given``: with the simulation's draws, for parity."""
    shutil.copytree(ROOT / "examples/flower", folder)
    (folder / "plan.toml").write_text(plan.to_toml())
    text = (folder / "pyproject.toml").read_text()
    for key, value in config.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{key} = ")]
        text = text.replace(line, f"{key} = {json.dumps(value)}")
    (folder / "pyproject.toml").write_text(text)
    if given:
        client = folder / "private_app/client_app.py"
        client.write_text(client.read_text() + "\nfrom tests.support.given_sites import give\n\ngive()\n")
    return folder
