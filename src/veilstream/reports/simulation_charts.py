"""The charts of a simulation's report."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from veilstream.privacy.guarantee import Guarantee
from veilstream.reports.charts import chart, held_out_chart, levels, loss_chart, running_mean, window_means
from veilstream.reports.page_kit import Chart
from veilstream.reports.quality import baseline_figures, loss_levels
from veilstream.runs.folder import Run

Floats = NDArray[np.float64]

_WINDOWS = 200


def learning_charts(run: Run) -> list[Chart]:
    """Accuracy, loss and regret over rounds, with every seed."""
    summary, charts = run.simulation, []
    if run.has_held_out:
        charts.append(held_out_chart(*run.held_out_accuracy(), baseline_figures(summary, "held_out_accuracy")))
    right = _history(run, "prequential_accuracy")
    if any(np.isfinite(values).any() for values in right.values()):
        ends, windows = _in_windows(right)
        stretch = max(1, round(summary.rounds / len(ends)))
        about = f"Each client is predicted before the model learns from it; means over {stretch} rounds."
        known = levels([(f"{name}, held out", value) for name, value in baseline_figures(summary, "held_out_accuracy")])
        title = "Prequential accuracy"
        charts.append(chart("prequential", title, about, "accuracy", ends, windows, share=True, lines=known))
    loss = _history(run, "loss")
    means = {name: running_mean(values) for name, values in loss.items()}
    charts.append(loss_chart(means, loss_levels(run.plan, summary)))
    if summary.comparators is not None:
        best = _history(run, "optimum")
        about = "Loss above the least that any model could have in the same round, averaged so far."
        charts.append(
            chart(
                "regret",
                "Dynamic regret per step",
                " ".join([about, *map(_sentence, summary.comparators)]),
                "regret per step",
                np.arange(1, summary.rounds + 1),
                {name: running_mean(values - best[name]) for name, values in loss.items()},
                logarithmic=True,
            )
        )
    return charts


def noise_charts(run: Run) -> list[Chart]:
    """Noise against signal, and the mechanisms' own error with the paper's bound."""
    summary, learning, charts = run.simulation, run.plan.learning, []
    noisy = {name for name, method in summary.methods.items() if method.mechanism}
    if noisy:
        ends, sent = _in_windows({n: v for n, v in _history(run, "noise").items() if n in noisy})
        charts.append(
            chart(
                "noise",
                "In a message",
                "Norm of the noise in the learners’ averaged message. The line is the clip norm, "
                "the largest norm that the gradients in the same message can have.",
                "norm",
                ends,
                sent,
                logarithmic=True,
                lines=[{"label": f"most signal: clip norm {learning.clip_norm:g}", "value": learning.clip_norm}],
            )
        )
        charts.append(
            chart(
                "distance",
                "What noise did to the model",
                "Distance from the model of the same method without noise, on the same clients.",
                "distance",
                np.arange(1, summary.rounds + 1),
                {n: v for n, v in _history(run, "distance").items() if n in noisy},
                logarithmic=True,
            )
        )
    errors = {name: values[None] for name, values in run.noise().items()}
    if errors:
        lines = []
        if promise := summary.main.guarantee:
            bound = printed_bound(promise, learning.learners)
            lines = [{"label": "the paper's bound at this budget", "value": bound}]
        charts.append(
            chart(
                "error",
                "Error of the mechanisms",
                "Standard deviation, per coordinate, of the noise in the learners’ averaged sum "
                "after each round, computed from the noise that runs. The line is what the paper "
                "prints for its own factorizations (eq-bc-logR), as far as log2(T) goes.",
                "standard deviation",
                np.arange(1, next(iter(errors.values())).shape[1] + 1),
                errors,
                logarithmic=True,
                lines=lines,
            )
        )
    return charts


def printed_bound(guarantee: Guarantee, learners: int) -> float:
    """Largest standard deviation by the printed ‖c‖² <= log2(T) + 1, ‖b‖² <= log2(T) (eq-bc-logR)."""
    row = math.log2(guarantee.horizon)
    one_step = guarantee.neighbours.reach * guarantee.clip_norm / guarantee.clients_per_step
    multiplier = guarantee.noise_std / guarantee.sensitivity
    return multiplier * one_step * math.sqrt((row + 1) * row / learners)


def _history(run: Run, column: str) -> dict[str, Floats]:
    return {name: np.asarray(values, np.float64) for name, values in run.history(column).items()}


def _in_windows(curves: dict[str, Floats]) -> tuple[NDArray[np.intp], dict[str, Floats]]:
    windows = {name: window_means(values, _WINDOWS) for name, values in curves.items()}
    ends = next(iter(windows.values()))[0]
    return ends, {name: values for name, (_, values) in windows.items()}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
