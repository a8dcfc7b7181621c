"""The search, the same for every method: a coarse grid, then neighbours of the best until none is better."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from experiments.protocol.settings import Limits, Point


@dataclass(frozen=True, order=True)
class Arm:
    """A method at a budget, possibly with some dimensions held where they are."""

    mechanism: str
    epsilon: float
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def held(self) -> frozenset[str]:
        """Names of the dimensions that are not searched."""
        return frozenset(name for name, _ in self.fixed)

    def at(self, point: Point) -> Point:
        """The nearest point that keeps what is held."""
        return replace(point, **dict(self.fixed))


Measure = Callable[[Sequence[tuple[Arm, Point]]], Iterable[float]]
"""Mean loss of each (smaller is better; infinite where it diverged), all on the same seeds."""


@dataclass
class Walk:
    """What is known of one arm."""

    limits: Limits
    arm: Arm
    gain: float
    """Smaller relative gains are not followed: they are within the noise of a few seeds."""
    found: dict[Point, float] = field(default_factory=dict)
    open_starts: list[Point] = field(default_factory=list)

    @property
    def best(self) -> Point:
        """Best so far."""
        return min(self.found, key=lambda point: (self.found[point], point))

    def neighbours(self, point: Point) -> list[tuple[str, int, Point]]:
        """In every direction that is searched."""
        return list(point.neighbours(self.limits, self.arm.held))

    def better(self, point: Point) -> dict[str, tuple[int, float]]:
        """Direction and loss of the better neighbour in each dimension that has one."""
        enough = self.found[point] - self.gain * abs(self.found[point])
        gains: dict[str, tuple[int, float]] = {}
        for name, by, other in self.neighbours(point):
            loss = self.found.get(other, math.inf)
            if loss < min(enough, gains.get(name, (0, math.inf))[1]):
                gains[name] = (by, loss)
        return gains

    def wanted(self, point: Point) -> list[Point]:
        """What to look at next from here; nothing once all neighbours are known and none is better."""
        unknown = [other for _, _, other in self.neighbours(point) if other not in self.found]
        gains = self.better(point)
        if not unknown and len(gains) > 1:  # all at once, beside the best single step
            together = replace(point, **{name: getattr(point, name) + by for name, (by, _) in gains.items()})
            if together.inside(self.limits) and together not in self.found:
                unknown.append(together)
        return unknown

    def moved(self, point: Point) -> Point:
        """The best known among a point, its neighbours, and all their gains together."""
        gains = self.better(point)
        if not gains:
            return point
        candidates = [other for _, _, other in self.neighbours(point) if other in self.found]
        together = replace(point, **{name: getattr(point, name) + by for name, (by, _) in gains.items()})
        if together in self.found:
            candidates.append(together)
        return min(candidates, key=lambda other: (self.found[other], other))

    @property
    def at_limits(self) -> list[str]:
        """Dimensions that end at the best setting, whatever is searched: no averaging less than none."""
        there = {(name, by) for name, by, _ in self.neighbours(self.best)}
        searched = {name for name, _ in there}
        return [name for name in vars(self.best) if name in searched and len({(name, -1), (name, 1)} & there) < 2]

    @property
    def unsettled(self) -> list[str]:
        """Dimensions in which the best setting has a neighbour that is better or was not tried."""
        if not self.found or not math.isfinite(self.found[self.best]):
            return ["all"]
        here, worse = self.best, []
        gains = self.better(here)
        for name, _, other in self.neighbours(here):
            if (other not in self.found or name in gains) and name not in worse:
                worse.append(name)
        return worse

    @property
    def edges(self) -> list[str]:
        """Dimensions in which the best setting lies on an edge of the search; a limit of the data is none."""
        least = self.limits.least_clients
        cut = least > 1 and self.best.shape[0] == least and "clients" not in self.unsettled
        return [*self.unsettled, *(["clients"] if cut else [])]


def search(
    arms: Sequence[Arm],
    coarse: Sequence[Point],
    limits: Limits,
    measure: Measure,
    *,
    gain: float = 1e-3,
    starts: int = 2,
    deadline: float = math.inf,
    step: Callable[[dict[Arm, Walk], str], None] = lambda walks, text: None,
    known: Mapping[Arm, Mapping[Point, float]] | None = None,
) -> dict[Arm, Walk]:
    """Search every arm with the same effort; stops early, unsettled, at ``deadline`` (`time.monotonic`)."""
    walks = {arm: Walk(limits, arm, gain, dict((known or {}).get(arm, {}))) for arm in arms}

    def look(wanted: Sequence[tuple[Arm, Point]]) -> None:
        asked = [(arm, point) for arm, point in dict.fromkeys(wanted) if point not in walks[arm].found]
        for (arm, point), loss in zip(asked, measure(asked), strict=True):
            walks[arm].found[point] = loss if math.isfinite(loss) else math.inf

    look([(arm, point) for arm in arms for each in coarse if (point := arm.at(each)).inside(limits)])
    step(walks, f"coarse grid: {sum(len(walk.found) for walk in walks.values())} settings")
    for walk in walks.values():
        apart: list[Point] = []
        for point in sorted(walk.found, key=lambda p, w=walk: (w.found[p], p)):  # type: ignore[misc]
            if all(_distance(point, other) > 3 for other in apart) and math.isfinite(walk.found[point]):
                apart.append(point)
        walk.open_starts = [] if known else apart[:starts]  # a search that goes on starts from its best
    for number in range(1000):
        if time.monotonic() > deadline:
            break
        asked: list[tuple[Arm, Point]] = []
        for arm, walk in walks.items():
            here = set()
            for start in [*walk.open_starts, walk.best]:
                at = start
                while not walk.wanted(at) and walk.moved(at) != at:
                    at = walk.moved(at)
                if wanted := walk.wanted(at):
                    here.add(at)
                    asked += [(arm, point) for point in wanted]
            walk.open_starts = sorted(here)
        if not asked:
            break
        look(asked)
        open_ = sum(bool(walk.open_starts) for walk in walks.values())
        step(walks, f"step {number}: {len(asked)} settings for {open_} of {len(walks)} arms")
    return walks


def _distance(a: Point, b: Point) -> int:
    return sum(abs(x - y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
