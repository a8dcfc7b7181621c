"""The plans that ship with the package: the figures of the paper, what goes beyond it, presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veilstream.errors import UnknownName
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
    smoke_steps: int | None = None  # steps of a learner in a smoke run, where τ differs between variants

    def plans(self, changes: dict[str, Any] | None = None, *, smoke: bool = False) -> Iterator[tuple[str, Plan]]:
        """Folder and plan of every run."""
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
_FAIR = {"fair_logistic": 4, "fair_logistic_200": 20, "fair_logistic_50": 80}

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("logistic", (Variant("", "logistic"),), {"learning.rounds": 60, "run.seeds": 2}),
        Figure(
            "fair",
            tuple(
                Variant(f"{4000 // met}-releases", name, {"learning.local_steps": met}) for name, met in _FAIR.items()
            ),
            {"run.seeds": 2, "run.evaluate_every": 1},
            smoke_steps=240,
        ),
        Figure("cnn", tuple(Variant(f"tau-{tau}", "cnn", _horizon(tau)) for tau in (1, 2, 4)), _SMOKE, smoke_steps=200),
        Figure("clip", (Variant("", "clip"),), _SMOKE | {"learning.rounds": 60}),
        Figure(
            "beyond",
            tuple(Variant(name, name, {"run.seeds": 10}) for name in _BEYOND),
            _SMOKE | {"learning.rounds": 30},
        ),
        Figure(
            "streams",
            tuple(Variant(name, f"streams_{name}") for name in _STREAMS),
            {"learning.rounds": 60, "run.seeds": 2, "run.evaluate_every": 60},
        ),
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
