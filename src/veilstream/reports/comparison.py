"""Several runs on one page: the recommended method of each, or one that is named."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.reports.charts import chart, running_mean
from veilstream.runs.folder import Run

Floats = NDArray[np.float64]

_FIGURES = {
    "held_out_accuracy": "held-out accuracy",
    "prequential_accuracy": "prequential accuracy",
    "rmse": "held-out error",
    "average_loss": "average loss",
    "dynamic_regret": "dynamic regret",
}


class Compared:
    """One run in a comparison: its name there, its method and what came of it."""

    def __init__(self, run: Run, method: str | None, name: str) -> None:
        self.run, self.name = run, name
        if run.is_federation:
            raise InputError(
                "run",
                str(run.path),
                "a simulation's folder",
                "a federation's accuracy is private; its own report shows what may be seen",
            )
        self.summary = run.summary
        self.method = self.summary["main_method"] if method is None else method
        if self.method not in self.summary["methods"]:
            raise UnknownName("method", self.method, self.summary["methods"])

    @property
    def facts(self) -> dict[str, Any]:
        """What the summary says of the method."""
        found: dict[str, Any] = self.summary["methods"][self.method]
        return found

    def final(self, key: str) -> dict[str, Any] | None:
        """A final figure; folders of before have `accuracy` for the held-out one."""
        figures = self.facts["final"]
        if key == "held_out_accuracy" and key not in figures:
            key = "accuracy"
        found: dict[str, Any] | None = figures.get(key)
        return found


def compared_runs(runs: Sequence[Run], method: str | None = None) -> list[Compared]:
    """Runs by the names of their folders, told apart by the folders above where they are alike.

    Raises:
        InputError: for fewer than two, a federation, or a method that one does not have.

    """
    if len(runs) < 2:
        raise InputError("run", len(runs), "at least two run folders", "name another")
    paths = [run.path.resolve() for run in runs]
    depth = 1
    while depth < 8 and len({p.parts[-depth:] for p in paths}) < len(paths):
        depth += 1
    names = ["/".join(p.parts[-depth:]) for p in paths]
    if len(set(names)) < len(names):
        raise InputError("run", names, "folders that differ", "name each once")
    return [Compared(run, method, name) for run, name in zip(runs, names, strict=True)]


def comparison_state(compared: Sequence[Compared]) -> dict[str, Any]:
    """The page's state (`report_state`): a chart for each measure that all of them have."""
    best = _best(compared)
    keys = [k for k in _FIGURES if any(each.final(k) for each in compared)]
    return {
        "schema": 1,
        "kind": "comparison",
        "title": " · ".join(each.name for each in compared[:3]) + (" …" if compared[3:] else ""),
        "subtitle": f"{len(compared)} runs side by side: "
        + ", ".join(f"{each.method} of {each.name}" for each in compared),
        "notices": ["Simulations: their noise comes from seeds and protected no one."],
        "headline": best,
        "promise": None,
        "methods": [
            {
                "name": each.name,
                "label": each.name,
                "group": None,
                "mechanism": None,
                "private": each.facts["guarantee"] is not None,
                "colour": i,
            }
            for i, each in enumerate(compared)
        ],
        "groups": [],
        "main": None,
        "seeds": list(range(max(len(each.summary["seeds"]) for each in compared))),
        "charts": {"learning": _charts(compared)},
        "results": {
            "columns": ["run", "method", "protects (ε, δ)", *(_FIGURES[k] for k in keys)],
            "rows": [
                [each.name, each.method, _promise(each), *(_cell(each.final(k)) for k in keys)] for each in compared
            ],
            "note": "Mean ± standard deviation over each run’s own seeds.",
            "main": best["run"],
        },
        "audit": None,
        "provenance": {
            "facts": [[each.name, str(each.run.path)] for each in compared],
            "command": shlex.join(["veilstream", "compare", *(str(each.run.path) for each in compared)]),
            "plan": "",
        },
    }


def _charts(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    charts = []
    if all((each.run.path / "accuracy.csv").exists() for each in compared):
        looked = {each.name: each.run.held_out_accuracy() for each in compared}
        rounds = sorted({r for own, _ in looked.values() for r in own})
        place = {r: i for i, r in enumerate(rounds)}
        values = {}
        for each in compared:
            own, found = looked[each.name]
            filled = np.full((len(found[each.method]), len(rounds)), np.nan)
            filled[:, [place[r] for r in own]] = found[each.method]
            values[each.name] = filled
        about = "Of the published model, on clients who are never learned from."
        charts.append(chart("held-out", "Held-out accuracy", about, "accuracy", np.array(rounds), values, share=True))
    longest = max(each.summary["rounds"] for each in compared)
    losses = {}
    for each in compared:
        own_loss = running_mean(np.asarray(each.run.history("loss")[each.method], np.float64))
        filled = np.full((len(own_loss), longest), np.nan)
        filled[:, : own_loss.shape[1]] = own_loss
        losses[each.name] = filled
    about = "Prequential: the loss of each round’s clients at the model published before it."
    charts.append(
        chart("loss", "Average loss so far", about, "average loss", np.arange(1, longest + 1), losses, logarithmic=True)
    )
    return charts


def _best(compared: Sequence[Compared]) -> dict[str, Any]:
    """The run whose figure is best: accuracy if all have one, else loss."""
    if all(each.final("held_out_accuracy") for each in compared):
        key, label, sign = "held_out_accuracy", "best held-out accuracy", -1.0
    else:
        key, label, sign = "average_loss", "least average loss", 1.0
    there = [(each, found) for each in compared if (found := each.final(key))]
    if not there:
        return {"value": "–", "label": "no run has a final figure", "spread": "", "beside": [], "run": None}
    winner, figure = min(there, key=lambda pair: sign * pair[1]["mean"])
    percent = sign < 0

    def form(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value:.4g}"

    return {
        "value": form(figure["mean"]),
        "label": f"{label}, {winner.name}",
        "spread": f"± {form(figure['std'])}",
        "beside": [{"label": each.name, "value": form(found["mean"])} for each, found in there if each is not winner][
            :4
        ],
        "run": winner.name,
    }


def _promise(each: Compared) -> str:
    promise = each.facts["guarantee"]
    return f"({promise['epsilon']:g}, {promise['delta']:g})" if promise else "nothing"


def _cell(value: dict[str, Any] | None) -> str:
    return "–" if value is None else f"{value['mean']:.4f} ± {value['std']:.4f}"
