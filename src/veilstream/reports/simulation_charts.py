"""The charts of a simulation's report: which curves, thinned out and packed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.reports.charts import chart, held_out_chart, running_mean, window_means
from veilstream.runs.folder import Run

Floats = NDArray[np.float64]

_WINDOWS = 200


def learning_charts(run: Run) -> list[dict[str, Any]]:
    """Accuracy, loss and regret over rounds, with every seed."""
    summary, charts = run.summary, []
    if (run.path / "accuracy.csv").exists():
        rounds, held = run.held_out_accuracy()
        charts.append(held_out_chart(np.array(rounds), held))
    measured = {name: _plain(values) for name, values in run.history("loss").items()}
    right = {n: _plain(v) for n, v in run.history("prequential_accuracy").items()}
    if any(np.isfinite(values).any() for values in right.values()):
        windows = {name: window_means(values, _WINDOWS) for name, values in right.items()}
        ends = next(iter(windows.values()))[0]
        charts.append(
            chart(
                "prequential",
                "Prequential accuracy",
                "Each client is predicted before it is learned from; means over stretches of "
                f"{max(1, round(summary['rounds'] / len(ends)))} rounds.",
                "accuracy",
                ends,
                {name: values for name, (_, values) in windows.items()},
                share=True,
            )
        )
    so_far = np.arange(1, summary["rounds"] + 1)
    charts.append(
        chart(
            "loss",
            "Average loss so far",
            "Prequential: the loss of each round's clients at the model published before it.",
            "average loss",
            so_far,
            {name: running_mean(values) for name, values in measured.items()},
            logarithmic=True,
        )
    )
    if summary.get("comparators"):
        best = {name: _plain(values) for name, values in run.history("optimum").items()}
        charts.append(
            chart(
                "regret",
                "Dynamic regret per step",
                "Loss above the least that any model could have had in that very round, averaged "
                "so far. " + " ".join(_sentence(r) for r in summary["comparators"]["remarks"]),
                "regret per step",
                so_far,
                {name: running_mean(values - best[name]) for name, values in measured.items()},
                logarithmic=True,
            )
        )
    return charts


def noise_charts(run: Run) -> list[dict[str, Any]]:
    """Noise against signal, and the mechanisms' own error with the theory's bound."""
    summary, plan, charts = run.summary, run.plan, []
    noisy = {n for n, method in summary["methods"].items() if method["mechanism"]}
    sent = {n: _plain(v) for n, v in run.history("noise").items() if n in noisy}
    rounds = np.arange(1, summary["rounds"] + 1)
    clip = plan.learning.clip_norm
    if sent:
        windows = {name: window_means(values, _WINDOWS) for name, values in sent.items()}
        ends = next(iter(windows.values()))[0]
        charts.append(
            chart(
                "noise",
                "In a message",
                "Norm of the noise in the learners' averaged message. The line is the clip norm, "
                "the most that the gradients in the same message can have.",
                "norm",
                ends,
                {name: values for name, (_, values) in windows.items()},
                logarithmic=True,
                lines=[{"label": f"most signal: clip norm {clip:g}", "value": clip}],
            )
        )
        far = {n: _plain(v) for n, v in run.history("distance").items() if n in noisy}
        charts.append(
            chart(
                "distance",
                "What noise did to the model",
                "Distance of the model to that of the same method without noise, on the same clients.",
                "distance",
                rounds,
                far,
                logarithmic=True,
            )
        )
    errors = {name: _plain(values)[None] for name, values in run.noise().items()}
    if errors:
        lines = []
        main = summary["methods"][summary["main_method"]]
        if main["guarantee"]:
            lines.append(
                {
                    "label": "the paper's bound at this budget",
                    "value": printed_bound(main["guarantee"], plan.learning.learners),
                }
            )
        charts.append(
            chart(
                "error",
                "Error of the mechanisms",
                "Standard deviation, a coordinate, of the noise in the learners' averaged sum "
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


def printed_bound(guarantee: Mapping[str, Any], learners: int) -> float:
    """Largest standard deviation by the norms that eq-bc-logR prints, at a guarantee's budget.

    The paper prints ‖c‖² <= log2(T) + 1 and ‖b‖² <= log2(T); the noise multiplier is the guarantee's.
    """
    row = math.log2(guarantee["horizon"])
    reach = 2.0 if guarantee["neighbours"] == "replace-one" else 1.0
    one_step = reach * guarantee["clip_norm"] / guarantee.get("clients_per_step", 1)
    multiplier = guarantee["noise_std"] / guarantee["sensitivity"]
    return float(multiplier * one_step * math.sqrt((row + 1) * row / learners))


def _plain(values: NDArray[Any]) -> Floats:
    return np.asarray(values, np.float64)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
