"""Seeds in batches, one after the other or in processes: the same numbers, whatever happens."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import veilstream as vs
from tests.test_package import SMALL_PLAN
from veilstream.errors import InputError, VeilstreamError
from veilstream.learning.models.pytree import PytreeTask
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.runs.folder import Run
from veilstream.simulation import seed_batches as batches_module
from veilstream.simulation.memory import MemoryPlan
from veilstream.simulation.seed_batches import SeedBatches, run_seed_batches

ROUNDS, DIM = 40, 4


@dataclass(frozen=True)
class Clients:
    """A stream that can be pickled, takes its time, and may break."""

    pause_s: float = 0.0
    broken: str = ""

    @property
    def provenance(self) -> str:
        return "made up"

    def round(self, seed: int, round_: int) -> Sample:
        time.sleep(self.pause_s)
        if self.broken == "raise" and round_ == 5:
            raise RuntimeError("the cable is out")
        features = np.random.default_rng([seed, round_]).standard_normal((2, 2, DIM))
        if self.broken == "nan" and (seed, round_) == (3, 5):
            features[0, 0] = np.nan
        return Sample(features.astype(np.float32), np.sign(features[..., 0]).astype(np.float32))

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        features = np.random.default_rng([seed, 77]).standard_normal((count, DIM))
        return Sample(features.astype(np.float32), np.sign(features[:, 0]).astype(np.float32))


def plan_of(**run) -> Plan:
    return Plan(
        learning={"rounds": ROUNDS, "local_steps": 2, "learners": 2},
        data={"kind": "custom", "dim": DIM, "held_out": 30},
        privacy={"epsilon": 10.0, "delta": 1e-3},
        run={"seeds": 4, "evaluate_every": 7} | run,
        methods=[
            {"name": "tree", "mechanism": "tree", "step_size": 0.1},
            {"name": "free", "kind": "noise-free", "step_size": 0.1},
        ],
    )


PLAN = plan_of()
SLOW = Clients(pause_s=0.05)  # four seconds a part: a worker that is not stopped goes on


@pytest.fixture(scope="module")
def all_at_once(tmp_path_factory) -> Run:
    return vs.run(PLAN, tmp_path_factory.mktemp("runs") / "out", stream=Clients())


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory) -> Run:
    return vs.run(PLAN, tmp_path_factory.mktemp("runs") / "out", stream=Clients(), processes=2)


def check_like(run: Run, other: Run) -> None:
    """Two finished runs agree to rounding, in every column, figure and model."""
    for column in ("loss", "prequential_accuracy", "noise", "distance"):
        mine, theirs = run.history(column), other.history(column)
        assert list(mine) == list(theirs)
        for name in mine:
            np.testing.assert_allclose(mine[name], theirs[name], atol=1e-5)
    assert run.held_out_accuracy()[0] == other.held_out_accuracy()[0]
    mine, theirs = run.summary, other.summary
    mine.pop("training_seconds"), theirs.pop("training_seconds")
    check_close(mine, theirs)
    for seed in mine["seeds"]:
        np.testing.assert_allclose(run.model("tree", seed), other.model("tree", seed), atol=1e-5)


def check_close(mine: object, theirs: object) -> None:
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            check_close(mine[key], theirs[key])
    elif isinstance(mine, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            check_close(one, other)
    elif isinstance(mine, float):
        assert mine == pytest.approx(theirs, abs=1e-5)
    else:
        assert mine == theirs


def left_over(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.name.startswith((".", "seed_batches", "checkpoint"))}


def test_two_processes_give_the_numbers_of_one(all_at_once, in_two_processes):
    check_like(in_two_processes, all_at_once)
    assert in_two_processes.summary["seeds"] == [0, 1, 2, 3]
    assert left_over(in_two_processes.path) == left_over(all_at_once.path) == set()


def test_a_small_budget_runs_seeds_in_turns_to_the_same_numbers(tmp_path):
    """Two seeds of a model of which a budget holds one and a half."""
    wide = {"data.kind": "synthetic", "data.dim": 9000, "learning.rounds": 6, "run.seeds": 2}
    seen = []

    def look(progress) -> None:
        stored = tmp_path / "small" / "seed_batches.json"
        seen.append((json.loads(stored.read_text())["seeds"], left_over(tmp_path / "small")))

    plan = Plan.parse(PLAN.to_toml(), wide | {"run.regret": False, "run.memory_mib": 206})
    small = vs.run(plan, tmp_path / "small", on_progress=look)
    assert {tuple(map(tuple, seeds)) for seeds, _ in seen} == {((0,), (1,))}
    assert seen[-1][1] == {"seed_batches.json", *(f"checkpoint-{i}.npz" for i in range(2))}
    assert left_over(small.path) == set()
    large = Plan.parse(plan.to_toml(), {"run.memory_mib": 4096})
    check_like(small, vs.run(large, tmp_path / "large"))


def test_more_processes_than_seeds_are_no_more_than_seeds(tmp_path):
    plan = plan_of(seeds=3, first_seed=5)
    prepared = [prepare(plan, m) for m in plan.methods]
    for processes, seeds in ((8, ((5,), (6,), (7,))), (2, ((5, 6), (7,))), (1, ((5, 6, 7),))):
        folder = tmp_path / str(processes)
        cut = SeedBatches.of(folder, plan, prepared, Logistic(DIM), Clients(), processes)
        assert cut.seeds == seeds
        again = SeedBatches.of(folder, plan, prepared, Logistic(DIM), Clients(), processes + 1)
        assert again == cut  # a resumed run keeps its batches, whatever the number of processes


def interrupt_after(rounds: int, also=lambda: None):
    def on_progress(progress) -> None:
        if progress.done >= rounds:
            also()
            raise KeyboardInterrupt

    return on_progress


def test_an_interrupted_run_goes_on_in_another_number_of_processes(in_two_processes, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        vs.run(PLAN, out, stream=SLOW, processes=2, on_progress=interrupt_after(10))
    assert multiprocessing.active_children() == []
    begun = {name for name in left_over(out) if name.startswith("checkpoint")}
    assert begun <= {"checkpoint-0.npz", "checkpoint-1.npz"}
    assert begun
    partial = vs.Run(out)
    assert not partial.summary["complete"]
    assert 1 <= partial.summary["rounds"] < ROUNDS
    assert len(partial.summary["seeds"]) == 2 * len(begun)
    assert np.isfinite(partial.model()).all()
    resumed = vs.run(PLAN, out, stream=Clients(), resume=True)
    for name in ("history.csv", "accuracy.csv"):
        assert (resumed.path / name).read_bytes() == (in_two_processes.path / name).read_bytes()
    assert left_over(out) == set()


def test_a_run_goes_on_with_another_budget(tmp_path, monkeypatch):
    """Blocks are those that the run was started with, whatever the memory would hold now."""
    plan = Plan.parse(SMALL_PLAN, {"run.regret": False})

    def blocks_of(rounds: int) -> None:
        fits = MemoryPlan(plan.run.seeds, rounds, 0)
        monkeypatch.setattr(batches_module, "memory_of", lambda *_: fits)

    blocks_of(3)
    with pytest.raises(KeyboardInterrupt):
        vs.run(plan, tmp_path / "out", on_progress=interrupt_after(6))
    blocks_of(5)
    other = Plan.parse(plan.to_toml(), {"run.memory_mib": 999})
    told = []
    resumed = vs.run(other, tmp_path / "out", resume=True, on_progress=told.append)
    assert [progress.done for progress in told] == [9, 12]
    assert resumed.summary["complete"]


def kill_one_worker():
    killed = []

    def on_progress(progress) -> None:
        if not killed:
            killed.append(multiprocessing.active_children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    return on_progress


def test_a_killed_worker_is_told_and_the_run_can_be_resumed(in_two_processes, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(VeilstreamError, match=r"was killed; --resume goes on from its checkpoint"):
        vs.run(PLAN, out, stream=SLOW, processes=2, on_progress=kill_one_worker())
    assert multiprocessing.active_children() == []
    assert (out / "seed_batches.json").exists()
    reached = [int(np.load(checkpoint)["round"]) for checkpoint in out.glob("checkpoint*.npz")]
    assert len(reached) < 2 or min(reached) < ROUNDS  # the other may have come to its end, this one not to its first
    resumed = vs.run(PLAN, out, stream=Clients(), resume=True)
    assert resumed.summary["complete"]
    history = (resumed.path / "history.csv").read_bytes()
    assert history == (in_two_processes.path / "history.csv").read_bytes()
    assert left_over(out) == set()


class Outbox(list):
    """What a worker says."""

    def send(self, message) -> None:
        self.append(message)


def work(tmp_path: Path, stream: Clients) -> tuple[SeedBatches, bytes]:
    cut = SeedBatches(tmp_path, ((0, 1), (2, 3)), 2)
    return cut, pickle.dumps((cut, PLAN.to_toml(), None, stream))


@pytest.fixture
def own_signals():
    """A worker as in a shell's background, where interrupts are ignored unless one listens."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_does_not_break_off_the_checkpoint(tmp_path, monkeypatch, own_signals):
    """A terminal tells every process, and the parent tells its workers once more."""
    save = batches_module.write_checkpoint

    def told_again(path, state) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        save(path, state)

    class Interrupting(Outbox):
        def send(self, message) -> None:
            super().send(message)
            if len(self) == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1.0)

    monkeypatch.setattr(batches_module, "write_checkpoint", told_again)
    cut, packed = work(tmp_path, Clients())
    outbox = Interrupting()
    batches_module._worker(packed, [0, 1], 0, 1, outbox)
    assert [message[1] for message in outbox] == [2, 4]
    with np.load(cut.checkpoint(0)) as state:
        assert state["round"] == 4
    assert not cut.checkpoint(1).exists()


