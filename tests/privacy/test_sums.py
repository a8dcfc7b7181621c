"""Sums over learners: the lemma on rounded noise, and the promise that rests on it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.special import ndtr

import veilstream as vs
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.privacy.guarantee import SumTrust
from veilstream.privacy.noise_law import calibrate_release
from veilstream.privacy.sums import log_rounding_ratio, sum_tail

CELLS = np.arange(-40, 41)


def rounded(std: float) -> np.ndarray:
    """Probabilities of round(N(0, std²)) at CELLS, by the normal distribution function."""
    return ndtr((CELLS + 0.5) / std) - ndtr((CELLS - 0.5) / std)


def rounded_with_uniforms(std: float, uniforms: int) -> np.ndarray:
    """Of round(N(0, std²) + a sum of uniforms on [-1/2, 1/2)), by numeric integration over the uniforms."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    shift, weight = np.zeros(1), np.ones(1)
    for _ in range(uniforms):
        shift = (shift[:, None] + 0.5 * nodes[None]).ravel()
        weight = (weight[:, None] * 0.5 * weights[None]).ravel()
    edges = CELLS[:, None] - shift[None]
    return (ndtr((edges + 0.5) / std) - ndtr((edges - 0.5) / std)) @ weight


@pytest.mark.parametrize(("std", "learners"), [(0.45, 2), (0.6, 2), (0.8, 2), (0.6, 3), (0.9, 3)])
def test_sum_of_rounded_normals_is_within_the_lemma_of_a_rounded_sum(std: float, learners: int) -> None:
    """Both laws by quadrature, at noise so small that the factor can be seen."""
    real = rounded(std)
    for _ in range(learners - 1):
        real = np.convolve(real, rounded(std))
    middle = len(real) // 2
    real = real[middle - 40 : middle + 41]
    ideal = rounded_with_uniforms(std * math.sqrt(learners), learners - 1)
    seen = np.abs(CELLS) <= 4.0 * std * math.sqrt(learners)
    ratio = real[seen] / ideal[seen]
    eta = math.expm1(log_rounding_ratio(std**2, learners, 1))
    assert np.all(ratio <= 1.0 + eta)
    assert np.all(ratio >= 1.0 - eta)
    assert np.abs(ratio - 1.0).max() > 1e-6  # the comparison sees something


def test_without_uniforms_the_lemma_would_be_false() -> None:
    """The sum of rounded normals is not the rounded sum: the uniforms are needed."""
    std, learners = 0.9, 2
    real = np.convolve(rounded(std), rounded(std))
    middle = len(real) // 2
    bare = rounded(std * math.sqrt(learners))
    eta = math.expm1(log_rounding_ratio(std**2, learners, 1))
    assert np.abs(real[middle] / bare[40] - 1.0) > 10.0 * eta


@pytest.mark.parametrize("name", ["independent", "tree", "toeplitz", "buffered", "banded", "optimal", "tree_full"])
def test_least_eigenvalue_is_above_the_bound_that_is_charged(name: str) -> None:
    """λ of B·Bᵀ by a dense solver, against 1 / (4·T·max‖c‖²)."""
    mechanism = getattr(vs.mechanisms, name)(33)
    b = np.asarray(mechanism.decoder_matrix(), np.float64)
    least = float(np.linalg.svd(b, compute_uv=False)[-1]) ** 2
    column = math.sqrt(float(mechanism.column_norms_squared().max()))
    assert least >= 1.0 / (4.0 * 33 * column**2)


