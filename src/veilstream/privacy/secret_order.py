"""How much noise a secret order needs: every record of an epoch is used at a step that nobody outside may know.

**Setting.** C is lower triangular without negative entries, with columns c_1 … c_T. A record chooses one of T steps,
each with probability 1/T, independently of all others and unseen (`records.secret_order`). The learner releases
C·G + Z step by step, where row j of G is the sum of the clipped gradients of the records of step j, and Z has
independent N(0, V²) entries. Lengths are in units of what one record can add to a row, s = V / that.

**What is proved.** Let Q be the law of all releases when the record's gradient is zero, P when it is there. For every
ε, in both orders, and also if each gradient is chosen by what was released before,

    δ_ε(P, Q) and δ_ε(Q, P) are at most those of the pair  mean_j N(c_j, s²·I),  N(0, s²·I).

This is the dominating pair for "balls in bins" of Choquette-Choo, Ganesh, Haque, Steinke and Thakurta 2024 ("Near
Exact Privacy Amplification for Matrix Mechanisms"). *Proof.* Tell the adversary everything of all other records, their
steps included. Given what was released before, their gradients are then known and drop out, and the ratio of densities
after step t is Σ_j w_j with w_j = (1/T)·Π_{r<=t} exp(⟨v_rj, z_r⟩/s² - ‖v_rj‖²/2s²), where v_rj = C_rj·g_j and g_j, of
norm at most 1, was fixed before step j. Both δ are means of convex functions of that ratio. Replace the last step's
vectors by numbers, all g_j by 1: given the past, the exponents are jointly Gaussian with covariances C_tj·C_ti·⟨g_j,
g_i⟩/s² <= C_tj·C_ti/s², since no entry of C is negative, and Kahane's inequality (1985) says that a larger covariance
makes the mean of a convex function of Σ_j w_j·exp(X_j - var(X_j)/2) no smaller. Given the last step's noise, what then
remains is a convex function of Σ_j w_j·m_j with numbers m_j >= 0 that depend on nothing released before: with w_j·m_j
for w_j the step before can be replaced alike, and so on to the first. ∎
Only the products ⟨c_i, c_j⟩ matter, and larger ones cost more: a window takes the largest over all windows.

*Zero-out neighbours*: both orders of the pair must keep (ε, δ). *Replace-one neighbours*: two hops, over the record's
absence. For any ε₁,  δ_ε(P, P') <= δ_ε₁(P, Q) + e^ε₁·δ_{ε-ε₁}(Q, P');  nothing is assumed of N(c_j) against N(-c_j).
The Gaussian mechanism's own curve holds as well, since a mixture is no easier to tell apart than its worst part; the
smaller noise of the two counts.

**Adversary.** The server and anyone who reads the messages, choosing models adaptively, who may know all other records
and their steps. The promise rests on the choice of steps staying secret, and on HMAC-SHA256 under the epoch's
secret being as good as independent uniform choices.

**Numbers.** δ of the pair is bounded by sampling (`privacy.mixture_bounds`): noise is chosen by one sample and then
certified by fresh ones, whose probability of failure, over all that are looked at, is charged to δ. The seed
follows from the request, so everybody finds the same. For δ < 1e-4, where several
columns are likelier than one to reach e^ε, draws raise columns together (`privacy.raised_columns`).

**Arithmetic.** What a program really releases is a Gaussian shift of at most μ_a away from C·G + Z, given the record's
step (`privacy.noise_law`), and mixing keeps that: δ of real P against ideal P is at most the Gaussian's. Real to ideal,
over to the neighbour, ideal to real is a chain: with ε_a for the outer hops, (ε - 2·ε_a) is left for the inner
one. A small share of ε and δ is set aside for it, and always for the same share, so that a simulation and a deployed
learner have the same noise.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer
from veilstream.mechanisms.columns import Columns, columns_of
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.solution_cache import load_or_solve
from veilstream.privacy.gaussian import GaussianCurve, mu_for
from veilstream.privacy.guarantee import Budget, Neighbours, SecretSteps
from veilstream.privacy.mixture_bounds import (
    Draws,
    Floats,
    bounded_mean,
    draws_downwards,
    draws_upwards,
    most_downwards,
    most_upwards,
    tightest_tilt_downwards,
    tightest_tilt_upwards,
)
from veilstream.privacy.raised_columns import Raised
from veilstream.progress import progress

_FAILURE = 1e-9
_SHARES = (1e-4, 1e-3, 1e-2, 1e-1)  # of ε and δ, set aside for arithmetic
_ROUGH_WORK = 1_500_000  # numbers drawn to look at one noise where mechanisms are compared
_RETHOUGHT = 3
"""After so many noises that were not certified, tilts are chosen anew."""
_ATTEMPTS = 12
_PARTS_OF_EPSILON = tuple(np.linspace(0.1, 0.9, 33).tolist())  # for the first hop
_PARTS_OF_TILT = (0.0, 0.5, 1.0, 1.5)
_TOGETHER = 2.0  # in place of a part: columns are raised together
_SMALL = 1e-4  # δ: below it columns may be raised together
_DIGITS = 11  # binary, of a noise: a bit more than asked, and the same on every machine


@dataclass(frozen=True)
class _Method:
    """How a noise is certified. Its number changes with anything that makes another noise of the same request."""

    number: int
    pilot_work: int  # numbers drawn to look at one noise
    most_pilot: int  # draws
    work: int  # numbers drawn to certify one noise, in each order
    most_draws: int
    plain: bool  # which range, see `most_downwards`

    @classmethod
    def of(cls, steps: int, delta: float) -> _Method:
        """The first one where it is as good, to half a percent: runs with its noise are published."""
        if delta < _SMALL:
            return _THIRD
        return _FIRST if steps <= 128 else _SECOND

    def draws(self, steps: int) -> int:
        return int(np.clip(self.work // steps, 10_000, self.most_draws))


_FIRST = _Method(1, 1_500_000, 20_000, 200_000_000, 1_000_000, plain=True)
_SECOND = _Method(2, 3_000_000, 100_000, 800_000_000, 8_000_000, plain=False)
_THIRD = _Method(3, 3_000_000, 100_000, 200_000_000, 2_000_000, plain=False)


@dataclass(frozen=True)
class SecretNoise:
    """Noise of a secret order, in units of what one record can add to a step."""

    std: float
    steps: SecretSteps


def spread_columns(mechanism: Factorization, window: int | None, delta: float = 1.0) -> tuple[Columns, float]:
    """The columns among which a record chooses, and how far the mechanism's own are from them.

    With a window, one set of columns whose inner products are at least those of every window's.
    """
    columns, apart = columns_of(mechanism)
    if delta < _SMALL:  # draws then rest on which columns overlap
        columns, cut = columns.trimmed()
        apart += cut
    return (columns, apart) if window is None else (_worst_window(columns, window), apart)


Charge = Callable[[float], tuple[float, float]]
"""From a noise std, in units of what one record can add, to what arithmetic may add: a Gaussian shift μ_a between what
a program releases and the ideal mechanism, and a probability, in either world, of what that leaves out."""


def secret_order_noise(
    budget: Budget,
    mechanism: Factorization,
    neighbours: Neighbours,
    window: int | None = None,
    charge: Charge = lambda _: (0.0, 0.0),
) -> SecretNoise:
    """Least noise, as found, that keeps the budget, arithmetic included.

    Raises:
        InputError: for a mechanism that does not qualify, or arithmetic that would cost a tenth of the budget.

    """
    columns, apart = spread_columns(mechanism, window, budget.delta)
    for share in _SHARES:
        inner = _inner(budget, share)
        seed = _seed(columns, inner, neighbours)

        def solve(inner: Budget = inner, seed: int = seed) -> dict[str, Floats]:
            return {"found": _Search(columns, neighbours, inner.delta, seed).least_noise(inner.epsilon)}

        found = load_or_solve(_recipe("noise", columns, inner, neighbours, mechanism), {"found": 1}, solve)["found"]
        std, sampled, draws, part = found.tolist()
        shift, tail = charge(std)
        if share >= needed_share(budget, shift + apart / std, tail):
            failure = _failure(inner.delta) if sampled else 0.0
            steps = SecretSteps(
                among=columns.count,
                window=window,
                seed=seed,
                draws=int(draws),
                failure_probability=failure,
                first_hop=part,
            )
            return SecretNoise(std, steps)
    raise AssertionError("needed_share is one of the shares, or refuses")


def rough_secret_noise(
    budget: Budget, mechanism: Factorization, neighbours: Neighbours, window: int | None = None
) -> float:
    """About what `secret_order_noise` finds, in a fraction of the time: to compare mechanisms by, never to release."""
    columns, _ = spread_columns(mechanism, window, budget.delta)
    alike = columns.count  # mechanisms that are compared meet the same draws
    return _Search(columns, neighbours, budget.delta, alike).rough_noise(budget.epsilon)


def secret_order_epsilon(
    std: float,
    delta: float,
    mechanism: Factorization,
    neighbours: Neighbours,
    window: int | None = None,
    charge: Charge = lambda _: (0.0, 0.0),
) -> float:
    """An ε that this noise keeps at this δ, as small as found: the same accounting, asked the other way round."""
    columns, apart = spread_columns(mechanism, window, delta)
    shift, tail = charge(std)
    known = GaussianCurve(neighbours.reach * math.sqrt(float(columns.norms_squared.max())) / std)
    largest = known.epsilon(0.5 * delta)  # of what is looked at
    share = needed_share(Budget(largest, delta), shift + apart / std, tail)
    kept = _inner(Budget(largest, delta), share).delta
    seed = _seed(columns, Budget(largest, kept), neighbours)

    def solve() -> dict[str, Floats]:
        found = _Search(columns, neighbours, kept, seed).least_epsilon(std, known.epsilon(kept))
        return {"found": np.array([found / (1.0 - share)])}

    recipe = _recipe("epsilon", columns, Budget(largest, kept), neighbours, mechanism) | {"std": std, "share": share}
    return float(load_or_solve(recipe, {"found": 1}, solve)["found"][0])


def needed_share(budget: Budget, shift: float, tail: float) -> float:
    """How much of ε and δ is to be set aside for a Gaussian shift μ_a = ``shift``, and a ``tail``, at either end.

    Raises:
        InputError: where a tenth is too little.

    """
    for share in _SHARES:
        outer = 0.5 * share * budget.epsilon
        missed = GaussianCurve(shift).delta(outer) if shift > 0.0 else 0.0
        growth = math.exp(min(budget.epsilon, 700.0))
        if (missed + tail) * (1.0 + growth) <= 0.9 * share * budget.delta:
            return share
    raise InputError(
        "privacy.order",
        "secret",
        f"arithmetic for which a tenth of the budget pays: it adds {shift:.2g} to mu and {tail:.2g} to delta",
        'fewer steps or parameters, a larger epsilon or delta, or order = "known"',
    )


def _inner(budget: Budget, share: float) -> Budget:
    """What is left of a budget for the inner hop."""
    return Budget(
        budget.epsilon * (1.0 - share), budget.delta * (1.0 - share) * math.exp(-0.5 * share * budget.epsilon)
    )


def _recipe(
    question: str, columns: Columns, budget: Budget, neighbours: Neighbours, mechanism: Factorization
) -> dict[str, object]:
    return {
        "mechanism": f"secret-order-{mechanism.name}",
        "horizon": columns.count,
        "question": question,
        "method": _Method.of(columns.count, budget.delta).number,
        "columns": columns.digest,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "neighbours": neighbours.value,
    }


def _seed(columns: Columns, budget: Budget, neighbours: Neighbours) -> int:
    method = _Method.of(columns.count, budget.delta).number
    asked = json.dumps([columns.digest, budget.epsilon, budget.delta, neighbours.value, method])
    return int.from_bytes(
        hashlib.sha256(asked.encode()).digest()[:4], "big"
    )  # a message between server and learner holds it


def _failure(delta: float) -> float:
    return min(_FAILURE, 1e-4 * delta)


def _rounded_up(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(math.ceil(fraction * 2**_DIGITS) / 2**_DIGITS, exponent)


def _worst_window(columns: Columns, window: int) -> Columns:
    """Columns of one window whose inner products are at least those of every window's."""
    W, T = positive_integer("privacy.window", window, "steps of a window; try 20"), columns.count
    if W > T or T % W:
        raise InputError(
            "privacy.window", window, f"a divisor of the {T} steps of an epoch", "another window, or other rounds"
        )
    entries = columns.entries
    width = entries.shape[1]
    largest = np.zeros((W, W))
    for first in range(0, T, W):
        own = np.zeros((W, W + width))
        for i in range(W):
            own[i, i : i + width] = entries[first + i]
        largest = np.maximum(largest, own @ own.T)
    least = float(np.linalg.eigvalsh(largest)[0])
    lift = max(0.0, 1e-9 * float(largest.max()) - least)  # the largest of positive matrices need not be one
    return Columns.of_products(largest + lift * np.eye(W))


