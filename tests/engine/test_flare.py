"""Over FLARE: the model that the ledgers imply, whoever is killed; nobody else gets in."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare", exc_type=ImportError)

from tests.support.federation import World, plan_of, wait_for
from veilstream.deployment.release import decode
from veilstream.errors import InputError, MissingExtra, ProtocolError
from veilstream.federation.addresses import free_port
from veilstream.federation.identity import add_learner, make_keys
from veilstream.federation.protocol.messages import Reply
from veilstream.federation.transports.flare import FlareNode, FlareServer, provision, workspace
from veilstream.federation.transports.flare.job import write_job
from veilstream.federation.transports.flare.names import ADMIN
from veilstream.federation.transports.flare.policy import (
    Job,
    Seen,
    abort_why,
    doubles,
    sites_to_start,
)
from veilstream.federation.transports.flare.process_tree import descendants

NAMES = ("a", "b")
PLAN = plan_of(rounds=34, learners=2)
SOON_S = 90.0


@contextmanager
def supervised(*parts):
    """Call `supervise` as the commands do."""
    said: list[str] = []
    stop = threading.Event()

    def work():
        while not stop.wait(0.5):
            said.extend(filter(None, (part.supervise() for part in parts)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield said
    finally:
        stop.set()
        thread.join()


class Recorded:
    """A transport that keeps what comes back."""

    def __init__(self, transport) -> None:
        self.transport, self.replies = transport, []
        self.nodes, self.send, self.close = transport.nodes, transport.send, transport.close

    def receive(self, timeout_s):
        found = self.transport.receive(timeout_s)
        self.replies += [(node, data) for node, data in found if isinstance(data, bytes)]
        return found


class Federation:
    """Two learners and a server over FLARE, for all tests of this file: it takes long to start."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.world = stack.enter_context(World(root, PLAN, NAMES)).start_all()
        self.keys, self.address = root / "keys", ("127.0.0.1", free_port())
        provision(self.keys, *self.address)
        self.coordinator = self.world.coordinator()
        self.server = FlareServer(self.keys / "server", root / "engine", self.address)
        stack.callback(self.server.close)
        self.server.start()
        self.nodes = {}
        for name in NAMES:
            node = self.nodes[name] = FlareNode(
                self.keys / "learners" / name, self.world.socket(name), root / f"{name}.engine",
                self.address,
            )  # fmt: skip
            stack.callback(node.close)
            node.start()
        self.said = stack.enter_context(supervised(self.server, *self.nodes.values()))
        self.transport = Recorded(self.server)

    def rounds(self, count: int) -> None:
        self.coordinator.go(self.transport, until=self.coordinator.round + count)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with ExitStack() as stack:
        yield Federation(tmp_path_factory.mktemp("f"), stack)


# --- kits ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_keys(folder, ["127.0.0.1"], ["a"])
    provision(folder, "127.0.0.1", 8400)
    return folder


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]}


def test_kits_are_where_they_are_needed_and_for_their_owner_only(keys):
    for kit in ("server/flare/server", "server/flare/admin", "learners/a/flare"):
        assert (keys / kit / "startup/rootCA.pem").exists()
        assert modes(keys / kit) == {0}
    assert modes(keys / "ca/flare") == {0}
    private = {path.read_text() for path in keys.rglob("*.key") if "flare" in path.parts}
    assert len(private) == 3  # server, admin, learner: one each
    ca = json.loads((keys / "ca/flare/veilstream/state/cert.json").read_text())["root_pri_key"]
    leaving = [*(keys / "server").rglob("*"), *(keys / "learners").rglob("*")]
    assert not [path for path in leaving if path.is_file() and ca in path.read_text()]
    assert not list(keys.rglob("prod_*"))
    assert not list(keys.rglob("*.sh"))


def test_provisioning_again_adds_a_learner_and_changes_nobody_else(keys):
    before = {path: path.read_bytes() for path in keys.rglob("*.crt")}
    assert before
    add_learner(keys, "late")
    provision(keys, "localhost", 8400)
    assert {path: path.read_bytes() for path in before} == before
    assert (keys / "learners/late/flare/startup/client.crt").exists()


def test_a_new_name_of_the_server_is_added_to_its_certificate(keys):
    from cryptography import x509

    provision(keys, "fl.example.org", 8400)
    pem = (keys / "server/flare/server/startup/server.crt").read_bytes()
    found = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert found.value.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(ip) for ip in found.value.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


@pytest.mark.parametrize("name", ["server", "root_cert"])
def test_names_that_flare_uses_itself_are_refused(tmp_path, name):
    make_keys(tmp_path / "keys", ["127.0.0.1"], [name])
    with pytest.raises(InputError, match="learner"):
        provision(tmp_path / "keys", "127.0.0.1", 8400)


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"])
    with pytest.raises(InputError, match="veilstream keys make --engine flare"):
        FlareServer(tmp_path / "keys/server", tmp_path / "engine", ("127.0.0.1", 1))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"veilstream\[flare\]"):
        provision(tmp_path / "keys", "127.0.0.1", 8400)


