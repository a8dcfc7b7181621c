"""The protocol of comparisons: what its search finds, what it runs, and what its stored log says."""

from __future__ import annotations

import csv
import dataclasses
import math

import numpy as np
import pytest
from experiments.protocol import tables
from experiments.protocol.measure import NO_NOISE, Bench, World
from experiments.protocol.search import Arm, Walk, search
from experiments.protocol.settings import NEWEST, POWER_3, Limits, Point
from experiments.protocol.studies import REPORT_SEEDS, STUDIES
from scipy.stats import ttest_rel

from tests.support.pages import ROOT
from veilstream.plans.prepare import prepare
from veilstream.simulation.engine import Simulation

RESULTS = ROOT / "docs/results"
COARSE = (Point(2, 4, -2, POWER_3), Point(4, 8, -2, NEWEST))
LIMITS = Limits(10_000)
SETTING = ("clients", "local_steps", "clip_norm", "step_size", "step_decay", "averaging", "newest_weight")


def bowl(centre: Point):
    """Losses that grow with the distance from one setting."""

    def measure(asked):
        return [
            1.0 + 0.1 * sum((a - b) ** 2 for a, b in zip(vars(p).values(), vars(centre).values(), strict=True))
            for _, p in asked
        ]

    return measure


@pytest.mark.parametrize(
    "centre", [Point(9, 17, -9, 0, 2, 5), Point(3, -6, 7, NEWEST + 6), Point(6, 5, 0, POWER_3, 0, 2)]
)
def test_the_grid_grows_until_the_best_setting_is_interior(centre):
    """However far it lies from the coarse grid."""
    arm = Arm("independent", 2.0)
    walk = search([arm], COARSE, LIMITS, bowl(centre))[arm]
    assert walk.best == centre
    assert walk.unsettled == []
    assert {p for _, _, p in centre.neighbours(LIMITS)} <= set(walk.found)


def test_a_search_out_of_time_says_what_is_not_settled_and_goes_on_from_there():
    arm = Arm("independent", 2.0)
    measure = bowl(Point(9, 17, -9, 0))
    cut = search([arm], COARSE, LIMITS, measure, deadline=-math.inf)[arm]
    assert cut.unsettled
    after = search([arm], COARSE, LIMITS, measure, known={arm: cut.found})[arm]
    assert after.best == Point(9, 17, -9, 0)
    assert after.unsettled == []


def test_what_is_held_stays_and_what_cannot_be_is_not_tried():
    arm = Arm("independent", 2.0, (("clients", 2),))
    limits = Limits(10_000, clients_per_step=8, least_clients=2)
    walk = search([arm, Arm("tree", 2.0)], COARSE, limits, bowl(Point(0, 9, -3, NEWEST)))
    assert {p.clients for p in walk[arm].found} == {2}
    free = walk[Arm("tree", 2.0)]
    assert free.best.shape[0] == 2
    assert "clients" in free.at_limits
    assert free.edges == ["clients"]  # a limit of ours, not of the data
    assert max(p.shape[0] / p.shape[1] for p in free.found) <= 8


def test_diverged_settings_are_never_best():
    arm = Arm("independent", 2.0)
    inside = bowl(Point(4, 6, -2, NEWEST))

    def measure(asked):
        return [math.nan if pair[1].reach > 6 else loss for pair, loss in zip(asked, inside(asked), strict=True)]

    assert search([arm], COARSE, LIMITS, measure)[arm].best == Point(4, 6, -2, NEWEST)


def world(seeds=(1, 2)) -> World:
    made = {
        "learning": {"learners": 3, "task": "logistic"},
        "data": {"kind": "synthetic", "dim": 6, "held_out": 200},
        "privacy": {"epsilon": 2.0, "delta": 1e-3},
    }
    return World(made, 48, seeds)


POINTS = (Point(2, 4, -1, POWER_3, decay=1), Point(2, 6, -3, NEWEST + 2, local=1), Point(3, 5, 0, NEWEST))


def test_a_bench_measures_what_the_simulator_gives_for_the_same_plan():
    """Noise is calibrated at clip norm one and scaled, and compiled code used again: the numbers stay a plan's."""
    asked = [(Arm(mechanism, 2.0), p) for mechanism in ("independent", "buffered") for p in POINTS]
    asked += [(Arm(NO_NOISE, 0.0), p) for p in POINTS] + [(Arm("buffered", 0.5), p) for p in POINTS]
    bench = Bench(world(), 48, ("independent", "buffered"), places=1)
    for (arm, point), figures in zip(asked, bench(asked), strict=True):
        own = (
            {"kind": "noise-free"}
            if arm.mechanism == NO_NOISE
            else {"mechanism": arm.mechanism, "epsilon": arm.epsilon}
        )
        plan = world().plan(point.shape, [{"name": "one", **own, **point.method(3, 48)}])
        alone = Simulation(plan, [prepare(plan, plan.methods[0])], (1, 2))
        while not alone.done:
            alone.advance()
        alone.close()
        assert figures.loss == pytest.approx(alone.history["loss"][0].mean(axis=1), rel=2e-5)
        assert figures.held_out == pytest.approx(alone.held_out_accuracy[0, :, -1], abs=0.006)
    assert bench.runs == 2 * len(asked)
    bench.close()


