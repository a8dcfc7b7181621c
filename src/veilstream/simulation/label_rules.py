"""What labels alone can say: predictions that look at no feature, beside which a model must show itself.

    majority            the running shares of all learners' labels together, known at each release
    learner's share     the running shares of this learner's labels, known at each record
    last label          the label of this learner's record before, at the running share of such repeats
    noisy count         this learner's, from counts released with independent noise: private, at a budget

The prediction is the label with the largest share, the loss that of the shares. Every label begins
with one imagined record. A noisy count is a private model with as many numbers as there are labels:
a client adds one to one of them, so replacing its record moves the counts by √2, once.

Where the noise of a running count is larger than the count, the count says nothing: shares are
never taken below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms import build
from veilstream.mechanisms.participation import ONCE, Participation
from veilstream.privacy import Budget, Neighbours, calibrate

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_NOISE = 0x1ABE1


@dataclass(frozen=True)
class RulesFigures:
    """Of one rule by round, over the clients who were there; NaN where nobody was."""

    accuracy: Floats
    loss: Floats


def majority(labels: Ints, classes: int) -> RulesFigures:
    """Of all learners' labels (rounds, learners, clients) of earlier rounds; -1 is nobody."""
    seen = _one_hot(labels, classes).sum(axis=(1, 2))
    before = 1.0 + np.cumsum(seen, axis=0) - seen
    return _judged(labels, np.broadcast_to(before[:, None, None], (*labels.shape, classes)))


def learners_share(labels: Ints, classes: int) -> RulesFigures:
    """Of each learner's own earlier labels, record by record."""
    rounds, learners, clients = labels.shape
    in_order = _one_hot(labels, classes).transpose(1, 0, 2, 3).reshape(learners, rounds * clients, classes)
    before = 1.0 + np.cumsum(in_order, axis=1) - in_order
    return _judged(labels, before.reshape(learners, rounds, clients, classes).transpose(1, 0, 2, 3))


def last_label(labels: Ints, classes: int) -> RulesFigures:
    """Of each learner's record before; the first is taken to follow label 0."""
    rounds, learners, clients = labels.shape
    in_order = labels.transpose(1, 0, 2).reshape(learners, rounds * clients)
    met = np.where(in_order >= 0, np.arange(in_order.shape[1]), -1)
    latest = np.concatenate([np.full((learners, 1), -1), np.maximum.accumulate(met, axis=1)[:, :-1]], axis=1)
    before = np.where(latest >= 0, np.take_along_axis(in_order, np.maximum(latest, 0), axis=1), 0)
    there, right = in_order >= 0, (before == in_order) & (in_order >= 0)
    repeats = (1.0 + right.cumsum(axis=1) - right) / (2.0 + there.cumsum(axis=1) - there)
    chance = np.where(right, repeats, (1.0 - repeats) / max(1, classes - 1))
    shape = (learners, rounds, clients)
    by_place = [values.reshape(shape).transpose(1, 0, 2) for values in (right.astype(np.float64), -np.log(chance))]
    return RulesFigures(_by_round(by_place[0], labels >= 0), _by_round(by_place[1], labels >= 0))


def noisy_count(
    labels: Ints,
    classes: int,
    budget: Budget,
    seed: int,
    *,
    participation: Participation = ONCE,
    local_steps: int = 1,
    neighbours: Neighbours = Neighbours.REPLACE_ONE,
) -> RulesFigures:
    """Of each learner's earlier rounds, as released with independent noise. Simulated: its noise comes from ``seed``.

    ``participation`` counts steps, of which a round has ``local_steps``; a round's count is one release.
    """
    rounds, learners, _ = labels.shape
    std = count_noise(rounds, budget, participation, local_steps, neighbours)
    rng = np.random.default_rng([seed, _NOISE])
    released = _one_hot(labels, classes).sum(axis=2) + std * rng.standard_normal((rounds, learners, classes))
    before = np.concatenate([np.zeros((1, learners, classes)), np.cumsum(released, axis=0)[:-1]])
    floor = std * np.sqrt(np.arange(rounds))[:, None, None]
    shares = 1.0 + np.maximum(before, floor)
    return _judged(labels, np.broadcast_to(shares[:, :, None], (*labels.shape, classes)))


def count_noise(
    rounds: int,
    budget: Budget,
    participation: Participation = ONCE,
    local_steps: int = 1,
    neighbours: Neighbours = Neighbours.REPLACE_ONE,
) -> float:
    """Standard deviation in each number of each release, by exact accounting.

    One record, replaced, moves the numbers of one release by √2, and one that is left out by 1; a
    person who comes k times, of k releases, or of fewer by more: k times that then covers every case.

    Guarantees: (ε, δ) for one client's records, for all releases together, by the Gaussian mechanism,
    against all who see the counts.
    """
    moved = math.sqrt(2.0) if neighbours is Neighbours.REPLACE_ONE else 1.0
    norm = moved / neighbours.reach  # the norm of a clipped vector for which `calibrate` counts as much
    if participation.times == 1 or participation.min_separation >= local_steps:
        times = min(participation.times, rounds)
        apart = max(1, participation.min_separation // local_steps)
        times = min(times, -(-rounds // apart))
        visits = (times, apart)
    else:
        norm, visits = norm * participation.times, (1, 1)
    return calibrate(budget, build("independent", rounds), norm, neighbours=neighbours, participation=visits)[0]


def _one_hot(labels: Ints, classes: int) -> Floats:
    hot: Floats = (labels[..., None] == np.arange(classes)).astype(np.float64)
    return hot


def _judged(labels: Ints, shares: Floats) -> RulesFigures:
    there = labels >= 0
    own = np.take_along_axis(shares, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    right, loss = shares.argmax(axis=-1) == labels, np.log(shares.sum(axis=-1)) - np.log(own)
    return RulesFigures(_by_round(right.astype(np.float64), there), _by_round(loss, there))


def _by_round(values: Floats, there: NDArray[np.bool_]) -> Floats:
    count = there.sum(axis=(1, 2))
    total = np.where(there, values, 0.0).sum(axis=(1, 2))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
