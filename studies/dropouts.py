"""Learners that drop out: what missing rounds cost, and what weights that follow answers ruin.

    python -m studies.dropouts --out FOLDER

The paper's logistic task (20 learners, 1000 rounds of 4 steps, d = 100), `buffered` noise at two
budgets, with each learner absent from 0, 10, 30 and 50 percent of the rounds. Three servers:

* *constant*: weight 1/n of the enrolled learners, as deployed. Less arrives, so the model moves
  less in a round;
* *constant, step raised*: the same, with a server step 1/(1 - share) times as large, which is
  public and constant in time, so that noise still cancels;
* *answered*: weight 1/(who answered), which moves the model as far and changes with every round.

Losses are prequential, on the clients of all learners. *Noise in the model* is the distance to the
same run without noise. In a last pair of runs half of the learners come late and half leave.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from veilstream.colours import colour_of
from veilstream.files import write_file
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.research.error_figure import save_figure
from veilstream.simulation.attendance import Attendance
from veilstream.simulation.engine import Simulation

SHARES = (0.0, 0.1, 0.3, 0.5)
SEEDS = (0, 1, 2)
BUDGETS = (2.0, 0.5)
STEP, SERVER_STEP = 0.0223607, 4.47214
INDEPENDENT_STEP = {2.0: 0.0223607, 0.5: 0.00139754}
"""Its own best, as in experiments/logistic.toml."""
LATE_AND_LEAVING = {"late": 0.5, "leaving": 0.5}

Floats = NDArray[np.float64]
Found = dict[str, dict[str, Any]]


def methods(raised: float) -> list[dict[str, Any]]:
    """Noise-free, buffered and independent ones; where steps are raised, those beside them."""
    base: list[dict[str, Any]] = [
        {"name": "noise-free", "kind": "noise-free", "step_size": STEP},
        *(
            {"name": f"buffered @ {eps:g}", "mechanism": "buffered", "epsilon": eps, "step_size": STEP}
            for eps in BUDGETS
        ),
        *(
            {
                "name": f"independent @ {eps:g}",
                "kind": "independent",
                "epsilon": eps,
                "step_size": INDEPENDENT_STEP[eps],
            }
            for eps in BUDGETS
        ),
    ]
    plain = [entry | {"server_step_size": SERVER_STEP} for entry in base]
    if raised == 1.0:
        return plain
    more = {"server_step_size": SERVER_STEP * raised}
    return plain + [entry | more | {"name": f"{entry['name']}, step raised"} for entry in base]


def plan_of(data: dict[str, Any], raised: float, rounds: int, learners: int, dim: int) -> Plan:
    """The task with some learners absent."""
    return Plan(
        name="dropouts",
        learning={"rounds": rounds, "local_steps": 4, "learners": learners},
        data={"dim": dim, **data},
        privacy={"epsilon": BUDGETS[0], "delta": 1e-3},
        run={"evaluate_every": max(1, rounds // 20), "regret": False},
        methods=methods(raised),
    )


def simulated(plan: Plan) -> dict[str, dict[str, Any]]:
    """By method: accuracy at the end and mean loss of every seed; loss and noise over rounds."""
    simulation = Simulation(plan, [prepare(plan, method) for method in plan.methods], SEEDS)
    try:
        while not simulation.done:
            simulation.advance()
    finally:
        simulation.close()
    loss, apart = (simulation.history[name].astype(np.float64) for name in ("loss", "distance"))
    return {
        method.name: {
            "accuracy": simulation.held_out_accuracy[i, :, -1].astype(float).tolist(),
            "loss": loss[i].mean(axis=1).tolist(),
            "noise in the model": apart[i, :, -1].tolist(),
            "loss over rounds": smoothed(loss[i]).tolist(),
            "noise over rounds": smoothed(apart[i]).tolist(),
        }
        for i, method in enumerate(plan.methods)
    }


def smoothed(curves: Floats, points: int = 50) -> Floats:
    """Means over stretches of rounds, (seeds, points)."""
    return np.stack([part.mean(axis=1) for part in np.array_split(curves, points, axis=1)], axis=1)


def study(shares: tuple[float, ...] = SHARES, *, rounds: int = 1000, learners: int = 20, dim: int = 100) -> Found:
    """Results by server, share and method; "late and leaving" stands beside the shares."""
    size = (rounds, learners, dim)
    found: Found = {"constant": {}, "answered": {}}
    for share in shares:
        data = {"missing": share}
        constant = simulated(plan_of(data, 1.0 / (1.0 - share), *size))
        found["constant"][f"{share:g}"] = constant
        with weights_by_answers():
            found["answered"][f"{share:g}"] = simulated(plan_of(data, 1.0, *size)) if share else constant
    found["constant"]["late and leaving"] = simulated(plan_of(LATE_AND_LEAVING, 1.0, *size))
    with weights_by_answers():
        found["answered"]["late and leaving"] = simulated(plan_of(LATE_AND_LEAVING, 1.0, *size))
    return found


class ByAnswers(Attendance):
    """Weights of 1/(who answered): what no server here does."""

    def weights(self, seeds: Sequence[int], first: int, count: int) -> NDArray[np.float32]:
        present = self.taking_part(seeds, first, count)
        answers = np.maximum(1, present.sum(axis=-1, keepdims=True)).astype(np.float32)
        return present.astype(np.float32) * (np.float32(self.learners) / answers)


def weights_by_answers() -> AbstractContextManager[Any]:
    """A simulation inside takes `ByAnswers`."""
    return patch("veilstream.simulation.engine.Attendance", ByAnswers)


def table(found: Found) -> str:
    """Markdown: accuracy, loss and noise in the model, means over seeds."""
    lines = [
        "| budget | absent | server | accuracy | loss | noise in the model |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for epsilon in BUDGETS:
        name = f"buffered @ {epsilon:g}"
        for share in found["constant"]:
            for weights, method in (("constant", name), ("constant", f"{name}, step raised"), ("answered", name)):
                if method not in found[weights][share] or (share == "0" and weights == "answered"):
                    continue
                seen = found[weights][share][method]
                mean = {key: float(np.mean(seen[key])) for key in list(seen)[:3]}
                server = weights + method.removeprefix(name)
                lines.append(
                    f"| {epsilon:g} | {share} | {server} | {mean['accuracy']:.3f} "
                    f"| {mean['loss']:.3f} | {mean['noise in the model']:.2f} |"
                )
    return "\n".join(lines)


SERVERS = {
    "constant weights": ("constant", "", colour_of("buffered"), "-"),
    "constant weights, step raised": ("constant", ", step raised", colour_of("optimal"), "-"),
    "weights follow answers": ("answered", "", "black", "--"),
}


def draw(found: Found, rounds: int, path: Path) -> None:
    """Loss against the share of absent learners for each budget, and noise over rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    shares = [share for share in found["constant"] if share != "late and leaving"]
    percent = [100 * float(share) for share in shares]
    for axes, epsilon in zip(panels, BUDGETS, strict=False):
        for label, (weights, raised, colour, line) in SERVERS.items():
            each = [
                found[weights][s].get(f"buffered @ {epsilon:g}{raised}") or found[weights][s][f"buffered @ {epsilon:g}"]
                for s in shares
            ]
            axes.plot(percent, [np.mean(e["loss"]) for e in each], line, color=colour, label=label)
            for at, e in zip(percent, each, strict=True):
                axes.plot([at] * len(e["loss"]), e["loss"], ".", color=colour)
        for name, line in (("noise-free", ":"), ("independent", "-.")):
            key = name if name == "noise-free" else f"{name} @ {epsilon:g}"
            values = [np.mean(found["constant"][s][key]["loss"]) for s in shares]
            axes.plot(percent, values, line, color="0.5", label=f"{name}, constant weights")
        axes.set_title(f"buffered noise, ε = {epsilon:g}")
        axes.set_xlabel("absent learners, percent")
        axes.set_ylabel("prequential loss")
    axes, name = panels[2], f"buffered @ {BUDGETS[1]:g}"
    for share in shares:
        for weights, raised, colour, line in SERVERS.values():
            if raised or (weights == "answered" and share == "0"):
                continue
            curves = np.array(found[weights][share][name]["noise over rounds"])
            at = (np.arange(curves.shape[1]) + 0.5) * rounds / curves.shape[1]
            axes.plot(at, curves.mean(axis=0), line, color=colour)
            if weights == "answered":
                axes.annotate(f"{100 * float(share):.0f}%", (at[-1], curves[:, -1].mean()))
            axes.fill_between(at, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    axes.set_title(f"noise in the model, ε = {BUDGETS[1]:g}")
    axes.set_xlabel("round")
    axes.set_ylabel("distance to the run without noise")
    axes.set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save_figure(figure, path, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for figure and numbers")
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    began = time.perf_counter()
    found = study(rounds=options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    write_file(options.out / "dropouts.json", json.dumps(found, indent=1) + "\n")
    draw(found, options.rounds, options.out / "dropouts.png")
    print(table(found))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
