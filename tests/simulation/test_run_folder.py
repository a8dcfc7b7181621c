"""A run is a folder: complete, redrawable, resumable, never overwritten."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import veilstream as vs
from tests.test_package import SMALL_PLAN
from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import main_method, prepare
from veilstream.research.comparators import Comparators, comparators
from veilstream.research.learning_figure import draw_run
from veilstream.simulation import seed_batches
from veilstream.simulation.engine import Simulation
from veilstream.simulation.memory import MemoryPlan

TABLES = {"history.csv", "accuracy.csv", "noise.csv"}
FILES = TABLES | {"plan.toml", "guarantee.json", "summary.json", "versions.json", "models.npz", "report.html"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return vs.run(Plan.parse(SMALL_PLAN), tmp_path_factory.mktemp("run") / "out")


def test_folder_holds_everything_and_nothing_else(finished):
    assert {p.name for p in finished.path.iterdir()} == FILES
    assert finished.plan == Plan.parse(SMALL_PLAN)
    for method in finished.summary["methods"].values():
        for key in ("accuracy", "average_loss", "dynamic_regret"):
            figure = method["final"][key]
            assert figure["mean"] == pytest.approx(np.mean(figure["seeds"]))
            assert len(figure["seeds"]) == 2


def test_only_noisy_methods_are_called_private(finished):
    guarantees = finished.guarantees
    assert guarantees["free"]["guarantee"] is None
    assert guarantees["free"]["protects"] == "nothing"
    assert guarantees["tree"]["guarantee"]["epsilon"] == 2.0
    assert finished.summary["methods"]["tree"]["guarantee"] == guarantees["tree"]["guarantee"]


def test_every_guarantee_stands_beside_simulated(finished):
    """A run's noise comes from seeds: no file may show a promise without saying so."""

    def places(value):
        if isinstance(value, dict):
            if "guarantee" in value or "epsilon" in value:
                yield value
            for inner in value.values():
                yield from places(inner)

    assert finished.simulated is True
    for name in ("summary.json", "guarantee.json"):
        content = json.loads((finished.path / name).read_text())
        found = [p for p in places(content) if "guarantee" in p]
        assert len(found) == 2
        assert all(p["simulated"] is True for p in found)
        beside = [p["guarantee"] for p in found if p["guarantee"]]
        assert [p for p in places(content) if "epsilon" in p] == beside
    assert json.loads((finished.path / "summary.json").read_text())["simulated"] is True


def test_dynamic_regret_is_loss_minus_each_rounds_optimum(finished):
    loss, best = finished.history("loss"), finished.history("optimum")
    for name, method in finished.summary["methods"].items():
        expected = (loss[name] - best[name]).mean(axis=1)
        np.testing.assert_allclose(method["final"]["dynamic_regret"]["seeds"], expected, rtol=1e-4)


def test_comparators_agree_with_scipy():
    from scipy.optimize import minimize

    from veilstream.plans.clients import stream_of

    plan = Plan.parse(SMALL_PLAN, {"learning.ridge": 0.1})
    found = comparators(plan, 0)
    stream = stream_of(plan)

    def loss(x, rounds):
        samples = [stream.round(0, r) for r in rounds]
        a = np.concatenate([s.features.reshape(-1, 5) for s in samples]).astype(float)
        y = np.concatenate([s.target.reshape(-1) for s in samples]).astype(float)
        return np.logaddexp(0, -y * (a @ x)).mean() + 0.05 * x @ x

    for r in (0, 7):
        best = minimize(loss, np.zeros(5), args=([r],), tol=1e-12)
        assert found.round_values[r] == pytest.approx(best.fun, abs=1e-8)
    offline = minimize(loss, np.zeros(5), args=(range(12),), tol=1e-12)
    assert found.offline_losses.mean() == pytest.approx(offline.fun, abs=1e-8)
    assert found.path_variation > 0


def test_figures_are_drawn_from_the_folder_alone(finished):
    paths = draw_run(vs.Run(finished.path))
    assert [p.suffix for p in paths] == [".png", ".svg"]
    assert all(p.stat().st_size > 5000 for p in paths)
    for path in paths:
        path.unlink()


def test_each_accuracy_has_a_name_of_its_own(finished):
    head = (finished.path / "history.csv").read_text().splitlines()[0].split(",")
    assert "prequential_accuracy" in head
    assert "accuracy" not in head
    looked = (finished.path / "accuracy.csv").read_text().splitlines()[0]
    assert looked == "method,seed,round,held_out_accuracy"
    final = finished.summary["methods"]["tree"]["final"]
    assert final["accuracy"] == final["held_out_accuracy"] != final["prequential_accuracy"]
    np.testing.assert_allclose(
        final["prequential_accuracy"]["seeds"], finished.history("prequential_accuracy")["tree"].mean(axis=1), rtol=1e-5
    )


