"""kind = "auto": what it chooses, from what, and what it refuses."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from studies.parity import DIM, LEARNERS, SEED, deploy

import veilstream as vs
from veilstream.audit.report import auditable
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms, differences
from veilstream.errors import InputError
from veilstream.plans.auto import GAMMA_SHARE, KAPPA, KAPPA_NUMBER, ROUND_CAP, PublicFacts
from veilstream.plans.plan import Plan, PlanError
from veilstream.plans.prepare import PlanNotice, prepare
from veilstream.plans.tasks import task_of
from veilstream.privacy.gradient_types import RawGradient
from veilstream.simulation.engine import Simulation

AUTO = {"name": "auto", "kind": "auto"}


def plan_of(method: dict | None = None, *, epsilon: float = 1.0, data=None, privacy=None, **learning) -> Plan:
    return Plan(
        learning={"rounds": 12, "local_steps": 3, "learners": LEARNERS} | learning,
        data={"dim": DIM} | (data or {}),
        privacy={"epsilon": epsilon, "delta": 1e-3} | (privacy or {}),
        run={"seeds": 1, "first_seed": SEED, "noise": "host", "regret": False},
        methods=[AUTO | (method or {})],
    )


def prepared(plan: Plan):
    return prepare(plan, plan.methods[0])


def test_the_step_gives_a_margin_the_noise_that_is_aimed_at():
    """Worked out from the dense matrices of workload and strategy."""
    plan = plan_of()
    found = prepared(plan)
    W = plan.workload_of(found.plan).matrix()
    rows = W @ np.linalg.inv(found.factorization.strategy_matrix())
    rms = math.sqrt(float((rows**2).sum(axis=1).mean()))
    both = found.plan.step_size * found.plan.server_step_size
    noise = both * found.noise_std * rms / math.sqrt(LEARNERS)
    assert noise == pytest.approx(KAPPA, rel=0.01)
    assert found.auto.margin_noise == pytest.approx(noise, rel=1e-4)
    assert not found.auto.capped


def test_what_was_chosen_is_written_whatever_bounds_the_sensitivity_of_people_who_return():
    """With eight visits the patterns are too many to try, and a decreasing Toeplitz matrix decides."""
    plan = plan_of(privacy={"participations": 8, "min_separation": 1}, rounds=40)
    found = prepared(plan)
    assert found.auto is not None
    assert json.loads(json.dumps(found.auto.as_dict()))["capped"] is False
    assert type(found.guarantee.sensitivity_exact) is bool


def test_a_round_moves_a_margin_no_further_than_the_cap_where_noise_is_small():
    found = prepared(plan_of(epsilon=1e4))
    moved = found.plan.step_size * found.plan.server_step_size * 3
    assert found.auto.capped
    assert moved == pytest.approx(ROUND_CAP, rel=0.01)
    assert found.auto.margin_noise < KAPPA


def test_numbers_bear_less_noise_than_classes():
    found = prepared(plan_of(task="least_squares"))
    assert found.auto.margin_noise == pytest.approx(KAPPA_NUMBER, rel=0.01)


def test_what_is_published_is_a_short_exponential_average_unless_the_method_says_otherwise():
    """A hundredth of the run, whatever the plan; noise is made for running sums, where gradients are taken."""
    short, long = prepared(plan_of()), prepared(plan_of(rounds=400, local_steps=1))
    assert (short.plan.newest_weight, long.plan.newest_weight) == (1.0, 0.25)
    assert (short.plan.averaging, short.plan.objective) == (None, None)
    assert long.auto.margin_noise == pytest.approx(KAPPA, rel=0.01)
    own = prepared(plan_of({"averaging": 3.0}))
    assert (own.plan.averaging, own.plan.newest_weight) == (3.0, None)
    assert "averaging 3.0" in str(own.auto)


def test_after_a_change_the_default_average_is_fresh_and_the_long_one_stale():
    """Weights of what is published half a run after a change: a power-3 average still has records from before it."""
    old = {}
    for name, method in (("default", {}), ("power 3", {"averaging": 3.0})):
        plan = plan_of(method, rounds=400, local_steps=1)
        W = plan.workload_of(prepared(plan).plan).matrix()
        weights = -np.diff(np.append(W[300], 0.0))  # of the models x^1, x^2, ... in what is published after round 300
        old[name] = weights[:250].sum() / weights.sum()
    assert old["default"] < 1e-4
    assert old["power 3"] > 0.4


SHARES = {"kind": "table", "client": "#row", "label": "y", "labels": ("a", "b"), "label_shares": (0.8, 0.2)}
FEATURES = ({"name": "x", "low": 0.0, "high": 1.0},)


def test_it_says_before_anything_is_spent_that_the_commonest_label_will_do_as_well():
    """From the plan alone: few records at a small epsilon; with many more it expects a gain."""
    data = SHARES | {"features": FEATURES}
    with pytest.warns(PlanNotice, match="no better than the 0.50 of always naming the labels' shares"):
        few = prepared(plan_of(data=data, epsilon=0.5))
    many = prepared(plan_of(data=data, epsilon=8.0, rounds=4000, learners=20))
    shares = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert few.auto.outlook.majority_loss == pytest.approx(shares, rel=1e-12)
    assert few.auto.outlook.records == 12 * 3 * LEARNERS
    assert not few.auto.outlook.worth_it
    assert many.auto.outlook.worth_it
    assert few.auto.outlook.expected_loss > shares > many.auto.outlook.expected_loss
    assert "Outlook: expected average loss" in str(many.auto)


@pytest.mark.filterwarnings("ignore::veilstream.plans.prepare.PlanNotice")
def test_the_outlook_falls_with_every_public_fact_that_helps():
    data = SHARES | {"features": FEATURES, "label_shares": (0.5, 0.5)}
    base = {"epsilon": 1.0, "rounds": 40, "local_steps": 1, "learners": 3}

    def expected(**changes):
        return prepared(plan_of(data=data, **(base | changes))).auto.outlook.expected_loss

    usual = expected()
    assert expected(epsilon=2.0) < usual
    assert expected(rounds=80) < usual
    assert expected(learners=12) < usual
    assert expected(epsilon=0.1) > usual
    assert expected(epsilon=8.0, rounds=400) < math.log(2) < expected(epsilon=0.1)


def test_numbers_and_unknown_tasks_have_no_outlook():
    assert prepared(plan_of(task="least_squares")).auto.outlook is None
    assert prepared(plan_of(task="custom", data={"kind": "custom"})).auto.outlook is None
    assert "state data.label_shares" in str(prepared(plan_of()).auto)


def test_a_task_of_ones_own_is_assumed_to_have_features_of_norm_one_and_says_so():
    found = prepared(plan_of(task="custom", data={"kind": "custom"}))
    assert found.rule.gamma == 0.01
    assert "assumed: nothing is known of this task" in str(found.auto)


def test_longer_features_get_a_shorter_step_and_a_larger_gamma():
    one, ten = prepared(plan_of()), prepared(plan_of(data={"feature_norm": 10.0}))
    assert ten.plan.step_size == pytest.approx(one.plan.step_size / 10, rel=0.01)
    assert (one.rule.gamma, ten.rule.gamma) == (GAMMA_SHARE, 10 * GAMMA_SHARE)


def test_clip_norm_is_one_whatever_the_plan_has_for_other_methods():
    found = prepared(plan_of(clip_norm=0.03))
    assert found.rule.clip_norm == found.guarantee.clip_norm == 1.0
    same = {"kind": "ours", "step_size": 1.0, "clip_norm": 1.0, "mechanism": "buffered"}
    assert found.noise_std == prepared(plan_of(same)).noise_std


TABLE = {
    "kind": "table",
    "client": "#row",
    "label": "y",
    "label_range": (10.0, 50.0),
    "features": ({"name": "x", "low": 0.0, "high": 1.0},),
}
WITHOUT_RANGE = {key: held for key, held in TABLE.items() if key != "label_range"}


@pytest.mark.parametrize(
    ("task", "data", "bound"),
    [
        ("logistic", {"feature_norm": 2.0}, 2.0),
        ("softmax", WITHOUT_RANGE | {"labels": ("a", "b", "c")}, math.sqrt(2.0)),
        ("least_squares", TABLE, 2.0),
        ("huber", TABLE, 0.5),
        ("poisson", TABLE, 50.0),
        ("least_squares", {}, None),
    ],
)
def test_the_longest_gradient_is_one_that_the_task_has(task, data, bound):
    """Searched for over predictions and labels in their public range, and reached."""
    plan = plan_of(task=task, data=data)
    assert PublicFacts.of(plan).gradient_bound == (None if bound is None else pytest.approx(bound))
    if bound is None:
        return
    loss = task_of(plan)
    a = np.zeros(loss.features_shape, np.float64)
    a[0] = plan.data.feature_norm
    ends = {"poisson": (-20.0, math.log(50.0)), "least_squares": (-1.0, 1.0), "huber": (-1.0, 1.0)}
    low, high = ends.get(task, (-40.0, 40.0))
    targets = {"poisson": (10.0, 50.0), "softmax": (0.0, 1.0, 2.0)}.get(task, (-1.0, 1.0))
    longest = 0.0
    for says in (low, high):
        x = np.zeros(loss.dim)
        x[0] = says / a[0]
        for y in targets:
            g = loss.host_gradient(x, vs.tasks.Sample(a, y))
            longest = max(longest, float(np.linalg.norm(g)))
    assert longest <= bound * (1 + 1e-9)
    assert longest > 0.99 * bound


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_size": 0.1}, r"methods\[0\]\.step_size = 0\.1: expected nothing: auto"),
        ({"clip_norm": 0.5}, r"methods\[0\]\.clip_norm = 0\.5.*remove it, or kind = \"ours\""),
        ({"server_step_size": 2.0}, r"methods\[0\]\.server_step_size"),
        ({"kind": "ours"}, r"methods\[0\]\.step_size = None.*add step_size.*kind = \"auto\""),
    ],
)
def test_what_auto_chooses_is_not_said_and_others_must_say_it(change, message):
    with pytest.raises(PlanError, match=message):
        plan_of(change)


def test_auto_needs_an_end():
    with pytest.raises(PlanError, match=r"methods\[0\]\.kind.*a run with an end"):
        plan_of(unbounded=True)


def test_a_plan_with_auto_survives_a_round_trip_and_has_no_step_before_it_is_prepared():
    plan = plan_of()
    assert Plan.parse(plan.to_toml()) == plan
    with pytest.raises(InputError, match="has not chosen its own yet"):
        _ = plan.methods[0].local_step_size


def test_deployed_learners_release_what_the_simulation_computes(tmp_path):
    plan = plan_of(epsilon=4.0)
    simulation = Simulation(plan, [prepared(plan)], [SEED])
    while not simulation.done:
        simulation.advance()
    expected = simulation.models()[0, 0]
    deployed = deploy(plan, tmp_path, task_of(plan)).models[-1]
    scale = np.abs(expected).max()
    # A deployed learner's noise is some 1e-4 larger, for what rounding costs.
    np.testing.assert_allclose(deployed, expected, atol=2e-3 * scale)


def test_a_learner_normalises_before_the_grid_and_the_norm_is_checked_in_integers():
    terms = Terms.of(plan_of(), DIM)
    local = LocalRounds(terms, 0)
    for length in (1e-20, 0.05, 1.0, 1e20):
        raw = (np.linspace(-1.0, 1.0, DIM) * length).astype(np.float32)
        units = local.clip(RawGradient(raw)).reveal()
        norm = float(np.linalg.norm(raw.astype(float)))
        expected = raw.astype(float) / (norm + terms.gamma) / terms.grid.step
        np.testing.assert_allclose(units, expected, atol=2.0, rtol=1e-6)
        bound = Fraction(1) / Fraction(terms.grid.step)
        assert sum(int(u) ** 2 for u in units) <= bound**2


def test_terms_hold_the_resolved_numbers_and_say_which_differ():
    plan = plan_of()
    ours, found = Terms.of(plan, DIM).settings, prepared(plan)
    assert ours == Terms.of(Plan.parse(plan.to_toml()), DIM).settings
    assert ours["gamma"] == found.rule.gamma
    assert ours["methods.step_size"] == found.plan.step_size
    assert (ours["methods.averaging"], ours["methods.newest_weight"]) == (None, 1.0)
    clipping = {
        "kind": "ours",
        "mechanism": "buffered",
        "step_size": found.plan.step_size,
        "server_step_size": found.plan.server_step_size,
        "newest_weight": 1.0,
    }
    theirs = Terms.of(plan_of(clipping), DIM).settings
    assert theirs["gamma"] is None
    assert "gamma" in differences(ours, theirs)
    assert "methods.step_size" not in differences(ours, theirs)


def test_an_audit_keeps_the_noise_and_normalises_as_deployed():
    plan = plan_of(learners=1)
    audited, deployed = (Terms.of(p, DIM) for p in (auditable(plan), plan))
    assert audited.gamma is not None
    assert audited.noise_std == deployed.noise_std
    assert audited.guarantee == deployed.guarantee
    np.testing.assert_array_equal(audited.mechanism.noising_matrix(), deployed.mechanism.noising_matrix())


def test_the_run_folder_shows_what_was_chosen_and_no_record(tmp_path):
    plan = plan_of()
    run = vs.run(plan, out=tmp_path / "run")
    chosen = json.loads((tmp_path / "run" / "guarantee.json").read_text())["auto"]["auto"]
    found = prepared(plan)
    assert chosen["step_size"] == found.plan.step_size
    assert chosen["gamma"] == found.rule.gamma
    assert chosen["facts"]["margin_reach"] == 1.0
    assert run.summary["methods"]["auto"]["step_size"] == found.plan.step_size
