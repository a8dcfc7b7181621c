"""What servers and learners may try where only sums are seen, over the messages that they really send.

Attacks on the masking room alone are in `test_masking.py`.
"""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest

from tests.federation.test_masked_rounds import QUICK, SUM, members, run, sum_plan
from tests.support.federation import Plain, World, csv_of, rows_of, table_plan_of
from veilstream.deployment.learner import Learner
from veilstream.errors import LedgerError, ProtocolError
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.keys.peers import PeerCertificates, own_certificate
from veilstream.federation.masking.learner_side import MASKED_HEADER_BYTES
from veilstream.federation.masking.requests import KeysRequest, MaskRequest, run_on_terms
from veilstream.federation.masking.server_side import MaskingServer
from veilstream.federation.masking.statements import Attempt, KeyList, KeyOffer, unpack_parts
from veilstream.federation.protocol.messages import Reply, Request, body_hash
from veilstream.federation.server import sum_coordinator
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.plans.data_source import open_file

NAMES = ("a", "b", "c", "d")


def four(rounds: int = 4, **changes):
    return sum_plan(rounds, learning={"learners": 4}, **changes)


def asked(world: World, name: str, kind: str, body: bytes = b"", *, round_: int = 0, run_: str = "run-1") -> Reply:
    """What a learner answers a server that says just this."""
    server = world.coordinator()._keys
    learner = world.daemons[name].learner
    request = Request(kind, learner.run or run_, name, os.urandom(4).hex(), round_, epoch=learner.epoch, body=body)
    answer = world.handlers[name](request.sign(server.identity))
    return Reply.read(answer, world.keys_of(name).identity.public)


def twisted(world: World, name: str, change) -> None:
    """From now on this learner's replies go through ``change(request, reply)``, which returns a reply or None."""
    honest, identity = world.handlers[name], world.keys_of(name).identity

    def handle(data: bytes) -> bytes:
        request = Request.read(data, world.keys_of(name).server)
        answer = honest(data)
        reply = change(request, Reply.read(answer, identity.public))
        return b"" if reply is None else reply.sign(identity)

    world.handlers[name] = handle


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(sum_coordinator, "_SIGN_S", 0.5)
    monkeypatch.setattr(sum_coordinator, "_AGAIN_S", 0.2)


def test_a_learner_that_never_opens_is_not_missed(tmp_path, quick):
    with World(tmp_path, four(), NAMES).start_all() as world:
        twisted(world, "d", lambda request, reply: None if request.kind == "open" else reply)
        assert run(world).finished
        assert members(world) == [set(NAMES)] * 4


def test_a_learner_that_never_signs_is_left_out_by_another_attempt(tmp_path, quick):
    with World(tmp_path, four(2), NAMES).start_all() as world:
        twisted(world, "d", lambda request, reply: None if request.kind == "set" and request.round == 1 else reply)
        server = world.coordinator()
        server.go(world.transport(), until=1)
        # It masks again in every attempt; only who is away, or refuses, is left out for good.
        twisted(world, "d", lambda request, reply: None if request.round == 1 and request.kind == "mask" else reply)
        server.go(world.transport())
        assert members(world) == [set(NAMES), {"a", "b", "c"}]


class Killed(BaseException):
    """In the middle of a round."""


def killed_when_all_have_agreed(world, monkeypatch) -> None:
    """The server dies in round 1, after every learner has agreed and before the sum is opened."""

    def die(self):
        if self.round == 1:
            raise Killed
        return opens(self)

    opens = MaskingServer.open
    server = world.coordinator()
    with monkeypatch.context() as patch:
        patch.setattr(MaskingServer, "open", die)
        with pytest.raises(Killed):
            server.go(world.transport())


@pytest.mark.parametrize("kept", [True, False])
def test_a_server_killed_when_learners_had_agreed_needs_nobody_to_seal_again(tmp_path, quick, monkeypatch, kept):
    """One of the set is away for good; without what it had sealed the server waits, and goes on when it is back."""
    with World(tmp_path, four(3), NAMES).start_all() as world:
        if not kept:
            keep = MaskingFiles.keep_masks

            def only_the_set(files, content):
                if not unpack_parts(content, 5)[4].nbytes:
                    keep(files, content)

            with monkeypatch.context() as patch:
                patch.setattr(MaskingFiles, "keep_masks", only_the_set)
                killed_when_all_have_agreed(world, monkeypatch)
            away = time.monotonic() + 2.0
            twisted(world, "d", lambda request, reply: None if time.monotonic() < away else reply)
        else:
            killed_when_all_have_agreed(world, monkeypatch)
            twisted(world, "d", lambda request, reply: None if request.round == 1 else reply)
        server = world.coordinator()
        server.go(world.transport())
        assert server.finished
        assert members(world) == [set(NAMES)] * 3


