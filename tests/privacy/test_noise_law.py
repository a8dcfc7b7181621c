"""What float64 may add to the noise, and what is charged for it."""

from __future__ import annotations

import dataclasses
import itertools
import math

import mpmath
import numpy as np
import pytest

import veilstream as vs
from tests.mechanisms import row_words
from tests.support.catalogue import VARIANTS
from veilstream.errors import InputError
from veilstream.mechanisms.analysis import rounding_gains
from veilstream.mechanisms.keystream import NoiseKey, Row
from veilstream.mechanisms.program import DRAW_ERROR
from veilstream.privacy.gaussian import GaussianCurve
from veilstream.privacy.grid import grid_for
from veilstream.privacy.grid_noise import GridNoise
from veilstream.privacy.noise_law import REACH, calibrate_release, charge_for

U = 2.0**-53
SCALE = 2.0**18
SECRET = NoiseKey.from_seed(6).secret
BUDGET = vs.Budget(2.0, 1e-3)


@pytest.fixture(params=sorted(VARIANTS))
def name(request):
    return request.param


def program_of(name: str, T: int):
    return VARIANTS[name](T).with_block_length(1).program


def test_the_charge_grows_with_the_root_of_the_dimension(name):
    program = program_of(name, 16)
    one = charge_for(program, 1, SCALE)
    for dim in (4, 100, 10**6):
        charge = charge_for(program, dim, SCALE)
        assert charge.mu == pytest.approx(math.sqrt(dim) * one.mu, rel=1e-12)
        assert charge.delta == pytest.approx(dim * one.delta, rel=1e-12)


def test_the_charge_grows_with_the_horizon(name):
    """Errors of all steps may conspire: at least T times as much, and for plain draws just that."""
    charges = [charge_for(program_of(name, T), 10, SCALE) for T in (8, 16, 32)]
    for shorter, longer in itertools.pairwise(charges):
        assert longer.mu >= 1.9 * shorter.mu
        assert longer.delta >= 2.0 * shorter.delta * (1 - 1e-12)
    if name == "independent":
        assert charges[1].mu == pytest.approx(2.0 * charges[0].mu, rel=1e-12)


def test_plain_draws_are_charged_what_can_be_counted_by_hand():
    """T draws of one coordinate: each off by ERROR, six roundings of 16 std and 4 of a unit."""
    charge = charge_for(program_of("independent", 100), 9, SCALE)
    a_step = DRAW_ERROR + 6.0 * U * 16.0 + 4.0 * U / SCALE
    assert charge.mu == pytest.approx(2.0 * 3.0 * 100 * a_step, rel=1e-12)
    assert charge.delta == pytest.approx(2.0 * 900 * math.exp(-128.0), rel=1e-9)


def test_the_tail_that_is_charged_is_that_of_the_normal_distribution():
    """P(|z| > REACH) <= exp(-REACH²/2), by mpmath."""
    with mpmath.workdps(50):
        tail = 2 * mpmath.ncdf(-REACH)
        assert tail < mpmath.exp(-(mpmath.mpf(REACH) ** 2) / 2)


