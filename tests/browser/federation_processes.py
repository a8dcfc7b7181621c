"""`veilstream server --publish` and its learners as processes, to be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.support.federation import plan_of
from veilstream.federation.addresses import free_port
from veilstream.federation.keys.new_keys import make_keys

NAMES = ("north", "south")


def small_plan(rounds: int) -> str:
    federation = {"quorum": 0.5, "deadline_s": 2.0, "patience_s": 1.0}
    return plan_of(rounds=rounds, learners=len(NAMES), federation=federation).to_toml()


class Federation:
    """A round takes a third of a second, so that one can see them tick."""

    def __init__(self, root: Path, plan: str, names: tuple[str, ...] = NAMES) -> None:
        self.root, self.names = root, names
        self.port, self.listen = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}/live"
        (root / "plan.toml").write_text(plan)
        make_keys(root / "keys", ["127.0.0.1"], list(names))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, name: str, *words: str) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "veilstream", *words, "--plan", "plan.toml", "--insecure"],
                cwd=self.root,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def start_server(self) -> None:
        self._start(
            "server",
            "server",
            "--publish",
            "--out",
            "run",
            "--listen",
            f"127.0.0.1:{self.listen}",
            "--model-api",
            f"127.0.0.1:{self.port}",
        )
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(self.url, timeout=5) as answer:
                    assert answer.status == 200
                return
            except OSError:
                assert time.monotonic() < until, (self.root / "server.log").read_text()
                time.sleep(0.1)

    def start_learner(self, name: str, data: str | None = None, *options: str) -> None:
        self._start(
            name,
            "learner",
            "--keys",
            f"keys/learners/{name}",
            "--data",
            data or f"plan:{self.names.index(name)}",
            "--server",
            f"127.0.0.1:{self.listen}",
            "--new-store",
            *(options or ("--reply-after", "0.3")),
        )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)
