"""Flower on this machine: a SuperLink, a SuperNode for each learner, and `flwr run`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomli_w

from veilstream.errors import InputError, MissingExtra, VeilstreamError
from veilstream.federation.addresses import free_port
from veilstream.federation.processes import Child
from veilstream.files import write_file

_FIRST_ACCOUNT = 61184
_UP_WITHIN_S = 60.0
_NAME = "federation"


def socket_folder(path: Path, account: int | None) -> Path:
    """A new folder whose sockets one other account may use; None: this account."""
    path.mkdir(parents=True, mode=0o700)
    if account is not None:
        os.chown(path, -1, account)
        path.chmod(0o2750)
    return path


class LocalFlower:
    """Flower's processes around learners that serve sockets."""

    def __init__(
        self,
        folder: Path,
        keys: Path,
        learners: Sequence[str],
        *,
        other_accounts: bool,
        python: Path | None = None,
        simulation: bool = False,
    ) -> None:
        """``other_accounts`` needs root; ``python`` has Flower's commands beside it; ``simulation`` is by Ray."""
        if importlib.util.find_spec("flwr") is None:
            raise MissingExtra("flwr", "flower", "a federation over Flower")
        self._folder, self._keys, self.learners = folder.absolute(), keys, list(learners)
        self._python = Path(sys.executable) if python is None else python
        self.port = free_port()
        self.account = _FIRST_ACCOUNT if other_accounts else None
        """Of the SuperLink, which also runs the server."""
        self.accounts: dict[str, int | None] = {
            name: _FIRST_ACCOUNT + 1 + place if other_accounts else None for place, name in enumerate(learners)
        }
        """Of the SuperNodes."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o711)
        if other_accounts:
            self._folder.chmod(0o711)
            self._check_reach()
        self.superlink = self._make_superlink(simulation)
        self.supernodes: dict[str, Child] = {}

    def start(self) -> None:
        """Start the SuperLink and register the learners' SuperNodes."""
        self.superlink.start()
        until = time.monotonic() + _UP_WITHIN_S
        while not _listens(self.port):
            if not self.superlink.running or time.monotonic() > until:
                raise VeilstreamError(
                    f"Flower's SuperLink did not start ({self.superlink.log}):\n{self.superlink.last_lines()}"
                )
            time.sleep(0.1)
        nodes = (self._keys / "server/nodes").absolute()
        with ThreadPoolExecutor(4) as several:
            for done in [
                several.submit(self._flwr, "supernode", "register", f"{nodes}/{name}.pub", _NAME)
                for name in self.learners
            ]:
                done.result()

    def start_supernode(self, name: str, at: Path) -> Child:
        """Start a learner's SuperNode, which may use this socket and nothing else of the learner."""
        home, account = self._home(name, self.accounts[name]), self.accounts[name]
        for needed in ("ca.pem", "node.key"):
            self._give(self._keys / "learners" / name / needed, home / needed, account)
        options = {
            "superlink": f"127.0.0.1:{self.port}",
            "root-certificates": home / "ca.pem",
            "auth-supernode-private-key": home / "node.key",
            "host": "127.0.0.1",
            "port": free_port(),
            "node-config": f"socket={json.dumps(str(at.absolute()))}",
        }
        child = self._child("flower-supernode", options, name, home, account)
        child.start()
        self.supernodes[name] = child
        return child

    def submit(self, app: Path, *options: str) -> str:
        """`flwr run`; the run's number."""
        said = self._flwr("run", str(app.absolute()), _NAME, *options)
        return str(said["run-id"])

    def status(self, run: str) -> str:
        """Flower's own word: starting, running, finished:completed, finished:failed, ..."""
        said = self._flwr("list", _NAME, "--run-id", run)
        return str(said["runs"][0]["status"])

    def stop(self, run: str) -> None:
        """`flwr stop`."""
        self._flwr("stop", run, _NAME)

    def close(self) -> None:
        """End all."""
        for child in [*self.supernodes.values(), self.superlink]:
            child.end(5.0)

    def _make_superlink(self, simulation: bool) -> Child:
        home = self._home("superlink", self.account)
        for needed in ("ca.pem", "tls.pem", "tls.key"):
            self._give(self._keys / "server" / needed, home / needed, self.account)
        options = {
            "host": "127.0.0.1",
            "port": self.port,
            "ssl-ca-certfile": home / "ca.pem",
            "ssl-certfile": home / "tls.pem",
            "ssl-keyfile": home / "tls.key",
            "database": home / "state.db",
        }
        flags = ["--simulation" if simulation else "--enable-supernode-auth"]
        flags.append("--disable-runtime-dependency-installation")
        return self._child("flower-superlink", options, "superlink", home, self.account, flags)

    def _child(
        self,
        program: str,
        options: Mapping[str, object],
        name: str,
        home: Path,
        account: int | None,
        flags: Sequence[str] = (),
    ) -> Child:
        command = [self._program(program)]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        log = self._folder / f"{name}.log"
        return Child([*command, *flags], log, self._environment(home), home, account, str(self._python))

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        home = self._home("operator", None)
        connection = {
            "address": f"127.0.0.1:{self.port}",
            "root-certificates": str((self._keys / "server/ca.pem").absolute()),
        }
        write_file(home / "config.toml", tomli_w.dumps({"superlink": {_NAME: connection}}))
        done = subprocess.run(
            [self._program("flwr"), *arguments, "--format", "json"],
            cwd=home,
            capture_output=True,
            text=True,
            env=os.environ | self._environment(home),
        )
        try:
            said = json.loads(done.stdout)
        except ValueError:
            said = {}
        if not said.get("success"):
            text = (said.get("error-message") or done.stdout + done.stderr)[-500:]
            raise VeilstreamError(f"`flwr {' '.join(arguments)}` failed: {text}")
        return dict(said)

    def _home(self, name: str, account: int | None) -> Path:
        home = self._folder / name
        home.mkdir(exist_ok=True, mode=0o700)
        if account is not None:
            os.chown(home, account, account)
        return home

    def give_to_server(self, path: Path) -> Path:
        """Give a folder, with everything in it, to the SuperLink's account."""
        path.mkdir(parents=True, exist_ok=True)
        if self.account is not None:
            for each in [path, *path.rglob("*")]:
                os.chown(each, self.account, self.account)
        return path

    @staticmethod
    def _give(source: Path, target: Path, account: int | None) -> None:
        shutil.copyfile(source, target)
        target.chmod(0o600)
        if account is not None:
            os.chown(target, account, account)

    def _program(self, name: str) -> str:
        beside = self._python.parent / name
        return str(beside) if beside.exists() else shutil.which(name) or name

    def _environment(self, home: Path) -> Mapping[str, str]:
        """Flower writes only here, fetches and reports nothing; a plan's modules may be in the current directory."""
        known = [os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
        return {
            "PYTHONPATH": os.pathsep.join(path for path in known if path),
            "FLWR_HOME": str(home),
            "HOME": str(home),
            "TMPDIR": str(home),
            "PATH": f"{self._python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "PYTHONUNBUFFERED": "1",
        }

    def _check_reach(self) -> None:
        try:
            done = subprocess.run(
                [str(self._python), "-c", "import flwr, veilstream"],
                cwd=self._folder,
                user=self.account,
                group=self.account,
                extra_groups=[],
                capture_output=True,
                text=True,
            )
            why = (done.stderr.splitlines() or [""])[-1] if done.returncode else ""
        except OSError as error:
            why = str(error)
        if why:
            raise InputError(
                "--transport",
                "flower",
                f"an installation and a folder that another account can read ({why})",
                f"{self._python} and {self._folder} must not lie in a closed folder such as /root; or --trust-carrier",
            )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
