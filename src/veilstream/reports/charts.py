"""Curves as a page carries them: sixteen bits a value, seeds and points in one text.

A report holds seeds x methods x points numbers for each of its charts. As decimal text they would
be tens of megabytes; on a scale of 65,534 steps between the least and the greatest value of the
chart they are two bytes each, and no screen shows the difference. Curves that span more than three
orders of magnitude are scaled by their logarithm. What is no number stays none.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MISSING = 65535
"""The code of what is no number."""
_STEPS = 65534
_WIDE = 1e3
MOST_POINTS = 500
"""Points of one curve on a page: more than a screen can show."""


def pack(values: NDArray[Any]) -> dict[str, Any]:
    """An array of finite numbers and NaN, as JSON holds it.

    Guarantees: `unpack` returns every number to within 1/65534 of the array's range, or, where its
    least is positive and its greatest more than a thousand times that, to within 1/65534 of the
    range of its logarithm. What is infinite comes back as NaN.
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
    """What the page reads back."""
    codes = np.frombuffer(base64.b64decode(packed["codes"]), "<u2").astype(np.float64)
    values = packed["low"] + codes / _STEPS * packed["span"]
    values = np.exp(values) if packed["log"] else values
    return np.where(codes == MISSING, np.nan, values).reshape(packed["shape"])


def thinned(points: int, most: int) -> NDArray[np.intp]:
    """Indices of at most so many points, evenly spread, the first and the last among them."""
    return np.unique(np.rint(np.linspace(0, points - 1, min(points, most))).astype(np.intp))


def window_means(values: Floats, most: int) -> tuple[NDArray[np.intp], Floats]:
    """Means over at most so many stretches of the last axis, and how many points end each.

    What is no number does not count; a stretch without numbers has none.
    """
    points = values.shape[-1]
    ends = np.unique(np.rint(np.linspace(0, points, min(points, most) + 1)).astype(np.intp))
    there = np.isfinite(values)
    means = []
    for first, last in pairwise(ends):
        count = there[..., first:last].sum(axis=-1)
        total = np.where(there[..., first:last], values[..., first:last], 0.0).sum(axis=-1)
        means.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    return ends[1:], np.stack(means, axis=-1)


def running_mean(values: Floats) -> Floats:
    """Means so far of every seed; no number before the first, and none once it has diverged."""
    there = np.isfinite(values)
    total = np.cumsum(np.where(there, values, 0.0), axis=-1)
    mean: Floats = total / np.maximum(np.cumsum(there, axis=-1), 1)
    # Once diverged, no mean is a number any more; rounds without clients only add nothing.
    gone = np.logical_or.accumulate(np.isinf(values), axis=-1)
    return np.where(gone | (np.cumsum(there, axis=-1) == 0), np.nan, mean)


def chart(
    name: str,
    title: str,
    about: str,
    y_label: str,
    x: NDArray[Any],
    values: Mapping[str, NDArray[Any]],
    *,
    logarithmic: bool = False,
    share: bool = False,
    lines: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One chart: arrays (seeds, points) by name, of at most `MOST_POINTS` points each.

    Args:
        name: its id, of its own on the page.
        title: its name for people.
        about: a sentence or two on what it shows.
        y_label: what is measured.
        x: rounds of the points.
        values: the curves; those without any number are left out.
        logarithmic: whether orders of magnitude matter.
        share: whether values lie between 0 and 1.
        lines: levels to compare with, each a label and a value.

    """
    kept = thinned(len(x), MOST_POINTS)
    values = {n: v for n, v in values.items() if np.isfinite(v).any()}
    return {
        "id": name,
        "title": title,
        "about": about,
        "x_label": "round",
        "y_label": y_label,
        "logarithmic": logarithmic,
        "share": share,
        "x": [int(v) for v in np.asarray(x)[kept]],
        "series": {n: pack(np.asarray(v)[..., kept]) for n, v in values.items()},
        "lines": lines or [],
    }


def held_out_chart(rounds: NDArray[Any], accuracy: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Held-out accuracy at the rounds that were looked at, of arrays (seeds, rounds) by method."""
    about = "Of the published model, on clients who are never learned from."
    return chart("held-out", "Held-out accuracy", about, "accuracy", rounds, accuracy, share=True)
