"""The plans that ship: they load, prepare, travel with the package, and run in small."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

import veilstream as vs
from tests.support.interrupts import start_interruptible
from tests.test_package import SMALL_PLAN
from veilstream.errors import UnknownName
from veilstream.plans.experiments import FIGURES, experiment_path, figure_of, plan_path
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import main_method, prepare
from veilstream.research.experiment_figures import draw_experiment

ROOT = Path(__file__).parent.parent.parent
SHIPPED = sorted(path.stem for path in (ROOT / "experiments").glob("*.toml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_loads_and_its_methods_can_be_prepared(name):
    small: dict[str, object] = {"learning.rounds": 12}
    if name == "streams_health":  # five visits must fit
        small["privacy.min_separation"] = 2
    plan = Plan.load(experiment_path(name), small)
    assert plan.name == name
    assert plan.description
    prepared = [prepare(plan, method) for method in plan.methods]
    assert prepared[main_method(prepared)].guarantee is not None
    assert any(p.factorization is None for p in prepared)  # the noise-free baseline
    for p in prepared:
        assert (p.guarantee is None) == (p.plan.kind in ("noise-free", "gao", "undeclared"))


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_not_private_says_so_in_its_name(name):
    for method in Plan.load(experiment_path(name)).methods:
        assert ("NOT PRIVATE" in method.name) == (method.kind == "undeclared")


@pytest.mark.parametrize("name", ["fair", "streams"])
def test_a_figure_of_comparisons_runs_every_choice_of_the_log_once(name):
    with (ROOT / "docs" / "results" / "comparisons-log.csv").open(newline="") as file:
        log = [row for row in csv.DictReader(file) if row["local_steps"]]
    for folder, study, experiment in figure_of(name).studies:
        head = Plan.load(experiment_path(experiment))
        total = head.learning.rounds * head.learning.local_steps * head.learning.clients_per_step
        chosen = {(r["mechanism"], float(r["epsilon"]), r["held"] != ""): r for r in log if r["study"] == study}
        seen = set()
        for part, plan in figure_of(name).plans():
            if folder and not part.startswith(f"{folder}/"):
                continue
            learning = plan.learning
            met = learning.local_steps * learning.clients_per_step
            assert learning.rounds == total // met
            assert (plan.data, plan.privacy.delta) == (head.data, head.privacy.delta)
            for m in plan.methods:
                key = (m.mechanism_name or "none", m.epsilon or 0.0, "given" in m.name)
                row = chosen[key]
                seen.add(key)
                assert (met, learning.local_steps) == (int(row["clients"]), int(row["local_steps"]))
                assert m.local_step_size * m.server_step_size == pytest.approx(
                    float(row["step_size"]) * learning.learners**0.5
                )
                assert (m.clip_norm, m.step_decay) == (float(row["clip_norm"]), float(row["step_decay"]))
                for key_, value in (("averaging", m.averaging), ("newest_weight", m.newest_weight)):
                    assert value == (float(row[key_]) if row[key_] else None)
        assert seen | {("none", 0.0, True)} == set(chosen) | {("none", 0.0, True)}


def test_every_plan_travels_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    carried = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    chosen = {"docs/results/comparisons-log.csv": "veilstream/_experiments/comparisons-log.csv"}
    plans = {f"experiments/{name}.toml": f"veilstream/_experiments/{name}.toml" for name in SHIPPED}
    assert {place: to for place, to in carried.items() if "/_experiments/" in to} == plans | chosen


def test_plans_are_found_by_name_or_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan_path(Path("mnist_private")) == experiment_path("mnist_private")
    assert plan_path(Path("cnn.toml")) == Path("cnn.toml")
    (tmp_path / "cnn").write_text("mine")
    assert plan_path(Path("cnn")) == Path("cnn")
    with pytest.raises(UnknownName, match="did you mean 'logistic'"):
        plan_path(Path("logistics"))
    with pytest.raises(UnknownName, match="did you mean 'beyond'"):
        figure_of("beyon")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figures_plans_are_valid_in_full_and_in_small(name):
    full = dict(figure_of(name).plans({}, smoke=False))
    small = dict(figure_of(name).plans({}, smoke=True))
    if figure_of(name).studies:  # in small every comparison is one plan of all its methods
        assert len(small) == len(figure_of(name).studies)
        methods: dict[str, set[str]] = {}
        for part, plan in full.items():
            methods.setdefault(part.rpartition("/")[0], set()).update(m.name for m in plan.methods)
        assert {part.rpartition("/")[0]: {m.name for m in plan.methods} for part, plan in small.items()} == methods
        assert all(plan.learning.rounds == 8 and plan.run.seeds <= 2 for plan in small.values())
        return
    assert list(full) == list(small)
    assert len(full) == len(figure_of(name).variants)
    for folder, plan in small.items():
        steps = plan.learning.rounds * plan.learning.local_steps
        assert steps <= 240
        assert plan.run.seeds <= 2
        assert 2 <= len(plan.methods) <= len(full[folder].methods)
        assert plan.learning.task == full[folder].learning.task
        assert plan.learning.local_steps == full[folder].learning.local_steps


def test_the_cnn_figure_keeps_its_horizon_for_every_tau():
    full = dict(figure_of("cnn").plans({}, smoke=False))
    assert list(full) == ["tau-1", "tau-2", "tau-4"]
    for tau, plan in zip((1, 2, 4), full.values(), strict=True):
        assert plan.learning.local_steps == tau
        assert plan.learning.rounds * tau == 6000
        assert plan.run.evaluate_every * tau == 200


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("smoke", [False, True])
def test_what_is_asked_for_outweighs_the_figures_own_numbers(name, smoke):
    for _, plan in figure_of(name).plans({"learning.rounds": 7, "run.seeds": 5}, smoke=smoke):
        assert (plan.learning.rounds, plan.run.seeds) == (7, 5)


def test_figures_of_clip_norms_and_of_what_goes_beyond_are_drawn(tmp_path):
    """From a small run with names as in clip.toml; what is not private is called so in both."""
    base = {"mechanism": "tree", "step_size": 0.1}
    methods = [
        {"name": "noise-free, clip 0.1", "kind": "noise-free", "step_size": 0.1, "clip_norm": 0.1},
        {"name": "tree, clip 0.1", "clip_norm": 0.1} | base,
        {"name": "tree, clip 1", "clip_norm": 1.0} | base,
        {"name": "tree, NOT PRIVATE", "kind": "undeclared"} | base,
    ]
    plan = Plan(**tomllib.loads(SMALL_PLAN) | {"methods": methods})
    run = vs.run(plan, tmp_path / "run")
    for name in ("clip", "beyond"):
        paths = draw_experiment(name, {"": run}, tmp_path)
        assert [p.name for p in paths] == [f"{name}.png", f"{name}.svg"]
        assert paths[0].read_bytes().startswith(b"\x89PNG")
        assert "NOT PRIVATE" in paths[1].read_text()


def cnn_smoke(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "veilstream", "reproduce", "cnn", "--smoke", "--out", str(out)]
    return start_interruptible([*command, "--json", *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_reproduce_cnn_in_small_is_interrupted_and_resumed(mnist, tmp_path):
    """Three runs and their figure; what was done before the interrupt is not done again."""
    out = tmp_path / "out"
    first = cnn_smoke(out)
    deadline = time.monotonic() + 300
    while not (out / "tau-2" / "guarantee.json").exists() and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, stderr = first.communicate(timeout=120)
    assert first.returncode == 130, stderr
    assert (out / "tau-1" / "summary.json").exists()
    assert not (out / "cnn.png").exists()
    before = (out / "tau-1" / "history.csv").stat().st_mtime_ns

    second = cnn_smoke(out, "--resume")
    stdout, stderr = second.communicate(timeout=600)
    assert second.returncode == 0, stderr
    assert (out / "tau-1" / "history.csv").stat().st_mtime_ns == before
    assert {p.name for p in out.iterdir()} == {"tau-1", "tau-2", "tau-4", "cnn.png", "cnn.svg"}
    assert (out / "cnn.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(stdout)
    assert list(told["runs"]) == ["tau-1", "tau-2", "tau-4"]
    for folder, summary in told["runs"].items():
        run = vs.Run(out / folder)
        assert run.summary["complete"]
        assert run.model("optimal").shape == (61_482,)
        assert summary["data"].startswith("MNIST")
        final = {name: m["final"] for name, m in summary["methods"].items()}
        assert list(final) == ["noise-free", "independent", "toeplitz", "optimal"]
        # Chance is 0.1; after 200 steps the noise-free model has left it, the noisy one has not.
        free, noisy = (final[name]["accuracy"]["mean"] for name in ("noise-free", "independent"))
        assert free > noisy + 0.05
        loss = {name: f["average_loss"]["mean"] for name, f in final.items()}
        assert loss["noise-free"] < loss["optimal"] < loss["independent"]


def test_the_preset_runs_by_its_name(mnist, tmp_path):
    small = {"learning.rounds": 15, "run.seeds": 1, "data.held_out": 300, "run.noise": "device"}
    run = vs.run(vs.Plan.load(plan_path(Path("mnist_private")), small), tmp_path / "out")
    losses = run.history("loss")["noise-free"][0]
    assert losses[0] == pytest.approx(np.log(10), rel=1e-4)  # ten digits, no one favoured at x⁰
    assert losses[-1] < losses[0]
    assert run.summary["methods"]["buffered @ 2"]["guarantee"]["epsilon"] == 2.0
