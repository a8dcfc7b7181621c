"""What every transport does, whatever carries its bytes.

A run ends with the model of an undisturbed one under the same draws, to the bit, although messages
are lost, late, doubled and out of order, and although a learner is killed. What is refused or too
large harms nobody else.
"""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.support.federation import World, plan_of, seeds_by_name, wait_for
from veilstream.errors import ProtocolError
from veilstream.federation.protocol.messages import Reply
from veilstream.federation.protocol.transport import Failure

ROUNDS = 5
NAMES = ("a", "b", "c")


def loopback(root, plan) -> World:
    return World(root, plan, NAMES)


def direct(root, plan) -> World:
    pytest.importorskip("grpc")
    from tests.support.direct import DirectWorld

    return DirectWorld(root, plan, NAMES)


WORLDS = [loopback, direct]


@pytest.fixture(params=WORLDS, ids=lambda world: world.__name__)
def make(request, tmp_path, monkeypatch):
    """Make a world with a plan; the same draws in all of them."""
    seeds_by_name(monkeypatch)
    made = []

    def one(plan=None, root="world"):
        world = request.param(tmp_path / root, plan or plan_of(ROUNDS))
        made.append(world)
        return world

    yield one
    for world in made:
        world.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The last model of a run in which nothing happens."""
    with pytest.MonkeyPatch.context() as patch:
        seeds_by_name(patch)
        with World(tmp_path_factory.mktemp("undisturbed"), plan_of(ROUNDS), NAMES) as world:
            world.start_all()
            coordinator = world.coordinator()
            coordinator.go(world.transport())
            return coordinator.models.read(ROUNDS).tobytes()


def enrolment(message: bytes) -> bool:
    """Asked again only after five seconds: too long for a test."""
    return b'"kind":"enrol' in message


class Disturbed:
    """A transport with a bad day on both ways."""

    def __init__(self, transport, kind: str, seed: int = 1) -> None:
        self._transport, self._kind = transport, kind
        self._random = random.Random(seed)
        self._held: list[tuple[float, tuple[str, bytes | Failure]]] = []
        self._lost: list[str] = []
        self.disturbed = 0

    def _now(self, chance: float) -> bool:
        happens = self._random.random() < chance
        self.disturbed += happens
        return happens

    def nodes(self):
        return self._transport.nodes()

    def send(self, node, head, body=b""):
        if self._kind == "loss" and not enrolment(head) and self._now(0.12):
            self._lost.append(node)
            return
        self._transport.send(node, head, body)
        if self._kind == "doubling" and self._now(0.5):
            self._transport.send(node, head, body)

    def receive(self, timeout_s):
        found = self._transport.receive(min(timeout_s, 0.02) if self._held else timeout_s)
        found = [item for item in found if not self._loses(item)]
        found += [(node, Failure("lost")) for node in self._lost]
        self._lost = []
        if self._kind == "doubling":
            found += [item for item in found if self._now(0.5)]
        if self._kind == "reordering" and len(found) < len(self.nodes()):
            time.sleep(0.05)  # until there is something to put in another order
            found += self._transport.receive(0.01)
        if self._kind == "reordering" and len(found) > 1:
            self.disturbed += 1
            found.reverse()
        if self._kind == "delay":
            now = time.monotonic()
            self._held += [(now + self._random.uniform(0.0, 0.3), item) for item in found]
            self.disturbed += len(found)
            found = [item for due, item in self._held if due <= now]
            self._held = [held for held in self._held if held[0] > now]
        return found

    def _loses(self, item) -> bool:
        if self._kind != "loss" or isinstance(item[1], Failure) or enrolment(item[1]):
            return False
        if not self._now(0.12):
            return False
        self._lost.append(item[0])
        return True

    def close(self):
        self._transport.close()


@pytest.mark.parametrize("kind", ["loss", "delay", "doubling", "reordering"])
def test_the_model_is_the_undisturbed_one(make, undisturbed, kind):
    world = make()
    transport = Disturbed(world.transport(), kind)
    world.start_all()
    coordinator = world.coordinator()
    coordinator.go(transport)
    assert transport.disturbed >= 2
    assert coordinator.models.read(ROUNDS).tobytes() == undisturbed


def test_a_learner_that_is_killed_in_a_round_makes_it_good(make, undisturbed):
    world = make()
    transport = world.transport()
    world.start_all()
    coordinator = world.coordinator()
    coordinator.go(transport, until=2)
    world.stop("b")
    thread = threading.Thread(target=coordinator.go, args=(transport,))
    thread.start()  # asks the two others, and waits
    time.sleep(0.5)
    assert coordinator.round == 2
    world.start("b")
    thread.join(30)
    assert coordinator.finished
    assert coordinator.models.read(ROUNDS).tobytes() == undisturbed


def test_a_refusal_comes_through_with_its_reason(make):
    world = make()
    transport = world.transport()
    world.start("a")
    world.start("b")
    world.start("c", plan_of(ROUNDS, method={"step_size": 0.2}))
    with pytest.raises(ProtocolError, match=r"step_size: server 0\.1, learner 0\.2"):
        world.coordinator().go(transport)


def test_a_message_over_the_limit_fails_and_nothing_else(make, undisturbed):
    world = make()
    transport = world.transport()
    world.start_all()
    wait_for(lambda: len(transport.nodes()) == len(NAMES))
    node = min(transport.nodes())
    transport.send(node, bytes(1 << 18))
    found = []
    wait_for(lambda: found.extend(transport.receive(0.1)) or found)
    assert [where for where, _ in found] == [node]
    what = found[0][1]  # the transport does not carry it, or its learner does not read it
    assert isinstance(what, Failure) or Reply.read(what, world.keys_of(node).identity.public).kind == "refusal"
    coordinator = world.coordinator()
    coordinator.go(transport)
    assert coordinator.models.read(ROUNDS).tobytes() == undisturbed


def test_a_request_to_someone_who_is_gone_fails(make):
    world = make()
    transport = world.transport()
    world.start("a")
    wait_for(lambda: len(transport.nodes()) == 1)
    (node,) = transport.nodes()
    world.stop("a")
    transport.send(node, b"anyone?")
    found = []
    wait_for(lambda: found.extend(transport.receive(0.1)) or found)
    assert found[0][0] == node
    assert isinstance(found[0][1], Failure)