def test_a_part_is_done_when_its_checkpoint_says_so(tmp_path):
    """Whoever hears that a part is done may read its results at once."""
    cut, _ = work(tmp_path, Clients())
    done = []

    def look(progress) -> None:
        if progress.done % ROUNDS == 0:
            with np.load(cut.checkpoint(progress.done // ROUNDS - 1)) as state:
                done.append(int(state["round"]))

    prepared = [prepare(PLAN, m) for m in PLAN.methods]
    made = {}
    run_seed_batches(cut, PLAN, prepared, None, Clients(), processes=1, on_progress=look, made=made)
    assert {index: part.rounds for index, part in made.items()} == {0: ROUNDS, 1: ROUNDS}
    assert done == [ROUNDS, ROUNDS]


@pytest.mark.parametrize(
    ("broken", "kind", "message"),
    [("nan", InputError, "finite features"), ("raise", VeilstreamError, r"RuntimeError\('the cable is out'\)")],
)
def test_a_workers_error_is_its_last_message(broken, kind, message, tmp_path, own_signals):
    outbox = Outbox()
    batches_module._worker(work(tmp_path, Clients(broken=broken))[1], [1], 0, 1, outbox)
    *_, (*_, error) = pickle.loads(pickle.dumps(list(outbox)))
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error


def test_an_error_inside_a_worker_arrives_as_itself(tmp_path):
    with pytest.raises(InputError, match="expected finite features") as arrived:
        vs.run(PLAN, tmp_path / "out", stream=Clients(broken="nan"), processes=2)
    assert arrived.value.field == "data"
    assert multiprocessing.active_children() == []


def test_what_cannot_be_pickled_is_refused_with_a_way_out(tmp_path):
    plan = Plan.parse(PLAN.to_toml(), {"learning.task": "custom"})
    task = PytreeTask(
        lambda params, features, target: ((features @ params["w"]) - target) ** 2,
        lambda seed: {"w": np.zeros(DIM, np.float32)},
    )
    with pytest.raises(InputError, match=r"in a module of their own, or take processes = 1"):
        vs.run(plan, tmp_path / "out", task=task, stream=Clients(), processes=2)
    assert not (tmp_path / "out").exists()
    done = vs.run(plan, tmp_path / "out", task=task, stream=Clients())
    assert done.summary["complete"]
