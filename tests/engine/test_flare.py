"""Over FLARE: the model that the ledgers imply, whoever is killed; no learner's file is read.

FLARE is real: its server and a site for each learner, by their own scripts and under accounts of
their own. FLARE answers orders that it should not; what a test shows is that they lead nowhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from studies.parity import SEED, GivenNoise, parity_plan, simulate

pytest.importorskip("nvflare", exc_type=ImportError)

from tests.support import flare as support
from tests.support import flare_attack
from tests.support.federation import DIM, World, plan_of, serve, wait_for
from tests.support.flare import ROOT, FlareWorld
from veilstream.deployment.release import decode
from veilstream.errors import InputError, MissingExtra
from veilstream.federation.flare import FlareServer, jobs, provision
from veilstream.federation.flare.jobs import Jobs, export
from veilstream.federation.flare.local import LocalFlare, interpreter
from veilstream.federation.flare.provisioning import ADMIN
from veilstream.federation.keys.identity import ServerKeys, add_learner, make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.protocol.messages import Reply
from veilstream.federation.protocol.transport import Failure
from veilstream.federation.server.coordinator import Coordinator
from veilstream.plans.data_source import PlanSource
from veilstream.plans.tasks import task_of

NAMES = ("a", "b")
PLAN = plan_of(rounds=34, learners=2)
SOON_S = 90.0
FIRST_ACCOUNT = 61384  # not those of a demo that may run beside this
needs_root = pytest.mark.skipif(not ROOT, reason="only root can start processes of other accounts")


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
    """Two learners and a server over FLARE, for all tests of this file: it takes long to start.

    FLARE's server and the site of b belong to attackers.
    """

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.world = stack.enter_context(World(root / "learners", PLAN, NAMES))
        self.keys = root / "learners/keys"
        flare = support.Federation(root, self.keys, NAMES, DIM, first_account=FIRST_ACCOUNT, hostile=("server", "b"))
        self.flare = flare.processes
        self.world.socket = self.flare.socket
        self.world.start_all()
        self.data = root / "learners/a/records.csv"
        self.data.write_text("age,income\n41,52000\n")
        self.data.chmod(0o600)
        self.coordinator = self.world.coordinator()
        self.transport = Recorded(flare.start(stack))
        wait_for(lambda: self.transport.nodes() == set(NAMES), SOON_S)

    def rounds(self, count: int) -> None:
        self.coordinator.go(self.transport, until=self.coordinator.round + count)

    def secrets(self) -> list[Path]:
        """What of learner a an attacker would like to read."""
        keys = self.keys / "learners/a"
        return [self.world.store("a"), keys / "identity.key", keys / "tls.key", self.data]

    def site_key(self) -> Path:
        """What belongs to the site's account anyway."""
        return self.flare.home("a") / "kit/startup/client.key"


@pytest.fixture(scope="module")
def federation():
    # Not in pytest's own folder, which no other account may enter.
    with tempfile.TemporaryDirectory(prefix="flare-") as folder, ExitStack() as stack:
        yield Federation(Path(folder), stack)


# --- kits ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("k") / "keys"
    make_keys(folder, ["127.0.0.1"], ["a"])
    provision(folder, "127.0.0.1", 8400)
    return folder


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]}


def test_a_kit_for_each_account_and_for_its_owner_only(keys):
    for kit in ("flare/server", "server/flare", "flare/sites/a"):
        assert (keys / kit / "startup/rootCA.pem").exists()
        assert modes(keys / kit) == {0}
    assert modes(keys / "ca/flare") == {0}
    private = {path.read_text() for path in keys.rglob("*.key") if "flare" in path.parts}
    assert len(private) == 3  # server, administrator, site: one each
    ca = json.loads((keys / "ca/flare/veilstream/state/cert.json").read_text())["root_pri_key"]
    leaving = [path for path in keys.rglob("*") if path.is_file() and "ca" not in path.parts]
    assert not [path for path in leaving if ca in path.read_text()]
    assert not list(keys.rglob("prod_*"))