@dataclass(frozen=True)
class _Choice:
    """How a noise is looked at: the first hop's part of ε, and the two tilts, as parts of the largest sensible ones."""

    part: float
    up: float
    down: float


class _Search:
    """The least noise for a budget, or the least ε of a noise: chosen by one sample, certified by others."""

    def __init__(self, columns: Columns, neighbours: Neighbours, delta: float, seed: int) -> None:
        self.columns, self.neighbours, self.seed = columns, neighbours, seed
        self.failure = _failure(delta)
        self.target = delta - self.failure
        T = columns.count
        self.method = _Method.of(T, delta)
        self.pilot = int(np.clip(self.method.pilot_work // T, 1_000, self.method.most_pilot))
        self.draws = self.method.draws(T)

    def least_noise(self, epsilon: float) -> Floats:
        """The noise, whether it rests on sampling, how many draws certified it, and the first hop's part of ε."""
        known = _rounded_up(self._known_noise(epsilon))
        fallback = np.array([known, 0.0, 0.0, 0.0])
        if self.columns.count == 1:
            return fallback
        with progress("accounting for a secret order", None) as tick:
            s, choice = self._guess(epsilon, known, tick)
            if s >= known:
                return fallback
            for attempt in range(1, _ATTEMPTS):
                s = _rounded_up(s)
                if s >= known:
                    break
                if self._certified(s, epsilon, choice, attempt, tick):
                    return np.array([s, 1.0, self.draws, choice.part])
                s *= 1.01 if attempt < _RETHOUGHT else 1.1
                if attempt >= _RETHOUGHT:  # few draws chose these tilts, and range alone may be too much for them
                    look = self._look(s, epsilon, None, tick, max(self.pilot, self.draws // 8), attempt)
                    _, choice = look.best(epsilon, self.draws, self.failure)
        return fallback

    def least_epsilon(self, s: float, known: float) -> float:
        """The ε; ``known`` is that of a known order, which holds as well."""
        if self.columns.count == 1:
            return known
        with progress("accounting for a secret order", None) as tick:
            looks: dict[float, _Look] = {}

            def excess(log_epsilon: float) -> float:
                epsilon = math.exp(log_epsilon)
                scale = round(math.log2(epsilon))  # draws are tilted for an ε nearby
                if scale not in looks:
                    looks[scale] = self._look(s, 2.0**scale, None, tick)
                return math.log(looks[scale].best(epsilon, self.draws, self.failure)[0] / self.target)

            low, high = math.log(known) - 4.0, math.log(known)
            if excess(high) > 0.0:
                return known
            for _ in range(12):
                middle = 0.5 * (low + high)
                low, high = (low, middle) if excess(middle) <= 0.0 else (middle, high)
            epsilon = math.exp(high)
            for attempt in range(1, _ATTEMPTS):
                epsilon *= 1.01
                if epsilon >= known:
                    break
                _, choice = self._look(s, epsilon, None, tick).best(epsilon, self.draws, self.failure)
                if self._certified(s, epsilon, choice, attempt, tick):
                    return epsilon
        return known

    def _known_noise(self, epsilon: float) -> float:
        reach = self.neighbours.reach * math.sqrt(float(self.columns.norms_squared.max()))
        return reach / mu_for(epsilon, self.target + self.failure)

    def rough_noise(self, epsilon: float) -> float:
        """About what `least_noise` is, to within some percent: to compare mechanisms, not to promise anything."""
        known = self._known_noise(epsilon)
        self.pilot = int(np.clip(_ROUGH_WORK // self.columns.count, 1_000, 20_000)) // 2
        return self._guess(epsilon, known, lambda _: None, rough=True)[0] if self.columns.count > 1 else known

    def _guess(
        self, epsilon: float, known: float, tick: Callable[[int], None], *, rough: bool = False
    ) -> tuple[float, _Choice]:
        """A noise that should be certified, by bisection and then, unless ``rough``, a larger sample."""

        def excess(s: float, choice: _Choice | None) -> tuple[float, _Choice]:
            value, best = self._look(s, epsilon, choice, tick).best(epsilon, self.draws, self.failure)
            return math.log(value / self.target), best

        at, choice = excess(known, None)
        if at > 0.0:
            return known, choice
        low, high = math.log(known) - 3.0, math.log(known)
        held: _Choice | None = None
        for turn in range(9):
            middle = 0.5 * (low + high)
            at, found = excess(math.exp(middle), held)
            if at <= 0.0:
                high, choice = middle, found
            else:
                low = middle
            if turn >= 3:
                held = choice
        s = math.exp(high)
        if rough:
            return s, choice
        # The slope of ln δ by ln s turns what a larger sample says into a better noise.
        here, choice = excess(s, None)
        further, _ = excess(1.05 * s, choice)
        slope = max(1.0, (here - further) / math.log(1.05))
        value, choice = self._look(s, epsilon, choice, tick, self.draws // 4).best(epsilon, self.draws, self.failure)
        return s * (value / self.target) ** (1.0 / slope) * 1.005, choice

    def _certified(self, s: float, epsilon: float, choice: _Choice, attempt: int, tick: Callable[[int], None]) -> bool:
        look = self._look(s, epsilon, choice, tick, self.draws, attempt)
        value, _ = look.best(epsilon, self.draws, self.failure * 2.0**-attempt, choice.part)
        return value <= self.target

    def _look(
        self,
        s: float,
        epsilon: float,
        choice: _Choice | None,
        tick: Callable[[int], None],
        draws: int | None = None,
        attempt: int = 0,
    ) -> _Look:
        """Draws at a noise: with all tilts, or with chosen ones."""
        count = self.pilot if draws is None else draws
        half = epsilon * (0.5 if self.neighbours is Neighbours.REPLACE_ONE else 1.0)
        together = self.method is _THIRD and 2 * self.columns.reach <= self.columns.count and epsilon <= 50.0
        ups = (*_PARTS_OF_TILT, *([_TOGETHER] if together else [])) if choice is None else (choice.up,)
        downs = _PARTS_OF_TILT if choice is None else (choice.down,)
        most_up = tightest_tilt_upwards(self.columns, s, half)
        most_down = tightest_tilt_downwards(self.columns, s, half)
        up: dict[float, tuple[Callable[[float], float], Draws]] = {}
        down = {}
        for part in ups:
            seed = [self.seed, count, attempt, 1, round(100 * part)]
            if part == _TOGETHER:
                raised = Raised.of(self.columns, s, half if choice is None else choice.part * epsilon)
                up[part] = raised.most, raised.draws(count, seed, tick)
            else:
                tilt = part * most_up
                most = partial(most_upwards, self.columns, s, tilt)
                up[part] = most, draws_upwards(self.columns, s, tilt, count, seed, tick)
        for part in downs:
            seed = [self.seed, count, attempt, 2, round(100 * part)]
            down[part] = part * most_down, draws_downwards(self.columns, s, part * most_down, count, seed, tick)
        return _Look(self.columns, self.neighbours, s, self.method.plain, up, down)


@dataclass(frozen=True)
class _Look:
    """Draws at one noise, by the part of the largest tilt that they have."""

    columns: Columns
    neighbours: Neighbours
    s: float
    plain: bool
    up: dict[float, tuple[Callable[[float], float], Draws]]
    down: dict[float, tuple[float, Draws]]

    def best(self, epsilon: float, count: int, failure: float, part: float | None = None) -> tuple[float, _Choice]:
        """The least bound on δ, and how it is reached; each of two means may fail with half of ``failure``."""
        if self.neighbours is Neighbours.ZERO_OUT:
            up, by_up = self._upwards(epsilon, count, 0.5 * failure)
            down, by_down = self._downwards(epsilon, count, 0.5 * failure)
            return max(up, down), _Choice(1.0, by_up, by_down)
        found = []
        for each in _PARTS_OF_EPSILON if part is None else (part,):
            up, by_up = self._upwards(each * epsilon, count, 0.5 * failure)
            down, by_down = self._downwards((1.0 - each) * epsilon, count, 0.5 * failure)
            both = up + math.exp(min(each * epsilon, 700.0)) * down
            found.append((both, _Choice(each, by_up, by_down)))
        return min(found, key=lambda pair: pair[0])

    def _upwards(self, epsilon: float, count: int, failure: float) -> tuple[float, float]:
        return min(
            (bounded_mean(draws.upwards(epsilon), most(epsilon), failure, count).value, part)
            for part, (most, draws) in self.up.items()
        )

    def _downwards(self, epsilon: float, count: int, failure: float) -> tuple[float, float]:
        found = []
        for part, (tilt, draws) in self.down.items():
            most = most_downwards(self.columns, self.s, tilt, epsilon, plain=self.plain)
            found.append((bounded_mean(draws.downwards(epsilon), most, failure, count).value, part))
        return min(found)