def test_insecure_is_loopback_only(keys, tmp_path):
    with pytest.raises(InputError, match="loopback"):
        FlareServer(keys / "server", tmp_path, ("0.0.0.0", 8400), insecure=True)
    with pytest.raises(InputError, match="loopback"):
        FlareNode(
            keys / "learners/a", tmp_path / "s", tmp_path, ("example.org", 8400), insecure=True
        )


# --- what is imported ----------------------------------------------------------------------------


def imported(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return set(out.stdout.split())


def test_our_own_process_does_not_load_flare():
    for module in ("server", "node", "job_manager", "provisioning"):
        assert "nvflare" not in imported(f"veilstream.federation.transports.flare.{module}")


def test_a_relay_loads_nothing_of_the_learner():
    loaded = imported("veilstream.federation.transports.flare.relay_site")
    ours = {name for name in loaded if name.startswith("veilstream")}
    flare = "veilstream.federation.transports.flare"
    assert ours == {
        "veilstream", "veilstream.federation", "veilstream.federation.protocol",
        "veilstream.federation.protocol.frames", "veilstream.federation.transports", flare,
        f"{flare}.names", f"{flare}.exit_with_parent", f"{flare}.relay_site",
    }  # fmt: skip
    assert not loaded & {"jax", "scipy"}


# --- when a job is started anew ------------------------------------------------------------------


def test_a_job_waits_for_all_then_for_those_who_are_there():
    seen = Seen(frozenset("abc"))
    assert not sites_to_start(seen, frozenset(), 0.0)
    assert not sites_to_start(seen, frozenset("ab"), 1.0)
    assert sites_to_start(seen, frozenset("abc"), 2.0) == frozenset("abc")
    assert not sites_to_start(seen, frozenset("ab"), 10.0)
    assert sites_to_start(seen, frozenset("ab"), 12.0) == frozenset("ab")


def test_a_running_job_is_given_up_only_for_one_that_could_join():
    seen = Seen(frozenset("abc"), frozenset("abc"), frozenset("ab"), connected=2.0)
    job = Job("j", frozenset("ab"), 0.0)
    assert abort_why(seen, job, 3.0, lambda sites: frozenset()) is None  # c is dead, or busy
    assert "c can" in str(abort_why(seen, job, 3.0, lambda sites: sites))  # now all are there
    seen.known = frozenset("abcd")
    assert abort_why(seen, job, 3.0, lambda sites: sites) is None  # more may come
    assert "c can" in str(abort_why(seen, job, 30.0, lambda sites: sites))
    seen.reached = frozenset("abc")
    assert abort_why(seen, job, 30.0, lambda sites: sites) is None
    seen.connected, seen.lost = None, 30.0
    assert abort_why(seen, job, 31.0, lambda sites: sites) is None
    assert "lost" in str(abort_why(seen, job, 35.0, lambda sites: sites))
    later = Job("k", frozenset("ab"), 36.0)
    assert abort_why(seen, later, 60.0, lambda sites: sites) is None
    assert "start" in str(abort_why(seen, later, 200.0, lambda sites: sites))


def test_two_learners_with_one_kit_are_noticed_once():
    seen = Seen(frozenset("ab"), reached=frozenset("ab"), doubted={"a": 0.0, "b": 0.0})
    assert not doubles(seen, 1.0)
    seen.reached = frozenset("a")  # b was only started again
    assert doubles(seen, 20.0) == frozenset("a")
    assert not doubles(seen, 30.0)


# --- rounds --------------------------------------------------------------------------------------


def test_rounds_go_and_all_releases_have_one_size(federation):
    federation.rounds(10)
    assert federation.coordinator.round == 10
    releases = [data for _, data in federation.transport.replies if b'"kind":"release"' in data]
    assert len(releases) == 20
    assert len({len(data) for data in releases}) == 1


def worker(federation):
    return descendants(federation.nodes["a"].pid)


def server_job(federation):
    return descendants(federation.server.pid)


def site_and_worker(federation):
    return [federation.nodes["b"].pid, *descendants(federation.nodes["b"].pid)]


def server(federation):
    return [federation.server.pid]


@pytest.mark.parametrize(
    "victims",
    [
        worker,
        *(pytest.param(v, marks=pytest.mark.slow) for v in (server_job, site_and_worker, server)),
    ],
)
def test_a_killed_process_costs_seconds_and_no_round(federation, victims):
    federation.rounds(1)
    done = federation.coordinator.round
    killed = victims(federation)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    federation.rounds(4)
    assert time.monotonic() - began < SOON_S
    assert federation.coordinator.round == done + 4


def test_a_stranger_is_refused_at_once(federation, tmp_path):
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"])
    provision(tmp_path / "keys", *federation.address)
    strange = tmp_path / "keys/learners/a"
    began = time.monotonic()
    with pytest.raises(ProtocolError, match="our CA did not sign"):
        FlareNode(strange, tmp_path / "s", tmp_path / "e", federation.address).start()
    # One that accepts the server, and is not accepted by it.
    ours = federation.keys / "learners/a/flare/startup/rootCA.pem"
    shutil.copy(ours, strange / "flare/startup/rootCA.pem")
    with pytest.raises(ProtocolError, match="does not accept our certificate"):
        FlareNode(strange, tmp_path / "s", tmp_path / "e", federation.address).start()
    assert time.monotonic() - began < 10.0


def test_a_server_by_another_name_is_refused(federation, tmp_path):
    keys = federation.keys / "learners/a"
    with pytest.raises(ProtocolError, match="another name"):
        FlareNode(keys, tmp_path / "s", tmp_path / "e", ("127.1", federation.address[1])).start()


def test_a_server_that_is_not_there_yet_is_waited_for(federation, tmp_path):
    keys = federation.keys / "learners/a"
    node = FlareNode(keys, tmp_path / "s", tmp_path / "e", ("127.0.0.1", free_port()))
    node.start()
    assert "cannot be reached" in str(node.supervise())
    assert node.pid is None
    node.close()


def test_everything_is_written_where_it_belongs(federation):
    root = federation.world.root
    rules = json.loads((root / "engine/server/local/resources.json").read_text())
    assert str(root) in rules["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"]
    assert list((root / "engine/server/jobs").iterdir())
    keys = [path for path in root.rglob("*.key") if not path.is_symlink()]
    assert all(federation.keys in path.parents for path in keys)
    assert (root / "engine").stat().st_mode & 0o777 == 0o700
    assert (root / "engine/relay.sock").stat().st_mode & 0o777 == 0o600


def test_the_model_is_the_one_that_the_ledgers_imply(federation):
    federation.rounds(PLAN.learning.rounds)
    assert federation.coordinator.finished
    model = federation.coordinator.models.read(PLAN.learning.rounds)
    federation.world.close()
    np.testing.assert_allclose(model, federation.world.model_by_ledgers(), rtol=0, atol=1e-5)
    payloads: dict[tuple[str, int], set[bytes]] = {}
    for node, data in federation.transport.replies:
        reply = Reply.read(data, federation.world.keys_of(node).identity.public)
        if reply.kind == "release":
            payloads.setdefault((node, decode(reply.body).round), set()).add(reply.body)
    assert len(payloads) == 2 * PLAN.learning.rounds
    assert all(len(bodies) == 1 for bodies in payloads.values())


# --- a job from elsewhere ------------------------------------------------------------------------

SUBMIT = """
import sys, time
from nvflare.fuel.flare_api.flare_api import new_secure_session
user, kit, job = sys.argv[1:]
session = new_secure_session(user, kit, timeout=30)
until = time.time() + 30
while not session.get_system_info().client_info and time.time() < until:
    time.sleep(0.2)
try:
    job = session.submit_job(job)
    while not str(session.get_job_status(job)).startswith("FINISHED") and time.time() < until:
        time.sleep(0.2)
    meta = session.get_job_meta(job)
    print("ended", meta["status"], meta.get("job_deploy_detail"))
finally:
    session.close()
"""


def test_a_job_that_brings_code_is_refused_by_the_site(tmp_path, monkeypatch):
    """Even if the server would let it pass."""
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"])
    address = ("127.0.0.1", free_port())
    provision(tmp_path / "keys", *address)
    with monkeypatch.context() as patch, ExitStack() as stack:
        rights = {"project_admin": "any"}
        careless = {"format_version": "1.0", "permissions": rights}
        patch.setattr(workspace, "_AUTHORIZATION", careless)
        server = FlareServer(tmp_path / "keys/server", tmp_path / "engine", address)
        stack.callback(server.close)
        patch.undo()
        server._server.start()  # without its job manager
        node = FlareNode(tmp_path / "keys/learners/a", tmp_path / "s", tmp_path / "a", address)
        stack.callback(node.close)
        node.start()
        wait_for(lambda: node.supervise() is not None and node.pid is not None, 30.0)
        job = write_job(tmp_path / "job", ["a"])
        proof = tmp_path / "proof"
        (job / "app/custom").mkdir()
        (job / "app/custom/evil.py").write_text(f"open({str(proof)!r}, 'w')\n")
        out = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SUBMIT, ADMIN, str(tmp_path / "engine/admin"),
             str(job)],
            capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert "ended FINISHED" in out.stdout, out
        assert "COMPLETED" not in out.stdout
        assert "a: NVFLARE_ERROR: BYOC not permitted" in out.stdout
        assert not proof.exists()
