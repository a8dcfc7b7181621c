"""`veilstream plan` and `demo`, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from veilstream.mechanisms import MECHANISMS

SMALL = [
    "--epsilon",
    "2",
    "--delta",
    "1e-3",
    "--rounds",
    "25",
    "--local-steps",
    "4",
    "--clip-norm",
    "1",
    "--learners",
    "20",
    "--dim",
    "100",
]


def veilstream(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "veilstream", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def plan(*extra: str) -> dict:
    done = veilstream("plan", *SMALL, "--json", *extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plan_compares_all_mechanisms_recommended_first():
    result = plan()
    rows = result["mechanisms"]
    assert {row["mechanism"] for row in rows} == set(MECHANISMS)
    assert rows[0]["mechanism"] == result["recommended"]
    best = min(row["error_round_ends"] for row in rows)
    assert rows[0]["error_round_ends"] <= 1.02 * best
    assert result["reason"]
    assert result["setting"]["horizon"] == 100


def test_a_plans_file_says_what_options_say(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        "[learning]\nrounds = 25\nlocal_steps = 4\nlearners = 20\n[privacy]\nepsilon = 2.0\n"
        'delta = 1e-3\n[[methods]]\nname = "a"\nmechanism = "tree"\nstep_size = 0.1\n'
    )
    done = veilstream("plan", str(file), "--mechanism", "tree", "--json")
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout), plan("--mechanism", "tree")
    assert found["setting"] == expected["setting"]
    assert found["mechanisms"][0]["noise_std"] == expected["mechanisms"][0]["noise_std"]
    looser = veilstream("plan", str(file), "--mechanism", "tree", "--epsilon", "4", "--json")
    assert json.loads(looser.stdout)["setting"]["epsilon"] == 4.0
    refused = veilstream("plan", "--epsilon", "2", "--delta", "1e-3")
    assert refused.returncode == 2
    assert "--rounds" in refused.stderr


def test_plan_figures_follow_from_their_definitions():
    import veilstream as vs

    (row,) = plan("--mechanism", "toeplitz")["mechanisms"]
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


def test_table_prints_the_guarantee_first_and_every_mechanism():
    done = veilstream("plan", *SMALL)
    assert done.returncode == 0
    assert done.stdout.startswith("Guarantee  (2, 0.001)-local differential privacy")
    for name in MECHANISMS:
        assert name in done.stdout
    assert "Recommended" in done.stdout
    header = next(line for line in done.stdout.splitlines() if line.startswith("mechanism"))
    for column in ("noise std V", "std max", "std mean", "std rounds"):
        assert column in header
    assert "max_error() and mean_error() are variances" in done.stdout.replace("\n", " ")
    assert "…" not in done.stdout


def test_accounting_neighbours_and_participation_change_the_noise():
    def std(*extra):
        return plan("--mechanism", "banded", *extra)["mechanisms"][0]["noise_std"]

    base = std()
    assert std("--accounting", "zcdp") == pytest.approx(base / 0.7283, rel=1e-3)
    assert std("--neighbours", "zero-out") == pytest.approx(base / 2)
    assert std("--participations", "4", "--separation", "20") == pytest.approx(2 * base, rel=1e-5)


def test_buffers_are_tuned_for_people_who_return():
    rows = plan("--participations", "4", "--separation", "20")["mechanisms"]
    errors = {(r["mechanism"], r["objective"]): r["error_published"] for r in rows}
    assert errors["buffered", "published"] < errors["buffered", None]


def test_rounds_objective_lowers_the_error_at_round_ends():
    mean = plan("--mechanism", "optimal")["mechanisms"][0]
    rounds = plan("--mechanism", "optimal", "--objective", "rounds")["mechanisms"][0]
    assert rounds["error_round_ends"] < mean["error_round_ends"]
    assert rounds["error_mean"] > mean["error_mean"]


def test_mechanisms_are_ranked_by_the_noise_in_what_is_published():
    """The reference's order, with step size times √d on top, and the standard deviations' scale."""
    import veilstream as vs

    done = veilstream(
        "plan",
        "--epsilon",
        "2",
        "--delta",
        "1e-3",
        "--rounds",
        "60",
        "--averaging",
        "3",
        "--step-size",
        "0.5",
        "--learners",
        "4",
        "--dim",
        "9",
        "--people",
        "30",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = result["mechanisms"]
    assert (result["recommended"], result["objective"]) in {("optimal", "published"), ("buffered", "published")}
    assert [r["error_published"] for r in rows[1:]] == sorted(r["error_published"] for r in rows[1:])
    w = vs.Workload(horizon=60, averaging=3.0)
    tree = next(r for r in rows if r["mechanism"] == "tree")
    f = vs.mechanisms.tree(60)
    variance = ((w.matrix() @ f.noising_matrix()) ** 2).sum(axis=1).mean()
    expected = tree["noise_std"] * (variance / 4) ** 0.5
    assert tree["error_published"] == pytest.approx(expected, rel=1e-9)
    assert tree["model_noise"] == pytest.approx(0.5 * expected * 3, rel=1e-9)
    # 0.5 a step: after 60 of them x is 30 away, and the average of all a little less far.
    assert 20 < result["model"]["reach"] < 30
    assert result["people"]["needed"] == 60
    assert "60 people a learner, and there are 30" in result["people"]["shortage"]


def test_a_table_says_what_averaging_would_do_and_when_people_are_too_few():
    done = veilstream(
        "plan", *SMALL, "--participations", "4", "--separation", "10", "--people", "20", "--step-size", "0.1"
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "With averaging = 3.0 the noise in what is published would be 0." in text
    assert "too few people" in text
    assert "noise of norm" in text
    enough = veilstream("plan", *SMALL, "--participations", "4", "--separation", "10", "--people", "25")
    assert "too few people" not in enough.stdout


def test_not_knowing_the_end_has_a_price_and_it_is_printed():
    import veilstream as vs

    base = ("--unbounded",)
    ways = plan(*base)["without_end"]
    long, known = vs.mechanisms.buffered(1000), vs.mechanisms.buffered(100)
    expected = (long.error_over_time()[99] / known.error_over_time()[3::4].max()) ** 0.5
    assert ways["a horizon 10 times too long (buffered)"] == pytest.approx(expected, rel=1e-9)
    assert 1.0 < expected < ways["a horizon 100 times too long (buffered)"]
    assert "stationary, the same for ever" in plan(*base, "--forgetting", "0.9")["without_end"]
    done = veilstream("plan", *SMALL, *base)
    assert "Without an end  epochs of doubling length:" in done.stdout


def promised(file, text: str, *extra: str) -> tuple[dict, object]:
    """What `plan FILE` says of a method that runs, and what the run itself promises."""
    from veilstream.plans.plan import Plan
    from veilstream.plans.prepare import prepare

    file.write_text(text)
    done = veilstream("plan", str(file), "--json", *extra)
    assert done.returncode == 0, done.stderr
    plan_ = Plan.load(file)
    return json.loads(done.stdout), prepare(plan_, plan_.methods[0]).guarantee


PLAN_FILE = """
[learning]
rounds = 20
local_steps = 4
[privacy]
epsilon = 1.0
delta = 1e-5
[data]
dim = 3
clients = 80
[[methods]]
name = "m"
step_size = 0.1
mechanism = "buffered"
"""


def test_a_methods_own_clients_a_step_divide_its_noise_as_in_the_run(tmp_path):
    text = PLAN_FILE + "clients_per_step = 4\n"
    result, runs = promised(tmp_path / "plan.toml", text, "--mechanism", "buffered")
    (row,) = result["mechanisms"]
    assert row["guarantee"] == runs.as_dict()
    assert row["sensitivity"] == pytest.approx(1.0, rel=1e-6)  # of C, whose columns are of norm one
    assert result["setting"]["clients_per_step"] == 4
    assert (result["people"]["needed"], result["people"]["shortage"]) == (80, None)


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_an_unbounded_plan_shows_the_promise_of_its_run(forgetting, tmp_path):
    """Stationary noise, or epochs of doubling length: nothing that needs an end is recommended."""
    text = PLAN_FILE.replace("rounds = 20", 'rounds = "unbounded"').replace("clients = 80", "")
    text = text.replace('mechanism = "buffered"', f"forgetting = {forgetting}")
    result, runs = promised(tmp_path / "plan.toml", text)
    assert result["mechanisms"][0]["guarantee"] == runs.as_dict()
    assert result["recommended"] == runs.mechanism
    assert {row["mechanism"] for row in result["mechanisms"]} == {runs.mechanism, "independent"}
    assert result["setting"]["unbounded"] is True
    assert result["offers"] == []


def test_a_projection_beside_correlated_noise_is_noticed_by_plan_too(tmp_path):
    file = tmp_path / "plan.toml"
    ball = PLAN_FILE.replace("rounds = 20", 'rounds = "unbounded"\nprojection_radius = 2.0')
    ball = ball.replace("clients = 80", "").replace('mechanism = "buffered"', "forgetting = 0.99")
    file.write_text(ball)
    done = veilstream("plan", str(file))
    assert done.returncode == 0, done.stderr
    assert "learning.projection_radius = 2 beside stationary noise" in done.stderr


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_figure_is_drawn(ending, tmp_path):
    target = tmp_path / "deep" / f"error.{ending}"
    done = veilstream("plan", *SMALL, "--figure", str(target))
    assert done.returncode == 0, done.stderr
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert target.read_bytes().startswith(magic)
    assert str(target) in done.stdout


def test_long_horizons_leave_out_what_would_take_long():
    done = veilstream("plan", "--epsilon", "1", "--delta", "1e-7", "--rounds", "30000", "--json")
    result = json.loads(done.stdout)
    assert result["left_out"] == ["optimal", "tree_full"]
    assert len(result["mechanisms"]) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "-1"], "privacy.epsilon = -1.0: expected a finite number > 0"),
        (["--epsilon", "nan"], "privacy.epsilon = nan"),
        (["--delta", "0"], "privacy.delta = 0.0: expected in (0, 1)"),
        (["--rounds", "0"], "rounds = 0: expected an integer >= 1"),
        (["--clip-norm", "inf"], "clip_norm = inf"),
        (["--mechanism", "toplitz"], "did you mean 'toeplitz'?"),
        (["--accounting", "renyi"], "accounting = 'renyi'"),
        (["--participations", "9", "--separation", "50"], "participation = (9, 50)"),
        (["--figure", "picture.gif"], "a name ending in .png, .svg or .pdf"),
        (["--epsilon", "1e300"], "privacy.epsilon = 1e+300: expected <= 1e6"),
        (["--clip-norm", "1e-320"], "clip_norm = 1e-320"),
        (["--forgetting", "1.5"], "forgetting = 1.5: expected in (0, 1]"),
        (["--people", "0"], "people = 0"),
        (["--clip-norm", "1e300"], "clip_norm = 1e+300: expected from 1e-15 to 1e+15"),
        (["--step-size", "1e308", "--json"], "step_size = 1e+308: expected from 1e-15 to 1e+15"),
        (["--clients-per-step", "0"], "clients_per_step = 0"),
        (["--step-decay", "500"], "step_decay = 500.0: expected"),
        (
            ["--objective", "published", "--mechanism", "tree"],
            "--objective = 'published': expected beside --mechanism optimal, buffered, toeplitz",
        ),
        (["--objective", "published", "--mechanism", "independent"], "--objective = 'published'"),
        (["--objective", "published", "--mechanism", "banded"], "--objective = 'published'"),
        (
            ["--objective", "published", "--mechanism", "buffered", "--unbounded"],
            "--objective = 'published': expected nothing beside --unbounded",
        ),
        (["--unbounded", "--mechanism", "tree"], "mechanism = 'tree': expected buffered or indep"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(arguments, message, tmp_path):
    done = veilstream("plan", *SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_figure_in_the_way_of_a_folder_or_a_file_is_refused_before_the_work(tmp_path):
    (tmp_path / "d.png").mkdir()
    (tmp_path / "afile").write_text("in the way")
    for target in ("d.png", "afile/x.png"):
        done = veilstream("plan", *SMALL, "--figure", str(tmp_path / target))
        assert done.returncode == 2
        assert done.stderr.startswith("veilstream: figure = ")


def test_absurd_horizon_is_one_clear_line():
    done = veilstream("plan", "--epsilon", "1", "--delta", "1e-7", "--rounds", "1000000000000")
    assert done.returncode == 1
    assert "not enough memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_cache_is_a_notice_in_plain_words(tmp_path):
    environment = {**os.environ, "VEILSTREAM_CACHE": str(tmp_path)}
    veilstream("plan", *SMALL, "--mechanism", "optimal", env=environment)
    (stored,) = tmp_path.iterdir()
    stored.write_bytes(b"damaged")
    done = veilstream("plan", *SMALL, "--mechanism", "optimal", env=environment)
    assert done.returncode == 0
    assert done.stderr.startswith("veilstream: cache file")
    assert "rebuilding it" in done.stderr
    assert done.stderr.count("\n") == 1


def test_reader_who_leaves_early_is_no_error():
    line = f"{sys.executable} -m veilstream plan {' '.join(SMALL)} --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, timeout=120)
    assert done.stderr == b""


def test_misplaced_objective_and_unknown_option_exit_2():
    assert veilstream("plan", *SMALL, "--objective", "max").returncode == 2
    assert veilstream("plan", *SMALL, "--colour").returncode == 2


def test_help_teaches():
    done = veilstream("plan", "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout
    assert "toeplitz_normalised" in done.stdout.replace("\n", "")
    top = veilstream("--help").stdout
    assert "Exit codes" in top
    assert "demo" in top


def test_version():
    import veilstream as vs

    assert veilstream("--version").stdout.strip() == f"veilstream {vs.__version__}"


def test_telemetrys_price_is_in_the_noise_that_a_plan_needs(tmp_path):
    """√(1 + 0.15²) times as much, for one metric at 0.3 of the clip norm."""
    text = (
        "[learning]\nrounds = 16\nclip_norm = 0.5\n[data]\ndim = 4\n"
        "[privacy]\nepsilon = 2.0\ndelta = 1e-3\n"
        '[[methods]]\nname = "a"\nmechanism = "tree"\nstep_size = 0.1\n'
    )
    (tmp_path / "plain.toml").write_text(text)
    (tmp_path / "told.toml").write_text(text + "[telemetry]\n")
    stds = []
    for name in ("plain", "told"):
        said = veilstream("plan", str(tmp_path / f"{name}.toml"), "--mechanism", "tree", "--json")
        stds.append(json.loads(said.stdout)["mechanisms"][0]["noise_std"])
    assert stds[1] / stds[0] == pytest.approx(1.0111874, abs=1e-6)
