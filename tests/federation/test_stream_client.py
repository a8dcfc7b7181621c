"""The learner's end of the stream: what its pings and its log tell, and what they do not."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import grpc.aio
from grpc._cython import cygrpc

from tests.support.direct import DirectWorld
from tests.support.federation import plan_of, wait_for
from veilstream.federation.direct import client, wire
from veilstream.federation.direct.client import StreamClient
from veilstream.federation.learner.process import LearnerService

LOGGER = "veilstream.federation.direct.client"


class Pings:
    """A server that asks without a pause and notes when it is answered."""

    def __init__(self, lasts_s: float, every_s: float) -> None:
        self._lasts_s, self._every_s = lasts_s, every_s
        self.answered: list[float] = []
        self.asked = 0

    async def read(self):
        loop = asyncio.get_running_loop()
        self.until = getattr(self, "until", loop.time() + self._lasts_s)
        await asyncio.sleep(self._every_s)
        if loop.time() >= self.until:
            return grpc.aio.EOF
        self.asked += 1
        return wire.PING

    async def write(self, frame: bytes) -> None:
        assert frame == wire.PING
        self.answered.append(asyncio.get_running_loop().time())


def learner() -> StreamClient:
    return StreamClient(("127.0.0.1", 1), "a", lambda data: data, None, dim=6, enrolled=True)


def test_a_flood_of_pings_gets_one_answer_in_its_time(monkeypatch):
    """So nobody watches from millisecond to millisecond when this process computes."""
    every_s = 0.2
    monkeypatch.setattr(client, "_PING_EVERY_S", every_s)
    here = learner()
    asked = 0
    answered: list[float] = []

    async def connections() -> None:
        nonlocal asked
        for _ in range(3):  # connecting anew gives no further answer
            pings = Pings(lasts_s=0.25, every_s=0.001)
            await here._answer_all(pings)
            asked += pings.asked
            answered.extend(pings.answered)

    asyncio.run(connections())
    assert asked > 30
    gaps = [later - sooner for sooner, later in itertools.pairwise(answered)]
    assert min(gaps) >= every_s - 1e-6
    assert 2 <= len(answered) <= 5  # 0.75 s


def test_the_first_ping_is_answered_at_once():
    """A server that asks whether a learner is there does not wait for long."""
    pings = Pings(lasts_s=0.05, every_s=0.0)
    asyncio.run(learner()._answer_all(pings))
    assert len(pings.answered) == 1


def test_every_ping_that_comes_after_an_answer_gets_one_too(monkeypatch):
    """Also if it comes while the answer before it is still being written."""
    monkeypatch.setattr(client, "_PING_EVERY_S", 0.0)

    class Lockstep(Pings):
        async def read(self):
            while self.asked > len(self.answered):
                await asyncio.sleep(0)
            if self.asked == 20:
                return grpc.aio.EOF
            self.asked += 1
            return wire.PING

        async def write(self, frame: bytes) -> None:
            await super().write(frame)
            for _ in range(5):
                await asyncio.sleep(0)

    pings = Lockstep(0.0, 0.0)

    async def all_of_them() -> None:
        await asyncio.wait_for(learner()._answer_all(pings), 5.0)

    asyncio.run(all_of_them())
    assert len(pings.answered) == 20


def test_grpc_knows_every_option_that_it_is_given():
    """It ignores one that is misspelt; so pings that were allowed ended quiet connections after a minute."""
    library = Path(cygrpc.__file__).read_bytes()
    given = [name for name, _ in (*wire.options(1), *wire.server_options(1))]
    assert given
    assert [name for name in given if name.encode() not in library] == []


@pytest.mark.parametrize("over", [False, True])
def test_a_server_that_goes_is_a_loss_only_while_the_run_goes_on(over, tmp_path, caplog):
    with DirectWorld(tmp_path, plan_of(learners=1), names=("a",)) as world:
        transport = world.transport()
        with caplog.at_level(logging.INFO, LOGGER):
            world.connect("a", lambda data: data, run_over=lambda: over)
            wait_for(lambda: transport.nodes() == {"a"})
            transport.close()
            wait_for(lambda: len(said(caplog)) > 1)
            wait_for(lambda: not world.nodes["a"].online)
            world.stop("a")
    lines = said(caplog)
    assert lines[0] == ("INFO", f"connected to 127.0.0.1:{world.port}")
    if over:
        gone = f"the run is over and the server at 127.0.0.1:{world.port} has gone"
        assert lines[1:] == [("INFO", gone)]
    else:
        assert {level for level, _ in lines[1:]} == {"WARNING"}


def said(caplog) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == LOGGER]


def test_the_service_tells_its_stream_that_the_run_is_over(tmp_path):
    with DirectWorld(tmp_path, plan_of(learners=1), names=("a",)) as world:
        world.transport()
        daemon = world.start("a")
        service = LearnerService(
            world.plan, tmp_path / "keys/learners/a", tmp_path / "a.db", "plan:0", ("127.0.0.1", world.port)
        )
        node = service._node(daemon, daemon.learner)
        assert not node._client._run_over()
        daemon.site.dismissed = True
        assert node._client._run_over()
