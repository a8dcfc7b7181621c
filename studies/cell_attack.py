"""The attack that broke 0.3.0, on every mechanism: which of two gradients did this client have?

    python -m studies.cell_attack --runs 400

A real learner with d = 61,482 meets a client whose gradient is +v or -v, by a fair coin, |v| = B_g
with all entries alike in size. An adversary who knows all else sees the messages and adds up, over
the coordinates, the logarithm of how much more probable they are under one than under the other:

* *smooth*: by the Gaussian law of the transcript, as the promise has it. It must succeed as often
  as the promise says, Φ(μ_c/2) for the client's own μ_c, and not more often;
* *fine*: as if noise were float32, with the probability of each cell of the first message worked
  out from how many float32 numbers reach it (`cell_edges`). This is what told the first client's
  gradient 60 times out of 60 in 0.3.0, when the cells' probabilities were off by a percent. Against
  cells with the Gaussian's own law, its fine structure is a coin of the adversary's own.

Both are refused as too good at 99.9% confidence (Clopper and Pearson, over all cases together).
`planted` puts float32 noise back, to show that the attack would notice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

import veilstream as vs
from veilstream.audit.disposable import Disposable
from veilstream.audit.statistics.law import law_of
from veilstream.audit.statistics.many_run import clopper_pearson
from veilstream.deployment import local_rounds
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.learning.tasks import Sample
from veilstream.mechanisms.keystream import Row
from veilstream.mechanisms.normals import TILE, NormalTiles
from veilstream.plans.plan import Plan
from veilstream.privacy.grid_noise import GridNoise
from veilstream.progress import progress

DIM, STEPS = 61_482, 4
CONFIDENCE = 0.999

Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]
Integers = NDArray[np.int64]


def plan_of(mechanism: str, tau: int) -> Plan:
    return Plan(
        learning={"rounds": STEPS // tau, "local_steps": tau, "learners": 1, "task": "custom"},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": mechanism, "step_size": 0.1}],
    )


class PlusOrMinus:
    """A task whose gradient is v times what the client says."""

    classifies, labels = False, None
    features_shape = ()

    def __init__(self, dim: int) -> None:
        self.dim = dim
        signs = np.random.default_rng(1).choice([-1.0, 1.0], dim)
        self.v = (signs / np.sqrt(dim)).astype(np.float32)

    def host_gradient(self, z: Float32s, sample: Sample) -> Float32s:
        return self.v * np.float32(float(sample.target))


# --- the adversary -------------------------------------------------------------------------------


def cell_edges(boundary: Floats, feed: np.float32) -> Floats:
    """Where float32 draws begin whose float32 product with ``feed`` reaches a boundary."""
    guess = (boundary / float(feed)).astype(np.float32)
    for _ in range(3):
        guess = np.nextafter(guess, np.float32(-np.inf))
    edge = np.full(boundary.shape, np.nan)
    for _ in range(7):
        reaches = np.isnan(edge) & ((guess * feed).astype(np.float64) >= boundary)
        below = np.nextafter(guess, np.float32(-np.inf))
        edge[reaches] = 0.5 * (guess[reaches].astype(np.float64) + below[reaches])
        guess = np.nextafter(guess, np.float32(np.inf))
    return edge


def fine_log_law(cells: Integers, grid: float, std: float, feed: np.float32) -> Floats:
    """Log-probability of first-message cells under float32 noise."""
    low = cell_edges((cells - 0.5) * grid, feed)
    high = cell_edges((cells + 0.5) * grid, feed)
    width = np.maximum(high - low, 1e-12)
    return np.log(width) - 0.5 * (0.5 * (low + high) / std) ** 2


class Adversary:
    """Knows the plan and v; sees prefixes."""

    def __init__(self, terms: Terms, units: Integers, client: int) -> None:
        self._terms, self._units = terms, units.astype(np.float64)
        law = law_of(
            terms.mechanism.noising_matrix(),
            std=terms.noise_std,
            reach=2.0 * terms.grid.clip_norm,
            claim=terms.guarantee.curve.mu,
            local_steps=terms.local_steps,
        )
        assert law.covariance is not None
        self._seen = client // terms.local_steps + 1
        covariance = law.covariance[: self._seen, : self._seen] / terms.grid.step**2
        shift = law.shifts[: self._seen, client]
        self._weights = np.linalg.solve(covariance, shift)
        norm = float(np.linalg.norm(self._units))
        self.mu = 2.0 * norm * float(np.sqrt(shift @ self._weights))
        self._first = client < terms.local_steps

    def scores(self, prefixes: list[Integers]) -> tuple[float, float]:
        """Evidence for +v: smooth, and with the fine structure of the first message."""
        seen = np.stack(prefixes).astype(np.float64)
        smooth = 2.0 * float(self._weights @ (seen @ self._units))
        if not self._first:
            return smooth, smooth
        terms = self._terms
        feed = terms.mechanism.program.matrix(0)[0, -1]
        where = prefixes[0], terms.grid.step, terms.noise_std, feed
        first, *rest = where
        units = self._units.astype(np.int64)
        plus, minus = (fine_log_law(first - s * units, *rest) for s in (1, -1))
        return smooth, float(np.nansum(plus - minus))


# --- the runs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A mechanism, τ, and which client is attacked."""

    mechanism: str
    tau: int
    client: int
    runs: int
    mu: float
    smooth: int
    fine: int
    """Right guesses."""

    @property
    def allowed(self) -> float:
        """Share of right guesses that the messages may allow: that of the client's own μ."""
        return float(ndtr(0.5 * self.mu))

    def surely_more(self, tests: int) -> bool:
        """Whether either attack is better than allowed, at the level of all tests together."""
        level = (1.0 - CONFIDENCE) / tests
        best = max(self.smooth, self.fine)
        return clopper_pearson(best, self.runs, level)[0] > self.allowed


