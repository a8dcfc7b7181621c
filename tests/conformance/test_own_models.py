"""Models of one's own, as docs/your-model.md has them: deployed, they are the simulation's."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from studies.parity import LEARNERS, SEED, GivenNoise, simulated_models

from tests.cli.test_plan import veilstream
from tests.engine.test_parity import streams_between
from tests.support.pages import blocks_in
from veilstream.errors import ProtocolError
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.server.coordinator import Coordinator
from veilstream.plans.data_source import PlanSource
from veilstream.plans.new_project import new_project
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of
from veilstream.runs.released_model import ReleasedModel

ROUNDS, TAU = 4, 3
NAMES = ("north", "south")
MODULES = ("jax_model", "torch_model", "dict_model")


def project(folder: Path, module: str) -> Path:
    """A new project with little data, two learners, and one of the page's models; its plan."""
    new_project(folder)
    (folder / "records/west.csv").unlink()
    for name in NAMES:
        lines = (folder / f"records/{name}.csv").read_text().splitlines()[:60]
        (folder / f"records/{name}.csv").write_text("\n".join(lines) + "\n")
    blocks = blocks_in("docs/your-model.md", "python")
    (code,) = [block for block in blocks if block.startswith(f"# {module}.py\n")]
    (folder / f"{module}.py").write_text(code)
    text = (folder / "plan.toml").read_text()
    for key, value in {"rounds": ROUNDS, "local_steps": TAU, "learners": LEARNERS}.items():
        text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.MULTILINE)
    text = text.replace('task = "logistic"', f'task = "{module}:make_task"')
    if module == "dict_model":
        features = text.index("# Columns that predict")
        text = text[:features] + 'encode = "dict_model:encode"\n' + text[text.index("[privacy]") :]
    text = text[: text.rindex("[[methods]]")].replace("averaging = 2.0", "")
    text = text.replace("seeds = 3", f'seeds = 1\nfirst_seed = {SEED}\nnoise = "host"\nregret = false')
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


@pytest.fixture
def plan(request, tmp_path, monkeypatch):
    if request.param == "torch_model":
        pytest.importorskip("torch", reason="PyTorch is not installed: ./test --torch installs it")
    path = project(tmp_path / "mine", request.param)
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Plan.load(path)
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("plan", MODULES, indirect=True)
def test_a_model_of_ones_own_deploys_to_the_simulations_numbers(plan, tmp_path):
    """Over the direct transport, with the simulation's draws; TLS, keys and ledgers as always."""
    expected = simulated_models(plan, [prepare(plan, m) for m in plan.methods])[0]
    make_keys(tmp_path / "keys", ["127.0.0.1", "localhost"], list(NAMES))
    with ExitStack() as stack:
        daemons = {}
        for place, name in enumerate(NAMES):
            store = tmp_path / name / "s.db"
            learner = GivenNoise.at(place)(plan, store, task_of(plan), create=True)
            keys = LearnerKeys.load(tmp_path / "keys/learners" / name)
            daemons[name] = Daemon(learner, keys, PlanSource(plan, place), parts=learner.parts)
            stack.callback(daemons[name].close)
        x0 = np.asarray(task_of(plan).init(SEED), np.float32)
        keys = ServerKeys.load(tmp_path / "keys/server")
        coordinator = Coordinator(plan, x0, keys, tmp_path / "run", task=task_of(plan))
        coordinator.go(streams_between(tmp_path, daemons, len(x0), stack))
        models = np.array([coordinator.models.read(r) for r in range(ROUNDS + 1)])
    # A gradient is rounded towards zero, so a prefix is at most one unit a step off, and half a
    # unit for its noise; the local models, and with them the gradients, follow these differences.
    unit, method = coordinator.terms.grid.step, plan.methods[0]
    allowed = 4 * unit * method.step_size * ROUNDS * TAU + 2e-6
    np.testing.assert_allclose(models, expected, atol=allowed)
    assert np.abs(models[-1] - models[0]).max() > 1000 * allowed


@pytest.mark.process
@pytest.mark.parametrize("plan", MODULES, indirect=True)
def test_a_model_of_ones_own_deploys_from_the_command_line(plan):
    """Processes of their own, real draws: everyone takes part, and a model comes out."""
    done = veilstream("federation", "demo", "--plan", "plan.toml", "--out", "demo", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["learners"], result["rounds"]) == (LEARNERS, ROUNDS)
    assert result["clients"] == LEARNERS * ROUNDS * TAU
    assert result["scores"]["metric"] == "accuracy"
    released = ReleasedModel.load(result["model"])
    task = task_of(plan)
    assert len(released.model) == task.dim
    assert not np.array_equal(released.model, np.asarray(task.init(0), np.float32))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dict_model"], indirect=True)
def test_a_model_of_ones_own_deploys_over_flower(plan):
    pytest.importorskip("flwr")
    with tempfile.TemporaryDirectory(prefix="vs-") as out:  # a socket's path must be short
        options = ["--transport", "flower", "--trust-carrier", "--out", out, "--json"]
        done = veilstream("federation", "demo", "--plan", "plan.toml", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clients"] == LEARNERS * ROUNDS * TAU


def test_the_pages_record_by_record_example_runs(capsys):
    blocks = blocks_in("docs/your-model.md", "python")
    (code,) = [block for block in blocks if block.startswith("import veilstream as vs\n")]
    exec(compile(code, "docs/your-model.md", "exec"), {})
    assert "PrivateModel(simulated, protects no one: 300 of 300 steps)" in capsys.readouterr().out


def test_the_pages_example_in_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_in("docs/your-model.md", "python")
    (code,) = [block for block in blocks if block.startswith("import numpy")]
    exec(compile(code, "docs/your-model.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[0]) > 0.8


@pytest.mark.parametrize("plan", ["dict_model"], indirect=True)
def test_sides_with_other_code_do_not_train_together(plan, tmp_path):
    from veilstream.deployment.learner import Learner

    make_keys(tmp_path / "keys", ["127.0.0.1", "localhost"], list(NAMES))
    x0 = np.asarray(task_of(plan).init(0), np.float32)
    keys = ServerKeys.load(tmp_path / "keys/server")
    coordinator = Coordinator(plan, x0, keys, tmp_path / "run", task=task_of(plan))
    Path("dict_model.py").write_text(Path("dict_model.py").read_text().replace("24.0", "12.0"))
    with ExitStack() as stack:
        daemons = {}
        for place, name in enumerate(NAMES):
            learner = Learner(plan, tmp_path / name / "s.db", task_of(plan), create=True)
            keys = LearnerKeys.load(tmp_path / "keys/learners" / name)
            daemons[name] = Daemon(learner, keys, PlanSource(plan, place))
            stack.callback(daemons[name].close)
        transport = streams_between(tmp_path, daemons, len(x0), stack)
        with pytest.raises(ProtocolError, match=r"different plans \(records.*sha256"):
            coordinator.go(transport)
        assert all(daemon.learner.round == 0 for daemon in daemons.values())
