"""The paper's bounds beside the regret that they bound, on quadratics whose regret is known exactly.

    python -m experiments.bound_ratios docs/results/bounds.json

The first figure's run (n = 20, R·τ = 4000, η̃ = 0.4, (2, 1e-3), the paper's accounting) on quadratics
with L = 0.25 and μ = 0.05: exact regret, the mean of simulated runs of Algorithm 1, lem-u (lem-u-IID for
independent noise) and thm-up with its hidden constants; then lem-u with one step of its proof after the other undone.
Two minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from experiments.stored import store

from veilstream import mechanisms
from veilstream.privacy import Budget, calibrate
from veilstream.research import theory
from veilstream.research.theory.quadratics import Quadratics, exact_regret, repaired_bounds

STEPS, DIM, LEARNERS, EPSILON, DELTA = 4000, 100, 20, 2.0, 1e-3
RUNS = 5
KINDS = {
    "toeplitz": mechanisms.toeplitz,
    "optimal": mechanisms.optimal,
    "tree": mechanisms.tree,
    "independent": mechanisms.independent,
}
WORLDS = {
    "noise": "at the optimum, which stays",
    "start": "at distance 5 of the optimum, no noise",
    "all": "at distance 5, optima that move, noise",
}


def problem(kind: str, tau: int, world: str) -> Quadratics:
    """The first figure's run in one of the worlds."""
    rng = np.random.default_rng(0)
    rounds = STEPS // tau
    made = KINDS[kind](STEPS)
    std, _ = calibrate(Budget(EPSILON, DELTA), made, clip_norm=1.0, accounting="zcdp")
    turn = np.linspace(0, 8 * np.pi, rounds)[:, None] + np.linspace(0, 2 * np.pi, DIM)
    away = rng.standard_normal(DIM)
    return Quadratics(
        curvatures=np.repeat([0.05, 0.1, 0.15, 0.2, 0.25], DIM // 5),
        start=(0.0 if world == "noise" else 5.0) * away / np.linalg.norm(away),
        optima=(0.1 if world == "all" else 0.0) * (np.sin(turn) - np.sin(turn).mean(axis=0)),
        learners=LEARNERS,
        local_steps=tau,
        step_size=0.4 / (LEARNERS**0.5 * tau),
        server_step_size=LEARNERS**0.5,
        noise_std=0.0 if world == "start" else std,
        increments=made.noising_matrix(),
    )


def simulated(p: Quadratics, kind: str) -> list[float]:
    """The regret of a few runs of Algorithm 1."""
    found = []
    for seed in range(RUNS):
        noise = KINDS[kind](STEPS).noise(std=p.noise_std or 1.0, dim=p.learners * DIM, seed=seed)
        x, regret = p.start.copy(), 0.0
        for optimum in p.optima:
            regret += float(p.curvatures @ (x - optimum) ** 2) / 2
            z = np.tile(x, (p.learners, 1))
            for _ in range(p.local_steps):
                w = next(noise).reshape(p.learners, DIM) if p.noise_std else 0.0
                z -= p.step_size * (p.curvatures * (z - optimum) + w)
            x -= p.server_step_size * (x - z.mean(axis=0))
        found.append(regret / p.rounds)
    return found


def row(kind: str, tau: int, world: str) -> dict[str, Any]:
    """One line of the table, with the steps of the proof."""
    p = problem(kind, tau, world)
    c, exact = p.constants(), exact_regret(p)
    rate = theory.main_theorem_rate(c, epsilon=EPSILON, delta=DELTA)
    hidden = theory.main_theorem_constants(c, epsilon=EPSILON, delta=DELTA)
    if world == "start":  # thm-up always has its noise
        rate = None
    bound = theory.dynamic_regret_bound(c).total
    released = (p.effective_step_size / tau) ** 2 * p.noise_variance * c.round_end_rows_squared[:-1].sum() / p.rounds
    runs = simulated(p, kind)
    shown: dict[str, Any] = {
        "noise": kind if p.noise_std else "none",
        "local_steps": tau,
        "world": WORLDS[world],
        "exact": exact.total,
        "simulated": fmean(runs),
        "simulated_std": stdev(runs),
        "lem_u": bound,
        "lem_u_to_exact": bound / exact.total,
        "noise_where_it_falls": float(p.curvatures.sum()) / 2 * released,  # ½·E(nᵀHn) of the noise n in x^r
    }
    if kind == "independent" and p.noise_std:
        shown["lem_u_iid_to_exact"] = theory.dynamic_regret_bound_independent(c).total / exact.total
    if rate is not None and kind == "toeplitz":
        parts = ("initial", "drift", "noise", "environment")
        total = sum(getattr(hidden, part) * getattr(rate, part) for part in parts)
        shown |= {"thm_up": total, "thm_up_to_exact": total / exact.total}
    shown["steps"] = [
        {"step": each.step, "bound": each.bound, "to_exact": each.bound / exact.total} for each in repaired_bounds(p)
    ]
    return shown


def main(path: Path) -> None:
    """Compute and store."""
    rows = []
    for kind, tau, world in (
        ("toeplitz", 4, "all"),
        ("toeplitz", 4, "noise"),
        ("toeplitz", 1, "noise"),
        ("optimal", 4, "noise"),
        ("tree", 4, "noise"),
        ("independent", 4, "noise"),
        ("toeplitz", 4, "start"),
    ):
        rows.append(row(kind, tau, world))
        sys.stderr.write(f"{rows[-1]}\n")
    store(path, "python -m experiments.bound_ratios docs/results/bounds.json", {"rows": rows})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
