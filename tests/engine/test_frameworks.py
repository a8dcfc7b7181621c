"""One plan over every transport: the released models are the same to the bit under the same draws.

`studies.parity` gives the sites the simulation's draws; the simulation's own models agree as far as the grid's rounding
allows, as `test_parity.py` derives it. What carries the messages here is real: HTTP between processes, Flower's
simulation engine (Ray), a SuperLink with three SuperNodes, FLARE's simulator.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from studies.parity import GivenNoise, parity_plan, simulated_models

import veilstream as vs
from tests.support.flower import ROOT, Flower, write_app
from veilstream.deployment.ledger.inspect import verify
from veilstream.federation.addresses import free_port
from veilstream.federation.direct import DirectNode, DirectServer
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.server.coordinator import Coordinator
from veilstream.plans.data_source import PlanSource
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of

pytestmark = pytest.mark.engine

ROUNDS, TAU = 3, 2
NAMES = ("a", "b", "c")
flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed (extra flower)")
ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'flwr[simulation]')"
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    whole = {"learning.learners": len(NAMES), "federation.quorum": 1.0, "federation.deadline_s": 120.0}
    return Plan.parse(parity_plan(["buffered"], TAU, ROUNDS).to_toml(), whole)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    vs.make_keys(folder, ["127.0.0.1", "localhost"], list(NAMES))
    return folder


@pytest.fixture(scope="module")
def direct(plan, keys, tmp_path_factory) -> np.ndarray:
    """The last model over the direct transport, with its TLS and its daemons."""
    root = tmp_path_factory.mktemp("direct")
    with ExitStack() as stack:
        server = DirectServer(keys / "server", ("127.0.0.1", 0), dim=task_of(plan).dim)
        stack.callback(server.close)
        server.start()
        for place, name in enumerate(NAMES):
            learner = GivenNoise.at(place)(plan, root / name / "s.db", task_of(plan), create=True)
            own = keys / "learners" / name
            daemon = Daemon(learner, LearnerKeys.load(own), PlanSource(plan, place), parts=learner.parts)
            stack.callback(daemon.close)
            node = DirectNode(own, daemon.handle, ("127.0.0.1", server.port), dim=task_of(plan).dim)
            stack.callback(node.close)
            node.start()
        x0 = np.asarray(task_of(plan).init(plan.run.first_seed), np.float32)
        coordinator = Coordinator(plan, x0, ServerKeys.load(keys / "server"), root / "run")
        coordinator.go(server)
        return coordinator.models.read(ROUNDS)


def check(model: Path, direct: np.ndarray) -> None:
    loaded = vs.load(model)
    assert loaded.round == ROUNDS
    np.testing.assert_array_equal(loaded.parameters, direct)


def test_direct_is_the_simulations_model_to_the_grids_rounding(plan, direct):
    simulated = simulated_models(plan, [prepare(plan, plan.methods[0])])[0, -1]
    unit = vs.Server(plan, learners=NAMES).terms.grid.step
    method = plan.methods[0]
    allowed = 2 * unit * method.step_size * method.server_step_size * ROUNDS * TAU + 1e-6
    np.testing.assert_allclose(direct, simulated, atol=allowed)
    assert np.abs(direct).max() > 100 * allowed


def test_plain_http(plan, keys, direct, tmp_path):
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    port, here = free_port(), ROOT / "examples/http"
    settings = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    start = [sys.executable, "-m", "tests.support.given_sites"]
    commands = [[*start, here / "server.py", tmp_path / "plan.toml", keys / "server", tmp_path / "out", port]]
    for place, name in enumerate(NAMES):
        words = [tmp_path / "plan.toml", keys / "learners" / name, f"plan:{place}", tmp_path / f"{name}.db"]
        commands.append([*start, here / "site.py", *words, f"http://127.0.0.1:{port}"])
    processes = [subprocess.Popen([str(word) for word in command], env=settings, cwd=ROOT) for command in commands]
    try:
        assert [process.wait(120) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.wait()
    check(tmp_path / "out/model.npz", direct)


@flower
@ray
def test_flowers_simulation_engine(plan, keys, direct, tmp_path):
    more = {"learners": ",".join(NAMES), "out": str(tmp_path / "out"), "sites": str(tmp_path / "sites")}
    app = write_app(tmp_path / "app", plan, given=True, **more)
    here = Flower(tmp_path / "flower", keys, simulation=True)
    try:
        here.start().run(app, 300.0, "--federation-config", f"num-supernodes={len(NAMES)}")
    finally:
        here.close()
    check(tmp_path / "out/model.npz", direct)
    assert {verify(tmp_path / "sites" / name / "store.db").round for name in NAMES} == {ROUNDS}


@flower
def test_flowers_deployment(plan, keys, direct, tmp_path):
    """SuperLink and three SuperNodes with TLS, their own keys, and signed messages."""
    app = write_app(tmp_path / "app", plan, given=True, keys=str(keys / "server"), out=str(tmp_path / "out"))
    here = Flower(tmp_path / "flower", keys)
    try:
        here.start()
        for place, name in enumerate(NAMES):
            own = {"keys": str(keys / "learners" / name), "store": str(tmp_path / name / "store.db")}
            here.start_supernode(name, data=f"plan:{place}", new_store=True, **own)
        here.run(app, 400.0)
    finally:
        here.close()
    check(tmp_path / "out/model.npz", direct)
    assert {verify(tmp_path / name / "store.db").round for name in NAMES} == {ROUNDS}


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="FLARE is not installed (extra flare)")
def test_flares_simulator_with_three_sites(plan, direct, tmp_path):
    shutil.copytree(ROOT / "examples/flare", tmp_path / "job")
    script, given = tmp_path / "job/site_script.py", "from tests.support.given_sites import give\n\ngive()\n\n\n"
    text = script.read_text()
    assert "def open_site" in text
    script.write_text(text.replace("def open_site", given + "def open_site"))
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    settings = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "HOME": str(tmp_path)}
    words = [tmp_path / "job/job.py", tmp_path / "plan.toml", tmp_path / "out", "--names", ",".join(NAMES)]
    command = [str(word) for word in (sys.executable, *words)]
    done = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert (tmp_path / "out/model.npz").exists(), done.stdout[-4000:] + done.stderr[-4000:]
    check(tmp_path / "out/model.npz", direct)
    assert {verify(tmp_path / "out/sites" / name / "store.db").round for name in NAMES} == {ROUNDS}