def test_a_learners_keys_and_its_sites_kit_have_nothing_in_common(keys):
    ours = {path.read_bytes() for path in (keys / "learners/a").rglob("*") if path.is_file()}
    theirs = {path.read_bytes() for path in (keys / "flare/sites/a").rglob("*") if path.is_file()}
    assert ours
    assert theirs
    assert not ours & theirs
    assert not list((keys / "learners").rglob("*flare*"))


def test_provisioning_again_adds_a_learner_and_changes_nobody_else(keys):
    before = {path: path.read_bytes() for path in keys.rglob("*.crt")}
    assert before
    add_learner(keys, "late")
    provision(keys, "localhost", 8400)
    assert {path: path.read_bytes() for path in before} == before
    assert (keys / "flare/sites/late/startup/client.crt").exists()


def test_a_new_name_of_the_server_is_added_to_its_certificate(keys):
    from cryptography import x509

    provision(keys, "fl.example.org", 8400)
    pem = (keys / "flare/server/startup/server.crt").read_bytes()
    found = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName)
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
        FlareServer(tmp_path / "keys/server", tmp_path / "engine", ("127.0.0.1", 1), dim=DIM)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"veilstream\[flare\]"):
        provision(tmp_path / "keys", "127.0.0.1", 8400)


def test_insecure_is_loopback_only(keys, tmp_path):
    with pytest.raises(InputError, match="loopback"):
        FlareServer(keys / "server", tmp_path, ("0.0.0.0", 8400), dim=DIM, insecure=True)


# --- what is imported ----------------------------------------------------------------------------


def imported(module: str, *path: Path) -> set[str]:
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]}; import {module}\n"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code + "print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(out.stdout.split())


def test_our_own_process_does_not_load_flare():
    for module in ("server", "jobs", "provisioning", "local"):
        assert "nvflare" not in imported(f"veilstream.federation.flare.{module}")


def test_a_job_brings_the_relay_and_the_relay_needs_nothing_of_ours(tmp_path):
    job = export("a", tmp_path)
    meta = json.loads((job / "meta.json").read_text())
    assert sorted(meta["deploy_map"].values()) == [["a"], ["server"]]
    for part in ("app_a", "app_server"):
        assert [path.name for path in (job / part / "custom").iterdir()] == ["veilstream_relay.py"]
        loaded = imported("veilstream_relay", job / part / "custom")
        assert not {name for name in loaded if name.startswith("veilstream.")}
        assert not loaded & {"veilstream", "jax", "scipy"}


# --- jobs ----------------------------------------------------------------------------------------


class Session:
    """As FLARE's, with a few answers."""

    def __init__(self) -> None:
        self.sites: dict[str, str] = {}
        self.jobs: dict[str, str] = {}
        self.submitted: list[str] = []
        self.aborted: list[str] = []

    def get_system_info(self):
        return type("Info", (), {"client_info": [type("C", (), {"name": n}) for n in self.sites]})

    def get_client_job_status(self, names):
        return [{"client_name": n, "status": self.sites[n]} for n in names if self.sites[n]]

    def list_jobs(self, name_prefix):
        return [{"job_name": name, "job_id": f"id of {name}", "status": status} for name, status in self.jobs.items()]

    def submit_job(self, path):
        self.submitted.append(Path(path).name)
        self.jobs[Path(path).name] = "SUBMITTED"

    def abort_job(self, job):
        self.aborted.append(job)


def test_a_job_for_each_idle_learner_that_answers_and_for_nobody_else(tmp_path):
    session = Session()
    session.sites = {"a": "no_jobs", "b": "busy", "dead": "", "stranger": "no_jobs"}
    session.jobs = {"veilstream-a": "FINISHED:EXECUTION_EXCEPTION", "veilstream-b": "RUNNING"}
    watched = Jobs(session, tmp_path)
    watched.look(["a", "b", "dead", "absent"])
    watched.look(["a", "b", "dead", "absent"])
    assert session.submitted == ["veilstream-a"]


