"""The real `veilstream server`: what its process has loaded, and what it sends to a thousand learners."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from studies.load import Fleet, Releases, plan_of

from veilstream.federation.addresses import free_port
from veilstream.federation.keys.identity import PrivateKey
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.federation.protocol.transport import Inbox
from veilstream.federation.server.process import ServerService

ROOT = Path(__file__).parents[2]
LEARNERS = 1000


def forbidden() -> list[str]:
    """What the import contract keeps from the server's side; and every framework and learner."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (ours,) = [c for c in contracts if c["name"].startswith("The server's side loads neither noise")]
    learners = ["veilstream.federation.learner", "veilstream.audit", "veilstream.deployment.ledger"]
    return [*ours["forbidden_modules"], *learners, "jax", "torch", "flwr", "matplotlib"]


def loaded(log: str) -> set[str]:
    """Modules in what `python -X importtime` wrote."""
    return set(re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", log, re.MULTILINE))


def found_in(modules: set[str]) -> set[str]:
    return {m for m in modules for no in forbidden() if m == no or m.startswith(f"{no}.")}


def test_help_loads_nothing_but_the_command_line():
    command = [sys.executable, "-X", "importtime", "-m", "veilstream", "server", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = loaded(done.stderr)
    assert "veilstream.cli.server" in modules
    assert not found_in(modules)
    assert not {m for m in modules if m.startswith(("veilstream.mechanisms", "veilstream.plans", "numpy"))}


def test_a_server_that_serves_to_the_end_has_loaded_neither_noise_nor_clients_data(tmp_path):
    """From its start over rounds, model API, live page and report to its end."""
    names = ["a", "b"]
    make_keys(tmp_path / "keys", ["127.0.0.1"], names)
    plan = plan_of(len(names), 20, 3)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    port = free_port()
    options = ["--plan", "plan.toml", "--out", "run", "--listen", f"127.0.0.1:{port}", "--exit-when-done"]
    live = ["--model-api", "127.0.0.1:0", "--publish"]
    command = [sys.executable, "-X", "importtime", "-m", "veilstream", "server", *options, *live]
    fleet = Fleet(tmp_path / "keys", names, Releases(plan))
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        asyncio.run(answer_until_it_ends(fleet, port, server))
    finally:
        server.kill()
        server.wait()
    told = (tmp_path / "log").read_text()
    assert server.returncode == 0, told[-2000:]
    assert (tmp_path / "run/report.html").exists()
    modules = loaded(told)
    assert {"veilstream.federation.server.coordinator", "veilstream.reports.live_federation"} <= modules
    assert not found_in(modules)


async def answer_until_it_ends(fleet: Fleet, port: int, server: subprocess.Popen[bytes]) -> None:
    answering = asyncio.create_task(fleet.run(port))
    while server.poll() is None:
        await asyncio.sleep(0.05)
        if answering.done():
            await answering  # a defect of ours
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


class Thousand:
    """The server's side of a transport: a thousand learners answer at once, in this process."""

    def __init__(self, releases: Releases, identities: dict[str, PrivateKey], server: PrivateKey) -> None:
        self._releases, self._identities, self._server = releases, identities, server
        self._places = {name: place for place, name in enumerate(identities)}
        self._inbox = Inbox()
        self.heads: list[bytes] = []
        self.bodies: dict[int, dict[int, bytes]] = {}
        """By round, the body objects that were sent."""

    def start(self) -> None: ...

    def supervise(self) -> None: ...

    def close(self) -> None: ...

    def nodes(self) -> set[str]:
        return set(self._identities)

    def receive(self, timeout_s: float):
        return self._inbox.receive(timeout_s)

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        request, identity = Request.read(head + body, self._server.public), self._identities[node]
        if request.kind == "enrol":
            settings = self._releases.settings
            facts = {"epoch": 0, "round": 0, "daemon": node, "settings": settings, "time": int(time.time())}
            reply = Reply("enrolled", node, digest(head), facts)
        elif request.kind == "end":
            reply = Reply("ended", node, digest(head), {"epoch": 0, "round": request.round})
        else:
            self.heads.append(head)
            self.bodies.setdefault(request.round, {})[id(body)] = body
            reply = Reply("release", node, digest(head), {}, self._releases.payload(self._places[node], request.round))
        self._inbox.put(node, reply.sign(identity))


def test_a_model_is_one_object_in_the_requests_to_a_thousand_learners(tmp_path):
    """Through what `veilstream server` builds around a transport, its counting included."""
    rounds = 2
    identities = {f"l{place:04d}": PrivateKey(place.to_bytes(32, "big")) for place in range(1, LEARNERS + 1)}
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "identity.key").write_text("07" * 32)
    (keys / "identity.key").chmod(0o600)
    known = ", ".join(f'"{name}": "{identity.public.raw.hex()}"' for name, identity in identities.items())
    (keys / "learners.json").write_text(f"{{{known}}}")
    plan = plan_of(LEARNERS, 50, rounds)
    releases = Releases(plan)
    transport = Thousand(releases, identities, PrivateKey(bytes([7] * 32)))
    service = ServerService(plan, keys, tmp_path / "run", ("127.0.0.1", 0), transport=transport, exit_when_done=True)
    done = service.run(stop=threading.Event())
    assert done.round == rounds
    assert {r: len(sent) for r, sent in transport.bodies.items()} == dict.fromkeys(range(rounds), 1)
    for r, sent in transport.bodies.items():
        (body,) = sent.values()
        assert body == releases.model(r).astype("<f4").tobytes()
    assert len(transport.heads) == len(set(transport.heads)) == rounds * LEARNERS
    assert max(map(len, transport.heads)) < 1000
    np.testing.assert_array_equal(done.models.read(rounds), releases.model(rounds))


@pytest.mark.parametrize("module", ["veilstream.mechanisms.normals", "veilstream.streams.tables", "jax"])
def test_what_was_loaded_would_be_found(module):
    log = f"import time:       120 |        120 |   {module}\nimport time: 1 | 2 | veilstream.errors\n"
    assert found_in(loaded(log)) == {module}
