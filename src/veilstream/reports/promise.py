"""A guarantee for people: in words, in symbols, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from veilstream.mechanisms.program import ENDLESS


def promise_of(guarantee: Mapping[str, Any] | None, *, simulated: bool) -> dict[str, Any]:
    """What a page or a statement says about a guarantee (`Guarantee.as_dict`).

    Args:
        guarantee: as the run folder holds it; None where nothing protects anyone.
        simulated: whether it is what deployed learners would give.

    Returns:
        ``symbols``, ``words``, ``rests`` and ``remarks``; where something is promised, ``formula``,
        ``leaves`` (all that leaves a learner) and ``uncovered`` (what is not promised).

    """
    if guarantee is None:
        return {
            "symbols": "no promise",
            "words": "This run adds no noise, or noise that protects no one: nothing is promised.",
            "rests": [],
            "leaves": [],
            "uncovered": [],
            "remarks": [],
        }
    g = guarantee
    epsilon, delta = g["epsilon"], g["delta"]
    often = g["participation"]["times"]
    apart = g["participation"]["min_separation"]
    takes_part = "takes part once" if often == 1 else f"takes part at most {often} times, at least {apart} steps apart"
    endless = g["horizon"] >= ENDLESS
    steps = "however many steps" if endless else f"all {g['horizon']:,} steps"
    swapped = "any other" if g["neighbours"] == "replace-one" else "one that says nothing"
    clients = g.get("clients_per_step", 1)
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
            *_telemetry_bound(g),
            f"A client {takes_part}.",
            f"{g['mechanism'].capitalize()} noise of standard deviation V = {g['noise_std']:.6g}, "
            "known to the learner alone; it is drawn by the operating system and used once.",
            f"Sensitivity Δ = {_sensitivity(g)} = {g['sensitivity']:.6g}, computed from "
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
            *(["Here seeds made the noise, so this run itself protected no one."] if simulated else []),
        ],
        "leaves": _leaves(g),
        "uncovered": _uncovered(g),
        "remarks": [text[:1].upper() + text[1:] + "." for text in g.get("remarks", ())],
    }


def _sensitivity(g: Mapping[str, Any]) -> str:
    """Δ as a formula, by what the guarantee counts in (`Guarantee.sensitivity`)."""
    reach = "2" if g["neighbours"] == "replace-one" else "1"
    norm = "R" if g.get("telemetry") else "clip norm"
    clients = g.get("clients_per_step", 1)
    return f"{reach} · {norm}" + (f" / {clients}" if clients > 1 else "") + " · ‖C‖"


def _telemetry_bound(g: Mapping[str, Any]) -> list[str]:
    told = g.get("telemetry")
    if not told:
        return []
    count = len(told["metrics"])
    return [
        f"Beside it each client contributes telemetry ({', '.join(told['metrics'])}): a coordinate "
        f"of width w = {told['width']:g} for each metric, held within ±w/2. All that a client "
        f"contributes has norm at most R = √(clip norm² + {count} · (w/2)²) = "
        f"{g['release_norm']:.6g}, and the noise is calibrated to R "
        f"({100.0 * told['noise_price']:.1f}% more than without telemetry)."
    ]


_METRICS = {
    "accuracy": "whether the prediction for a client was right",
    "loss": "a client’s loss, cut at a cap",
    "clipped": "whether a client’s gradient was clipped",
    "present": "whether a client was there",
}


def _leaves(g: Mapping[str, Any]) -> list[str]:
    """All that leaves a learner."""
    told = g.get("telemetry")
    if told:
        named = [f"{name} ({_METRICS[name]})" for name in told["metrics"]]
        sums = (
            "Noisy sums of clipped gradients and, as further coordinates of the same sums under "
            f"the same noise and the same promise, of telemetry: {', '.join(named)}."
        )
    else:
        sums = "Noisy sums of clipped gradients."
    return [
        f"{sums} Nothing else of any client: no record and no name.",
        "Records stay at the learner; gradients are discarded after one step.",
        "The server sees in which rounds a learner answers, and when.",
    ]


def _uncovered(g: Mapping[str, Any]) -> list[str]:
    """What a reader might take for promised, and is not."""
    return [
        "That a client came at all: what a client’s record says is protected; in which rounds a "
        "learner answers, and so that somebody was there, is seen.",
        "The learner’s own machine: whoever controls it sees records, gradients and noise.",
        "A person who is a client of several learners: the promise is for the messages of one. "
        f"With records at m learners, μ = {g['mu']:.4f} becomes √m times as large (1.41 times at "
        "two), and ε grows with it.",
    ]


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