def test_a_job_without_a_worker_is_ended_but_not_one_that_is_starting(tmp_path, monkeypatch):
    session, clock = Session(), [0.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: clock[0])
    session.sites = {"a": "no_jobs", "b": "no_jobs"}
    session.jobs = {"veilstream-a": "RUNNING", "veilstream-b": "DISPATCHED"}
    watched = Jobs(session, tmp_path)
    for clock[0] in (0.0, 4.0, 5.5):
        watched.look(["a", "b"])
    assert session.aborted == ["id of veilstream-a"]
    assert not session.submitted


# --- the socket of jobs, without FLARE -----------------------------------------------------------


def test_the_newest_job_of_a_site_counts_and_what_the_old_one_had_has_failed(tmp_path):
    with FlareWorld(tmp_path, PLAN, NAMES) as world:
        transport = world.transport()
        world.connect("a")
        wait_for(lambda: transport.nodes() == {"a"})
        first = world._jobs["a"]
        world.connect("a")
        wait_for(lambda: "can be reached" in str(transport.supervise()))
        wait_for(lambda: first.recv(1) == b"")
        assert transport.nodes() == {"a"}
        transport.send("a", b"hello")  # no daemon is there
        found = []
        wait_for(lambda: found.extend(transport.receive(0.1)) or found)
        assert [(node, type(what)) for node, what in found] == [("a", Failure)]


# --- rounds --------------------------------------------------------------------------------------


def test_rounds_go_and_all_releases_have_one_size(federation):
    federation.rounds(10)
    assert federation.coordinator.round == 10
    releases = [data for _, data in federation.transport.replies if b'"kind":"release"' in data]
    assert len(releases) == 20
    assert len({len(data) for data in releases}) == 1


def test_released_models_equal_the_simulations(federation, tmp_path):
    """Other learners behind the same sites, with the simulation's draws."""
    rounds, tau = 6, 3
    plan = parity_plan(["buffered"], tau, rounds)
    expected = simulate(plan, tmp_path / "simulated")["buffered"]
    for name in NAMES:
        federation.world.stop(name)
    with ExitStack() as stack:
        for place, name in enumerate(NAMES):
            store = tmp_path / name / "s.db"
            learner = GivenNoise.at(place)(plan, store, task_of(plan), create=True)
            daemon = Daemon(learner, federation.world.keys_of(name), PlanSource(plan, place))
            stack.callback(daemon.close)
            stack.callback(serve(daemon, federation.flare.socket(name)).close)
        keys = ServerKeys.load(federation.keys / "server")
        x0 = np.asarray(task_of(plan).init(SEED), np.float32)
        coordinator = Coordinator(plan, x0, keys, tmp_path / "run")
        coordinator.go(federation.transport.transport)
        models = np.array([coordinator.models.read(r) for r in range(rounds + 1)])
    federation.world.start_all()
    # As in `test_parity`: a unit a step for gradients, half a unit for noise.
    method = plan.methods[0]
    sizes = method.step_size * method.server_step_size
    allowed = 2 * coordinator.terms.grid.step * sizes * rounds * tau + 1e-6
    np.testing.assert_allclose(models, expected.models, atol=allowed)
    assert np.abs(models[-1]).max() > 100 * allowed


# --- attacks: orders are answered, and no file of the learner is read -----------------------------


def check(answers: dict[str, list[str]], federation: Federation) -> None:
    """The attack works, since the site's own key is read; and the learner's files are not."""
    key = federation.site_key()
    assert all(key.read_text().strip() in answer for answer in answers.pop(str(key)))
    assert answers.keys() == {str(path) for path in federation.secrets()}
    for path, found in answers.items():
        secret = Path(path).read_bytes()
        for answer in found:
            assert "Permission denied" in answer, path
            assert not any(line in answer.encode() for line in secret.splitlines() if len(line) > 8)


def orders(federation: Federation) -> dict[str, object]:
    return {"site": "a", "files": [str(p) for p in (federation.site_key(), *federation.secrets())]}


@needs_root
@pytest.mark.parametrize("who", ["server", "b"])
def test_whoever_runs_flares_server_or_another_site_reads_no_file_of_a_learner(federation, who):
    home = federation.flare.home(who)
    (home / "orders.part").write_text(json.dumps(orders(federation)))
    (home / "orders.part").chmod(0o644)
    (home / "orders.part").rename(home / "orders.json")
    wait_for((home / "answers.json").exists, 30.0)
    check(json.loads((home / "answers.json").read_text()), federation)


