"""How good a model is, in the words that every page has: a figure, and the same figure of what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from veilstream.learning.task_kind import Target
from veilstream.learning.task_registry import task_kind
from veilstream.plans.plan import Plan
from veilstream.plans.records import label_unit
from veilstream.reports.page_kit import Facts, Headline, Measure, Shade, Table, facts, measure
from veilstream.runs.summary import HeldOut, MethodSummary, SimulationSummary

ALWAYS = {
    "majority": "always the commonest label",
    "mean": "always the mean",
    "no_change": "repeating the last label",
    "learner's share": "each learner's label share",
}
"""Predictions without a model, by their names in files."""

SHARES = ("auc", "balanced_accuracy", "held_out_accuracy", "accuracy", "prequential_accuracy")
_IN_BASELINES = {"held_out_accuracy": "accuracy"}  # where their names differ
_HEADS = (
    ("auc", "balanced_accuracy", "held_out_accuracy"),
    ("rmse", "r2"),
    ("prequential_accuracy",),
    ("average_loss",),
)
_SPLITS = {
    "time": "the last records of each learner, in time",
    "people": "people who are never learned from",
    "made-up": "made-up clients who are never learned from",
}
_MOST_LABELS = 12  # with more, a matrix of all pairs cannot be read
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


def named(name: str, told: Mapping[str, Any]) -> str:
    """A baseline of summary.json in words."""
    if "label" in told:
        return f"always “{told['label']}”"
    kind, _, epsilon = name.partition(" @ ")
    return f"noisy label count, ε = {epsilon}" if kind == "noisy count" else ALWAYS[name]


def figure_names(unit: str | None) -> dict[str, str]:
    """Final figures in the order of tables, with the unit of those that have one."""
    return {
        "auc": "AUC",
        "balanced_accuracy": "balanced accuracy",
        "held_out_accuracy": "accuracy",
        "log_loss": "log loss",
        "rmse": f"RMSE ({unit})" if unit else "RMSE",
        "r2": "R²",
        "prequential_accuracy": "prequential accuracy",
        "average_loss": "average loss",
        "dynamic_regret": "dynamic regret",
        "static_regret": "static regret",
    }


def baseline_figures(summary: SimulationSummary, key: str) -> list[tuple[str, float]]:
    """One figure of every baseline that has it; ranking by a constant has AUC 0.5."""
    found = []
    for name, told in summary.baselines.items():
        value = 0.5 if (key, name) == ("auc", "majority") else told.get(_IN_BASELINES.get(key, key))
        if isinstance(value, float | int):
            found.append((named(name, told), float(value)))
    return found


def baseline_cell(summary: SimulationSummary, name: str, key: str) -> str:
    """A baseline's figure in a table."""
    value = dict(baseline_figures(summary, key)).get(named(name, summary.baselines[name]))
    return "–" if value is None else f"{value:.4f}"


def simulation_headline(summary: SimulationSummary) -> Headline:
    """The recommended method beside its baselines, with the run's own verdict."""
    main, verdict = summary.main, summary.verdict
    keys = next((own for keys in _HEADS if (own := [key for key in keys if key in main.final])), [])
    if not keys:
        return {
            "sentence": f"{main.name} has no final figure: it diverged.",
            "better": False,
            "figures": [measure("diverged", f"{main.name}: no final figure")],
            "beside": [],
        }
    figures = [_measure(summary, key) for key in keys]
    seeds, spread = len(summary.seeds), figure(main.final[keys[0]].std, share=keys[0] in SHARES)
    over = f", ± {spread} over {seeds} seeds" if seeds > 1 else ", one seed"
    figures[0]["label"] += f" of {main.name}{over}"
    figures[0]["compared"] += facts(_others(summary, keys[0]))
    return {
        "sentence": "" if verdict is None else verdict.sentence,
        "better": None if verdict is None else verdict.better,
        "figures": figures,
        "beside": facts(_held_out(summary.held_out, keys[-1])),
    }


def _measure(summary: SimulationSummary, key: str) -> Measure:
    share = key in SHARES
    known = [(name, figure(value, share=share)) for name, value in baseline_figures(summary, key)]
    return measure(figure(summary.main.final[key].mean, share=share), figure_names(summary.unit)[key], known)


def _others(summary: SimulationSummary, key: str) -> list[tuple[str, str]]:
    """Methods without noise, and with independent noise for the same promise."""
    main = summary.main
    return [
        (m.name, figure(m.final[key].mean, share=key in SHARES))
        for m in summary.methods.values()
        if m is not main
        and key in m.final
        and (m.mechanism is None or (m.mechanism == "independent" and m.budget == main.budget))
    ][:3]


def _held_out(held: HeldOut | None, key: str) -> list[tuple[str, str]]:
    if held is None:
        return []
    used = f"{held.used:,}" if held.used == held.rows else f"{held.used:,} of {held.rows:,}"
    told = [("held out", f"{used} records: {_SPLITS.get(held.split, held.split)}")]
    if held.sampling_error is not None:
        name, share = ("accuracy", True) if key in SHARES else ("RMSE", False)
        told.append((f"sampling error of {name} (95%)", f"± {figure(held.sampling_error, share=share)}"))
    return told


def label_table(method: MethodSummary) -> Table | None:
    """What became of the held-out records of each label; None for numbers."""
    told = method.confusion
    if told is None:
        return None
    rows: list[list[str | Shade]] = []
    many = len(told.labels) > _MOST_LABELS
    for label, counts in zip(told.labels, told.counts, strict=True):
        total, found = sum(counts), method.recall.get(label)
        recall = "–" if found is None else f"{found.mean:.3f}"
        shown = _confused(told.labels, label, counts) if many else [_shade(count, total) for count in counts]
        rows.append([label, f"{total:,.0f}", recall, *shown])
    columns = ["most often taken for"] if many else [f"taken for “{label}”" for label in told.labels]
    return {
        "columns": ["label", "records", "recall", *columns],
        "rows": rows,
        "note": f"Held-out records, as {method.name} predicts them; counts are means over seeds. Recall is the share "
        "of a label’s records that are found.",
        "main": None,
    }


def _shade(count: float, total: float) -> Shade:
    return {"text": f"{count:,.0f}", "share": count / total if total else 0.0}


def _confused(labels: Sequence[str], label: str, counts: Sequence[float]) -> list[str | Shade]:
    others = [(count, name) for name, count in zip(labels, counts, strict=True) if name != label and count]
    return ["–" if not others else "{1}, {0:,.0f}".format(*max(others))]


def method_verdicts(summary: SimulationSummary) -> list[Facts]:
    """A sentence on each method, and what to try where the recommended one is no better than its baseline."""
    said = [(m.name, m.verdict) for m in summary.methods.values() if m.verdict]
    lists: list[Facts] = [{"title": "Each method beside its baseline", "rows": facts(said)}] if len(said) > 1 else []
    return lists


def loss_levels(plan: Plan, summary: SimulationSummary) -> list[tuple[str, float]]:
    """The baseline's loss where the task's loss follows from held-out figures: log loss, or a square."""
    kind = task_kind(plan.learning.task)
    if kind is None or plan.learning.ridge:
        return []
    if kind.target in (Target.SIGN, Target.CLASS):
        return [("always the labels’ shares, held out", value) for _, value in baseline_figures(summary, "log_loss")]
    if kind.name == "least_squares":
        unit = label_unit(plan)
        return [(f"{name}, held out", 0.5 * (v / unit) ** 2) for name, v in baseline_figures(summary, "rmse")]
    return []