def transcripts(plan: Plan, task: PlusOrMinus, client: int, coins: NDArray[np.bool_]) -> Iterator[list[Integers]]:
    """One learner after another, each with its own store; messages up to the client's."""
    terms = Terms.of(plan, task.dim)
    nothing = np.zeros((), np.float32)
    for plus in coins:
        seen = []
        with Disposable(plan, task) as learner:  # type: ignore[arg-type]
            for r in range(client // terms.local_steps + 1):
                learner.begin_round(r, np.zeros(task.dim, np.float32))
                for step in range(r * terms.local_steps, (r + 1) * terms.local_steps):
                    said = (1.0 if plus else -1.0) if step == client else 0.0
                    learner.observe(f"{step}", Sample(nothing, said))
                seen.append(decode(learner.finish_round().payload).prefix)
        yield seen


def attack(
    mechanism: str,
    tau: int,
    client: int,
    runs: int,
    *,
    dim: int = DIM,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _: None,
) -> Case:
    """``runs`` learners, each guessed once."""
    plan, task = plan_of(mechanism, tau), PlusOrMinus(dim)
    terms = Terms.of(plan, dim)
    clipped = terms.grid.gradient(vs.clip(task.v, terms.grid.clip_norm))
    adversary = Adversary(terms, np.asarray(clipped), client)
    coins = np.random.default_rng([seed, tau, client]).random(runs) < 0.5
    right = np.zeros(2, int)
    for plus, seen in zip(coins, transcripts(plan, task, client, coins), strict=True):
        right += [(score > 0.0) == plus for score in adversary.scores(seen)]
        tick(1)
    return Case(mechanism, tau, client, runs, adversary.mu, *right.tolist())


class Float32Noise(GridNoise):
    """The noise of 0.3.0: float32 draws, multiplied once more in float32."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **(more | {"draw": self._singles}))

    def _singles(self, row: Row, out: Floats, scale: float) -> Iterator[slice]:
        feed = self._program.matrix(self._position)[0, -1]
        std = np.float32(scale * self._grid.step)
        single = np.empty(len(out), np.float32)
        context, tiles = row.open(), NormalTiles(len(out))
        for first in range(0, len(out), TILE):
            tile = slice(first, min(first + TILE, len(out)))
            tiles.fill(context, single[tile], float(std))
            exact = (single[tile] * feed).astype(np.float64)
            out[tile] = (exact / self._grid.step + 1e-7) / float(feed)  # ties upwards
            yield tile

    def _uncertainty(self, feed: float, largest: float) -> float:
        return -1.0  # nothing is looked at twice


def planted() -> Any:
    """Put the hole back."""
    return patch.object(local_rounds, "GridNoise", Float32Noise)


def study(runs: int, mechanisms: list[str], dim: int = DIM) -> list[Case]:
    """Every mechanism, τ 1 and 2, first and second client."""
    cases = [(m, tau, client) for m in mechanisms for tau in (1, 2) for client in (0, 1)]
    with progress("attacking cells", len(cases) * runs) as tick:
        return [attack(*case, runs, dim=dim, tick=tick) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description="The attack on the law of released cells.")
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--mechanisms", nargs="+", default=list(vs.mechanisms.MECHANISMS))
    parser.add_argument("--planted", action="store_true", help="with the noise of 0.3.0")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    began = time.monotonic()
    if given.planted:
        with planted():
            cases = study(given.runs, given.mechanisms, given.dim)
    else:
        cases = study(given.runs, given.mechanisms, given.dim)
    if given.json:
        print(json.dumps([asdict(case) for case in cases]))
        return
    print("mechanism            tau client   mu_c  allowed  smooth   fine   of runs")
    for c in cases:
        print(
            f"{c.mechanism:20} {c.tau:3} {c.client:6} {c.mu:6.3f}  {c.allowed:6.1%}  "
            f"{c.smooth / c.runs:6.1%} {c.fine / c.runs:6.1%}   {c.runs}"
            + ("   MORE THAN PROMISED" if c.surely_more(2 * len(cases)) else "")
        )
    print(f"d = {given.dim}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
