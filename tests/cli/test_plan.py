"""`veilstream plan`, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import veilstream as vs
from veilstream.mechanisms import MECHANISMS
from veilstream.plans.comparison import Setting, compare, names_for
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import PlanNotice, prepare

PLAN = """
[learning]
rounds = 25
local_steps = 4
learners = 20
[privacy]
epsilon = 2.0
delta = 1e-3
[[methods]]
name = "a"
mechanism = "buffered"
step_size = 0.1
"""


def veilstream(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "veilstream", *arguments], capture_output=True, text=True, timeout=600, **options
    )


def compared(changes: dict | None = None, names: list[str] | None = None, text: str = PLAN) -> dict:
    """What `--json` prints, without a process."""
    return json.loads(json.dumps(compare(Setting.of(Plan.parse(text, changes)), names).as_dict()))


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_json_compares_all_mechanisms_recommended_first(plan_file):
    done = veilstream("plan", str(plan_file), "--set", "privacy.epsilon=1.5", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = result["mechanisms"]
    assert {row["mechanism"] for row in rows} == set(MECHANISMS)
    assert rows[0]["mechanism"] == result["recommended"]
    best = min(row["error_published"] for row in rows)
    assert rows[0]["error_published"] <= 1.15 * best
    assert [r["error_published"] for r in rows[1:]] == sorted(r["error_published"] for r in rows[1:])
    assert result["reason"]
    assert (result["setting"]["horizon"], result["setting"]["epsilon"]) == (100, 1.5)
    assert result["people_needed"] == 100


def test_figures_follow_from_their_definitions():
    (row,) = compared(names=["toeplitz"])["mechanisms"]
    f = vs.mechanisms.toeplitz(100)
    std, _ = vs.calibrate(vs.Budget(2.0, 1e-3), f, 1.0)
    assert row["noise_std"] == pytest.approx(std, rel=1e-12)
    assert row["sensitivity"] == pytest.approx(f.sensitivity(), rel=1e-12)
    # max_error() is a variance at sensitivity one; plan prints standard deviations.
    worst = (f.max_error() / 20) ** 0.5 * std / f.sensitivity()
    assert row["error_max"] == pytest.approx(worst, rel=1e-9)
    model_noise = std * (f.row_norms_squared()[3::4].mean() / 20) ** 0.5
    assert row["error_round_ends"] == pytest.approx(model_noise, rel=1e-9)
    independent = std / f.sensitivity() * (sum(range(4, 101, 4)) / 25 / 20) ** 0.5
    assert row["relative_to_independent"] == pytest.approx(model_noise / independent, rel=1e-6)
    assert row["state_bytes"] == 400 * row["state_vectors"]
    assert row["seconds_per_step"] > 0
    assert row["guarantee"]["epsilon"] == 2.0


def test_a_table_prints_the_guarantee_first_and_every_mechanism(plan_file):
    done = veilstream("plan", str(plan_file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Guarantee with the recommended noise  (2, 0.001)-local differential privacy")
    for name in MECHANISMS:
        assert name in done.stdout
    header = next(line for line in done.stdout.splitlines() if line.startswith("mechanism"))
    for column in ("noise std V", "std max", "std mean", "std rounds"):
        assert column in header
    text = " ".join(done.stdout.split())
    for said in (
        "Recommended",
        "max_error() and mean_error() are variances",
        "With averaging = 3.0 the noise in what is published would be 0.",
        "noise of norm",
        "need at least 100 people a learner",
    ):
        assert said in text
    assert "…" not in done.stdout


def test_accounting_neighbours_and_participation_change_the_noise():
    def std(changes=None):
        return compared(changes, ["banded"])["mechanisms"][0]["noise_std"]

    base = std()
    assert std({"privacy.accounting": "zcdp"}) == pytest.approx(base / 0.7283, rel=1e-3)
    assert std({"privacy.neighbours": "zero-out"}) == pytest.approx(base / 2)
    returning = {"privacy.participations": 4, "privacy.min_separation": 20}
    assert std(returning) == pytest.approx(2 * base, rel=1e-5)


def test_mechanisms_are_ranked_by_the_noise_in_what_is_published():
    """The reference's order, with step size times √d on top, and the standard deviations' scale."""
    changes = {
        "learning.rounds": 60,
        "learning.local_steps": 1,
        "learning.learners": 4,
        "data.dim": 9,
        "methods.a.averaging": 3.0,
        "methods.a.step_size": 0.5,
    }
    result = compared(changes)
    assert {result["mechanisms"][1]["objective"], result["mechanisms"][2]["objective"]} == {"published"}
    w = vs.Workload(horizon=60, averaging=3.0)
    tree = next(r for r in result["mechanisms"] if r["mechanism"] == "tree")
    f = vs.mechanisms.tree(60)
    variance = ((w.matrix() @ f.noising_matrix()) ** 2).sum(axis=1).mean()
    expected = tree["noise_std"] * (variance / 4) ** 0.5
    assert tree["error_published"] == pytest.approx(expected, rel=1e-9)
    assert tree["model_noise"] == pytest.approx(0.5 * expected * 3, rel=1e-9)
    # 0.5 a step: after 60 of them x is 30 away, and the average of all a little less far.
    assert 20 < result["model"]["reach"] < 30


def test_not_knowing_the_end_has_a_price():
    endless = {"learning.unbounded": True}
    ways = compared(endless)["without_end"]
    long, known = vs.mechanisms.buffered(1000), vs.mechanisms.buffered(100)
    expected = (long.error_over_time()[99] / known.error_over_time()[3::4].max()) ** 0.5
    assert ways["a horizon 10 times too long (buffered)"] == pytest.approx(expected, rel=1e-9)
    assert 1.0 < expected < ways["a horizon 100 times too long (buffered)"]
    forgets = PLAN.replace('mechanism = "buffered"', "forgetting = 0.9")
    assert "stationary, the same for ever" in compared(endless, text=forgets)["without_end"]


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_an_unbounded_plan_shows_the_promise_of_its_run(forgetting):
    """Stationary noise, or epochs of doubling length: nothing that needs an end is recommended."""
    text = PLAN.replace('mechanism = "buffered"', f"forgetting = {forgetting}")
    text = text.replace("rounds = 25", "rounds = 25\nunbounded = true")
    plan = Plan.parse(text)
    result, runs = compared(text=text), prepare(plan, plan.methods[0]).guarantee
    assert result["mechanisms"][0]["guarantee"] == json.loads(json.dumps(runs.as_dict()))
    assert result["recommended"] == runs.mechanism
    assert {row["mechanism"] for row in result["mechanisms"]} == {runs.mechanism, "independent"}
    assert result["setting"]["unbounded"] is True
    assert result["offers"] == {}


def test_a_methods_own_clients_a_step_divide_its_noise_as_in_the_run():
    changes = {"methods.a.clients_per_step": 4}
    plan = Plan.parse(PLAN, changes)
    result = compared(changes, ["buffered"])
    (row,) = result["mechanisms"]
    assert row["guarantee"] == json.loads(json.dumps(prepare(plan, plan.methods[0]).guarantee.as_dict()))
    assert row["sensitivity"] == pytest.approx(1.0, rel=1e-6)  # of C, whose columns are of norm one
    assert result["setting"]["clients_per_step"] == 4


def test_telemetrys_price_is_in_the_noise_that_a_plan_needs():
    """√(1 + 0.15²) times as much, for one metric at 0.3 of the clip norm."""
    plain, told = (compared(names=["tree"], text=PLAN + more) for more in ("", "[telemetry]\n"))
    stds = [result["mechanisms"][0]["noise_std"] for result in (plain, told)]
    assert stds[1] / stds[0] == pytest.approx(1.0111874, abs=1e-6)


def test_long_horizons_leave_out_what_would_take_long_unless_the_plan_names_it():
    long = Setting.of(Plan.parse(PLAN, {"learning.rounds": 30_000, "learning.local_steps": 1}))
    assert set(MECHANISMS) - set(names_for(long)) == {"optimal", "tree_full"}
    assert "optimal" in names_for(replace(long, mechanism="optimal"))


def test_a_folder_gets_the_figure_and_the_numbers(plan_file, tmp_path):
    out = tmp_path / "deep" / "out"
    done = veilstream("plan", str(plan_file), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert (out / "error-over-time.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "comparison.json").read_text())["setting"]["rounds"] == 25
    assert str(out) in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "privacy.epsilon=-1"], "privacy.epsilon = -1: expected a number > 0"),
        (["--set", "learning.rounds=0"], "learning.rounds = 0: expected a whole number >= 1"),
        (["--set", "methods.a.mechanism=toplitz"], "did you mean 'toeplitz'?"),
        (["--set", "privacy.participations=9", "--set", "privacy.min_separation=50"], "participation = (9, 50)"),
        (["--set", "epsilon"], "--set = 'epsilon': expected KEY=VALUE"),
        (["--set", "learning.unbounded=true", "--set", "methods.a.mechanism=tree"], "this one needs an end"),
        (["--out", "afile/x"], "in a folder that can be written"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(arguments, message, plan_file, tmp_path):
    (tmp_path / "afile").write_text("in the way")
    done = veilstream("plan", str(plan_file), *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"plan.toml", "afile"}


def test_a_projection_beside_correlated_noise_is_noticed_by_plan_too():
    with pytest.warns(PlanNotice, match="beside correlated noise"):
        Setting.of(Plan.parse(PLAN, {"learning.projection_radius": 2.0}))


def test_a_plan_that_protects_no_one_is_refused():
    text = PLAN.replace('mechanism = "buffered"', 'kind = "noise-free"')
    with pytest.raises(vs.errors.InputError, match="a method that protects someone"):
        Setting.of(Plan.parse(text))


def test_absurd_horizon_is_one_clear_line():
    done = veilstream("plan", "demo", "--set", "learning.rounds=1000000000000")
    assert done.returncode == 1
    assert "not enough memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_cache_is_a_notice_in_plain_words(plan_file, tmp_path):
    cache = tmp_path / "cache"
    run = ("plan", str(plan_file), "--json")
    environment = {**os.environ, "VEILSTREAM_CACHE": str(cache)}
    veilstream(*run, env=environment)
    for stored in cache.iterdir():
        stored.write_bytes(b"damaged")
    done = veilstream(*run, env=environment)
    assert done.returncode == 0
    for line in done.stderr.splitlines():
        assert line.startswith("veilstream: cache file")
        assert "rebuilding it" in line
    assert done.stderr


def test_reader_who_leaves_early_is_no_error(plan_file):
    line = f"{sys.executable} -m veilstream plan {plan_file} --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, timeout=600)
    assert done.stderr == b""


def test_help_teaches():
    done = veilstream("plan", "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout
    assert "privacy.epsilon=1" in done.stdout.replace("\n", "")
    top = veilstream("--help").stdout
    assert "Exit codes" in top
    assert "demo" in top


def test_version():
    assert veilstream("--version").stdout.strip() == f"veilstream {vs.__version__}"
