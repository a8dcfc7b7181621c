"""How good predictions are, by the usual measures; NumPy alone, the same for a run, a federation and a file.

Predictions of labels are places 0, 1, 2, ... in the order of the plan's labels. ``logits`` are what a model says
before it decides: (n,) for two labels, where more means the second, or (n, classes). ``groups`` says whose each row
is: rows of one person are not independent, and sampling errors count people then.

    accuracy        share of rows whose label is right
    recall          of one label: share of its rows that are given it
    balanced        mean recall of the labels that there are; 1/classes for a model that knows nothing
    AUC             the chance that a row of a label is ranked above a row without it (ties count half); 0.5 for a
                    model that knows nothing. For more than two labels: the mean over labels, each against the others
    log loss        calibrated: mean of -log(probability of the true label), after `calibrated` below
    RMSE            root mean square error;  R²: 1 - mean square error / variance of the rows' own targets
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.integer[Any]]
Groups = NDArray[np.integer[Any]]

Z95 = 1.959963984540054  # a normal variable lies within this many standard deviations with probability 0.95
_PENALTY = 1e-3  # of calibration, on all rows together: keeps it finite where scores tell labels apart
_SEED = 0x5EED


@dataclass(frozen=True)
class LabelQuality:
    """What predicted labels are worth on some rows."""

    accuracy: float
    balanced_accuracy: float
    recall: tuple[float | None, ...]  # by label; None for a label without rows
    confusion: NDArray[np.int64]  # rows: truth; columns: prediction
    auc: float | None = None  # None without logits, or with rows of one label only
    log_loss: float | None = None


@dataclass(frozen=True)
class NumberQuality:
    """What predicted numbers are worth on some rows, in the units of the targets."""

    rmse: float
    r2: float | None  # None where all targets are alike


def label_quality(truth: Places, predicted: Places, classes: int, logits: Any = None) -> LabelQuality:
    """All measures of labels, for places from 0 to ``classes`` - 1."""
    counts = confusion(truth, predicted, classes)
    told = np.zeros(0) if logits is None else np.asarray(logits, np.float64)
    usable = logits is not None and bool(np.isfinite(told).all())
    return LabelQuality(
        accuracy=float(np.mean(np.asarray(truth) == predicted)),
        balanced_accuracy=balanced_accuracy(counts),
        recall=recall(counts),
        confusion=counts,
        auc=auc(truth, told, classes) if usable else None,
        log_loss=log_loss(truth, calibrated(truth, told, classes)) if usable else None,
    )


def number_quality(target: Any, predicted: Any) -> NumberQuality:
    """All measures of numbers."""
    truth = np.asarray(target, np.float64)
    error = float(np.mean((np.asarray(predicted, np.float64) - truth) ** 2))
    variance = float(np.var(truth))
    return NumberQuality(math.sqrt(error), 1.0 - error / variance if variance > 0.0 else None)


def confusion(truth: Places, predicted: Places, classes: int) -> NDArray[np.int64]:
    """Counts of (true label, predicted label)."""
    cells = np.asarray(truth, np.int64) * classes + np.asarray(predicted, np.int64)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes).astype(np.int64)


def recall(counts: NDArray[np.int64]) -> tuple[float | None, ...]:
    """Recall of each label, from a confusion matrix."""
    rows = counts.sum(axis=1)
    return tuple(float(counts[k, k] / n) if n else None for k, n in enumerate(rows))


def balanced_accuracy(counts: NDArray[np.int64]) -> float:
    """Mean recall of the labels that there are, from a confusion matrix."""
    there = [share for share in recall(counts) if share is not None]
    return sum(there) / max(len(there), 1)


def auc(truth: Places, logits: Floats, classes: int) -> float | None:
    """Area under the ROC curve; None where the rows have one label only."""
    truth = np.asarray(truth)
    if logits.ndim == 1:
        return _auc_of_one(truth == 1, logits)
    # Probabilities, since a label is compared over rows: a row's logits may all be large.
    shares = probabilities(logits)
    each = [_auc_of_one(truth == k, shares[:, k]) for k in range(classes)]
    there = [area for area in each if area is not None]
    return sum(there) / len(there) if there else None


def _auc_of_one(positive: NDArray[np.bool_], scores: Floats) -> float | None:
    """The Mann-Whitney statistic, from mean ranks."""
    count, n = int(positive.sum()), len(positive)
    if not 0 < count < n:
        return None
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(ties)
    ranks = (last - 0.5 * (ties - 1))[place]
    return float((ranks[positive].sum() - 0.5 * count * (count + 1)) / (count * (n - count)))


def probabilities(logits: Any) -> Floats:
    """Probability of each label, (n, classes), from logits (n,) or (n, classes)."""
    told = two_columns(logits)
    shifted = np.exp(told - told.max(axis=1, keepdims=True))
    shares: Floats = shifted / shifted.sum(axis=1, keepdims=True)
    return shares


def two_columns(logits: Any) -> Floats:
    """Logits with a column for each label; of two labels the first has 0."""
    told = np.asarray(logits, np.float64)
    return np.stack([np.zeros_like(told), told], axis=1) if told.ndim == 1 else told


def log_loss(truth: Places, shares: Floats) -> float:
    """Mean of -log(probability of the true label)."""
    own = shares[np.arange(len(shares)), np.asarray(truth, np.int64)]
    return float(-np.log(np.maximum(own, 1e-300)).mean())


def calibrated(truth: Places, logits: Any, classes: int) -> Floats:
    """Probabilities after calibration, (n, classes): a slope for all logits and a constant for each label.

    For two labels that is Platt scaling. The rows are cut at random in two halves; each half's probabilities come
    from the slope and constants of least log loss on the other half, so no row is calibrated by its own label.
    """
    told, truth = two_columns(logits), np.asarray(truth, np.int64)
    half = np.random.default_rng(_SEED).permutation(len(truth)) % 2 == 0
    shares: Floats = np.empty_like(told)
    for part in (half, ~half):
        fitted = _fit(told[~part], truth[~part], classes)
        shares[part] = probabilities(fitted[0] * told[part] + fitted[1:])
    return shares


def _fit(told: Floats, truth: NDArray[np.int64], classes: int) -> Floats:
    """Slope and constants of least log loss, by Newton's method; the loss is convex in them."""
    n = len(truth)
    scale = float(np.abs(told - told.mean(axis=1, keepdims=True)).max(initial=0.0)) or 1.0
    inputs = told / scale
    wanted = np.zeros((n, classes))
    wanted[np.arange(n), truth] = 1.0
    found, penalty = np.zeros(classes + 1), _PENALTY / max(n, 1)

    def loss_of(point: Floats) -> float:
        shares = probabilities(point[0] * inputs + point[1:])
        return log_loss(truth, shares) + 0.5 * penalty * float(point @ point)

    now = loss_of(found) if n else 0.0
    for _ in range(50 if n else 0):
        shares = probabilities(found[0] * inputs + found[1:])
        rest = shares - wanted
        slope = np.append((rest * inputs).sum(), rest.sum(axis=0)) / n + penalty * found
        mean = (shares * inputs).sum(axis=1)
        curve = np.empty((classes + 1, classes + 1))
        curve[0, 0] = ((shares * inputs**2).sum(axis=1) - mean**2).mean()
        curve[0, 1:] = curve[1:, 0] = (shares * (inputs - mean[:, None])).mean(axis=0)
        curve[1:, 1:] = np.diag(shares.mean(axis=0)) - shares.T @ shares / n
        step = np.linalg.solve(curve + (penalty + 1e-12) * np.eye(classes + 1), slope)
        size = 1.0
        while size > 1e-6 and loss_of(found - size * step) > now:
            size *= 0.5
        after = loss_of(found - size * step)
        if not now - after > 1e-12:
            break
        found, now = found - size * step, after
    return np.append(found[0] / scale, found[1:])