def test_a_folder_of_another_version_is_refused_by_name(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "old")
    versions = json.loads((tmp_path / "old/versions.json").read_text())
    assert versions.pop("format") == 1
    (tmp_path / "old/versions.json").write_text(json.dumps(versions))
    for use in (vs.Run, lambda path: vs.run(Plan.parse(SMALL_PLAN), path, resume=True)):
        with pytest.raises(InputError, match=r"versions\.json.*format 1, not None.*run the plan again"):
            use(tmp_path / "old")


def test_a_history_without_a_column_or_with_rows_out_of_place_is_refused(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    with pytest.raises(InputError, match="no column regret; there are"):
        finished.history("regret")
    head, first, *rest = (finished.path / "history.csv").read_text().splitlines()
    (tmp_path / "run/history.csv").write_text("\n".join([head, *rest, first]) + "\n")
    with pytest.raises(InputError, match="are not together"):
        vs.Run(tmp_path / "run").history("loss")


def test_a_simulation_can_be_read_by_others_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        done = vs.run(Plan.parse(SMALL_PLAN, {"learning.rounds": 4}), tmp_path / "out")
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in done.path.iterdir()}
    assert set(modes.values()) == {0o644}, modes
    assert done.path.stat().st_mode & 0o777 == 0o755


def test_noise_over_rounds_is_that_of_dense_matrices(finished):
    """V times the norm of B's row at a round's end, over the root of three learners."""
    method = finished.summary["methods"]["tree"]
    rows = np.linalg.norm(vs.mechanisms.tree(24).decoder_matrix(), axis=1)[1::2]
    np.testing.assert_allclose(finished.noise()["tree"], method["noise_std"] * rows / np.sqrt(3), rtol=1e-5)
    assert set(finished.noise()) == {"tree"}


def test_the_recommended_method_has_the_least_noise_at_the_first_budget():
    """At T = 24 independent noise in a sum grows to sqrt(24) V; a tree's is below; twice the
    budget does not count."""
    text = SMALL_PLAN.replace('name = "free"', 'name = "a"').replace("noise-free", "independent")
    text += '[[methods]]\nname = "rich"\nmechanism = "optimal"\nstep_size = 0.1\nepsilon = 4.0\n'
    plan = Plan.parse(text + '[[methods]]\nname = "best"\nmechanism = "optimal"\nstep_size = 0.1\n')
    prepared = [prepare(plan, method) for method in plan.methods]
    assert [p.plan.name for p in prepared] == ["a", "tree", "rich", "best"]
    assert main_method(prepared) == 3
    assert main_method(prepared[:2]) == 1
    assert main_method(prepared[:1]) == 0
    assert main_method(prepared[2:3]) == 0


def test_folders_without_a_name_never_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan.parse(SMALL_PLAN, {"learning.rounds": 4})
    runs = [vs.run(plan) for _ in range(3)]
    names = [str(run.path) for run in runs]
    assert names == [f"runs/{plan.name}", f"runs/{plan.name}-2", f"runs/{plan.name}-3"]
    again = vs.run(plan, resume=True)
    assert again.path == runs[-1].path


def test_a_changed_key_is_named_with_both_values(finished):
    changed = {"learning.rounds": 5, "methods.tree.step_size": 0.2}
    with pytest.raises(InputError) as refused:
        vs.run(Plan.parse(SMALL_PLAN, changed), finished.path, resume=True)
    assert "learning.rounds = 5 (was 12)" in str(refused.value)
    assert "methods.tree.step_size = 0.2 (was 0.1)" in str(refused.value)
    assert "set them back" in str(refused.value)


def test_regret_resumes_where_it_was_and_can_be_left_out(tmp_path, monkeypatch):
    from veilstream.simulation import runner

    plan, out, solved = Plan.parse(SMALL_PLAN), tmp_path / "out", []

    def counted(plan, seed):
        solved.append(seed)
        return comparators(plan, seed)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "comparators", counted)
    with pytest.raises(KeyboardInterrupt):
        vs.run(plan, out, on_solving=interrupt)
    assert solved == [0]
    assert vs.Run(out).summary["methods"]["tree"]["final"]["dynamic_regret"] is None
    shutil.copytree(out, tmp_path / "without")
    whole = vs.run(plan, out, resume=True)
    assert solved == [0, 1]
    assert whole.summary["methods"] == vs.run(plan, tmp_path / "once").summary["methods"]
    assert not list(out.glob("regret-*"))
    solved.clear()
    left_out = Plan.parse(SMALL_PLAN, {"run.regret": False})
    short = vs.run(left_out, tmp_path / "without", resume=True)
    assert solved == []
    assert short.summary["complete"]
    assert short.summary["comparators"] is None


def test_damaged_regret_is_solved_again(tmp_path):
    kept = tmp_path / "regret-0.npz"
    found = comparators(Plan.parse(SMALL_PLAN), 0)
    found.save(kept)
    loaded = Comparators.load(kept, 12)
    np.testing.assert_array_equal(loaded.round_values, found.round_values)
    assert (loaded.path_variation, loaded.remark) == (found.path_variation, found.remark)
    assert Comparators.load(kept, 13) is None
    kept.write_bytes(kept.read_bytes()[:200])
    assert Comparators.load(kept, 12) is None
    assert Comparators.load(tmp_path / "none.npz", 12) is None