class Replay:
    """Noise beside its exact twin: 50 digits, ideal draws, one coordinate at a time."""

    def __init__(self, name: str, steps: int, dim: int, std: float = 2.7) -> None:
        self.mechanism = VARIANTS[name](steps).with_block_length(1)
        self.steps, self.dim = steps, dim
        grid = grid_for(1.0, std)
        self.noise = GridNoise(self.mechanism.program, std=std, grid=grid, dim=dim)
        self.scale = mpmath.mpf(self.noise.scale)
        self.increment_errors: list[list[float]] = []
        """ρ of every step and coordinate, in units of V."""
        self.state_errors: list[np.ndarray] = []
        """ε of every step: the largest over coordinates, for each state."""
        self.increments = np.zeros((steps, dim))
        """As they ran, less the exact ones, in units of V."""
        self._states = [[mpmath.mpf(0)] * dim for _ in range(len(self.noise.state))]

    def run(self) -> Replay:
        with mpmath.workdps(50):
            for step in range(self.steps):
                self._step(step)
        return self

    def _step(self, step: int) -> None:
        program = self.mechanism.program
        matrix = [[mpmath.mpf(float(entry)) for entry in row] for row in program.matrix(step)]
        read = row_words.cipher(SECRET, step)
        draws = [self.scale * row_words.draw(read, self.dim, i) for i in range(self.dim)]
        states, fractions = self.noise.state.copy(), self.noise.fraction.copy()
        moved = self.noise.step(Row(SECRET, step)).copy()
        after, left = self.noise.state, self.noise.fraction
        rho, epsilon = [], np.zeros(len(states))
        for i in range(self.dim):
            held = [mpmath.mpf(float(s)) for s in states[:, i]] + [draws[i]]
            ran = int(moved[i]) + mpmath.mpf(float(left[i])) - mpmath.mpf(float(fractions[i]))
            one_step = mpmath.fdot(matrix[0], held)
            rho.append(float(abs(ran - one_step) / self.scale))
            for k, row in enumerate(matrix[1:]):
                error = abs(float(after[k, i]) - mpmath.fdot(row, held)) / self.scale
                epsilon[k] = max(epsilon[k], float(error))
            exact = [state[i] for state in self._states] + [draws[i]]
            self.increments[step, i] = (ran - mpmath.fdot(matrix[0], exact)) / self.scale
            for k, row in enumerate(matrix[1:]):
                self._states[k][i] = mpmath.fdot(row, exact)
        self.increment_errors.append(rho)
        self.state_errors.append(epsilon)


@pytest.mark.parametrize(
    ("name", "dim"),
    [("independent", 4), ("tree", 3), ("buffered", 4), ("toeplitz", 1), ("banded", 4), ("tree_full", 3)],
)
def test_rounding_errors_of_200_steps_are_below_what_is_charged(name, dim):
    """Step by step, and together: C times all errors, which is how far they can move a draw."""
    steps = 60 if name == "toeplitz" else 200
    replay = Replay(name, steps, dim).run()
    program, scale = replay.mechanism.program, float(replay.scale)
    gains, k = rounding_gains(program), program.state_size
    # The sizes that the module's text states, at REACH standard deviations.
    rho = U * (k + 4) * gains.output * REACH + 6 * U * gains.feed * REACH + gains.feed * DRAW_ERROR
    rho += 4 * U / scale
    epsilon = U * (k + 2) * (gains.transition + gains.entry) * REACH + gains.entry * DRAW_ERROR
    assert 0.0 < np.max(replay.increment_errors) < rho
    for seen in replay.state_errors:
        assert (seen <= epsilon).all()
    moved = np.linalg.norm(replay.mechanism.strategy_matrix() @ replay.increments, axis=0)
    charge = charge_for(program, 1, scale)
    assert 0.0 < moved.max() < charge.mu / 2  # half for each of two worlds


@pytest.mark.parametrize("dim", [1, 1000, 10**6])
@pytest.mark.parametrize("accounting", ["exact", "zcdp"])
def test_the_promise_holds_with_its_charge(name, dim, accounting):
    noise = calibrate_release(BUDGET, VARIANTS[name](16), 0.7, dim, accounting=accounting)
    guarantee = noise.guarantee
    assert noise.mechanism.program.block_length == 1
    assert (guarantee.epsilon, guarantee.delta) == (2.0, 1e-3)
    assert guarantee.noise_std == noise.std
    assert guarantee.arithmetic_mu == noise.charge.mu > 0.0
    assert guarantee.epsilon_at(1e-3) <= 2.0
    # From the definition: the curve of everything that moves a draw, and the tail in both worlds.
    mu = guarantee.sensitivity / noise.std + noise.charge.mu
    delta = GaussianCurve(mu).delta(2.0) + noise.charge.delta * (1.0 + math.exp(2.0))
    assert delta <= 1e-3
    assert guarantee.sensitivity == pytest.approx(1.4 * noise.mechanism.sensitivity(), rel=1e-12)
    assert noise.grid == grid_for(0.7, noise.std)


@pytest.mark.parametrize("dim", [1, 10**6, 10**12])
def test_noise_grows_by_the_charge_and_by_nothing_else(name, dim):
    mechanism = VARIANTS[name](16).with_block_length(1)
    std, plain = vs.calibrate(BUDGET, mechanism, 1.0, accounting="exact")
    noise = calibrate_release(BUDGET, mechanism, 1.0, dim)
    assert noise.std > std
    mu = plain.sensitivity / std
    expected = mu / (mu - noise.charge.mu)
    assert noise.std / std == pytest.approx(expected, rel=1e-14)
    if dim == 10**12:
        assert noise.std / std > 1.0 + 1e-8  # visible: it is really charged