def test_a_learner_that_masks_wrongly_costs_its_round_and_never_the_model(tmp_path, quick):
    def garbled(request, reply):
        if request.kind != "mask" or request.round != 1:
            return reply
        body = bytearray(reply.body)
        body[MASKED_HEADER_BYTES + 6] ^= 0x40
        return Reply(reply.kind, reply.learner, reply.answers, reply.facts, bytes(body), body_hash(bytes(body)))

    with World(tmp_path, four(3), NAMES).start_all() as world:
        twisted(world, "d", garbled)
        server = world.coordinator()
        server.go(world.transport(), until=1)
        before = server.fold.x.copy()
        server.go(world.transport(), until=2)
        assert np.array_equal(server.fold.x, before)
        assert any("the sum of round 1 was refused" in note for note in world.notes)
        server.go(world.transport())
        assert not np.array_equal(server.fold.x, before)
        assert np.linalg.norm(server.fold.x) < world.plan.learning.model_norm_cap


def test_a_learner_that_begins_another_epoch_changes_no_key_and_waits_for_the_next_run(tmp_path, quick):
    with World(tmp_path, four(4), NAMES).start_all() as world:
        server = world.coordinator()
        server.go(world.transport(), until=2)
        world.daemons["d"].learner.end_epoch()
        world.daemons["d"].learner.new_epoch()
        server.go(world.transport())
        assert members(world) == [set(NAMES)] * 2 + [{"a", "b", "c"}] * 2


def test_a_restored_store_masks_and_opens_nothing(tmp_path):
    with World(tmp_path, four(), NAMES).start_all() as world:
        run(world, 1)
        world.stop("d")
        for file in world.store("d").parent.iterdir():
            shutil.copy(file, tmp_path / f"copy-{file.name}")
        world.start("d")
        run(world, 2)
        world.stop("d")
        shutil.copy(tmp_path / "copy-store.db", world.store("d"))
        with pytest.raises(LedgerError, match="old copy"):
            Learner(world.plan, world.store("d"), Plain())
        # With its witness restored too, what the others have signed gives it away.
        for file in world.store("d").parent.iterdir():
            if (copy := tmp_path / f"copy-{file.name}").exists():
                shutil.copy(copy, file)
        world.start("d")
        server = world.coordinator()
        proofs = tuple(server.server.masks.certificates[r] for r in (0, 1))
        told = MaskRequest(Attempt(proofs[0].opened.at.keys, 2, 1), proofs, None, bytes(4 * Plain.dim))
        reply = asked(world, "d", "mask", told.pack(), round_=2)
        assert reply.kind == "refusal"
        assert reply.facts["why"] == "it has stopped (its own log says why)"


def test_a_server_that_asks_for_a_learners_own_round_is_refused(tmp_path):
    with World(tmp_path, four(), NAMES).start_all() as world:
        reply = asked(world, "a", "round", bytes(4 * Plain.dim))
        assert reply.kind == "refusal"
        assert "privacy.trust" in reply.facts["why"]


def test_keys_that_the_server_makes_up_are_refused_by_the_ca(tmp_path):
    make_keys(tmp_path / "other", ["127.0.0.1"], list(NAMES))
    with World(tmp_path, four(), NAMES).start_all() as world:
        offer = KeyOffer.unpack(unpack_parts(asked(world, "a", "key").body, 2)[0])
        learner = world.daemons["a"].learner
        run_ = run_on_terms(learner.run, learner.settings)
        others = [KeyOffer(name, 0, os.urandom(32), bytes(64)) for name in "bcd"]
        forged = tuple(own_certificate(tmp_path / "other/learners" / name) for name in NAMES)
        reply = asked(world, "a", "keys", KeysRequest(KeyList(run_, (offer, *others)).pack(), forged).pack())
        assert reply.kind == "refusal"
        assert "did not sign" in reply.facts["why"]
        known = PeerCertificates(tmp_path / "keys/learners/a")
        with pytest.raises(ProtocolError, match="CA did not sign"):
            known.identities(forged)
        right = [own_certificate(tmp_path / "keys/learners" / name) for name in NAMES]
        assert sorted(known.identities(right)) == sorted(NAMES)


