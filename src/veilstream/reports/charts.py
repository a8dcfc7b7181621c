"""Charts as a page carries them: curves thinned out and packed to sixteen bits a value.

As decimal text a report's numbers would be tens of megabytes. Curves that span more than three orders of
magnitude are scaled by their logarithm.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.reports.page_kit import Chart

Floats = NDArray[np.float64]

MOST_POINTS = 500  # points of one curve on a page: more than a screen can show
MISSING = 65535  # the code for NaN
_STEPS = 65534
_WIDE = 1e3


def pack(values: NDArray[Any]) -> dict[str, Any]:
    """An array of finite numbers and NaN, as JSON holds it.

    Guarantees: `unpack` returns every number to within 1/65534 of the array's range, or, where its
    least is positive and its greatest more than a thousand times that, to within 1/65534 of the
    range of its logarithm. Infinite values come back as NaN.
    """
    given = np.asarray(values, np.float64)
    finite = np.isfinite(given)
    there = given[finite]
    low, high = (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)
    logarithmic = low > 0.0 and high > _WIDE * low
    scaled = np.where(finite, given, max(low, 1e-300))
    a, b = (np.log(low), np.log(high)) if logarithmic else (low, high)
    scaled = np.log(scaled) if logarithmic else scaled
    span = b - a or 1.0
    codes = np.where(finite, np.rint((scaled - a) / span * _STEPS), MISSING).astype("<u2")
    text = base64.b64encode(codes.tobytes()).decode("ascii")
    return {"shape": list(given.shape), "low": float(a), "span": float(span), "log": bool(logarithmic), "codes": text}


def unpack(packed: Mapping[str, Any]) -> Floats:
    """The array that `pack` was given, as the page reads it."""
    codes = np.frombuffer(base64.b64decode(packed["codes"]), "<u2").astype(np.float64)
    values = packed["low"] + codes / _STEPS * packed["span"]
    values = np.exp(values) if packed["log"] else values
    return np.where(codes == MISSING, np.nan, values).reshape(packed["shape"])


def thinned(points: int, most: int) -> NDArray[np.intp]:
    """At most so many indices, evenly spread, with the first and the last."""
    return np.unique(np.rint(np.linspace(0, points - 1, min(points, most))).astype(np.intp))


def window_means(values: Floats, most: int) -> tuple[NDArray[np.intp], Floats]:
    """Means over at most so many windows of the last axis, NaN aside, and how many points end each."""
    points = values.shape[-1]
    ends = np.unique(np.rint(np.linspace(0, points, min(points, most) + 1)).astype(np.intp))
    there = np.isfinite(values)
    means = []
    for first, last in pairwise(ends):
        count = there[..., first:last].sum(axis=-1)
        total = np.where(there[..., first:last], values[..., first:last], 0.0).sum(axis=-1)
        means.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    return ends[1:], np.stack(means, axis=-1)


def running_mean(values: NDArray[Any]) -> Floats:
    """Each seed's mean so far. Rounds without clients (NaN) do not count; after a divergence it is NaN."""
    given = np.asarray(values, np.float64)
    there = np.isfinite(given)
    count = np.cumsum(there, axis=-1)
    mean: Floats = np.cumsum(np.where(there, given, 0.0), axis=-1) / np.maximum(count, 1)
    diverged = np.logical_or.accumulate(np.isinf(given), axis=-1)
    return np.where(diverged | (count == 0), np.nan, mean)


def chart(
    name: str,
    title: str,
    about: str,
    y_label: str,
    x: Sequence[int] | NDArray[Any],
    values: Mapping[str, NDArray[Any]],
    *,
    logarithmic: bool = False,
    share: bool = False,
    from_zero: bool = False,
    whole: bool = False,
    lines: list[dict[str, Any]] | None = None,
) -> Chart:
    """One chart (`page_kit.Chart`) of at most `MOST_POINTS` points."""
    kept = thinned(len(x), MOST_POINTS)
    return {
        "id": name,
        "title": title,
        "about": about,
        "x_label": "round",
        "y_label": y_label,
        "logarithmic": logarithmic,
        "share": share,
        "from_zero": from_zero,
        "whole": whole,
        "x": [int(v) for v in np.asarray(x)[kept]],
        "series": {n: pack(np.asarray(v)[..., kept]) for n, v in values.items() if np.isfinite(v).any()},
        "lines": lines or [],
    }


Levels = Sequence[tuple[str, float]]
"""What curves are compared with: names and values."""


def levels(known: Levels) -> list[dict[str, Any]]:
    """Lines across a chart."""
    return [{"label": name, "value": value} for name, value in known]


def held_out_chart(
    rounds: Sequence[int] | NDArray[Any], accuracy: Mapping[str, NDArray[Any]], known: Levels = ()
) -> Chart:
    """Held-out accuracy, of arrays (seeds, rounds) by method, and that of predictions without a model."""
    about = "Accuracy of the published model on clients it never learns from."
    return chart("held-out", "Held-out accuracy", about, "accuracy", rounds, accuracy, share=True, lines=levels(known))


def loss_chart(means: Mapping[str, NDArray[Any]], known: Levels = ()) -> Chart:
    """Average loss so far, of arrays (seeds, rounds) by method."""
    about = "Prequential: the loss of each round’s clients, under the model published before that round."
    x = np.arange(1, max(values.shape[-1] for values in means.values()) + 1)
    return chart("loss", "Average loss so far", about, "average loss", x, means, logarithmic=True, lines=levels(known))
