"""A guarantee for people: in words, in symbols, and what it rests on."""

from __future__ import annotations

import math
from typing import TypedDict

from veilstream.privacy.guarantee import SECRET_ORDER_THEOREM, Accounting, Guarantee, Neighbours, SecretSteps, SumTrust
from veilstream.wording import counted


class Promise(TypedDict):
    """What a page or a statement says about a guarantee."""

    symbols: str
    reach: str  # whom it is given to, and for how long
    words: str
    formula: str
    rests: list[str]
    leaves: list[str]  # all that leaves a learner
    uncovered: list[str]  # what a reader might take for promised, and is not
    remarks: list[str]


CONTENT_DECIDES_NOTHING = (
    "A client who is named takes a step whatever the record says: one that cannot be used is a zero gradient."
)
"""The rule, in the words of every statement and of docs/privacy.md."""

_NOTHING: Promise = {
    "symbols": "no promise",
    "reach": "nothing is promised to anyone",
    "words": "This run adds no noise, or noise that protects no one: nothing is promised.",
    "formula": "",
    "rests": [],
    "leaves": [],
    "uncovered": [],
    "remarks": [],
}


def promise_of(guarantee: Guarantee | None, *, simulated: bool) -> Promise:
    """A guarantee (None: nothing protects anyone) in words; ``simulated``: only a deployed learner would keep it."""
    if guarantee is None:
        return _NOTHING
    g = guarantee
    epsilon, delta = f"{g.epsilon:g}", _power(g.delta)
    steps = "any number of steps" if g.endless else f"all {g.horizon:,} steps"
    swapped = "anyone else’s" if g.neighbours is Neighbours.REPLACE_ONE else "an empty one"
    return {
        "symbols": f"ε = {epsilon}, δ = {delta}",
        "reach": _reach(g, simulated),
        "words": (
            f"Someone who reads everything that leaves {'a learner' if g.trust is None else 'learners'} in {steps}, "
            "and even chooses every next model, "
            f"can hardly tell your record from {swapped}: reading it makes no conclusion more than "
            f"e^ε = {_factor(g.epsilon)} times as likely, except with probability δ = {delta}. " + _whom_to_trust(g)
        ),
        "formula": (
            f"P[M(D) ∈ S] ≤ e^{epsilon} · P[M(D′) ∈ S] + {delta}   for all S, and all "
            f"D, D′ that differ in {g.unit} ({g.neighbours.value})"
        ),
        "rests": _rests(g, simulated),
        "leaves": _leaves(g),
        "uncovered": [
            f"That someone came at all: the promise protects what a record says. {CONTENT_DECIDES_NOTHING} In which "
            "rounds a learner answers, and so that somebody was there, can be seen.",
            "The learner’s own machine: its administrator can see records, gradients and noise.",
            "A person who is a client of several learners: the promise is about one learner’s messages. "
            + _several_learners(g),
        ],
        "remarks": [text[:1].upper() + text[1:] + "." for text in g.remarks],
    }


def _reach(g: Guarantee, simulated: bool) -> str:
    given = "what deployed learners promise each client" if simulated else "promised to each client"
    if g.epochs > 1:
        return f"{given} in an epoch; in all {g.epochs} together ε = {g.epsilon_over_epochs:.4g}"
    return f"{given}, " + ("however long it runs" if g.endless else "for the whole run")


def _rests(g: Guarantee, simulated: bool) -> list[str]:
    times, apart = g.participation.times, g.participation.min_separation
    visits = "once" if times == 1 else f"at most {times} times, at least {apart} steps apart"
    averaged = f", and {g.clients_per_step} are averaged in a step" if g.clients_per_step > 1 else ""
    exact = "." if g.sensitivity_exact else " (a safe upper bound)."
    rests = [f"Every client’s gradient is clipped to norm {g.clip_norm:g}{averaged}."]
    if g.telemetry:
        told = g.telemetry
        rests.append(
            f"Each client also contributes telemetry ({', '.join(told.metrics)}): one coordinate "
            f"of width w = {told.width:g} per metric, held within ±w/2. All that a client "
            f"contributes has norm at most R = √(clip norm² + {len(told.metrics)} · (w/2)²) = "
            f"{g.release_norm:.6g}, and the noise is calibrated to R "
            f"({100.0 * told.price(g.clip_norm):.1f}% more than without telemetry)."
        )
    if g.epochs > 1:
        visits += (
            f", and a person in at most {g.epochs} epochs: ε = {g.epsilon:g} is for each epoch, and "
            f"ε = {g.epsilon_over_epochs:.4g} at the same δ for all of them together"
        )
    rests += [
        f"A client takes part {visits}.",
        f"{g.mechanism.capitalize()} noise of standard deviation V = {g.noise_std:.6g}, "
        "which only the learner knows; the operating system draws it, and it is used once.",
        f"Sensitivity Δ = {_sensitivity(g)} = {g.sensitivity:.6g}, computed from the noise that runs{exact} "
        f"μ = {_noise_that_hides(g)} = {g.curve_if_order_known.mu:.4f}{_of_a_known_order(g)}.",
        f"Accounting: {_accounting(g)}.",
        f"Against {g.adversary}: one Gaussian mechanism C·G + ξ under adaptive continual "
        "release (lem-priv-analy; Denisov et al. 2022, Theorem 2.1), then post-processing.",
    ]
    if g.secret is not None:
        rests += _secret(g, g.secret)
    if g.trust is not None:
        rests.append(_floor(g, g.trust))
    if g.arithmetic_mu:
        rests.append(
            f"Rounding and floating point are included: {g.arithmetic_mu:.2g} of μ, {g.arithmetic_delta:.2g} of δ."
        )
    if simulated:
        rests.append("Here seeds made the noise, so this run itself protected no one.")
    return rests