@pytest.mark.parametrize("changed", [{}, {"epsilon": 40.0}, {"honest": 3}])
def test_learners_take_no_key_of_one_with_another_plan_whatever_the_server_told_each(tmp_path, changed):
    with World(tmp_path, four(), NAMES) as world:
        for name in NAMES:
            world.start(name, four(privacy=changed) if name == "d" else None)
        offers = [KeyOffer.unpack(unpack_parts(asked(world, name, "key").body, 2)[0]) for name in NAMES]
        learner = world.daemons["a"].learner
        keys = KeyList(run_on_terms(learner.run, learner.settings), tuple(offers))
        certificates = tuple(own_certificate(tmp_path / "keys/learners" / name) for name in NAMES)
        reply = asked(world, "a", "keys", KeysRequest(keys.pack(), certificates).pack())
        assert reply.kind == ("refusal" if changed else "keys")
        if changed:
            assert "learner 'd' did not sign" in reply.facts["why"]


def test_visits_that_are_priced_as_apart_are_not_brought_together_by_leaving_a_learner_out(tmp_path, quick):
    with World(tmp_path, four(5, privacy={"participations": 2, "min_separation": 2}), NAMES).start_all() as world:
        server = world.coordinator()
        server.go(world.transport(), until=1)
        twisted(world, "d", lambda request, reply: None if request.kind == "mask" and request.round == 1 else reply)
        server.go(world.transport())
        assert members(world) == [set(NAMES)] + [{"a", "b", "c"}] * 4
        assert world.daemons["d"].learner.over
        assert "d" in server.refused


def test_a_round_that_comes_without_proof_of_the_one_before_spends_nothing(tmp_path):
    with World(tmp_path, four(), NAMES).start_all() as world:
        run(world, 2)
        learner = world.daemons["a"].learner
        digest = world.coordinator().server.masks.keys.digest()
        told = MaskRequest(Attempt(digest, 3, 1), (), None, bytes(4 * Plain.dim))
        before = learner.ledger.chain.length, learner.round
        reply = asked(world, "a", "mask", told.pack(), round_=3)
        assert "without proof" in reply.facts["why"]
        assert (learner.ledger.chain.length, learner.round) == before


def test_paused_or_without_clients_a_learner_takes_part_with_its_noise_alone(tmp_path):
    class Nobody:
        def ready(self, least, most, may_take):
            return False

        def serve(self, round_, observe, wanted):
            raise AssertionError("nobody is offered")

    with World(tmp_path, four(2), NAMES) as world:
        for name in NAMES:
            world.start(name, source=Nobody() if name == "d" else None)
        assert run(world).finished
        assert members(world) == [set(NAMES)] * 2
        assert world.daemons["d"].learner.ledger.chain.standing.steps == 2


def test_under_a_secret_order_a_learner_that_was_left_out_carries_no_client_into_another_round(tmp_path, quick):
    plan = table_plan_of(
        6,
        4,
        learning={"local_steps": 1, "clients_per_step": 10},
        privacy=SUM | {"order": "secret"},
        federation=QUICK,
        method={"mechanism": "independent"},
    )
    with World(tmp_path, plan, NAMES) as world:
        for place, name in enumerate(NAMES):
            path = tmp_path / f"{name}.csv"
            path.write_text(csv_of(rows_of([f"p{place}-{i}" for i in range(60)])))
            world.start(name, source=open_file(path, plan))
        server = world.coordinator()
        server.go(world.transport(), until=1)
        assert world.daemons["d"].learner.ledger.chain.standing.unopened
        twisted(world, "d", lambda request, reply: None if request.kind == "mask" and request.round == 1 else reply)
        server.go(world.transport())
        assert members(world) == [set(NAMES)] + [{"a", "b", "c"}] * 5
        assert world.daemons["d"].learner.over
        assert "d" in server.refused