def test_another_runs_folder_is_never_overwritten(finished, tmp_path):
    before = (finished.path / "summary.json").read_bytes()
    with pytest.raises(InputError, match="--resume continues it"):
        vs.run(Plan.parse(SMALL_PLAN), finished.path)
    with pytest.raises(InputError, match="started with other settings"):
        vs.run(Plan.parse(SMALL_PLAN, {"learning.rounds": 5}), finished.path)
    assert (finished.path / "summary.json").read_bytes() == before
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(InputError, match="new or empty"):
        vs.run(Plan.parse(SMALL_PLAN), tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "mine"


def blocks_of_three(monkeypatch) -> None:
    monkeypatch.setattr(seed_batches, "memory_of", lambda plan, *_, **__: MemoryPlan(plan.run.seeds, 3, 0))


def test_interrupted_run_is_usable_and_resumes_to_the_same_numbers(finished, tmp_path, monkeypatch):
    plan = Plan.parse(SMALL_PLAN)
    blocks_of_three(monkeypatch)
    calls = 0

    def interrupt(_):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vs.run(plan, tmp_path / "out", on_progress=interrupt)
    partial = vs.Run(tmp_path / "out")
    assert not partial.summary["complete"]
    assert partial.summary["rounds"] == 6
    assert partial.history("loss")["tree"].shape == (2, 6)
    resumed = vs.run(plan, tmp_path / "out", resume=True)
    whole = vs.run(plan, tmp_path / "whole")
    for name in ("summary.json", "history.csv", "accuracy.csv"):
        mine = (resumed.path / name).read_text()
        if name == "summary.json":
            mine, theirs = json.loads(mine), json.loads((whole.path / name).read_text())
            mine.pop("training_seconds"), theirs.pop("training_seconds")
            assert mine == theirs
        else:
            assert mine == (whole.path / name).read_text()
    assert not (resumed.path / "checkpoint.npz").exists()
    np.testing.assert_allclose(resumed.history("loss")["tree"], finished.history("loss")["tree"], atol=1e-5)


@pytest.mark.parametrize("place", ["_evaluate", "_advance_group", "_record"])
@pytest.mark.parametrize("call", [3, 4])
def test_interrupts_inside_a_block_resume_to_the_same_numbers(place, call, tmp_path, monkeypatch):
    """Two groups of methods, stopped within or between them: the checkpoint holds whole blocks."""
    liu = '\n[[methods]]\nname = "liu"\nkind = "liu"\nstep_size = 0.1\n'
    plan = Plan.parse(SMALL_PLAN + liu)
    blocks_of_three(monkeypatch)
    whole = vs.run(plan, tmp_path / "whole")
    original, calls = getattr(Simulation, place), 0

    def interrupted(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Simulation, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        vs.run(plan, tmp_path / "out")
    resumed = vs.run(plan, tmp_path / "out", resume=True)
    for name in ("history.csv", "accuracy.csv"):
        assert (resumed.path / name).read_text() == (whole.path / name).read_text()


def test_interrupt_before_the_first_block_leaves_a_run_that_can_be_resumed(tmp_path, monkeypatch):
    plan = Plan.parse(SMALL_PLAN)

    def stop(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            vs.run(plan, tmp_path / "out")
    assert vs.run(plan, tmp_path / "out", resume=True).summary["complete"]


def test_a_diverged_method_costs_the_others_nothing(tmp_path):
    plan = Plan.parse(SMALL_PLAN, {"methods.tree.step_size": 1e20, "learning.ridge": 0.1})
    summary = vs.run(plan, tmp_path / "out").summary
    assert summary["methods"]["tree"]["final"]["average_loss"] is None
    assert "diverged" in summary["methods"]["tree"]["final"]["remark"]
    assert summary["methods"]["free"]["final"]["dynamic_regret"]["mean"] > 0


def test_a_plan_that_cannot_be_prepared_claims_no_folder(tmp_path):
    plan = Plan.parse(SMALL_PLAN)
    object.__setattr__(plan.methods[1], "mechanism", "oak")
    with pytest.raises(InputError):
        vs.run(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_that_are_not_finite_are_refused(tmp_path, monkeypatch):
    from veilstream.learning.tasks import Sample
    from veilstream.streams.synthetic import SyntheticStream

    original = SyntheticStream.round

    def broken(self, seed, round_):
        drawn = original(self, seed, round_)
        return Sample(drawn.features * (np.nan if round_ == 4 else 1.0), drawn.target)

    monkeypatch.setattr(SyntheticStream, "round", broken)
    with pytest.raises(InputError, match="finite features"):
        vs.run(Plan.parse(SMALL_PLAN), tmp_path / "out")


def test_resuming_a_finished_run_changes_nothing(finished):
    before = (finished.path / "summary.json").stat().st_mtime_ns
    (finished.path / "report.html").unlink()
    vs.run(Plan.parse(SMALL_PLAN), finished.path, resume=True)
    assert (finished.path / "summary.json").stat().st_mtime_ns == before
    assert (finished.path / "report.html").exists()
