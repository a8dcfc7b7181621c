"""Many runs with a canary: what an adversary who sees everything can tell, counted.

In each run a fair coin decides which of two neighbouring records the canary has. A statistic of the
transcript guesses which. Weights and thresholds follow from the claimed law, or are chosen on runs
of their own; the rest are counted, and binomial bounds (Clopper and Pearson 1934) hold without any
assumption.

1. ε: any (ε, δ) promise has  FNR >= 1 - δ - e^ε·FPR  and the same with the two exchanged.
2. μ: any μ-Gaussian promise has  FPR + FNR >= 2·Φ(-μ/2)  for every test. With fair coins the number
   of wrong guesses is binomial with probability (FPR + FNR)/2, so one exact bound on that gives
   μ >= -2·Φ⁻¹(error): no union over two error rates. ε at any δ follows from μ's own curve.
3. Conformance: if the mechanism is the Gaussian that is claimed, the likelihood ratio errs in
   exactly Φ(-d'/2) of runs, so the two-sided interval on μ holds the expected d'.

Why μ: at a small δ, an ε counted from 10⁵ runs lies a third or more below the truth, since the
events that show it are rare. Wrong guesses are not rare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta

from veilstream.audit.statistics.check import CONFIDENCE, FALSE_ALARMS
from veilstream.audit.statistics.law import Law
from veilstream.errors import InputError
from veilstream.privacy.gaussian import GaussianCurve

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_FITTED = 0.15  # share of the runs that choose weights and thresholds
_LEAST = 400


@dataclass(frozen=True)
class Guesses:
    """One statistic's account."""

    statistic: str
    runs: int
    """How many guesses ``errors`` is of."""
    errors: int
    """Wrong guesses at the threshold half-way: of the law, or between the fitting runs' means."""
    false_alarms: int
    misses: int
    """At the threshold that showed most ε in the fitting runs."""
    mu_lower: float
    mu_upper: float
    epsilon_lower: float
    """Without assumptions, at the stated confidence; so are the two above."""
    mu_surely: float
    mu_at_most: float
    epsilon_surely: float
    """The same at the level of an alarm."""


@dataclass(frozen=True)
class ManyRun:
    """What many runs tell."""

    runs: int
    fitted: int
    first: int
    """Counted runs in which the canary had the first record; the others had the second."""
    claim: float
    expected: float | None
    delta: float
    guesses: tuple[Guesses, ...]
    roc: tuple[tuple[float, float], ...]
    """(false-alarm rate, miss rate) of the best statistic, at some thresholds, for a picture."""
    confidence: float
    false_alarms: float

    @property
    def best(self) -> Guesses:
        """The statistic that showed most."""
        return max(self.guesses, key=lambda g: g.mu_lower)

    @property
    def mu_lower(self) -> float:
        """μ is at least this, at the stated confidence (shared between the statistics)."""
        return self.best.mu_lower

    @property
    def epsilon_lower(self) -> float:
        """ε is at least this, without assumptions."""
        return max(g.epsilon_lower for g in self.guesses)

    @property
    def epsilon_via_mu(self) -> float:
        """ε of the Gaussian curve with the lower bound on μ."""
        return epsilon_of(self.mu_lower, self.delta)

    @property
    def violation(self) -> bool:
        """More is told than was promised."""
        limit = epsilon_of(self.claim, self.delta)
        return any(g.mu_surely > self.claim or g.epsilon_surely > limit for g in self.guesses)

    @property
    def stranger(self) -> bool:
        """The likelihood ratio guesses better or worse than the claimed mechanism allows."""
        if self.expected is None or self.guesses[0].statistic != LIKELIHOOD_RATIO:
            return False
        ratio = self.guesses[0]
        return not ratio.mu_surely <= self.expected <= ratio.mu_at_most

    @property
    def alarm(self) -> bool:
        """Either."""
        return self.violation or self.stranger


LIKELIHOOD_RATIO, LEARNED = "likelihood ratio", "learned linear"


def many_run(
    transcripts: Floats,
    second: Bools,
    law: Law,
    *,
    delta: float,
    client: int | None = None,
    centre: float = 0.0,
    expected: float | None = None,
    confidence: float = CONFIDENCE,
    false_alarms: float = FALSE_ALARMS,
) -> ManyRun:
    """Judge (R, N) transcripts, one run a column; ``second`` says which record each canary had.

    The coins must be fair and independent. ``expected`` is the separation that theory gives the
    likelihood ratio for ``client`` (the worst one), None where it names none; ``centre`` is half
    the sum of the canary's two gradients: the law puts the threshold there.

    Guarantees: μ is at least `mu_lower` with probability ``confidence``, whatever was run; for a
    mechanism that keeps its claim and meets ``expected``, `alarm` is raised with probability at
    most ``false_alarms``.
    """
    n = transcripts.shape[1]
    if n < _LEAST or second.shape != (n,):
        raise InputError("runs", n, f"at least {_LEAST}", "bounds from fewer say nothing")
    fitted = int(n * _FITTED)
    fit, fit_coins = transcripts[:, :fitted], second[:fitted]
    rest, coins = transcripts[:, fitted:], second[fitted:]
    learned = _discriminant(fit, fit_coins)
    means = [float((learned @ fit[:, side]).mean()) for side in (fit_coins, ~fit_coins)]
    chosen = {LEARNED: (learned, 0.5 * sum(means))}
    if law.root is not None:
        who = law.worst if client is None else client
        ratio = law.likelihood_ratio(who)
        chosen = {LIKELIHOOD_RATIO: (ratio, centre * float(ratio @ law.shifts[:, who]))} | chosen
    share = (1.0 - confidence) / len(chosen), false_alarms / len(chosen)
    guesses = tuple(
        _count(name, half_way, w @ transcripts, second, fitted, delta, share) for name, (w, half_way) in chosen.items()
    )
    best = max(guesses, key=lambda g: g.mu_lower).statistic
    return ManyRun(
        runs=n,
        fitted=fitted,
        first=int((~coins).sum()),
        claim=law.claim,
        expected=expected,
        delta=delta,
        guesses=guesses,
        roc=_roc(chosen[best][0] @ rest, coins),
        confidence=confidence,
        false_alarms=false_alarms,
    )


