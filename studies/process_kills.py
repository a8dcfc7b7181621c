"""A federation of real processes, of which any may be killed at any time: what every chaos study does.

Server and learners are the commands that people run; this process is their init system and starts again what has
died. Victims are drawn at random from all of their processes. Beside the kills, learners stay away: so many of them
at any time, on average, each for 10 to 30 s.

A killed process takes some seconds of a processor until it takes part again, nearly all of it for Python to start,
import and read its ledger. Where machines are so busy that kills come faster than that, nothing moves: then a study
ends after three minutes without a round, and its report says so, with what the server said last.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from veilstream.federation.addresses import free_port
from veilstream.federation.demo import direct_processes
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.processes import Child
from veilstream.plans.plan import Plan
from veilstream.progress import progress

_STUCK_S = 180.0
_AWAY_S = (10.0, 30.0)


@dataclass
class Report:
    """What was done, and what was found."""

    learners: int
    rounds: int
    seconds: float = 0.0
    done: int = 0
    """Rounds that were closed."""
    kills: Counter[str] = field(default_factory=Counter)
    absences: int = 0
    violations: Counter[str] = field(default_factory=Counter)
    back_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By what was killed: seconds until two more rounds were closed, where nobody else died in between."""
    memory_mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of server and learners, ten times on the way."""


@dataclass(frozen=True)
class Chaos:
    """How much."""

    every_s: float
    """Mean seconds between two kills; 0: none."""
    absent: float = 0.0
    """Share of learners that are away at any time."""
    limit_s: float = 3000.0


def names_of(learners: int) -> list[str]:
    """Of a study's learners, in order."""
    return [f"learner-{i}" for i in range(learners)]


def run_to_the_end(folder: Path, plan: Plan, report: Report, chaos: Chaos, seed: int) -> bool:
    """Whether the run came to its end while processes died."""
    names = names_of(report.learners)
    make_keys(folder / "keys", ["127.0.0.1", "localhost"], names)
    (folder / "plan.toml").write_text(plan.to_toml())
    children = direct_processes(folder, {name: f"plan:{place}" for place, name in enumerate(names)}, free_port())
    began = time.monotonic()
    try:
        for child in children:
            child.start()
        _Init(folder, children, report, chaos, np.random.default_rng(seed)).run(began + chaos.limit_s)
    finally:
        for child in children:
            child.end()
        report.seconds = time.monotonic() - began
        report.done = _rounds_done(folder)
    return _is_over(folder)


class _Init:
    """Starts again what has died, and kills."""

    def __init__(
        self, folder: Path, children: list[Child], report: Report, chaos: Chaos, rng: np.random.Generator
    ) -> None:
        self._folder, self._children, self._report, self._chaos, self._rng = folder, children, report, chaos, rng
        self._done, self._kill_at, self._leave_at = 0, 0.0, 0.0
        self._moved_at = time.monotonic()
        self._killed: tuple[str, float, int] | None = None
        self._away: dict[int, float] = {}

    def run(self, until: float) -> None:
        report = self._report
        with progress("rounds", report.rounds) as tick:
            while not _is_over(self._folder):
                now = time.monotonic()
                if now > until:
                    report.violations[f"not complete after {self._chaos.limit_s:.0f} s"] += 1
                    return
                if now > self._moved_at + _STUCK_S:
                    said = self._children[0].last_lines(3)
                    report.violations[f"no round for {_STUCK_S:.0f} s; the server said: {said}"] += 1
                    return
                if not self._all_up(now):
                    return
                before = self._done
                self._look(now)
                tick(self._done - before)
                if self._done:
                    self._hurt(now)
                time.sleep(0.05)

    def _all_up(self, now: float) -> bool:
        """Start again who has died and is not to stay away; False where one has ended by itself."""
        for place, child in enumerate(self._children):
            if not child.running and child.exit_code not in (None, 0, -9, -15):
                self._report.violations[f"gave up with {child.exit_code}: {child.last_lines(2)}"] += 1
                return False
            if not child.running and self._away.get(place, 0.0) < now:
                child.end()
                child.start()
        return True

    def _look(self, now: float) -> None:
        report, done = self._report, max(self._done, _rounds_done(self._folder))
        if done > self._done:
            self._done, self._moved_at = done, now
        if done * 10 // report.rounds > len(report.memory_mib["server"]):
            _weigh(self._children, report)
        if self._killed and done >= self._killed[2] + 2:
            report.back_s[self._killed[0]].append(round(now - self._killed[1], 2))
            self._killed = None

    def _hurt(self, now: float) -> None:
        chaos, report, rng = self._chaos, self._report, self._rng
        if now > self._kill_at:
            self._kill_at = now + (rng.exponential(chaos.every_s) if chaos.every_s else math.inf)
            if chaos.every_s:
                victim = kill_one(self._children, rng)
                report.kills[victim] += 1
                self._killed = victim, now, self._done
        if chaos.absent and now > self._leave_at:
            self._leave_at = now + rng.exponential(sum(_AWAY_S) / 2 / (chaos.absent * report.learners))
            here = [place for place in range(1, len(self._children)) if self._away.get(place, 0.0) < now]
            if here:
                place = int(rng.choice(here))
                self._away[place] = now + rng.uniform(*_AWAY_S)
                self._children[place].end(0.0)
                report.absences += 1


def kill_one(children: list[Child], rng: np.random.Generator) -> str:
    """SIGKILL for one process of the whole family, whichever it is."""
    family: list[tuple[str, int]] = []
    for place, child in enumerate(children):
        if child.pid is None:
            continue
        side = "server" if place == 0 else "learner"
        family.append((side, child.pid))
        family += [(f"{side}: {name}", pid) for name, pid in _descendants(child.pid)]
    if not family:
        return "nobody"
    name, pid = family[int(rng.integers(len(family)))]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return "nobody"
    return name


def _descendants(root: int) -> list[tuple[str, int]]:
    """All processes that descend from one, with a short name for each."""
    try:
        processes = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [(_short_name(process), process.pid) for process in processes]


def _short_name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    modules = [word for word in words if "veilstream" in word]
    last = [m.rpartition("/")[2] for m in modules if m.count(".") > 1 and "/" not in m]
    return last[0] if last else "process"


def _weigh(children: list[Child], report: Report) -> None:
    for place, child in enumerate(children):
        name = "server" if place == 0 else f"learner {place - 1}"
        try:
            memory = psutil.Process(child.pid).memory_info().rss if child.pid else 0
        except psutil.NoSuchProcess:
            memory = 0
        report.memory_mib[name].append(round(memory / 2**20, 1))


def _is_over(folder: Path) -> bool:
    return (folder / "run/summary.json").exists()


def _rounds_done(folder: Path) -> int:
    """Closed rounds; one that was listed just before a kill may be there twice."""
    path = folder / "run/rounds.csv"
    return len({line.split(b",", 1)[0] for line in path.read_bytes().splitlines()[1:]}) if path.exists() else 0
