"""Learners and server that die between any two steps of the masking protocol, in one process, with accounts kept aside.

What each learner adds is written down as it is masked, beside the protocol. Afterwards every round has one opened set,
and the model is, to the bit, what these sets and the increments of those days give.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import pytest

from tests.federation.test_masked_rounds import sum_plan
from tests.support.federation import DIM, World
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.federation.loopback import Loopback
from veilstream.federation.masking.learner_side import MaskingLearner
from veilstream.federation.protocol.sum_fold import SumFold
from veilstream.federation.server import sum_coordinator
from veilstream.federation.server.masking_files import MaskingFiles


class _Killed(Exception):
    """The server, here."""


class Dying(Loopback):
    """Learners die before or after they answer, and come back; some stay away for a while."""

    def __init__(self, world: World, rng: np.random.Generator, kill: float, leave: float) -> None:
        super().__init__(world.handlers)
        self._world, self._rng, self._kill, self._leave = world, rng, kill, leave
        self._one = threading.Lock()
        self.deaths = 0
        self.back_in: dict[str, int] = {}

    def _ask(self, node: str, request: bytes) -> None:
        with self._one:  # one at a time, so that a seed gives one story
            when = self._rng.random()
            if when < self._kill:
                self._die(node)
            if node not in self._world.handlers:
                self._inbox.put(node, sum_coordinator_failure())
                return
            reply = self._world.handlers[node](request)
            if self._kill <= when < 2 * self._kill:  # all is written, and the answer is lost
                self._die(node)
                reply = b""
            self._inbox.put(node, reply or sum_coordinator_failure())

    def _die(self, node: str) -> None:
        self.deaths += 1
        if node in self._world.daemons:
            self._world.stop(node)
        if self._rng.random() < self._leave:
            self.back_in[node] = int(self._rng.integers(5, 40))
        else:
            self._world.start(node)

    def receive(self, timeout_s: float):
        with self._one:
            for node in list(self.back_in):
                self.back_in[node] -= 1
                if self.back_in[node] <= 0:
                    del self.back_in[node]
                    self._world.start(node)
        return super().receive(min(timeout_s, 0.05))


def sum_coordinator_failure():
    from veilstream.federation.protocol.transport import Failure

    return Failure("it died")


def run_with_deaths(world: World, seed: int, kill: float, server_dies: float, leave: float) -> tuple[int, int]:
    """To the end; how often learners and the server died."""
    rng = np.random.default_rng(seed)
    world.start_all()
    transport, servers = Dying(world, rng, kill, leave), 0
    server = world.coordinator()
    while not server.finished:

        def look() -> None:
            if rng.random() < server_dies:
                raise _Killed

        try:
            server.go(transport, look=look)
        except _Killed:
            servers += 1
            server = world.coordinator()
    for node in list(transport.back_in):
        world.start(node)
    return transport.deaths, servers


def check_accounts(world: World, added: dict[tuple[int, int, int], np.ndarray]) -> None:
    """One set a round; ledgers that verify and agree; the model that follows."""
    openings = MaskingFiles(world.root / "run").openings()
    rounds, names = world.plan.learning.rounds, sorted(world.names)
    assert sorted(openings) == list(range(rounds))
    server = world.coordinator()
    fold = SumFold(server.terms, np.zeros(DIM, np.float32), names)
    for r in range(rounds):
        what = openings[r].opened
        total = sum(added[k, r, what.at.attempt] for k in what.members)
        fold.take_sum([names[k] for k in what.members], total, "")
        fold.close_round()
        assert not fold.refused_sum
    assert np.array_equal(fold.x, server.fold.x)
    for name in world.names:
        if name in world.daemons:
            world.stop(name)
        verify(world.store(name))
        with Ledger(world.store(name)) as ledger:
            shared, told = defaultdict(set), {}
            for record in ledger.records():
                if record.kind == "share":
                    shared[record.body.round].add((record.body.attempt, record.body.hash))
                if record.kind == "opened":
                    told[record.body.round] = record.body.hash
        for r, sets in shared.items():
            later = {attempt for attempt, _ in sets}
            assert len(later) == len(sets), "two sets of one attempt were opened"
            if r in told:
                assert max(sets)[1] == told[r] or len(sets) >= 1


@pytest.mark.parametrize(
    ("seed", "kill", "server_dies", "leave"),
    [(1, 0.08, 0.0, 0.0), (2, 0.0, 0.08, 0.0), (3, 0.05, 0.04, 0.1)],
    ids=["learners die", "the server dies", "both, and some stay away"],
)
def test_deaths_between_any_two_steps_open_no_round_twice(tmp_path, monkeypatch, seed, kill, server_dies, leave):
    added: dict[tuple[int, int, int], np.ndarray] = {}
    original = MaskingLearner.mask

    def noted(self, at, increment, proof=None):
        state, message = original(self, at, increment, proof)
        added[state.standing.me, at.round, at.attempt] = np.array(increment)
        return state, message

    monkeypatch.setattr(MaskingLearner, "mask", noted)
    monkeypatch.setattr(sum_coordinator, "_SIGN_S", 1.0)
    monkeypatch.setattr(sum_coordinator, "_AGAIN_S", 0.2)
    names = ("a", "b", "c", "d")
    plan = sum_plan(12, learning={"learners": 4}, federation={"patience_s": 0.1})
    with World(tmp_path, plan, names) as world:
        learners, servers = run_with_deaths(world, seed, kill, server_dies, leave)
        check_accounts(world, added)
    assert (learners > 0) == (kill > 0)
    assert (servers > 0) == (server_dies > 0)
