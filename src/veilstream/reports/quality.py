"""How good a model is, in the words that every page has: a figure, and the same figure of what it is compared with."""

from __future__ import annotations

import math

ALWAYS = {"majority": "always the commonest label", "mean": "always the mean", "no_change": "repeating the last label"}
"""Predictions without a model, by their names in files."""

_Z95 = 1.96


def figure(value: float, *, share: bool) -> str:
    """A share (accuracy, recall, AUC) or an error as text."""
    return f"{value:.3f}" if share else f"{value:.4g}"


def beats(model: float, baseline: float, records: int, *, share: bool) -> bool | None:
    """Whether a model's figure is better than the baseline's; None where records are too few to tell shares apart."""
    if not share:
        return model < baseline
    chance = _Z95 * math.sqrt(max(baseline * (1.0 - baseline), 1e-9) / max(records, 1))
    return None if abs(model - baseline) <= chance else model > baseline


def against(better: bool | None) -> str:
    """How a figure compares, in words."""
    return {True: "better than", False: "no better than", None: "within chance of"}[better]
