"""FLARE for tests: real processes under accounts of their own; and a stand-in without FLARE."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from tests.support import flare_attack
from tests.support.federation import DIM, World
from veilstream.federation.services.daemon import Daemon
from veilstream.federation.transports.flare import FlareServer, provision
from veilstream.federation.transports.flare.local import (
    FIRST_ACCOUNT,
    FlareProcess,
    account_folder,
    interpreter,
)
from veilstream.federation.transports.flare.server import JobSocket
from veilstream.plans.plan import Plan

ROOT = os.geteuid() == 0


def account(place: int) -> int | None:
    """Of FLARE's server (0) and the sites after it; tests elsewhere use other numbers."""
    return FIRST_ACCOUNT + 100 + place if ROOT else None


class FlareProcesses:
    """FLARE's server, its sites, and ours on top; sockets are where `socket` says."""

    def __init__(
        self, root: Path, keys: Path, names: tuple[str, ...], address: tuple[str, int], dim: int,
        hostile: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """``hostile``: who runs `flare_attack` in its process."""
        self.root, self.names, self.keys, self.hostile = root, names, keys, hostile
        root.mkdir(parents=True)
        root.chmod(0o711)
        for name in names:
            account_folder(self.socket(name).parent, self.account(name))
        provision(keys, *address)
        state = account_folder(root / "engine", account(0))
        self.engine = FlareServer(keys / "server", state, address, dim=dim)
        self.server = self._process(
            "server", keys / "flare/server", "VEILSTREAM_RELAY_SOCKET", self.engine.path, account(0)
        )
        self.sites = {
            name: self._process(
                name, keys / "flare/sites" / name, "VEILSTREAM_SOCKET", self.socket(name),
                self.account(name),
            )
            for name in names
        }  # fmt: skip

    def _process(self, name: str, kit: Path, variable: str, path: Path, user: int | None):
        home = self.home(name)
        environment = {variable: str(path)}
        if name in self.hostile:
            inject = self.root / "inject" / name
            inject.mkdir(parents=True)
            shutil.copy(flare_attack.__file__, inject / "sitecustomize.py")
            theirs = interpreter(user)[1].get("PYTHONPATH", "")
            environment["PYTHONPATH"] = f"{inject}:{theirs}"
        return FlareProcess(kit, home, self.root / f"{name}.log", environment, user)

    def home(self, name: str) -> Path:
        return self.root / "homes" / name

    def account(self, name: str) -> int | None:
        return account(1 + self.names.index(name))

    def socket(self, name: str) -> Path:
        return self.root / "sockets" / name / "l.sock"

    def start(self, stack: ExitStack) -> FlareServer:
        """To be ended with the stack."""
        stack.callback(self.engine.close)
        for process in [self.server, *self.sites.values()]:
            stack.callback(process.end)
            process.start()
        self.engine.start()
        return self.engine

    def supervise(self) -> str | None:
        """As an init system would: what has died is started again."""
        for process in [self.server, *self.sites.values()]:
            process.keep_running()
        return None


class FlareWorld(World):
    """Our halves of FLARE's jobs without FLARE: a thread stands for a job."""

    def __init__(self, root: Path, plan: Plan, names: tuple[str, ...] = ("a", "b", "c")) -> None:
        super().__init__(root, plan, names)
        self._jobs: dict[str, socket.socket] = {}

    def transport(self) -> JobSocket:
        jobs = self.job_socket = JobSocket(self.root / "relay.sock", DIM)
        jobs.start()
        return jobs

    def start(self, name: str, *more, **options) -> Daemon:
        daemon = super().start(name, *more, **options)
        self.connect(name)
        return daemon

    def connect(self, name: str) -> socket.socket:
        """What a job does once both of its processes run."""
        from veilstream.federation.transports.flare import veilstream_relay as relay

        job = self._jobs[name] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        job.connect(str(self.job_socket.path))
        calls = SimpleNamespace(
            round=lambda request: relay.ask(str(self.socket(name)), request),
            ping=lambda: relay.ANSWERED,
        )
        site = _Site(name, calls)
        threading.Thread(target=relay.carry, args=(job, site, lambda: False), daemon=True).start()
        return job

    def stop(self, name: str) -> None:
        if name in self._jobs:
            job = self._jobs.pop(name)
            job.shutdown(socket.SHUT_RDWR)
        super().stop(name)

    def close(self) -> None:
        super().close()
        if hasattr(self, "job_socket"):
            self.job_socket.close()


class _Site:
    """As FLARE's proxy of a site."""

    def __init__(self, name: str, calls: SimpleNamespace) -> None:
        self.name, self._calls = name, calls

    def __call__(self, *, timeout: float) -> SimpleNamespace:
        return self._calls
