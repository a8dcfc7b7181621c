"""The audit that `veilstream audit` runs, on learners with a bug: it says what is wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest
from studies.cell_attack import planted
from studies.mutations.data_bugs import fine, unclipped
from studies.mutations.findings import plan_of
from studies.mutations.law_bugs import every_epoch_alike, sharing, weak_seeds, without_noise
from studies.mutations.noise_bugs import Late, halved, raw_step, redrawn, renoised

from tests.support.known_secrets import known_secrets, unguarded
from veilstream.audit import audit
from veilstream.deployment import local_rounds
from veilstream.deployment.epochs import EpochLedger
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan
from veilstream.privacy import gradient_types, grid
from veilstream.reports.audit_figure import draw_audit

LAW, LEARNER = "veilstream.privacy.noise_law", "veilstream.deployment.learner_epochs"

PLANTED = {
    "noise redrawn after a restart": (1, "not the noise", [patch.object(LocalRounds, "row", redrawn)]),
    "a round re-sent with fresh noise": (1, "answered twice", [patch.object(EpochLedger, "last_release", renoised)]),
    "B_g instead of 2·B_g": (1, "mu is at least", [patch(f"{LAW}.calibrate", halved)]),
    "noise row shifted by one": (1, "mu is at least", [patch.object(local_rounds, "GridNoise", Late)]),
    "the same client twice": (
        1,
        "runs: mu is at least",
        [patch.object(Learner, "_spent", lambda self, tag, step, stored: False)],
    ),
    "clipping off": (
        1,
        "no gradient explains",
        [
            patch.object(gradient_types, "clip_one", unclipped),
            patch.object(grid, "_square_norm", lambda units, bound: 0),
        ],
    ),
    "one noise draw per round, raw local steps": (
        4,
        "runs: mu is at least",
        [patch.object(LocalRounds, "noisy", raw_step)],
    ),
    "float release without the grid": (1, "finer than the grid", [patch(f"{LAW}.grid_for", fine)]),
    "a seed chosen by the operator": (
        1,
        "share their noise",
        [known_secrets(lambda: hashlib.sha256(b"operator").digest())],
    ),
    "one coordinate without noise": (1, "too little noise", [without_noise(77)]),
    "two coordinates sharing noise": (1, "share their noise", [sharing(11, 100)]),
    "seeds from a secret of the store and the step": (1, "an epoch repeats the noise", [every_epoch_alike()]),
    "seeds of 16 bits": (1, "drawn from too few", [weak_seeds(), patch(f"{LEARNER}.check_generator_once", unguarded)]),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_the_audit_says_what_is_wrong(bug, tmp_path):
    tau, said, patches = PLANTED[bug]
    mechanism = "toeplitz" if tau == 1 else "independent"
    with ExitStack() as planted:
        for each in patches:
            planted.enter_context(each)
        report = audit(
            plan_of(mechanism, rounds=8, local_steps=tau), runs=4000, coordinates=3000, draws=20_000, federation=False
        )
    assert any(said in alarm for alarm in report.alarms), report.alarms
    assert report.verdict.startswith("BROKEN")
    json.dumps(report.as_dict(), allow_nan=False)
    if bug == "noise row shifted by one":
        assert report.as_dict()["one_run"]["fixed"]["mu_lower"] == "infinite"
        assert all(path.exists() for path in draw_audit(report, tmp_path))


def auto(**learning) -> Plan:
    return Plan(
        learning={"rounds": 8, "learners": 3, **learning},
        data={"dim": 4},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        methods=[{"name": "auto", "kind": "auto"}],
    )


def normalised_twice_as_long(raw, gamma):
    norm = np.linalg.norm(raw.astype(float))
    return np.nan_to_num(2.0 * raw / (norm + gamma), nan=0.0).astype(np.float32)


@pytest.mark.parametrize("tau", [1, 2])
def test_a_method_that_chooses_its_own_steps_keeps_its_promise(tau):
    """All checks together alarm on correct code with probability below 6e-6."""
    plan = auto(local_steps=tau)
    report = audit(plan, runs=4000, coordinates=3000, draws=20_000, federation=False)
    assert report.verdict.startswith("KEPT"), report.alarms
    if tau == 1:  # gradients of length 7 are normalised with gamma = 0.01, not clipped to one
        step = Terms.of(plan, 4).grid.step
        assert report.twins.moved_units == pytest.approx(2.0 * 7.0 / 7.01 / step, abs=2)


@pytest.mark.parametrize(
    ("said", "patches"),
    [
        ("mu is at least", [patch(f"{LAW}.calibrate", halved)]),
        (
            "no gradient explains",
            [
                patch.object(gradient_types, "normalised", normalised_twice_as_long),
                patch.object(gradient_types, "clip_one", unclipped),
                patch.object(grid, "_square_norm", lambda units, bound: 0),
            ],
        ),
    ],
    ids=["B_g instead of 2·B_g", "normalised to length two"],
)
def test_the_audit_says_what_is_wrong_with_such_a_method(said, patches):
    with ExitStack() as planted_bugs:
        for each in patches:
            planted_bugs.enter_context(each)
        report = audit(auto(), runs=4000, coordinates=3000, draws=20_000, federation=False)
    assert any(said in alarm for alarm in report.alarms), report.alarms


def test_the_command_takes_such_a_plan(tmp_path):
    path = tmp_path / "auto.toml"
    path.write_text(auto().to_toml())
    asked = ["audit", "--plan", str(path), "--runs", "400", "--draws", "1e4", "--no-federation", "--json"]
    done = subprocess.run([sys.executable, "-m", "veilstream", *asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"].startswith("KEPT")


def test_the_audit_sees_float32_under_the_grid():
    with planted():
        report = audit(plan_of("buffered", rounds=64), runs=1000, coordinates=3000, draws=2_000_000, federation=False)
    assert any("lattice of float32" in alarm for alarm in report.alarms), report.alarms


def test_the_audit_of_a_federation_sees_a_bare_coordinate_on_the_wire():
    with without_noise(2500):
        report = audit(plan_of(rounds=8), runs=1000, coordinates=3000, draws=20_000, federation=True)
    for name in ("north", "south"):
        assert any(f"federation, {name}: noise of every coordinate" in alarm for alarm in report.alarms)