def test_a_delta_that_cut_off_draws_cannot_keep_is_refused():
    mechanism = vs.mechanisms.toeplitz(8)
    calibrate_release(vs.Budget(1.0, 1e-40), mechanism, 1.0, 1000)
    with pytest.raises(InputError, match=r"privacy\.delta = 1e-60: expected more than .* coordinates.*larger delta"):
        calibrate_release(vs.Budget(1.0, 1e-60), mechanism, 1.0, 1000)


def test_the_least_delta_grows_with_dimension_and_epsilon():
    """On the edge: what one coordinate can keep, 10^9 cannot; nor can a larger ε."""
    mechanism = vs.mechanisms.independent(4)
    edge = 10 * 2.0 * 4 * math.exp(-128.0) * (1 + math.exp(1.0))
    calibrate_release(vs.Budget(1.0, edge), mechanism, 1.0, 1)
    with pytest.raises(InputError, match=r"privacy\.delta"):
        calibrate_release(vs.Budget(1.0, edge), mechanism, 1.0, 10**9)
    with pytest.raises(InputError, match=r"privacy\.delta"):
        calibrate_release(vs.Budget(20.0, edge), mechanism, 1.0, 1)


def test_more_than_float64_can_keep_is_refused():
    with pytest.raises(InputError, match=r"dim = .*few enough for float64.*fewer steps"):
        calibrate_release(vs.Budget(0.01, 1e-9), vs.mechanisms.independent(10**5), 1.0, 10**17)


@pytest.mark.parametrize("dim", [0, -1, 2.5, "3", True, None])
def test_dimensions_that_are_none(dim):
    with pytest.raises(InputError, match="dim"):
        calibrate_release(BUDGET, vs.mechanisms.tree(4), 1.0, dim)


def test_participation_and_neighbours_reach_the_promise():
    options = {"participation": (2, 4), "neighbours": "zero-out"}
    noise = calibrate_release(BUDGET, vs.mechanisms.banded(16, bands=4), 1.0, 10, **options)
    assert noise.guarantee.participation.times == 2
    plain = noise.mechanism
    std, guarantee = vs.calibrate(BUDGET, plain, 1.0, accounting="exact", **options)
    same = dataclasses.replace(noise.guarantee, noise_std=std, arithmetic_mu=0.0, arithmetic_delta=0.0)
    assert same == guarantee


def test_the_charge_is_the_sum_that_the_text_derives():
    """Written out anew for one step after another, from the program's own numbers."""
    program = vs.mechanisms.buffered(12).with_block_length(1).program
    k, u, reach = program.state_size, 2.0**-53, 16.0
    steps = [program.matrix(s).astype(np.float64) for s in range(12)]
    covariance, sizes = np.zeros((k, k)), []
    for M in steps:
        sizes.append(np.sqrt(np.diag(covariance)))
        covariance = M[1:, :k] @ covariance @ M[1:, :k].T + np.outer(M[1:, k], M[1:, k])
    C = np.linalg.inv(vs.mechanisms.buffered(12).with_block_length(1).noising_matrix())
    worst = 0.0
    for s, (M, size) in enumerate(zip(steps, sizes, strict=True)):
        feed, entry = abs(M[0, k]), np.abs(M[1:, k])
        rho = u * (k + 4) * reach * (np.abs(M[0, :k]) @ size)
        rho += feed * (6 * u * reach + 2.0**-46)
        epsilon = u * (k + 2) * reach * (np.abs(M[1:, :k]) @ size + entry) + entry * 2.0**-46
        later = np.zeros((k, k))  # what a change of the next state does to all draws after it
        for N in reversed(steps[s + 1 :]):
            seen = N[0, :k] / N[0, k]
            F = N[1:, :k] - np.outer(N[1:, k], seen)
            later = np.outer(seen, seen) + F.T @ later @ F
        worst = max(worst, np.linalg.norm(C[:, s]) * rho + np.sqrt(np.diag(later)) @ epsilon)
    charged = charge_for(program, 1, 1e18).mu / (2 * 12)
    assert worst <= charged <= 2.0 * worst  # each factor is taken at its own worst step