def clopper_pearson(count: int, total: int, level: float) -> tuple[float, float]:
    """Lower and upper bound on a probability, each wrong with probability at most ``level``."""
    low = 0.0 if count == 0 else float(beta.ppf(level, count, total - count + 1))
    high = 1.0 if count == total else float(beta.isf(level, count + 1, total - count))
    return low, high


def epsilon_at_least(rare: int, rare_runs: int, common: int, common_runs: int, delta: float, level: float) -> float:
    """Lower bound on ε from counts of the two errors, wrong with probability at most ``level``."""
    low = clopper_pearson(rare, rare_runs, 0.5 * level)[1]
    share = 1.0 - delta - clopper_pearson(common, common_runs, 0.5 * level)[1]
    return max(0.0, math.log(share / low)) if share > 0.0 else 0.0


def epsilon_of(mu: float, delta: float) -> float:
    """ε of the Gaussian curve; zero for no separation at all."""
    if math.isinf(mu):
        return math.inf
    return GaussianCurve(mu).epsilon(delta) if mu > 0.0 else 0.0


def _discriminant(transcripts: Floats, second: Bools) -> Floats:
    """Fisher's linear discriminant; a touch of ridge where a message carries no noise."""
    one, other = transcripts[:, ~second], transcripts[:, second]
    apart = other.mean(axis=1) - one.mean(axis=1)
    centred = np.concatenate([one - one.mean(axis=1, keepdims=True), other - other.mean(axis=1, keepdims=True)], axis=1)
    spread = centred @ centred.T / centred.shape[1]
    ridge = 1e-12 * float(np.trace(spread)) / len(spread) + 1e-300
    weights: Floats = np.linalg.solve(spread + ridge * np.eye(len(spread)), apart)
    return weights


def _count(
    name: str, half_way: float, score: Floats, coins: Bools, fitted: int, delta: float, share: tuple[float, float]
) -> Guesses:
    rare, side = _rare_event(score[:fitted], coins[:fitted], delta)
    guesses = (score > half_way) != coins
    if name == LEARNED:  # the law's statistic is fixed before any run: all of them count
        guesses = guesses[fitted:]
    errors, n = int(guesses.sum()), len(guesses)
    score, coins = score[fitted:], coins[fitted:]
    wrong = int(((score > rare) & ~coins).sum())
    missed = int(((score <= rare) & coins).sum())
    ones, others = int((~coins).sum()), int(coins.sum())
    # An alarm may come from the ε or from either side of μ.
    report, alarm = share[0], share[1] / 3.0

    def mu_bounds(level: float) -> tuple[float, float]:
        low, high = clopper_pearson(errors, n, level)
        return max(0.0, -2.0 * float(ndtri(high))), max(0.0, -2.0 * float(ndtri(low)))

    def epsilon_bound(level: float) -> float:
        counts = [(wrong, ones), (missed, others)]
        rare, common = counts if side else reversed(counts)
        return epsilon_at_least(*rare, *common, delta, level)

    (low, high), (sure_low, sure_high) = mu_bounds(report), mu_bounds(alarm)
    return Guesses(
        name, n, errors, wrong, missed, low, high, epsilon_bound(report), sure_low, sure_high, epsilon_bound(alarm)
    )


def _rare_event(score: Floats, second: Bools, delta: float) -> tuple[float, bool]:
    """The threshold that shows most ε, and whether false alarms are the rare error there."""
    order = np.sort(score)
    cuts = order[np.unique(np.linspace(0, len(order) - 1, 2001).astype(int))]
    one, other = np.sort(score[~second]), np.sort(score[second])
    wrong = len(one) - np.searchsorted(one, cuts, side="right")
    missed = np.searchsorted(other, cuts, side="right")
    fpr = beta.isf(0.05, wrong + 1, np.maximum(len(one) - wrong, 1e-9))
    fnr = beta.isf(0.05, missed + 1, np.maximum(len(other) - missed, 1e-9))
    with np.errstate(invalid="ignore", divide="ignore"):
        by_alarms = np.log(np.maximum(1.0 - delta - fnr, 0.0) / fpr)
        by_misses = np.log(np.maximum(1.0 - delta - fpr, 0.0) / fnr)
    both = np.nan_to_num(np.stack([by_alarms, by_misses]), nan=-np.inf)
    side, at = np.unravel_index(int(np.argmax(both)), both.shape)
    return float(cuts[at]), bool(side == 0)


def _roc(score: Floats, second: Bools, points: int = 200) -> tuple[tuple[float, float], ...]:
    one, other = np.sort(score[~second]), np.sort(score[second])
    quantiles = ndtr(np.linspace(-3.0, 3.0, points))
    cuts = np.quantile(score, quantiles)
    fpr = 1.0 - np.searchsorted(one, cuts, side="right") / len(one)
    fnr = np.searchsorted(other, cuts, side="right") / len(other)
    return tuple(zip(fpr.tolist(), fnr.tolist(), strict=True))
