"""`veilstream run`, `reproduce` and `demo`, as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from tests.cli.test_plan import veilstream
from tests.support.interrupts import start_interruptible
from tests.test_package import SMALL_PLAN


def test_run_prints_guarantees_first_and_leaves_a_folder(tmp_path):
    plan = tmp_path / "mine.toml"
    plan.write_text(SMALL_PLAN)
    done = veilstream("run", str(plan), "--out", str(tmp_path / "out"), "--set", "learning.rounds=8")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("Simulation: its noise comes from seeds and protects no one")
    assert "free: nothing (noise-free)" in done.stderr
    assert "tree: (2, 0.001)-local differential privacy" in done.stderr
    assert "average loss" in done.stdout
    assert "protects (simulated)" in done.stdout
    assert (tmp_path / "out" / "report.html").exists()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rounds"] == 8
    again = veilstream("run", str(plan), "--out", str(tmp_path / "out"))
    assert again.returncode == 2
    assert "started with other settings" in again.stderr


def test_run_as_json_with_seeds(tmp_path):
    plan = tmp_path / "mine.toml"
    plan.write_text(SMALL_PLAN)
    done = veilstream("run", str(plan), "--out", str(tmp_path / "out"), "--set", "run.seeds=3", "--json")
    result = json.loads(done.stdout)
    assert len(result["final"]["accuracy"]["seeds"]) == 3
    assert done.stderr == ""


def test_bad_plans_are_one_clear_line(tmp_path):
    plan = tmp_path / "mine.toml"
    plan.write_text(SMALL_PLAN.replace("rounds = 12", "ronds = 12"))
    done = veilstream("run", str(plan), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "did you mean 'rounds'?" in done.stderr
    assert "(line 3)" in done.stderr
    assert not (tmp_path / "out").exists()
    assert veilstream("run", str(plan), "--set", "nonsense").returncode == 2
    assert veilstream("run", "missing.toml").returncode == 2


def test_reproduce_smoke_shows_the_papers_order(tmp_path):
    done = veilstream("reproduce", "logistic", "--smoke", "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    methods = json.loads(done.stdout)["methods"]
    assert len(methods) == 16
    loss = {name: m["final"]["average_loss"]["mean"] for name, m in methods.items()}
    assert loss["noise-free"] < loss["optimal @ 2"] < loss["tree @ 2"]
    assert methods["noise-free"]["guarantee"] is None
    for name, method in methods.items():
        if "@" in name:
            assert method["guarantee"]["accounting"] == ("exact" if "exact" in name else "zcdp")


def test_demo_never_deletes_what_is_not_its_own(tmp_path):
    out = tmp_path / "demo"
    assert veilstream("demo", "--set", "run.seeds=1", "--out", str(out)).returncode == 0
    (out / "mynotes.txt").write_text("mine")
    done = veilstream("demo", "--set", "run.seeds=1", "--out", str(out))
    assert done.returncode == 2
    assert (out / "mynotes.txt").read_text() == "mine"
    assert (out / "summary.json").exists()


# The command as it is, but for a checkpoint at every chance: an interrupt then surely finds one.
EAGER = """
from veilstream.cli import main
from veilstream.simulation import seed_batches
seed_batches._CHECKPOINT_EVERY_S = 0.0
main()
"""


def test_ctrl_c_says_what_is_left_and_resumes(tmp_path):
    plan = tmp_path / "mine.toml"
    plan.write_text(SMALL_PLAN)
    out = tmp_path / "out"
    options = ["run", str(plan), "--out", str(out), "--set", "learning.rounds=6000"]
    options += ["--set", "run.regret=false"]
    running = start_interruptible([sys.executable, "-c", EAGER, *options], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (out / "checkpoint.npz").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert f"The rounds so far are in {out}; --resume continues them." in stderr
    assert stderr.endswith("veilstream: interrupted; nothing half-written was left\n")
    partial = json.loads((out / "summary.json").read_text())
    assert not partial["complete"]
    assert 0 < partial["rounds"] < 6000
    for name in ("models.npz", "report.html"):
        assert (out / name).stat().st_size > 0, name
    assert "Not complete" in (out / "report.html").read_text()
    refused = veilstream(*options)
    assert refused.returncode == 2
    assert "--resume continues it" in refused.stderr
    resumed = veilstream(*options, "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["rounds"] == 6000
    assert not (out / "checkpoint.npz").exists()


def test_unknown_figure_is_refused():
    done = veilstream("reproduce", "logistics")
    assert done.returncode == 2
    assert "did you mean 'logistic'?" in done.stderr


def test_demo_trains_and_can_be_run_again(tmp_path):
    for _ in range(2):
        done = veilstream("demo", "--set", "run.seeds=1", "--out", str(tmp_path / "demo"))
        assert done.returncode == 0, done.stderr
    assert "noise-free" in done.stdout
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


def test_run_prints_what_auto_chose_and_from_which_facts(tmp_path):
    plan = tmp_path / "mine.toml"
    plan.write_text(SMALL_PLAN + '\n[[methods]]\nname = "untuned"\nkind = "auto"\n')
    done = veilstream("run", str(plan), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("  auto: step_size ")
    assert "untuned: (2, 0.001)-local differential privacy" in before
    assert "From the plan alone: task logistic, margin reach 1" in after
    assert "3 learners, 12 rounds of 2 steps" in after
    ranked = veilstream("plan", str(plan), "--json")
    assert ranked.returncode == 0, ranked.stderr
