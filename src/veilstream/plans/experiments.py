"""The plans that ship with the package: the figures of the paper, what goes beyond it, presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veilstream.errors import UnknownName
from veilstream.plans.chosen import chosen_plans
from veilstream.plans.plan import Plan


@dataclass(frozen=True)
class Variant:
    """One run of a figure."""

    folder: str  # inside the figure's folder; empty where the figure is one run
    experiment: str
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """The runs of one figure, and overrides that make a quick try."""

    name: str
    variants: tuple[Variant, ...]
    smoke: dict[str, Any]
    studies: tuple[
        tuple[str, str, str], ...
    ] = ()  # Comparisons whose choices it runs: folder, study, head of the plans
    smoke_steps: int | None = None  # steps of a learner in a smoke run, where τ differs between variants

    def plans(self, changes: dict[str, Any] | None = None, *, smoke: bool = False) -> Iterator[tuple[str, Plan]]:
        """Folder and plan of every run."""
        for folder, study, experiment in self.studies:
            small, rounds = (dict(self.smoke), 8) if smoke else ({}, None)
            for part, plan in chosen_plans(study, experiment_path(experiment), small | (changes or {}), rounds):
                yield f"{folder}/{part}" if folder else part, plan
        for variant in self.variants:
            small = dict(self.smoke) if smoke else {}
            if smoke and self.smoke_steps:
                tau = variant.overrides.get("learning.local_steps", 1)
                small["learning.rounds"] = self.smoke_steps // tau
            overrides = variant.overrides | small | (changes or {})
            plan = Plan.load(experiment_path(variant.experiment), overrides)
            if smoke:
                plain = tuple(m for m in plan.methods if " @ own" not in m.name)
                plan = dataclasses.replace(plan, methods=plain)
            yield variant.folder, plan


def _horizon(tau: int) -> dict[str, Any]:
    return {
        "name": f"cnn, tau {tau}",
        "learning.local_steps": tau,
        "learning.rounds": 6000 // tau,
        "run.evaluate_every": 200 // tau,
    }


_SMOKE = {"run.seeds": 1, "run.evaluate_every": 50, "data.held_out": 500}
_STREAMS = ("electricity", "covertype", "flights", "health")
_BEYOND = ("beyond_cnn", "beyond_cnn_30", "beyond_random", "beyond_edge", "beyond_edge_10", "mnist_private")

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("logistic", (Variant("", "logistic"),), {"learning.rounds": 60, "run.seeds": 2}),
        Figure("fair", (), {"run.seeds": 2}, studies=(("", "logistic", "fair_logistic"),)),
        Figure("cnn", tuple(Variant(f"tau-{tau}", "cnn", _horizon(tau)) for tau in (1, 2, 4)), _SMOKE, smoke_steps=200),
        Figure("clip", (Variant("", "clip"),), _SMOKE | {"learning.rounds": 60}),
        Figure(
            "beyond",
            tuple(Variant(name, name, {"run.seeds": 10}) for name in _BEYOND),
            _SMOKE | {"learning.rounds": 30},
        ),
        Figure("streams", (), {"run.seeds": 2}, studies=tuple((name, name, f"streams_{name}") for name in _STREAMS)),
    )
}


def figure_of(name: str) -> Figure:
    """The figure of this name; an unknown one is refused with the nearest."""
    if name not in FIGURES:
        raise UnknownName("figure", name, FIGURES)
    return FIGURES[name]


def experiment_path(name: str) -> Path:
    """The plan of this name, in an installed package or in a checkout."""
    package = Path(__file__).parent.parent
    for folder in (package / "_experiments", package.parent.parent / "experiments"):
        if folder.is_dir():
            known = sorted(path.stem for path in folder.glob("*.toml"))
            if name not in known:
                raise UnknownName("experiment", name, known)
            return folder / f"{name}.toml"
    raise UnknownName("experiment", name, [])


def plan_path(given: Path) -> Path:
    """A plan file, or the shipped plan of that name."""
    if given.is_file() or given.suffix or len(given.parts) > 1:
        return given
    return experiment_path(given.name)
