"""Refusals: whether what one record says can be seen in what the server gets.

    python -m studies.refusals --pairs 200

One learner reads a file, a server leads it through every round over the direct transport (TLS on loopback);
all that the server receives is kept. In each world one record is another: good, with an empty cell, of the
wrong type, beyond all bounds, very long, without a client's name, or a row that cannot be read. Whoever it is of takes
a step in all of them, so the messages must be equal in number, order, kind and size. (A row of empty cells is no
record and is skipped; that someone came is not what the promise protects, so this world is shown and not compared.)

Then the best test there is: someone who knows every other record, all models and the law of the noise, and
wants to tell a good record from a refused one. With one step a round all other gradients can be computed, so
what is left is noise plus, if the record was good, its gradient; the likelihood ratio of the two is the best test.
Its share of right guesses must not exceed (1 + a)/2 with a = (e^eps - 1 + 2 delta)/(e^eps + 1), except by chance:
an alarm means that so many would come with probability below `FALSE_ALARMS` at that share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.federation.direct import DirectServer
from veilstream.federation.keys.identity import PublicKey, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.process import LearnerService
from veilstream.federation.protocol.messages import Reply
from veilstream.federation.protocol.transport import Failure, Received
from veilstream.federation.server.coordinator import Coordinator
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.plans.tasks import task_of
from veilstream.privacy.clipping import clip
from veilstream.progress import progress
from veilstream.records.schema import Encoded

FALSE_ALARMS = 1e-6
ROUNDS, FEATURES, NAME = 8, 3, "north"
EPSILON, DELTA, CLIP_NORM = 1.0, 1e-5, 0.25  # every gradient of x = 0 is longer, so clipping is in play

Floats = NDArray[np.float64]

GOOD = ["ann", "yes", "1", "1", "1"]
COMPARED = {
    "good": GOOD,
    "empty cell": ["ann", "yes", "", "1", "1"],
    "wrong type": ["ann", "yes", "tall", "1", "1"],
    "unknown label": ["ann", "perhaps", "1", "1", "1"],
    "no number": ["ann", "yes", "nan", "1", "1"],
    "beyond all bounds": ["ann", "yes", "9" * 5000, "1", "1"],
    "very long": ["ann", "yes", "1" * 200_000, "1", "1"],
    "control characters": ["ann", "yes", "\x00\x1b[2J", "1", "1"],
    "no client": ["", "yes", "1", "1", "1"],
    "not readable": [*GOOD, "one cell more"],
}
NOBODY = {"blank row": ["", "", "", "", ""]}


def plan_of() -> Plan:
    """One learner, one step a round, as many rounds as records."""
    return Plan(
        name="refusals",
        learning={"rounds": ROUNDS, "local_steps": 1, "learners": 1, "clip_norm": CLIP_NORM},
        data={
            "kind": "table",
            "client": "person",
            "label": "y",
            "labels": ("no", "yes"),
            "features": tuple({"name": f"x{i}", "low": -1.0, "high": 1.0} for i in range(FEATURES)),
        },
        privacy={"epsilon": EPSILON, "delta": DELTA},
        methods=[{"name": "toeplitz", "mechanism": "toeplitz", "step_size": 0.3}],
    )


def csv_of(first: list[str]) -> str:
    """The record in question, then others."""
    names = ["person", "y", *(f"x{i}" for i in range(FEATURES))]
    rng = np.random.default_rng(5)
    others = [
        [f"person {i}", ("no", "yes")[i % 2], *(f"{x:.3f}" for x in rng.uniform(-1, 1, FEATURES))]
        for i in range(1, ROUNDS)
    ]
    return "".join(",".join(row) + "\n" for row in (names, first, *others))


class _NobodyLeft(Exception):
    """The learner sits a round out: a server that waits for it would wait for ever."""


class _Wiretap(DirectServer):
    """The server's transport, which keeps what came."""

    heard: list[tuple[Reply, int]]
    learner: PublicKey

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """What the server gets."""
        came = super().receive(timeout_s)
        for _, data in came:
            if not isinstance(data, Failure):
                self.heard.append((Reply.read(bytes(data), self.learner), len(data)))
                if self.heard[-1][0].kind == "absent":
                    raise _NobodyLeft
        return came


@dataclass(frozen=True)
class Seen:
    """All that the server got in one run."""

    forms: tuple[tuple[str, int], ...]  # kind and size of every message, in order
    releases: tuple[bytes, ...]
    models: Floats  # x^0 to the last, one a round


def run_world(root: Path, content: str, plan: Plan) -> Seen:
    """A server and a learner beside this file, until the run is over or the learner has no more clients."""
    make_keys(root / "keys", ["127.0.0.1"], [NAME])
    (root / "records.csv").write_text(content, encoding="utf-8")
    keys = ServerKeys.load(root / "keys/server")
    task = task_of(plan)
    wire = _Wiretap(root / "keys/server", ("127.0.0.1", 0), dim=task.dim)
    wire.heard, wire.learner = [], keys.learners[NAME]
    wire.start()
    stop, failed = threading.Event(), list[BaseException]()
    service = LearnerService(
        plan,
        root / "keys/learners" / NAME,
        root / "store.db",
        str(root / "records.csv"),
        ("127.0.0.1", wire.port),
        new_store=True,
    )

    def serve() -> None:
        try:
            service.run(stop)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        coordinator = Coordinator(plan, np.zeros(task.dim, np.float32), keys, root / "run")
        with contextlib.suppress(_NobodyLeft):
            coordinator.go(wire, ROUNDS)
        models = np.array([coordinator.models.read(r) for r in range(coordinator.round + 1)], np.float64)
    finally:
        stop.set()
        thread.join()
        wire.close()
    if failed:
        raise failed[0]
    return Seen(
        tuple((reply.kind, size) for reply, size in wire.heard),
        tuple(bytes(reply.body) for reply, _ in wire.heard if reply.kind == "release"),
        models,
    )


