"""Rounds over the messages that are really sent, where learners share masks with neighbours in a graph alone."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from tests.federation.test_masked_peers import asked, twisted
from tests.federation.test_masked_rounds import members, run, sum_plan
from tests.federation.test_masking_graph import MANY, small
from tests.support.federation import World
from veilstream.deployment.ledger.inspect import verify
from veilstream.errors import InputError
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.masking import learner_side, server_side
from veilstream.federation.masking.learner_side import MaskingLearner
from veilstream.federation.masking.requests import KeysRequest, ShareRequest
from veilstream.federation.masking.server_side import MaskingServer
from veilstream.federation.masking.statements import SetOfRound, Signatures
from veilstream.federation.server import sum_coordinator, sum_server
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.mask_graph import MaskGraph
from veilstream.reports import opened_sums
from veilstream.reports.statement import make_statement
from veilstream.runs.folder import Run

NAMES = tuple(f"n{k:02d}" for k in range(MANY))


@pytest.fixture(autouse=True)
def thirteen(monkeypatch):
    for module in (learner_side, server_side, sum_server):
        monkeypatch.setattr(module, "mask_graph", small)
    monkeypatch.setattr(sum_coordinator, "_SIGN_S", 2.0)
    monkeypatch.setattr(sum_coordinator, "_AGAIN_S", 1.0)


def plan(rounds: int):
    return sum_plan(rounds, learning={"learners": MANY}, privacy={"honest": 6, "colluding": 2})


def test_rounds_with_a_graph_give_the_sums_and_go_on_after_restarts(tmp_path, monkeypatch):
    made: dict[tuple[int, int], np.ndarray] = {}
    original = MaskingLearner.mask

    def noted(self, at, increment, proof=None):
        made[at.round, self.standing.me] = increment.copy()
        return original(self, at, increment, proof)

    monkeypatch.setattr(MaskingLearner, "mask", noted)
    with World(tmp_path, plan(3), NAMES).start_all() as world:
        server = run(world, 1)
        assert server.server.masks.rules.two_steps
        told = server.fold.x.copy()
        for name in NAMES[:2]:
            world.stop(name)
            world.start(name)
        server = run(world)
        assert server.finished
        assert members(world) == [set(NAMES)] * 3
        assert np.linalg.norm(told) > 0.0
        # x = -η·η_g/n · Σ increments on the grid: what the method's fold makes of the sums of what was masked.
        total = sum(made.values()).astype(np.float64)[: server.fold.terms.dim]
        away = server.fold.x.astype(np.float64)
        cosine = float(total @ away) / (np.linalg.norm(total) * np.linalg.norm(away))
        assert cosine == pytest.approx(-1.0, abs=1e-5)
    for name in NAMES:
        assert verify(world.store(name)).steps == 3


def test_another_list_is_made_without_a_learner_that_vanishes_before_the_draw(tmp_path, monkeypatch):
    """The graph of twelve is all pairs in this small case, and still drawn."""

    def of_any_size(learners, colluding):
        pairs = MaskGraph(12, (1, 2, 3, 4, 5), 2.0, 2, 11, 6, 0.0)
        return small(learners, colluding) if learners != 12 else pairs

    for module in (learner_side, server_side, sum_server):
        monkeypatch.setattr(module, "mask_graph", of_any_size)
    with World(tmp_path, plan(2), NAMES).start_all() as world:
        twisted(world, NAMES[4], lambda request, reply: None if request.kind == "keys" else reply)
        server = run(world)
        assert server.finished
        assert server.server.masks.keys.number == 2
        assert set(server.server.masks.keys.names) == set(NAMES) - {NAMES[4]}
        assert [len(each) for each in members(world)] == [12, 12]


def test_a_server_that_is_killed_before_the_draw_asks_for_the_same_list(tmp_path):
    with World(tmp_path, plan(2), NAMES).start_all() as world:
        files = MaskingFiles(tmp_path / "run")
        run(world, 1)
        kept = files.keys()
        assert len(kept.told) == MANY
        (tmp_path / "other").mkdir()
        MaskingFiles(tmp_path / "other").keep_keys(replace(kept, told=()))
        server = world.coordinator().server
        server.resume(MaskingFiles(tmp_path / "other"))
        assert server.masks is None
        assert {server.question(name) for name in NAMES} == {"keys"}
        assert not server.draw()
        for name in NAMES:
            server._take_told(name, asked(world, name, "keys", kept.pack(), run_=server.run).body)
        assert server.draw()
        assert (
            server.masks.links._order
            == MaskingServer.unpack(
                files.masks(), server.rules, server._identities, server.terms.release_dim, kept.told
            ).links._order
        )


def test_a_statement_verifies_the_draw_of_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(opened_sums, "mask_graph", small)
    with World(tmp_path, plan(2), NAMES).start_all() as world:
        assert run(world).finished
    keys, files = ServerKeys.load(tmp_path / "keys/server"), MaskingFiles(tmp_path / "run")
    assert "2 of 2 certificates are verified" in " ".join(make_statement(Run(tmp_path / "run"), keys).text.split())
    kept = files.keys()
    files.keep_keys(replace(kept, told=(*kept.told[:-1], bytes(32))))
    with pytest.raises(InputError, match="did not commit"):
        make_statement(Run(tmp_path / "run"), keys)


def test_a_learner_tells_no_pads_to_a_server_that_shows_no_agreement(tmp_path):
    with World(tmp_path, plan(2), NAMES).start_all() as world:
        server = run(world, 1)
        masks = server.server.masks
        what = SetOfRound(masks.at, masks.core, frozenset(range(MANY)))
        proofs = tuple(masks.certificates.values())
        signed = Signatures({k: os.urandom(64) for k in range(9)})
        reply = asked(world, "n00", "open", ShareRequest(proofs, what, signed).pack(), round_=1)
        assert reply.kind == "refusal"
        body = KeysRequest(masks.keys.pack(), (), tuple(bytes(32) for _ in NAMES)).pack()
        assert asked(world, "n00", "keys", body, round_=1).kind == "refusal"