def _whom_to_trust(g: Guarantee) -> str:
    if g.trust is None:
        return "You need not trust the server."
    return (
        f"You need not trust the server, but {counted(g.trust.honest, 'learner')} that take part in every round (your "
        f"own may be one): they must keep their noise and keys to themselves. If you trust none but your own, "
        f"ε = {g.floor_epsilon:.4g} at the same δ is left (the floor)."
    )


def _noise_that_hides(g: Guarantee) -> str:
    return "Δ/V" if g.trust is None else f"Δ/(V·√{g.trust.honest})"


def _floor(g: Guarantee, trust: SumTrust) -> str:
    told = f", and {counted(trust.colluding, 'learner')} may tell the server all they know" if trust.colluding else ""
    graph = ""
    if trust.graph_failure:
        runs = "" if trust.runs == 1 else f" in any of {trust.runs} runs (federation.epochs)"
        graph = (
            f" Each learner masks with some of the others; that these do not keep sums together{runs} has probability "
            f"{trust.graph_failure:.1g}, counted in δ. This needs that who colludes was settled before they were drawn."
        )
    return (
        f"The server can open only the sum over learners of a round, once, and learners open none without "
        f"{trust.honest} honest ones of every round before{told}.{graph} If all others collude, or the cryptography "
        f"(X25519, AES-256, SHA-256, Ed25519) is broken, each learner’s own noise V still gives its clients the "
        f"floor: "
        f"ε = {g.floor_epsilon:.4g} at the same δ."
    )


def _several_learners(g: Guarantee) -> str:
    if g.secret is not None:
        return "With records at m learners, each promises (ε, δ), and together they promise (m·ε, m·δ)."
    return (
        f"With records at m learners, μ = {g.curve.mu:.4f} becomes √m times as large (1.41 times at "
        "two), and ε grows with it."
    )


def _of_a_known_order(g: Guarantee) -> str:
    return "" if g.secret is None else ", as if everybody knew at which step a record is used"


def _secret(g: Guarantee, secret: SecretSteps) -> list[str]:
    """What a promise rests on beside noise where the order is secret."""
    where, nobody = f"all {secret.among:,} steps", ""
    if secret.window is not None:
        where = f"the {secret.among:,} steps of the next window"
        nobody = " The first window of an epoch uses nobody, and its last takes nobody."
    return [
        f"Every record is used at one of {where}, each as likely as any other, by a keyed choice (HMAC-SHA256) under a "
        "secret of the epoch that nobody but the learner knows. The steps of all other records may be known. If the "
        f"secret comes out, ε = {g.epsilon_if_order_known:.4g} at the same δ is left.{nobody}",
        f"The secret order’s theorem: {SECRET_ORDER_THEOREM}.",
    ]


def _secret_accounting(secret: SecretSteps) -> str:
    if not secret.draws:
        return "by the Gaussian mechanism’s own curve, which holds for a secret order, too; no more is known here"
    return (
        f"an upper bound on δ from {secret.draws:,} draws (seed {secret.seed}), wrong with probability at most "
        f"{secret.failure_probability:.2g}, which is counted in δ"
    )


def _sensitivity(g: Guarantee) -> str:
    norm = "R" if g.telemetry else "clip norm"
    clients = f" / {g.clients_per_step}" if g.clients_per_step > 1 else ""
    return f"{g.neighbours.reach} · {norm}{clients} · ‖C‖"


_METRICS = {
    "accuracy": "whether the prediction for a client was right",
    "loss": "a client’s loss, cut at a cap",
    "clipped": "whether a client’s gradient was clipped",
    "present": "whether a client was there",
}


def _leaves(g: Guarantee) -> list[str]:
    sums = "Noisy sums of clipped gradients."
    if g.telemetry:
        named = ", ".join(f"{name} ({_METRICS[name]})" for name in g.telemetry.metrics)
        sums = (
            "Noisy sums of clipped gradients and of telemetry, as further coordinates of the same sums under "
            f"the same noise and the same promise: {named}."
        )
    if g.trust is not None:
        sums += " Each leaves under masks: only their sum over learners is ever opened."
    return [
        f"{sums} Nothing else about any client: no record and no name.",
        "Records stay at the learner; gradients are discarded after one step.",
        "The server sees in which rounds a learner answers, and when.",
    ]


def _accounting(g: Guarantee) -> str:
    if g.secret is not None:
        return _secret_accounting(g.secret)
    if g.accounting is Accounting.ZCDP:
        return (
            "the paper’s, by zero-concentrated privacy, which is loose (exactly, this noise gives "
            f"ε = {g.epsilon_at(g.delta):.3f})"
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
