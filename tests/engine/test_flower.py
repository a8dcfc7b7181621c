"""Over stock Flower: SuperLink, SuperNodes and `flwr run`, each part under an account of its own.

One federation for all of these tests: Flower starts a process for every message, and its SuperNodes
look for messages every three seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from studies.parity import GivenNoise, parity_plan, simulate

from tests.support.flower import ACCOUNT, as_account, open_folder, reachable_python
from veilstream.deployment.terms import Terms
from veilstream.federation.flower.app_folder import write_app
from veilstream.federation.flower.carrier_socket import CarrierSocket
from veilstream.federation.flower.local import LocalFlower, socket_folder
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.protocol import frames
from veilstream.federation.server.checkpoint import ModelFile
from veilstream.plans.data_source import PlanSource
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of

pytestmark = pytest.mark.engine

ROUNDS, TAU = 3, 2
NAMES = ("a", "b")
SECRET = "someone's record"


@dataclass
class Federation:
    root: Path
    flower: LocalFlower
    sockets: dict[str, Path]
    carriers: dict[str, CarrierSocket]
    daemons: dict[str, Daemon]
    app: Path
    plan: object
    expected: np.ndarray
    separate: bool
    """Whether Flower's parts have accounts of their own."""

    def rounds(self) -> int:
        try:
            return (self.root / "run/rounds.csv").read_text().count("\n") - 1
        except OSError:
            return 0

    def wait_for_round(self, r: int, seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while self.rounds() < r:
            assert time.monotonic() < until, self.logs()
            time.sleep(0.1)

    def wait_for_end(self, run: str, seconds: float = 60.0) -> str:
        until = time.monotonic() + seconds
        while not (status := self.flower.status(run)).startswith("finished"):
            assert time.monotonic() < until, self.logs()
        return status

    def logs(self) -> str:
        return "".join(path.read_text()[-1500:] for path in (self.root / "flower").glob("*.log"))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    whole = {"federation.quorum": 1.0, "federation.deadline_s": 300.0}
    plan = Plan.parse(parity_plan(["buffered"], TAU, ROUNDS).to_toml(), whole)
    expected = simulate(plan, tmp_path_factory.mktemp("parity") / "run")["buffered"].models
    with open_folder() as root, ExitStack() as stack:
        make_keys(root / "keys", ["127.0.0.1"], list(NAMES))
        (root / "plan.toml").write_text(plan.to_toml())
        (root / "secrets").mkdir(mode=0o700)
        (root / "secrets/records.csv").write_text(SECRET)
        python = reachable_python(root)
        flower = LocalFlower(root / "flower", root / "keys", NAMES, other_accounts=python is not None, python=python)
        stack.callback(flower.close)
        server_keys = root / "server-keys"
        (root / "keys/server").rename(server_keys)
        (root / "keys/server").symlink_to(server_keys)
        sockets, carriers, daemons = {}, {}, {}
        (root / "sockets").mkdir(mode=0o711)
        for place, name in enumerate(NAMES):
            learner = GivenNoise.at(place)(plan, root / name / "s.db", task_of(plan), create=True)
            keys = LearnerKeys.load(root / "keys/learners" / name)
            daemon = daemons[name] = Daemon(learner, keys, PlanSource(plan, place), parts=learner.parts)
            stack.callback(daemon.close)
            folder = socket_folder(root / "sockets" / name, flower.accounts[name])
            carrier = carriers[name] = CarrierSocket(
                daemon.handle, folder / "s", dim=int(learner.settings["d"]), trust_own_account=python is None
            )
            stack.callback(carrier.close)
            carrier.start()
            sockets[name] = carrier.path
        flower.start()
        flower.give_to_server(server_keys)
        flower.give_to_server(root / "run")
        app = root / "app"
        write_app(app, plan=root / "plan.toml", keys=server_keys, out=root / "run")
        for name in NAMES:
            flower.start_supernode(name, sockets[name])
        yield Federation(root, flower, sockets, carriers, daemons, app, plan, expected, python is not None)


def test_models_equal_the_simulations_although_a_supernode_and_the_run_end(federation):
    flower = federation.flower
    first = flower.submit(federation.app)
    federation.wait_for_round(1)
    flower.supernodes["a"].end(10.0)
    flower.stop(first)
    assert federation.wait_for_end(first) == "finished:stopped"
    assert federation.rounds() < ROUNDS
    flower.start_supernode("a", federation.sockets["a"])
    second = flower.submit(federation.app)
    assert federation.wait_for_end(second, 120.0) == "finished:completed", federation.logs()
    plan, task = federation.plan, task_of(federation.plan)
    models = ModelFile(federation.root / "run/models.f32", task.dim)
    found = np.array([models.read(r) for r in range(ROUNDS + 1)])
    # As in test_parity.py.
    method, unit = plan.methods[0], Terms.of(plan, task.dim).grid.step
    allowed = 2 * unit * method.step_size * method.server_step_size * ROUNDS * TAU + 1e-6
    np.testing.assert_allclose(found, federation.expected, atol=allowed)
    assert np.abs(found[-1]).max() > 100 * allowed
    for daemon in federation.daemons.values():
        assert daemon.learner.round == ROUNDS


def test_nothing_is_installed_or_fetched(federation):
    text = federation.logs()
    assert "Installing app dependencies" not in text
    for home in (federation.root / "flower").iterdir():
        assert not [path for path in home.rglob("*") if path.name in (".venv", "uv.lock")]


HOSTILE = '''
"""An app as a malicious server submits it: whatever it can read, it sends back."""
import ctypes, glob, json, os, socket
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
import time

TARGETS = {targets!r}
SOCKETS = {sockets!r}
PID = {pid!r}
app = ClientApp()
server = ServerApp()


def tries():
    got, tried = [], 0
    for path in TARGETS:
        tried += 1
        for what in (lambda: open(path, "rb").read(1), lambda: os.listdir(path)):
            try:
                what()
                got.append(path)
            except (OSError, NotADirectoryError):
                pass
    for name in ("mem", "environ", "maps", "fd", "cwd", "root"):
        tried += 1
        path = "/proc/%d/%s" % (PID, name)
        try:
            if name == "mem":
                open(path, "rb")
            elif name in ("environ", "maps"):
                open(path, "rb").read(1)
            elif name == "fd":
                os.listdir(path)
            else:
                os.listdir(path + "/")
            got.append(path)
        except OSError:
            pass
    tried += 1
    if ctypes.CDLL(None, use_errno=True).ptrace(16, PID, 0, 0) == 0:
        got.append("ptrace")
    answers = []
    for path in SOCKETS:
        for junk in (b"", b"cat /etc/passwd", b"VSM2" + bytes(200), b"\\xff" * 64):
            tried += 1
            try:
                with socket.socket(socket.AF_UNIX) as s:
                    s.settimeout(5)
                    s.connect(path)
                    s.sendall(len(junk).to_bytes(8, "little") + junk)
                    answers.append([path, s.recv(4096)[8:].hex()])
            except OSError as error:
                answers.append([path, type(error).__name__])
    return {{"uid": os.getuid(), "groups": os.getgroups(), "tried": tried, "got": got,
            "answers": answers}}


@app.query()
def attack(message, context):
    record = ConfigRecord({{"found": json.dumps(tries())}})
    return Message(RecordDict({{"r": record}}), reply_to=message)


@server.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    messages = [Message(RecordDict({{"r": ConfigRecord({{"n": i}})}}), n, MessageType.QUERY)
                for i, n in enumerate(nodes)]
    names, found = set(grid.push_messages(messages)), []
    while names:
        for reply in grid.pull_messages(list(names)):
            names.discard(reply.metadata.reply_to_message_id)
            found.append(json.loads(reply.content["r"]["found"]))
        time.sleep(0.1)
    found.append(dict(tries(), server=True))
    open({out!r} + ".new", "w").write(json.dumps(found))
    os.rename({out!r} + ".new", {out!r})
'''


def write_hostile_app(federation: Federation) -> Path:
    root = federation.root
    targets = [root / "secrets", root / "secrets/records.csv", root / "keys", root / "keys/ca"]
    targets += [root / "keys/ca/ca.key"]
    for name in NAMES:
        targets += [root / name, root / name / "s.db", root / name / "s.witness"]
        targets += [root / "keys/learners" / name / key for key in ("identity.key", "tls.key")]
    text = HOSTILE.format(
        targets=[str(target) for target in targets],
        sockets=[str(path) for path in federation.sockets.values()],
        pid=os.getpid(),
        out=str(root / "run/found.json"),
    )
    app = root / "hostile"
    (app / "hostile").mkdir(parents=True)
    (app / "hostile/__init__.py").write_text("")
    (app / "hostile/code.py").write_text(text)
    (app / "pyproject.toml").write_text(
        textwrap.dedent("""
        [project]
        name = "hostile"
        version = "1.0.0"
        description = "reads what it can"
        license = "Apache-2.0"
        dependencies = []
        [tool.flwr.app]
        publisher = "someone"
        [tool.flwr.app.components]
        serverapp = "hostile.code:server"
        clientapp = "hostile.code:app"
        """)
    )
    return app


def test_a_hostile_app_reads_nothing_of_a_learner(federation):
    if not federation.separate:
        pytest.skip("needs root, and a Python that other accounts can start")
    before = {name: daemon.learner.round for name, daemon in federation.daemons.items()}
    run = federation.flower.submit(write_hostile_app(federation))
    assert federation.wait_for_end(run) == "finished:completed", federation.logs()
    found = json.loads((federation.root / "run/found.json").read_text())
    uids = {each["uid"] for each in found}
    assert uids == {federation.flower.account, *federation.flower.accounts.values()}
    assert os.getuid() not in uids
    for each in found:
        assert each["got"] == []
        assert each["tried"] > 20
        for path, answer in each["answers"]:
            own = federation.flower.accounts[Path(path).parent.name] == each["uid"]
            if not own:  # another learner's SuperNode, and the server, do not get as far
                assert answer == "PermissionError"
            elif answer not in ("ConnectionResetError", "BrokenPipeError", "", "TimeoutError"):
                assert b'"kind":"refusal"' in bytes.fromhex(answer)
    notes = "".join(carrier.supervise() or "" for carrier in federation.carriers.values())
    assert "something that is not a request" in notes
    assert before == {name: daemon.learner.round for name, daemon in federation.daemons.items()}


def test_a_local_account_reads_nothing_and_does_not_reach_the_socket(federation):
    if not federation.separate:
        pytest.skip("needs root, and a Python that other accounts can start")
    for name in NAMES:
        for path in (
            federation.root / name / "s.db",
            federation.root / "keys/learners" / name / "identity.key",
            federation.root / "flower" / name / "node.key",
        ):
            assert path.exists()
            assert as_account(["/bin/cat", str(path)], ACCOUNT + 500).returncode != 0
        at = str(federation.sockets[name])
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({at!r})"
        done = as_account(["/usr/bin/python3", "-c", code], ACCOUNT + 500)
        assert "PermissionError" in done.stderr


def test_a_supernode_of_the_learners_own_account_is_refused(federation):
    if not federation.separate:
        pytest.skip("needs root, and a Python that other accounts can start")
    with pytest.raises(OSError, match=r"closed without an answer|reset|Broken pipe"):
        frames.ask(federation.sockets["a"], b"VSM2", 5.0)
    time.sleep(0.1)
    assert "learner's own account" in (federation.carriers["a"].supervise() or "")


def test_it_runs_in_flowers_simulation(tmp_path_factory):
    pytest.importorskip("ray", reason="Flower's simulation needs ray (flwr[simulation])")
    plan = parity_plan(["buffered"], TAU, ROUNDS)
    expected = simulate(plan, tmp_path_factory.mktemp("parity") / "run")["buffered"].models
    with open_folder() as root, ExitStack() as stack:
        make_keys(root / "keys", ["127.0.0.1"], list(NAMES))
        (root / "plan.toml").write_text(plan.to_toml())
        python = reachable_python(root)
        flower = LocalFlower(
            root / "flower", root / "keys", [], other_accounts=python is not None, python=python, simulation=True
        )
        stack.callback(flower.close)
        server_keys = root / "server-keys"
        shutil.copytree(root / "keys/server", server_keys)
        folder = socket_folder(root / "sockets", flower.account)
        for place, name in enumerate(NAMES):
            learner = GivenNoise.at(place)(plan, root / name / "s.db", task_of(plan), create=True)
            keys = LearnerKeys.load(root / "keys/learners" / name)
            daemon = Daemon(learner, keys, PlanSource(plan, place), parts=learner.parts)
            stack.callback(daemon.close)
            carrier = CarrierSocket(
                daemon.handle,
                folder / f"{place}.sock",
                dim=int(learner.settings["d"]),
                trust_own_account=python is None,
            )
            stack.callback(carrier.close)
            carrier.start()
        write_app(
            root / "app",
            plan=root / "plan.toml",
            keys=flower.give_to_server(server_keys),
            out=flower.give_to_server(root / "run"),
            sockets=folder,
        )
        flower.start()
        run = flower.submit(root / "app", "--federation-config", "num-supernodes=2")
        until = time.monotonic() + 180.0
        while not (status := flower.status(run)).startswith("finished"):
            assert time.monotonic() < until
        assert status == "finished:completed"
        models = ModelFile(root / "run/models.f32", task_of(plan).dim)
        np.testing.assert_allclose(models.read(ROUNDS), expected[-1], atol=1e-4)
        assert np.abs(expected[-1]).max() > 1e-2