def test_a_simulation_starts_over_only_with_methods_of_its_own_kind():
    plan = world().plan((4, 1), [{"name": m, "mechanism": m, "step_size": 0.1} for m in ("independent", "buffered")])
    prepared = [prepare(plan, m) for m in plan.methods]
    simulation = Simulation(plan, prepared, (1,))
    with pytest.raises(ValueError, match="same shapes and recipes"):
        simulation.again(prepared[::-1])
    while not simulation.done:
        simulation.advance()
    first = simulation.history["loss"].copy()
    simulation.again([dataclasses.replace(p, noise_std=0.0) for p in prepared])
    while not simulation.done:
        simulation.advance()
    assert not np.allclose(first, simulation.history["loss"])
    simulation.again(prepared)
    while not simulation.done:
        simulation.advance()
    simulation.close()
    assert np.array_equal(first, simulation.history["loss"])


def test_the_whole_run_moves_as_far_whatever_its_decay_and_releases():
    for point in (POINTS[0], dataclasses.replace(POINTS[0], decay=4, clients=4), POINTS[1]):
        method = point.method(3, 48)
        rounds = np.arange(point.releases(48))
        effective = method["step_size"] * method["server_step_size"] * point.shape[1]
        steps = effective * (1.0 + rounds) ** -method["step_decay"]
        assert steps.sum() * method["clip_norm"] == pytest.approx(2.0**point.reach)


def test_paired_intervals_are_those_of_a_paired_t_test():
    rng = np.random.default_rng(5)
    ours, others = (dict(enumerate(rng.normal(size=10))) for _ in range(2))
    interval = ttest_rel(list(ours.values()), list(others.values())).confidence_interval(0.95)
    found = tables.paired(ours, others)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(tuple(interval))


def stored(kind: str):
    with (RESULTS / f"comparisons{kind}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_stored_log_follows_from_every_setting_tried():
    """Chosen is the best of all that were tried, its neighbours were tried, and none is better.

    No choice lies on an edge but those of electricity at the most releases that we look at.
    """
    tried: dict[str, list[dict[str, str]]] = {}
    for row in stored("-search"):
        tried.setdefault(row["study"], []).append(row)
    log = {(r["study"], r["mechanism"], float(r["epsilon"]), r["held"]): r for r in stored("-log")}
    assert set(tried) == set(STUDIES)
    for name, rows in tried.items():
        study = STUDIES[name]
        found = tables.tried(rows)
        assert set(found) == set(study.arms())
        for arm, losses in found.items():
            walk = Walk(study.limits, arm, study.gain, losses)
            row = log[name, arm.mechanism, arm.epsilon, tables.held_text(arm)]
            assert walk.unsettled == []
            at_our_limit = name == "electricity" and walk.best.shape[0] == 2
            assert row["edges"] == ("clients" if at_our_limit else "none")
            assert int(row["settings"]) == len(losses)
            assert int(row["clients"]) == walk.best.shape[0]
            assert float(row["found"]) == pytest.approx(min(losses.values()), rel=1e-5)


def test_reported_settings_are_the_chosen_ones_on_ten_seeds_that_chose_nothing():
    seeds: dict[tuple[str, ...], set[int]] = {}
    chosen = {(r["study"], r["mechanism"], r["epsilon"], r["held"]): r for r in stored("-log")}
    for row in stored(""):
        seeds.setdefault(tuple(row[k] for k in ("study", "method", "epsilon", "held")), set()).add(int(row["seed"]))
        noise_free = row["method"] == "noise-free"
        key = row["study"], "none" if noise_free else row["method"], row["epsilon"] or "0", row["held"]
        if key in chosen and row["local_steps"]:
            for name in (
                "clients",
                "local_steps",
                "clip_norm",
                "step_size",
                "step_decay",
                "averaging",
                "newest_weight",
            ):
                assert row[name] == chosen[key][name]
    assert set(map(frozenset, seeds.values())) == {frozenset(REPORT_SEEDS)}
    assert len(REPORT_SEEDS) == 10
    assert not any(seed in REPORT_SEEDS for seed in range(1000, 1004))