def in_folder(content: str, plan: Plan) -> Seen:
    """`run_world` in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="vs-refusals-") as folder:
        return run_world(Path(folder), content, plan)


class BestTest:
    """The likelihood ratio of "the first record was good" against "it was refused"."""

    def __init__(self, plan: Plan) -> None:
        self._task, schema = task_of(plan), schema_of(plan)
        self.terms = Terms.of(plan, self._task.dim, self._task)
        lines = [line.split(",") for line in csv_of(GOOD).splitlines()]
        found = [schema.encode(dict(zip(lines[0], line, strict=True))) for line in lines[1:]]
        self._records = [record.sample for record in found if isinstance(record, Encoded)]
        assert len(self._records) == ROUNDS
        self._decoder = np.asarray(self.terms.mechanism.decoder_matrix(), np.float64)
        self._strategy = np.asarray(self.terms.mechanism.strategy_matrix(), np.float64)

    def _gradient(self, x: Floats, sample: Sample) -> Floats:
        return np.asarray(clip(np.asarray(self._task.gradient(x.astype(np.float32), sample)), CLIP_NORM), np.float64)

    @property
    def mu(self) -> float:
        """How far the two worlds lie apart, in standard deviations; the promise allows twice the clip norm."""
        own = self._gradient(np.zeros(self._task.dim), self._records[0])
        return float(np.linalg.norm(own) * np.linalg.norm(self._strategy[:, 0]) / self.terms.noise_std)

    def says_good(self, seen: Seen) -> bool:
        """The guess."""
        prefixes = np.array([decode(body).prefix for body in seen.releases], np.float64) * self.terms.grid.step
        others = [self._gradient(x, s) for x, s in zip(seen.models[1:], self._records[1:], strict=False)]
        known = np.cumsum([np.zeros(self._task.dim), *others], axis=0)
        # What is left is B(C·e_0·g + xi), with g the gradient of the first record or zero.
        left = np.linalg.solve(self._decoder, prefixes - known)
        own = np.outer(self._strategy[:, 0], self._gradient(seen.models[0], self._records[0]))
        return bool((left * own).sum() > 0.5 * (own * own).sum())


@dataclass(frozen=True)
class Result:
    """What the study found."""

    alike: bool  # whether all compared worlds have the same messages
    messages: dict[str, dict[str, int]]  # by world and kind
    guesses: int
    right: int
    advantage: float  # share of right guesses, times two, minus one
    expected: float  # that the Gaussian's distance gives
    allowed: float  # by epsilon and delta
    p_value: float  # of so many right guesses, were the advantage as large as is allowed

    @property
    def alarm(self) -> bool:
        """Whether the server learns more than is promised."""
        return not self.alike or self.p_value < FALSE_ALARMS


def study(pairs: int, *, tick: Callable[[int], None] = lambda _: None) -> Result:
    """Compare the worlds, then guess ``pairs`` times in each of two."""
    plan = plan_of()
    seen = {name: in_folder(csv_of(first), plan) for name, first in (COMPARED | NOBODY).items()}
    alike = len({seen[name].forms for name in COMPARED}) == 1
    test, right = BestTest(plan), 0
    for _ in range(pairs if alike else 0):
        right += test.says_good(in_folder(csv_of(GOOD), plan))
        right += not test.says_good(in_folder(csv_of(COMPARED["empty cell"]), plan))
        tick(1)
    guesses = 2 * pairs if alike else 0
    allowed = (math.exp(EPSILON) - 1 + 2 * DELTA) / (math.exp(EPSILON) + 1)
    return Result(
        alike,
        {name: _counts(world) for name, world in seen.items()},
        guesses,
        right,
        2.0 * right / guesses - 1.0 if guesses else math.nan,
        math.erf(test.mu / 2.0 / math.sqrt(2.0)),
        allowed,
        _upper_tail(right, guesses, 0.5 * (1.0 + allowed)),
    )


def _counts(seen: Seen) -> dict[str, int]:
    return dict(Counter(kind for kind, _ in seen.forms))


def _upper_tail(right: int, guesses: int, share: float) -> float:
    """P[so many or more], of independent guesses."""
    from scipy.stats import binom

    return float(binom.sf(right - 1, guesses, share))


def main() -> None:
    """As a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=200)
    pairs = parser.parse_args().pairs
    with progress("pairs", pairs) as tick:
        result = study(pairs, tick=tick)
    print(json.dumps({**asdict(result), "alarm": result.alarm}, indent=1))
    raise SystemExit(1 if result.alarm else 0)


if __name__ == "__main__":
    main()