def test_noise_of_the_honest_learners_together_keeps_the_budget() -> None:
    """V / √h each, and the floor is the exact curve of one learner's noise."""
    mechanism, budget = vs.mechanisms.buffered(64), vs.Budget(0.5, 1e-3)
    alone = calibrate_release(budget, mechanism, 1.0, 1000, clients_per_step=8)
    trust = SumTrust(learners=10, honest=8, colluding=1)
    among = calibrate_release(budget, mechanism, 1.0, 1000, clients_per_step=8, trust=trust)
    assert among.std * math.sqrt(8) == pytest.approx(alone.std, rel=1e-6)
    assert among.std * math.sqrt(8) >= alone.std * (1.0 - 1e-9)
    promise = among.guarantee
    assert promise.epsilon_at(1e-3) <= 0.5
    mu = promise.sensitivity / among.std  # Φ(μ/2 - ε/μ) - e^ε·Φ(-μ/2 - ε/μ) at the floor is δ
    floor = promise.floor_epsilon
    delta = ndtr(mu / 2 - floor / mu) - math.exp(floor) * ndtr(-mu / 2 - floor / mu)
    assert delta == pytest.approx(1e-3, rel=1e-5)
    assert vs.Guarantee.from_dict(promise.as_dict()) == promise
    assert "floor" in str(promise)
    assert f"{floor:.4g}" in str(promise)
    assert f"epsilon {floor:.4g}" in promise.in_short  # what `veilstream model show` prints


def test_more_learners_than_counted_on_only_add_to_the_promise() -> None:
    """μ + arithmetic at every number of honest learners from h to n."""
    trust = SumTrust(learners=50, honest=5)
    among = calibrate_release(vs.Budget(1.0, 1e-6), vs.mechanisms.toeplitz(200), 1.0, 10_000, trust=trust)
    one = among.charge.mu / math.sqrt(50)
    promised = among.guarantee.curve.mu
    for honest in range(5, 51):
        real = among.guarantee.sensitivity / (among.std * math.sqrt(honest)) + math.sqrt(honest) * one
        assert real <= promised * (1.0 + 1e-12)


def test_a_run_too_long_for_the_lemma_is_refused() -> None:
    with pytest.raises(InputError, match=r"learning\.rounds.*few enough for sums over 10 learners"):
        sum_tail(SumTrust(learners=10, honest=10), 10**9, 10**6, 2.0**17, 3.0)


def plan(**privacy: object) -> Plan:
    steps = privacy.pop("local_steps", 1)
    return Plan(
        learning={"rounds": 20, "local_steps": steps, "learners": 10, "clients_per_step": 4},
        privacy={"epsilon": 1.0, "delta": 1e-5, **privacy},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"trust": "sum"}, r"privacy\.honest = None: expected a number"),
        ({"trust": "sum", "honest": 9, "colluding": 2}, r"privacy\.honest = 9: expected at most 10"),
        ({"trust": "sum", "honest": 5, "local_steps": 2}, r"learning\.local_steps = 2: expected 1 beside"),
        ({"honest": 5}, r"privacy\.honest"),
        ({"trust": "sum", "honest": 0}, r"privacy\.honest"),
    ],
)
def test_a_plan_that_sums_cannot_protect_is_refused(privacy: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(**privacy)


def test_a_plan_without_sums_has_the_terms_that_it_had() -> None:
    """The keys are silent where nobody uses them, so digests stay."""
    private = plan().privacy
    assert private is not None
    assert not {"trust", "honest", "colluding"} & private.agreed_values().keys()
    summed = plan(trust="sum", honest=5).privacy
    assert summed is not None
    assert summed.agreed_values() | {"trust": "sum", "honest": 5} == summed.agreed_values()


def test_sum_trust_names_the_field_that_is_wrong() -> None:
    trust = SumTrust(learners=5, honest=3, colluding=2)
    assert trust.gain == math.sqrt(3)
    with pytest.raises(InputError, match=r"privacy\.honest"):
        dataclasses.replace(trust, honest=6)
    with pytest.raises(InputError, match=r"privacy\.colluding"):
        dataclasses.replace(trust, colluding=3)


def test_a_graph_of_masks_is_charged_to_delta_of_the_sums_and_never_to_the_floor() -> None:
    """Φ(μ/2 - ε/μ) - e^ε·Φ(-μ/2 - ε/μ) at the sums' noise is δ less the failure, and at the floor's it is δ."""

    def delta(mu: float, epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))

    budget, mechanism = vs.Budget(1.0, 1e-11), vs.mechanisms.buffered(20)
    for learners, colluding, failure in ((60, 9, 0.0), (100, 0, 0.0), (100, 9, 2.0**-40)):
        trust = SumTrust(learners=learners, honest=16, colluding=colluding)
        std, promise = vs.calibrate(budget, mechanism, 1.0, trust=trust)
        assert trust.graph_failure == failure
        assert promise.delta == 1e-11
        assert delta(promise.sensitivity / (4.0 * std), 1.0) == pytest.approx(1e-11 - failure, rel=1e-7)
        assert delta(promise.sensitivity / std, promise.floor_epsilon) == pytest.approx(1e-11, rel=1e-7)
        assert promise.as_dict().get("graph_failure", 0.0) == failure
        assert ("graph" in str(promise)) == bool(failure)
        assert promise.delta_at(promise.epsilon_at(1e-11)) <= 1e-11 * (1.0 + 1e-7)
        assert vs.Guarantee.from_dict(promise.as_dict()) == promise
    with pytest.raises(InputError, match=r"privacy\.delta"):
        vs.calibrate(vs.Budget(1.0, 1e-12), mechanism, 1.0, trust=trust)