def standard_error(values: Any, groups: Groups | None = None) -> float:
    """Standard error of a mean over rows, or over groups of rows that belong together; inf for fewer than two."""
    each = np.asarray(values, np.float64)
    off = each - each.mean()
    if groups is not None:
        off = np.bincount(np.unique(groups, return_inverse=True)[1], weights=off)
    if len(off) < 2:
        return math.inf
    count = len(off)
    return math.sqrt(float((off**2).sum()) * count / (count - 1)) / len(each)


def balanced_terms(truth: Places, predicted: Places, classes: int) -> Floats:
    """Values of rows whose mean is the balanced accuracy, and whose standard error is its own to first order."""
    counts = confusion(truth, predicted, classes)
    rows = counts.sum(axis=1)
    there = int((rows > 0).sum())
    own = np.array([0.0 if share is None else share for share in recall(counts)])
    weight = len(np.asarray(truth)) / (there * np.maximum(rows, 1))
    terms: Floats = balanced_accuracy(counts) + weight[truth] * ((np.asarray(truth) == predicted) - own[truth])
    return terms


def spread_over(values: Sequence[Floats], groups: Groups | None, *, same_rows: bool) -> tuple[float, float]:
    """Mean of values, and its standard error over rows and seeds together.

    Args:
        values: of each row, for each seed.
        groups: whose each row is, or None.
        same_rows: whether all seeds have the same rows; their errors then do not average out.

    """
    means = np.array([each.mean() for each in values])
    count = len(means)
    if same_rows:
        of_rows = standard_error(np.mean(values, axis=0), groups) ** 2
    else:
        of_rows = sum(standard_error(each, groups) ** 2 for each in values) / count**2
    of_seeds = float(means.var(ddof=1)) / count if count > 1 else 0.0
    return float(means.mean()), math.sqrt(of_rows + of_seeds)
