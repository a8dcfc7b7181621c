"""The audit of sums: correct code raises no alarm, each planted fault one in the check made for it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import kstest
from studies.mutations import sum_bugs

from veilstream.audit import audit
from veilstream.audit.programme import Programme, auditable
from veilstream.audit.report import AuditReport
from veilstream.audit.statistics.check import alarming
from veilstream.audit.sums import SumsFound, law_of_sum, open_sums, presence_of, summed
from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan
from veilstream.reports.audit_figure import draw_audit

BY_CHECK = {
    "V/h instead of V/√h": "h = 3, runs with a canary",
    "noise of missed steps forgotten": "the floor, with rounds missed, the claimed noise",
    "a learner of the core without noise": "h = 3, the claimed noise",
    "prefixes instead of increments": "h = 3, the claimed noise",
    "an own mask that is always the same": "messages, left out",
    "no own mask": "messages, left out",
    "pairwise masks that are always the same": "keys of one attempt",
}
_SEEDS = 40


def whole_plan(**privacy) -> Plan:
    return Plan(
        learning={"rounds": 12, "learners": 10, "clients_per_step": 4},
        data={"dim": 4},
        privacy={"epsilon": 2.0, "delta": 1e-3, "trust": "sum", "honest": 4, "colluding": 2} | privacy,
        methods=[{"name": "ours", "mechanism": "toeplitz", "step_size": 0.1}],
    )


@pytest.mark.parametrize(("honest", "colluding"), [(1, 0), (2, 1), (3, 0)])
def test_correct_code_raises_no_alarm(honest, colluding):
    """All together raise one with probability 1e-6; noise, masks and coins are drawn anew in each run of this."""
    checks = sum_bugs.checks(honest=honest, colluding=colluding)
    assert alarming(checks) == ()
    assert len(checks) == 14


def test_people_who_return_are_audited_without_messages_that_come_too_late():
    """One alarm in 1e6 runs of correct code. A learner whose message was not counted ends its epoch there."""
    checks = sum_bugs.checks(participations=2, min_separation=3)
    assert alarming(checks) == ()


@pytest.mark.parametrize("bug", sum_bugs.PLANTED)
def test_each_planted_fault_is_caught_by_its_check(bug):
    with sum_bugs.PLANTED[bug]():
        alarms = {check.name.removeprefix("sums: ") for check in alarming(sum_bugs.checks())}
    assert BY_CHECK[bug] in alarms


def test_the_law_of_sums_has_the_mu_of_both_promises():
    """By closed forms: with C = I every step has mu = 2·B_g/(V·√h), and the floor √h times that."""
    plan = dataclasses.replace(
        sum_bugs.sum_plan(), methods=(dataclasses.replace(sum_bugs.sum_plan().methods[0], mechanism="independent"),)
    )
    terms = Terms.of(plan, 1)
    together, floor = (law_of_sum(terms, 3, floor=floor) for floor in (False, True))
    assert together.expected == pytest.approx(np.full(16, 2.0 / (terms.noise_std * np.sqrt(3.0))), rel=1e-9)
    assert floor.expected == pytest.approx(np.sqrt(3.0) * together.expected, rel=1e-9)
    assert together.claim == pytest.approx(together.expected.max(), rel=1e-6)
    assert floor.claim == pytest.approx(floor.expected.max(), rel=1e-6)


def test_an_attack_with_all_noise_known_reads_the_records():
    """The audit can see: told everybody's noise, the one learner's own too, nothing but the canary is left."""
    plan = sum_bugs.sum_plan()
    terms = Terms.of(plan, 1)
    with sum_bugs.one_without_noise():  # of the second learner: not of the one with the canary
        opened = open_sums(plan, terms, 400, seed=2)
    left = opened.one.prefixes - opened.one.canary
    assert np.abs(left[0]).max() > 0.1 * terms.noise_std
    assert opened.one.step is not None


def test_the_learner_outside_the_core_is_away_late_and_vanishes():
    kinds = presence_of(16, 3, once=True)
    assert {"here", "away", "late", "vanishes"} == set(kinds)
    assert kinds[0] == kinds[-1] == "here"
    assert set(presence_of(16, 3, once=False)) == {"here", "away"}


def test_the_rest_of_the_audit_is_of_the_same_noise_and_the_floor():
    programme = Programme.of(whole_plan())
    given = Terms.of(auditable(whole_plan()), 1)
    assert programme.plan.trust is None
    assert programme.terms.noise_std == pytest.approx(given.noise_std, rel=1e-6)
    assert programme.terms.guarantee.epsilon == pytest.approx(given.guarantee.floor_epsilon)
    assert programme.promise == given.guarantee
    small = summed(auditable(whole_plan(), full=True))
    assert (small.trust.honest, small.trust.colluding, small.trust.learners) == (4, 1, 6)


@pytest.mark.parametrize(("learners", "graph"), [(60, False), (100, True)])
def test_the_verdict_says_that_no_graph_was_run(learners, graph):
    private = whole_plan()
    plan = dataclasses.replace(private, learning=dataclasses.replace(private.learning, learners=learners))
    programme = Programme.of(plan)
    assert programme.promise.trust.learners == learners
    bound = SimpleNamespace(claim=1.0, mu_lower=0.5)
    found = SumsFound(4, 4, 6, 16, bound, bound, bound, bound)
    report = SimpleNamespace(
        guarantee=programme.promise, mu_lower=0.5, reduced_from=None, rounds=16, claim=1.0, fixed=bound
    )
    verdict = AuditReport._verdict_of_sums(report, found)
    assert "sums that were audited are of 6 learners" in verdict
    assert (f"the graph of masks of {learners} learners" in verdict) == graph


@pytest.mark.all
@pytest.mark.parametrize("order", ["known", "secret"])
def test_the_audit_prints_both_promises(order, tmp_path):
    """All checks together alarm on correct code with probability below 6e-6."""
    plan = whole_plan(order=order)
    report = audit(plan, runs=4000, coordinates=3000, draws=20_000, federation=order == "known")
    assert report.verdict.startswith("KEPT"), report.alarms
    assert "the floor is epsilon" in report.verdict
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["claimed"]["epsilon"] == 2.0
    assert told["sums"]["honest"] == 4
    assert told["sums"]["floor"]["mu"] > told["sums"]["promise"]["mu"] == told["claimed"]["mu"]
    assert sum(check["check"].startswith("sums: ") for check in told["checks"]) == 14
    assert all(path.exists() for path in draw_audit(report, tmp_path))


@pytest.mark.all
def test_the_audit_says_what_is_wrong_with_sums():
    with sum_bugs.divided_by_h():
        report = audit(whole_plan(), runs=4000, coordinates=3000, draws=20_000, federation=False)
    assert report.verdict.startswith("BROKEN")
    assert any(alarm.startswith("sums: h = 4") for alarm in report.alarms), report.alarms


@pytest.mark.slow
def test_p_values_of_correct_code_are_uniform_where_they_are_exact():
    """Over 40 audits, by Kolmogorov and Smirnov's test of three checks at 1e-4 each: false alarms 3e-4."""
    found = [sum_bugs.checks(seed) for seed in range(_SEEDS)]
    assert not any(alarming(checks) for checks in found)
    for name in ("as they are sent", "two of one learner", "left out"):
        ps = [check.p for checks in found for check in checks if check.name == f"sums: messages, {name}"]
        assert len(ps) == _SEEDS
        assert kstest(ps, "uniform").pvalue > 1e-4
