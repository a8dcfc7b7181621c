"""From budget to noise to guarantee, and every way of asking wrongly."""

from __future__ import annotations

import inspect
import json
import math

import numpy as np
import pytest

import veilstream as vs
from veilstream.errors import InputError, UnknownName
from veilstream.privacy import Neighbours, Participation

BUDGET = vs.Budget(2.0, 1e-3)


@pytest.fixture(scope="module")
def f():
    return vs.mechanisms.toeplitz(64)


def test_sensitivity_is_twice_clip_norm_times_the_largest_column(f):
    std, guarantee = vs.calibrate(BUDGET, f, clip_norm=0.5)
    largest = np.linalg.norm(f.strategy_matrix(), axis=0).max()
    assert guarantee.sensitivity == pytest.approx(2 * 0.5 * largest, rel=1e-9)
    assert guarantee.delta_at(2.0) == pytest.approx(1e-3, rel=1e-9)
    assert guarantee.delta_at(2.0) <= 1e-3
    assert std == guarantee.noise_std


def test_zero_out_neighbours_need_half_the_noise(f):
    replace, _ = vs.calibrate(BUDGET, f, 1.0)
    zero, guarantee = vs.calibrate(BUDGET, f, 1.0, neighbours="zero-out")
    assert zero == pytest.approx(replace / 2)
    assert guarantee.neighbours is Neighbours.ZERO_OUT


def test_participation_scales_the_noise_and_is_recorded(f):
    once, _ = vs.calibrate(BUDGET, f, 1.0)
    thrice, guarantee = vs.calibrate(BUDGET, f, 1.0, participation=(3, 10))
    assert thrice / once == pytest.approx(f.sensitivity((3, 10)) / f.sensitivity())
    assert guarantee.participation == Participation(3, 10)
    assert "at most 3 times, at least 10 steps apart" in str(guarantee)


def test_bound_on_sensitivity_is_said_to_be_one():
    _, guarantee = vs.calibrate(BUDGET, vs.mechanisms.toeplitz_normalised(5000), 1.0, participation=(2, 5))
    assert not guarantee.sensitivity_exact
    assert any("upper bound" in remark for remark in guarantee.remarks)


def test_the_same_noise_gives_more_to_weaker_neighbours_and_less_to_who_comes_often(f):
    std, _ = vs.calibrate(BUDGET, f, 1.0)
    assert vs.privacy_of(std, f, 1.0, neighbours="zero-out").epsilon(1e-3) < 1.0
    assert vs.privacy_of(std, f, 1.0, participation=(3, 10)).epsilon(1e-3) > 2.0


@pytest.mark.parametrize("accounting", ["exact", "zcdp"])
@pytest.mark.parametrize(
    "options", [{}, {"neighbours": "zero-out"}, {"participation": (3, 10)}, {"clients_per_step": 4}]
)
def test_both_questions_take_the_same_options_and_undo_each_other(f, accounting, options):
    std, _ = vs.calibrate(BUDGET, f, 1.0, accounting=accounting, **options)
    curve = vs.privacy_of(std, f, 1.0, accounting=accounting, **options)
    assert curve.epsilon(1e-3) == pytest.approx(2.0, rel=1e-12)
    assert curve.delta(2.0) == pytest.approx(1e-3, rel=1e-9)


def test_the_papers_curve_is_never_below_what_the_noise_really_gives(f):
    papers = vs.privacy_of(3.0, f, 1.0, accounting="zcdp")
    exact = vs.privacy_of(3.0, f, 1.0)
    for delta in (1e-9, 1e-3, 0.3):
        assert papers.epsilon(delta) > exact.epsilon(delta)
    assert papers.delta(0.0) == 1.0


def test_options_go_by_keyword_and_are_the_same(f):
    def options(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    both = {"neighbours", "participation", "accounting", "clients_per_step", "telemetry"}
    of_a_whole_promise = {"trust", "order", "window"}  # a curve is of one learner's noise, whoever knows the order
    asked, told = options(vs.calibrate), options(vs.privacy_of)
    assert set(told) == both
    assert set(asked) == both | of_a_whole_promise
    assert {name: asked[name] for name in both} == told
    with pytest.raises(TypeError):
        vs.calibrate(BUDGET, f, 1.0, "zero-out")


def test_guarantee_says_what_it_protects(f):
    _, guarantee = vs.calibrate(BUDGET, f, 1.0)
    text = str(guarantee)
    for part in ("(2, 0.001)", "one client's record", "replace-one", "once", "64 steps", "exact"):
        assert part in text
    plain = json.loads(json.dumps(guarantee.as_dict()))
    assert plain["epsilon"] == 2.0
    assert plain["neighbours"] == "replace-one"
    assert plain["participation"] == {"times": 1, "min_separation": 1}
    assert plain["epsilon_exact"] == pytest.approx(2.0, rel=1e-9)
    for word in ("unit", "adversary", "horizon", "accounting", "noise_std", "mu"):
        assert word in plain


def test_weak_delta_is_remarked_on():
    _, weak = vs.calibrate(BUDGET, vs.mechanisms.tree(4000), 1.0)
    assert any("weak for 4000 clients" in remark for remark in weak.remarks)
    _, strong = vs.calibrate(vs.Budget(2.0, 1e-7), vs.mechanisms.tree(4000), 1.0)
    assert strong.remarks == ()


def test_budgets_that_promise_nothing_are_refused():
    for epsilon in (0, -1, math.nan, math.inf, "2", True, None):
        with pytest.raises(InputError, match=r"privacy\.epsilon = .*> 0 \(lower means more private"):
            vs.Budget(epsilon, 1e-3)
    with pytest.raises(InputError, match="<= 1e6"):
        vs.Budget(1e300, 1e-3)
    for delta in (0, 1, -1e-3, 2, math.nan, math.inf, "1e-3", True):
        with pytest.raises(InputError, match=r"privacy\.delta = .*in \(0, 1\)"):
            vs.Budget(1.0, delta)


@pytest.mark.parametrize("clip_norm", [0, -1, 1e-320, math.nan, math.inf, "1", None])
def test_bad_clip_norm_is_refused(f, clip_norm):
    with pytest.raises(InputError, match="clip_norm"):
        vs.calibrate(BUDGET, f, clip_norm)
    with pytest.raises(InputError, match="clip_norm"):
        vs.privacy_of(1.0, f, clip_norm)


def test_unknown_choices_suggest_the_nearest(f):
    with pytest.raises(UnknownName, match="did you mean 'exact'"):
        vs.calibrate(BUDGET, f, 1.0, accounting="exakt")
    with pytest.raises(UnknownName, match="did you mean 'replace-one'"):
        vs.calibrate(BUDGET, f, 1.0, neighbours="replace_one")
    with pytest.raises(InputError, match="budget"):
        vs.calibrate((2.0, 1e-3), f, 1.0)
    with pytest.raises(InputError, match="participation"):
        vs.calibrate(BUDGET, f, 1.0, participation=(10, 10))


def test_queries_of_a_guarantee_are_checked(f):
    _, guarantee = vs.calibrate(BUDGET, f, 1.0)
    with pytest.raises(InputError, match="delta"):
        guarantee.epsilon_at(0)
    with pytest.raises(InputError, match="epsilon"):
        guarantee.delta_at(-1)
