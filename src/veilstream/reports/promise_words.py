"""A guarantee for people: in words, in symbols, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from veilstream.mechanisms.program import ENDLESS

__all__ = ["promise_of"]


def promise_of(guarantee: Mapping[str, Any] | None, *, simulated: bool) -> dict[str, Any]:
    """What a page or a statement says about a guarantee (`Guarantee.as_dict`).

    Args:
        guarantee: as the run folder holds it; None where nothing protects anyone.
        simulated: whether it is what deployed learners would give.

    Returns:
        ``symbols``, ``words``, ``rests`` and ``remarks``.

    """
    if guarantee is None:
        return {
            "symbols": "no promise",
            "words": "This run adds no noise, or noise that protects no one: nothing is promised.",
            "rests": [],
            "remarks": [],
        }
    g = guarantee
    epsilon, delta = g["epsilon"], g["delta"]
    often = g["participation"]["times"]
    apart = g["participation"]["min_separation"]
    takes_part = (
        "takes part once"
        if often == 1
        else f"takes part at most {often} times, at least {apart} steps apart"
    )
    endless = g["horizon"] >= ENDLESS
    steps = "however many steps" if endless else f"all {g['horizon']:,} steps"
    swapped = "any other" if g["neighbours"] == "replace-one" else "one that says nothing"
    clients = g.get("clients_per_step", 1)
    reach = "2" if g["neighbours"] == "replace-one" else "1"
    return {
        "symbols": f"ε = {epsilon:g}, δ = {_power(delta)}",
        "words": (
            f"Whoever reads everything that leaves a learner in {steps}, and even chooses every "
            f"next model, gains only so much on whether a client’s record was theirs or {swapped}: "
            f"no conclusion becomes more than e^ε = {_factor(epsilon)} times as likely by it, "
            f"except with probability δ = {_power(delta)}. The server need not be trusted."
        ),
        "formula": (
            f"P[M(D) ∈ S] ≤ e^{epsilon:g} · P[M(D′) ∈ S] + {_power(delta)}   for all S, and all "
            f"D, D′ that differ in {g['unit']} ({g['neighbours']})"
        ),
        "rests": [
            f"Every client’s gradient is clipped to norm {g['clip_norm']:g}"
            + (f", and {clients} are averaged in a step" if clients > 1 else "")
            + ".",
            f"A client {takes_part}.",
            f"{g['mechanism'].capitalize()} noise of standard deviation V = {g['noise_std']:.6g}, "
            "known to the learner alone; it is drawn by the operating system and used once.",
            f"Sensitivity Δ = {reach} · clip norm · ‖C‖ = {g['sensitivity']:.6g}, computed from "
            "the noise that runs"
            + ("." if g.get("sensitivity_exact", True) else " (a safe upper bound).")
            + f" μ = Δ/V = {g['mu']:.4f}.",
            f"Accounting: {_accounting(g)}.",
            f"Against {g['adversary']}: one Gaussian mechanism C·G + ξ under adaptive continual "
            "release (lem-priv-analy; Denisov et al. 2022, Theorem 2.1), then post-processing.",
            *(
                [
                    f"Rounding and floating point are counted in: {g['arithmetic_mu']:.2g} of μ, "
                    f"{g['arithmetic_delta']:.2g} of δ."
                ]
                if g.get("arithmetic_mu")
                else []
            ),
            *(
                ["Here seeds made the noise, so this run itself protected no one."]
                if simulated
                else []
            ),
        ],
        "remarks": [text[:1].upper() + text[1:] + "." for text in g.get("remarks", ())],
    }


def _accounting(g: Mapping[str, Any]) -> str:
    if g["accounting"] == "zcdp":
        return (
            "the paper’s, by zero-concentrated privacy, which is loose (exactly, this noise gives "
            f"ε = {g['epsilon_exact']:.3f})"
        )
    return "exact, by the Gaussian mechanism’s own curve"


def _factor(epsilon: float) -> str:
    return f"{math.exp(epsilon):.3g}" if epsilon < 700 else "infinitely many"


_DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power(value: float) -> str:
    """A small number as people write it: 10⁻⁵, 3·10⁻⁶, 0.01."""
    if value >= 0.01:
        return f"{value:g}"
    digits, _, exponent = f"{value:e}".partition("e")
    factor = f"{float(digits):g}"
    power = f"10{str(int(exponent)).translate(_DIGITS)}"
    return power if factor == "1" else f"{factor}·{power}"
