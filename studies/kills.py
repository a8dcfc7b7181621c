"""Learners that are killed again and again, and what the world outside saw of them.

    python -m studies.kills --kills 2000

A learner process (the real `Learner` on a real store and witness) is driven by a hostile world and
dies by SIGKILL: at random times, or at a chosen place of its own code. Another one starts on what
it left behind, and so on. The world is a server that asks for a round with another model each time,
and clients who bring other data each time they have to ask again.

Two accounts outlive every kill: what the world was told (`World`, in this process), and a file to
which a learner appends each pairing of a step's secret with a gradient. When a history of lives
ends, `check` compares both with the ledger. Sabotaged learners (``--sabotage``) show that each of
its counts can be other than zero.

A life costs milliseconds because it is forked, from a process with one thread and without JAX: the
command starts such a process and shows how far it has come.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from studies.kill_accounts import VIOLATIONS, check
from studies.kill_lives import (
    _OFTEN,
    _VISITS,
    COMMANDS,
    DIM,
    FIRST_START,
    KILLS_A_HISTORY,
    PLACES,
    RANDOM,
    SABOTAGES,
    Fate,
    NumpyLogistic,
    plan,
)
from studies.kill_world import Died, Doom, Failed, Life, World
from veilstream.deployment.learner import Learner
from veilstream.progress import progress

# --- many lives -----------------------------------------------------------------------------------


@dataclass
class Study:
    """All histories together."""

    kills: int
    seed: int
    sabotage: str | None
    ticked: Callable[[int], None]
    rng: np.random.Generator = field(init=False)
    at: Counter[str] = field(default_factory=Counter)
    during: Counter[str] = field(default_factory=Counter)
    """What random kills interrupted."""
    totals: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _places: deque[str] = field(init=False)

    def __post_init__(self) -> None:
        self._places = deque([SABOTAGES[self.sabotage]] if self.sabotage else PLACES)
        self.rng = np.random.default_rng(self.seed)

    def run(self, folder: Path) -> dict[str, Any]:
        """Histories until there were enough kills; then the figures."""
        began = time.monotonic()
        _warm_up(folder)
        while self.at.total() < self.kills and len(self.failures) < 100:
            self.totals["histories"] += 1
            self._history(folder / f"{self.totals['histories']}.db")
        everywhere = (*FIRST_START, *PLACES, RANDOM)
        return {
            "kills": self.at.total(),
            "seed": self.seed,
            "sabotage": self.sabotage,
            "wall_s": round(time.monotonic() - began, 1),
            "violations": {name: self.violations[name] for name in VIOLATIONS},
            "kills_at": {place: self.at[place] for place in everywhere},
            "random_kills_during": dict(self.during),
            "totals": dict(self.totals),
            "failures": self.failures[:5],
        }

    def _history(self, store: Path) -> None:
        """One store, from its first start to its last; then the accounts are compared."""
        diary = store.with_suffix(".diary")
        world = World(self.rng)
        enough = min(self.kills, self.at.total() + KILLS_A_HISTORY)
        first = deque(FIRST_START)
        try:
            while self.at.total() < enough:
                place = first[0] if first else self._next_place()
                done = self._life(store, diary, world, place)
                if done == place:  # else it did not come up: another life tries again
                    first.popleft() if first else self._places.rotate(-1)
            self._last_life(store, diary, world)
        except Failed as failure:
            self.failures.append(str(failure))
            self.violations["learners that gave up"] += 1
        self.totals += _figures(world)
        self.violations += check(store, diary, world, self.totals)

    def _next_place(self) -> str | None:
        """Random times and chosen places in turn."""
        return None if self.at.total() % 2 else self._places[0]

    def _life(self, store: Path, diary: Path, world: World, place: str | None) -> str:
        """From a start to a death; where it died."""
        target = place or str(self.rng.choice(COMMANDS, p=_OFTEN))
        visit = int(self.rng.integers(1, _VISITS.get(target, 4) + 1))
        fate = Fate(place, visit)
        doom = Doom("" if place else target, visit, self.rng.random())
        life = Life(store, diary, fate, doom, self.sabotage)
        try:
            life.ask("start")
            while True:
                world.go_on(life)
        except Died:
            pass
        finally:
            killed = life.close()
        if not killed:
            raise Failed("ended, and not by SIGKILL")
        where = RANDOM if life.killed_during else str(place)
        self.at[where] += 1
        if life.killed_during:
            self.during[life.killed_during] += 1
        self.ticked(1)
        return where

    def _last_life(self, store: Path, diary: Path, world: World) -> None:
        """Undisturbed: everyone who was ever taken comes back, and the server asks once more."""
        life = Life(store, diary, Fate(), None, self.sabotage)
        try:
            life.ask("start")
            world.go_on(life)
            for name in list(world.taken):
                world.visit(life, name)
            world.go_on(life)
        except Died:
            raise Failed("died without being killed") from None
        finally:
            life.close()


def _warm_up(folder: Path) -> None:
    """Import, solve and cache here what every life needs; see that forking is safe."""
    with Learner(plan(), folder / "warm.db", NumpyLogistic(), create=True) as learner:
        learner.learn_round(0, np.zeros(DIM), [])
    assert "jax" not in sys.modules
    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1


def _figures(world: World) -> Counter[str]:
    return Counter(
        {
            "clients told that they were taken": len(world.taken),
            "messages received": sum(map(len, world.payloads.values())),
            "models refused": world.refusals,
            "acknowledgements confirmed": len(world.noted),
        }
    )


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Run the study in a process of its own and print its figures."""
    parser = argparse.ArgumentParser(prog="studies.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", choices=SABOTAGES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        _study_here(asked)
        return
    report = _study_elsewhere(sys.argv[1:], asked.kills)
    print(json.dumps(report) if asked.json else _text(report))


def _study_here(asked: argparse.Namespace) -> None:
    def ticked(kills: int) -> None:
        print(kills, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        study = Study(asked.kills, asked.seed, asked.sabotage, ticked)
        print(json.dumps(study.run(Path(folder))), flush=True)


def _study_elsewhere(arguments: list[str], kills: int) -> dict[str, Any]:
    """A progress bar has a thread, and so has a BLAS: neither may be where lives are forked."""
    command = [sys.executable, "-m", "studies.kills", "--here", *arguments]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    last = ""
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as study,
        progress("kills", kills) as tick,
    ):
        assert study.stdout is not None
        for last in study.stdout:
            if not last.startswith("{"):
                tick(int(last))
    if study.returncode:
        raise SystemExit(study.returncode)
    report: dict[str, Any] = json.loads(last)
    return report


def _text(report: dict[str, Any]) -> str:
    lines = [f"{report['kills']} kills by SIGKILL in {report['wall_s']} s (seed {report['seed']})"]
    for title in ("violations", "kills_at", "random_kills_during", "totals"):
        lines += ["", title.replace("_", " ")]
        lines += [f"  {number:>7}  {name}" for name, number in report[title].items()]
    return "\n".join([*lines, *report["failures"]])


if __name__ == "__main__":
    main()
