"""Rounds in which the server sees only sums: real learners, stores and messages."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.federation import DIM, Plain, World, plan_of, seeds_by_name
from veilstream.deployment import terms
from veilstream.deployment.ledger.inspect import verify
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.site import Site
from veilstream.federation.loopback import Loopback
from veilstream.federation.protocol.messages import Request
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.masking_files import MaskingFiles

SUM = {"trust": "sum", "honest": 2, "epsilon": 4.0, "delta": 1e-3}
ONE_STEP = {"local_steps": 1, "clients_per_step": 2}
QUICK = {"quorum": 0.6, "deadline_s": 3.0, "grace_s": 0.3, "patience_s": 0.3}


def sum_plan(rounds: int = 6, **changes):
    return plan_of(
        rounds,
        learning=ONE_STEP | changes.pop("learning", {}),
        privacy=SUM | changes.pop("privacy", {}),
        federation=QUICK | changes.pop("federation", {}),
        **changes,
    )


def run(world: World, until: int | None = None):
    server = world.coordinator()
    server.go(world.transport(), until=until)
    return server


def members(world: World) -> list[set[str]]:
    """Who was part of each round's sum, by the certificates."""
    files = MaskingFiles(world.root / "run")
    names = sorted(world.names)
    return [{names[k] for k in c.opened.members} for _, c in sorted(files.openings().items())]


def ledger_model(world: World) -> np.ndarray:
    """x as the learners' ledgers imply it: all that they sealed and that was opened."""
    return world.model_by_ledgers()


def test_masked_and_plain_federations_with_the_same_draws_give_one_model(tmp_path, monkeypatch):
    seeds_by_name(monkeypatch)
    summed = sum_plan()
    known = terms.Terms.of(summed, DIM)
    original = terms.calibrate_release

    def same_noise(*args, **options):
        options["trust"] = summed.trust
        return original(*args, **options)

    with World(tmp_path / "masked", summed) as world:
        masked = run(world.start_all())
    monkeypatch.setattr(terms, "calibrate_release", same_noise)
    plain_plan = plan_of(6, learning=ONE_STEP, privacy={"trust": "each"}, federation=QUICK)
    assert terms.Terms.of(plain_plan, DIM).noise_std == known.noise_std
    with World(tmp_path / "plain", plain_plan) as world:
        plain = run(world.start_all())
    assert np.array_equal(masked.fold.x, plain.fold.x)
    assert np.linalg.norm(masked.fold.x) > 0.0


def test_a_learner_that_was_away_comes_back_with_the_noise_of_rounds_it_missed(tmp_path):
    with World(tmp_path, sum_plan(8)).start_all() as world:
        server = world.coordinator()
        transport = world.transport()
        server.go(transport, until=2)
        world.stop("c")
        server.go(transport, until=5)
        world.start("c")
        server.go(transport, until=8)
        assert [len(each) for each in members(world)[:5]] == [3, 3, 2, 2, 2]
        assert members(world)[-1] == {"a", "b", "c"}
        total = sum(world.daemons[name].learner.increment(7).astype(object) for name in "abc")
        assert server.fold.round == 8
        assert len(total) == DIM
    for name in "abc":
        assert verify(world.store(name)).steps == 8


def test_rounds_go_on_when_server_and_learners_start_again_between_any_two(tmp_path):
    world = World(tmp_path, sum_plan(6)).start_all()
    with world:
        for until in range(1, 7):
            server = run(world, until)
            for name in world.names:
                world.stop(name)
                world.start(name)
        assert server.finished
        assert members(world) == [{"a", "b", "c"}] * 6


def test_a_plain_server_refuses_a_plan_for_sums(tmp_path):
    with World(tmp_path, sum_plan()) as world, pytest.raises(InputError, match=r"privacy\.trust"):
        Coordinator(world.plan, np.zeros(DIM, np.float32), world.coordinator()._keys, tmp_path / "other")


def test_a_learner_hands_out_no_message_of_its_own(tmp_path):
    with World(tmp_path, sum_plan()).start_all() as world:
        run(world, 1)
        learner = world.daemons["a"].learner
        for ask in (learner.sealed_release, learner.finish_round):
            with pytest.raises(InputError, match=r"privacy\.trust"):
                ask()
        with pytest.raises(ProtocolError):
            world.coordinator().fold.accept("a", b"")


def test_sums_of_learners_whose_records_arrive_and_are_used_in_the_next_window(tmp_path):
    """A secret order with a window beside `trust = "sum"`: everybody who came before the last window is in a sum."""
    plan = sum_plan(6, privacy={"order": "secret", "window": 2}, method={"mechanism": "independent"})
    with World(tmp_path, plan).start_all() as world:
        server = run(world)
        assert server.finished
    assert all(verify(world.store(name)).clients == 4 * 2 for name in "abc")
    assert [len(each) for each in members(world)] == [3] * 6
    assert np.linalg.norm(server.fold.x) > 0.0


def test_rounds_that_a_secret_order_sits_out_are_said_to_pass_with_the_people_whose_steps_they_are(
    tmp_path, caplog, monkeypatch
):
    """All learners share one clock: nobody's step waits for a pause, or for a learner that was left out."""
    plan = sum_plan(8, privacy={"order": "secret", "window": 4}, method={"mechanism": "independent"})
    with World(tmp_path, plan).start_all() as world:
        server, transport = world.coordinator(), world.transport()
        server.go(transport, until=4)
        monkeypatch.setattr(Daemon, "paused", property(lambda daemon: daemon.name == "a"))
        server.go(transport, until=6)
        assert "cost nothing" not in caplog.text
        said = "noise alone, and whoever's step comes meanwhile is not used and has taken part, until `veilstream"
        assert caplog.text.count(said) == 1
        daemon = world.daemons["b"]
        daemon.site._masked_round(7, np.zeros(DIM, np.float32).tobytes(), Request("mask", "run", "b", "0" * 32), daemon)
        assert daemon.learner.round == 8
        assert "1 rounds went on without this learner: whoever's step was in them is not used" in caplog.text


class _Slow(Loopback):
    """One learner's shares always come when the round is over."""

    def _ask(self, node: str, request: bytes) -> None:
        if node == "c" and b'"open"' in request[:2000]:
            time.sleep(0.2)
        super()._ask(node, request)


def test_an_answer_that_comes_after_enough_others_is_no_old_message(tmp_path):
    with World(tmp_path, sum_plan(5)).start_all() as world:
        server = world.coordinator()
        server.go(_Slow(world.handlers))
        assert server.finished
        assert not [note for note in world.notes if "nothing that was asked" in note]


def test_both_sides_say_how_many_were_part_of_every_sum(tmp_path):
    with World(tmp_path, sum_plan(6)).start_all() as world:
        server, transport = world.coordinator(), world.transport()
        assert server.core is None
        server.go(transport, until=2)
        assert server.core == (3, 2)
        world.stop("c")
        server.go(transport, until=4)
        world.start("c")
        server.go(transport, until=6)
        assert server.core == (2, 2)
        assert world.daemons["a"].site.core in ((2, 2), (3, 2))  # by what it has proof of


def test_a_site_in_python_refuses_before_it_makes_a_store(tmp_path):
    store = tmp_path / "store.db"
    with pytest.raises(InputError, match=r"privacy\.trust"):
        Site.open(sum_plan(), store, "plan:0", name="a", create=True, task=Plain())
    assert not store.exists()
