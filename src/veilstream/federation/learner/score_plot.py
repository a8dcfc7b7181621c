"""A learner's score over its rounds as a small SVG: the model beside the two baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

LINES = {"model": "model", "majority": "majority", "mean": "mean", "no_change": "no change"}
"""Names of a score's figures, and what they are called; classes of the lines as well."""

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 92, 12, 34
_TICKS = 4
_APART = 13.0  # between two names at the right, in pixels


def score_svg(points: Sequence[dict[str, Any]], kind: str) -> str:
    """The figure, or nothing where fewer than two points are there.

    Args:
        points: as `ScoreHistory.points` gives them.
        kind: what the score is, for the axis.

    """
    names = [name for name in LINES if len(points) > 1 and name in points[0]]
    if not names:
        return ""
    values = [float(point[name]) for point in points for name in names]
    if not all(map(math.isfinite, values)):
        return ""
    low, high = _around(min(values), max(values), at_most=1.0 if kind == "accuracy" else math.inf)
    first, last = int(points[0]["round"]), int(points[-1]["round"])

    def x(round_: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (round_ - first) / max(last - first, 1)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    said = "; ".join(f"{LINES[name]} {points[-1][name]:.3g}" for name in names)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="'
        f'{escape(kind)} over rounds {first} to {last}; last: {escape(said)}">'
    ]
    for tick in range(_TICKS + 1):
        value = low + (high - low) * tick / _TICKS
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y(value) + 4, f"{value:.3g}", "end"))
    shown = sorted({first, (first + last) // 2, last})
    parts += [_text(x(round_), _HEIGHT - 18, str(round_), "middle") for round_ in shown]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 3, "round", "middle"))
    heights = _spread([y(points[-1][name]) for name in names])
    for name, height in zip(names, heights, strict=True):
        line = " ".join(f"{x(point['round']):.1f},{y(point[name]):.1f}" for point in points)
        parts.append(f'<polyline class="{name}" points="{line}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 6, height + 4, LINES[name], "start", name))
    return "".join(parts) + "</svg>"


def _around(low: float, high: float, *, at_most: float) -> tuple[float, float]:
    room = 0.08 * (high - low) or 0.05 * abs(high) or 0.05
    return max(0.0, low - room), min(high + room, max(at_most, low + room))


def _spread(heights: list[float]) -> list[float]:
    """The same, moved apart so that names do not lie on each other."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    spread, above = list(heights), -math.inf
    for index in order:
        above = spread[index] = max(heights[index], above + _APART)
    return spread


def _text(x: float, y: float, text: str, anchor: str, name: str = "") -> str:
    kind = f' class="name {name}"' if name else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