def test_each_run_that_a_record_outlives_unused_is_charged_a_graph() -> None:
    """A record may meet a draw in each of federation.epochs runs before it is used; the union bound is in δ."""

    def promised(epochs: int = 1) -> vs.Guarantee:
        read = Plan(
            learning={"rounds": 16, "learners": 100, "model_norm_cap": 1e3, "local_steps": 1},
            data={"dim": 4},
            federation={"epochs": epochs},
            privacy={"epsilon": 2.0, "delta": 1e-8, "trust": "sum", "honest": 40, "colluding": 10},
            methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
        )
        return Terms.of(read, 1).guarantee

    one, many = promised(), promised(epochs=1000)
    assert one.graph_failure == 2.0**-40
    assert many.graph_failure == 1000 * 2.0**-40
    assert many.noise_std > one.noise_std
    assert "1000 runs" in str(many)
    with pytest.raises(InputError, match=r"privacy\.delta .*federation\.epochs"):
        promised(epochs=1_000_000)


def test_no_epsilon_is_printed_for_a_delta_that_graphs_use_up() -> None:
    trust = SumTrust(learners=100, honest=40, colluding=10)
    _, promise = vs.calibrate(vs.Budget(2.0, 1e-9), vs.mechanisms.buffered(20), 1.0, trust=trust)
    failure = 2.0**-40
    for delta in (1e-14, failure / 2, failure):
        assert promise.epsilon_at(delta) == math.inf
    for delta in (1.001 * failure, 1.5 * failure, 3 * failure, 1e-9):
        epsilon = promise.epsilon_at(delta)
        assert promise.delta_at(epsilon) <= delta * (1.0 + 1e-6)
    several = dataclasses.replace(promise, epochs=500)
    epsilon = several.epsilon_over_epochs
    assert several.over_epochs.delta(epsilon) + 500 * failure <= 1e-9 * (1.0 + 1e-6)
    with pytest.raises(InputError, match=r"privacy\.epochs_per_person = 2000"):
        dataclasses.replace(promise, epochs=2000)


def test_it_is_said_that_colluders_do_not_depend_on_the_graph() -> None:
    for learners, said in ((60, False), (100, True)):
        trust = SumTrust(learners=learners, honest=40, colluding=10)
        _, promise = vs.calibrate(vs.Budget(2.0, 1e-9), vs.mechanisms.buffered(20), 1.0, trust=trust)
        for text in (promise.adversary, str(promise)):
            assert ("chosen before their graph of masks is drawn" in text) == said