HOSTILE = """
import subprocess
from nvflare.collab import collab

class Site:
    def __init__(self):
        pass
    @collab.publish
    def read(self, files):
        return {file: [_run("cat", file), _run("grep", "", file)] for file in files}

class Server:
    def __init__(self):
        pass
    @collab.main
    def run(self):
        import json
        (site,) = collab.clients
        asked = json.loads(open("ORDERS").read())
        with open("ANSWERS.part", "w") as file:
            json.dump(site(timeout=20).read(asked["files"]), file)
        import os
        os.rename("ANSWERS.part", "ANSWERS")

def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr
"""
SUBMIT = """
import sys
from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.flare_api import new_secure_session
user, kit, folder = sys.argv[1:]
sys.path.insert(0, folder)
import hostile
recipe = CollabRecipe("hostile", hostile.Server(), hostile.Site())
recipe.set_per_site_config({"a": {}})
recipe.export(folder + "/job")
session = new_secure_session(user, kit, timeout=10)
print(session.submit_job(folder + "/job/hostile"))
session.close()
"""


@needs_root
def test_a_job_that_brings_any_code_reads_no_file_of_a_learner(federation, tmp_path):
    home = federation.flare.home("server")
    (home / "job-orders").write_text(json.dumps(orders(federation)))
    (home / "job-orders").chmod(0o644)
    code = HOSTILE.replace("ORDERS", str(home / "job-orders"))
    (tmp_path / "hostile.py").write_text(code.replace("ANSWERS", str(home / "job-answers")))
    kit = federation.keys / "server/flare"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SUBMIT, ADMIN, str(kit), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out
    wait_for((home / "job-answers").exists, 40.0)
    check(json.loads((home / "job-answers").read_text()), federation)


# --- processes that die --------------------------------------------------------------------------


def worker(flare: LocalFlare) -> list[int]:
    return flare.processes["a"].workers()


def server_job(flare: LocalFlare) -> list[int]:
    return flare.processes["server"].workers()[:1]


def site(flare: LocalFlare) -> list[int]:
    return [flare.processes["b"].pid or 0]


def server(flare: LocalFlare) -> list[int]:
    return [flare.processes["server"].pid or 0]


@pytest.mark.parametrize(
    "victims", [worker, *(pytest.param(v, marks=pytest.mark.slow) for v in (server_job, site, server))]
)
def test_a_killed_process_costs_seconds_and_no_round(federation, victims):
    federation.rounds(1)
    done = federation.coordinator.round
    killed = victims(federation.flare)
    assert all(killed)
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    federation.rounds(4)
    assert time.monotonic() - began < SOON_S
    assert federation.coordinator.round == done + 4


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


@needs_root
def test_a_local_account_reads_no_file_of_a_learner_through_the_sites_listener(federation):
    """Last, since the site does not recover from it."""
    import psutil

    site = psutil.Process(federation.flare.processes["a"].pid)
    (port,) = (c.laddr.port for c in site.net_connections() if c.status == "LISTEN")
    script = federation.flare.home("a").parent / "attack.py"
    script.write_bytes(Path(flare_attack.__file__).read_bytes())
    script.chmod(0o644)
    python, environment = interpreter(local := FIRST_ACCOUNT + 50)
    out = subprocess.run(
        [str(python), "-W", "ignore", str(script), json.dumps(orders(federation) | {"port": port})],
        env=os.environ | environment,
        user=local,
        group=local,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    check(json.loads(out.stdout.partition("RESULT ")[2]), federation)


def test_an_interpreter_that_the_account_cannot_run_is_refused(monkeypatch, tmp_path):
    hidden = tmp_path / "bin/python"
    hidden.parent.mkdir(mode=0o700)
    hidden.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(hidden))
    monkeypatch.setattr(sys, "path", [str(hidden.parent / "site-packages")])
    hidden.parent.joinpath("site-packages").mkdir(mode=0o700)
    with pytest.raises(InputError, match="other accounts may run"):
        interpreter(61000)
