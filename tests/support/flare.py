"""FLARE for tests: real processes under accounts of their own; and a stand-in without FLARE."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from tests.support import flare_attack
from tests.support.federation import DIM, World
from veilstream.federation.addresses import free_port
from veilstream.federation.flare import FlareServer, provision
from veilstream.federation.flare.local import LocalFlare, interpreter
from veilstream.federation.flare.server import JobSocket
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.supervision import supervised
from veilstream.plans.plan import Plan

ROOT = os.geteuid() == 0


class Federation:
    """FLARE's processes, and our server's side on top; learners are somebody else's."""

    def __init__(
        self, root: Path, keys: Path, names: Sequence[str], dim: int, *, first_account: int, hostile: Sequence[str] = ()
    ) -> None:
        """``hostile``: who runs `flare_attack` in its process."""
        address = ("127.0.0.1", free_port())
        provision(keys, *address)
        root.chmod(0o711)  # FLARE's accounts must reach their own folders
        environments = {name: self._injected(root / f"inject-{name}") for name in hostile}
        self.processes = LocalFlare(
            root / "flare", keys, names, other_accounts=ROOT, first_account=first_account, environments=environments
        )
        self.engine = FlareServer(
            keys / "server", root / "engine", address, dim=dim, socket=self.processes.socket("server")
        )

    def start(self, stack: ExitStack) -> FlareServer:
        """To be ended with the stack."""
        stack.callback(self.engine.close)
        stack.callback(self.processes.close)
        self.processes.start()
        self.engine.start()
        stack.enter_context(supervised([self.engine, self.processes]))
        return self.engine

    @staticmethod
    def _injected(folder: Path) -> dict[str, str]:
        folder.mkdir()
        shutil.copy(flare_attack.__file__, folder / "sitecustomize.py")
        theirs = interpreter(1 if ROOT else None)[1].get("PYTHONPATH", "")
        return {"PYTHONPATH": f"{folder}:{theirs}"}


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
        from veilstream.federation.flare.jobs import relay_module

        relay = relay_module()
        job = self._jobs[name] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        job.connect(str(self.job_socket.path))
        calls = SimpleNamespace(
            round=lambda request: relay.ask(str(self.socket(name)), request), ping=lambda: relay.ANSWERED
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
