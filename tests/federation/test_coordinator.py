"""Server and learners together, over Loopback: numbers, losses, restarts, refusals."""

from __future__ import annotations

import dataclasses
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.federation import DIM, Plain, World, plan_of, rows_of, seeds_by_name, source_of, wait_for
from veilstream.deployment import terms
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.rescue import ask_for_epoch, begin_again
from veilstream.deployment.terms import Terms, differences
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import PrivateKey, ServerKeys
from veilstream.federation.keys.new_keys import add_learner
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.federation.protocol.transport import Failure
from veilstream.federation.server.coordinator import Coordinator
from veilstream.mechanisms import factorization
from veilstream.plans.plan import Plan
from veilstream.streams.intake import AlwaysReady


@pytest.fixture
def world(tmp_path):
    with World(tmp_path, plan_of()) as made:
        yield made


def finished(world) -> np.ndarray:
    coordinator = world.coordinator()
    assert coordinator.finished
    return coordinator.models.read(coordinator.round)


def test_a_run_ends_with_the_model_that_the_ledgers_imply(world):
    world.start_all()
    world.coordinator().go(world.transport())
    model = finished(world)
    world.close()
    np.testing.assert_allclose(model, world.model_by_ledgers(), rtol=1e-6)
    for name in world.names:
        status = verify(world.store(name))
        assert (status.round, status.clients, status.ended) == (6, 12, True)


class Tampering:
    """A transport that changes what passes."""

    def __init__(self, inner, change=None) -> None:
        self._inner, self._change = inner, change
        self.nodes, self.send, self.close = inner.nodes, inner.send, inner.close

    def receive(self, timeout_s):
        return [(node, self._change(node, what)) for node, what in self._inner.receive(timeout_s)]


class Losing(Tampering):
    """It loses requests and replies, and delivers some twice."""

    def __init__(self, inner, seed: int) -> None:
        super().__init__(inner)
        self._rng, self.send = np.random.default_rng(seed), self._send

    def _send(self, node, head, body=b""):
        for _ in range(int(self._rng.choice([0, 1, 1, 2]))):
            self._inner.send(node, head, body)

    def receive(self, timeout_s):
        out = []
        for node, what in self._inner.receive(timeout_s):
            out += [(node, what)] * int(self._rng.choice([0, 1, 1, 2]))
        return out


def test_lost_and_doubled_messages_change_nothing(tmp_path, monkeypatch):
    seeds_by_name(monkeypatch)
    monkeypatch.setattr("veilstream.federation.server.coordinator._AGAIN_S", 0.1)
    plan = plan_of(federation={"patience_s": 0.2, "deadline_s": 60.0})
    models = []
    for name, wrap in (("calm", lambda c: c), ("stormy", lambda c: Losing(c, 5))):
        with World(tmp_path / name, plan).start_all() as world:
            world.coordinator().go(wrap(world.transport()))
            models.append(finished(world))
    np.testing.assert_array_equal(models[0], models[1])


def test_a_server_that_is_started_again_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    seeds_by_name(monkeypatch)
    models = []
    for name, stops in (("whole", [6]), ("parts", [1, 1, 4, 6])):
        with World(tmp_path / name, plan_of()).start_all() as world:
            for until in stops:
                coordinator = world.coordinator()
                coordinator.go(world.transport(), until)
            models.append([coordinator.models.read(r) for r in range(7)])
    np.testing.assert_array_equal(models[0], models[1])


@contextmanager
def killed_at_save(monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("veilstream.federation.server.checkpoint.Position.save", killed)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_server_killed_before_its_checkpoint_loses_only_the_round_in_flight(world, monkeypatch):
    world.start_all()
    coordinator = world.coordinator()
    coordinator.go(world.transport(), 2)

    with killed_at_save(monkeypatch):
        coordinator.go(world.transport(), 3)
    again = world.coordinator()
    assert again.round == 2
    again.go(world.transport())
    model = finished(world)
    world.close()
    np.testing.assert_allclose(model, world.model_by_ledgers(), rtol=1e-6)


def test_weights_stay_constant_when_a_learner_is_away_and_its_rounds_are_its_own(tmp_path):
    plan = plan_of(federation={"quorum": 0.5, "deadline_s": 0.3, "patience_s": 0.1})
    with World(tmp_path, plan) as world:
        world.start("a")
        world.start("b")
        coordinator = world.coordinator()
        coordinator.go(world.transport(), 3)
        world.start("c")
        wait_for(lambda: "c" in world.transport().nodes())
        coordinator.go(world.transport())
        rounds = {name: seat.round for name, seat in coordinator.fold.seats.items()}
        assert rounds["a"] == rounds["b"] == 6
        assert rounds["c"] in (2, 3)  # it counts those it took part in
        model = finished(world)
        world.close()
        np.testing.assert_allclose(model, world.model_by_ledgers(), rtol=1e-6)


def test_a_late_reply_is_made_good_by_the_next(tmp_path):
    """One learner needs longer than a round: its sums arrive later, and none is lost."""
    plan = plan_of(rounds=8, federation={"quorum": 0.5, "deadline_s": 0.2, "patience_s": 0.1})

    class Slow(AlwaysReady):
        def __init__(self, inner):
            self._inner = inner

        def serve(self, round_, observe, wanted):
            time.sleep(0.5)
            self._inner.serve(round_, observe, wanted)

    from veilstream.plans.data_source import PlanSource

    with World(tmp_path, plan) as world:
        world.start("a")
        world.start("b")
        world.start("c", source=Slow(PlanSource(plan, 2)))
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        seat = coordinator.fold.seats["c"]
        assert 1 <= seat.round < 8
        prefixes = {n: s.prefix.copy() for n, s in coordinator.fold.seats.items()}
        world.close()
        total = sum(p * coordinator.terms.grid.step for p in prefixes.values())
        np.testing.assert_allclose(finished(world), -0.2 * np.asarray(total) / 3, rtol=1e-6, atol=1e-7)


def test_a_learner_killed_and_started_again_repeats_its_bytes(world):
    world.start_all()
    world.coordinator().go(world.transport(), 3)
    world.stop("b")
    coordinator = world.coordinator()
    going = threading.Thread(target=coordinator.go, args=(world.transport(),), daemon=True)
    going.start()
    time.sleep(0.3)
    assert going.is_alive()  # the quorum is everyone
    world.start("b")
    going.join(30)
    assert not going.is_alive()
    model = finished(world)
    world.close()
    np.testing.assert_allclose(model, world.model_by_ledgers(), rtol=1e-6)


def test_a_learner_that_lost_its_store_comes_back_in_a_new_epoch(world):
    world.start_all()
    world.coordinator().go(world.transport(), 3)
    world.stop("b")
    for file in world.store("b").parent.glob("store.db*"):
        file.unlink()
    begin_again(world.store("b"))
    world.start("b", source=others(50))
    coordinator = world.coordinator()
    coordinator.go(world.transport())
    seat = coordinator.fold.seats["b"]
    assert (seat.epoch, seat.round) == (1, 3)
    assert verify(world.store("b")).clients == 6 + 6


def others(count: int = 60):
    """Clients who were never there before."""
    return source_of(rows_of(f"other {i}" for i in range(count)))


@pytest.mark.parametrize("rounds_before", [0, 2])
def test_a_learner_that_begins_another_epoch_while_the_server_runs_is_asked_again(rounds_before, tmp_path):
    plan = plan_of(rounds=30)
    with World(tmp_path, plan).start_all() as world:
        coordinator = world.coordinator()
        transport = world.transport()
        going = threading.Thread(target=coordinator.go, args=(transport,), daemon=True)
        if rounds_before:
            going.start()
            wait_for(lambda: coordinator.round >= rounds_before)
        else:  # enrolled in epoch 0, and no release accepted yet
            until = time.monotonic() + 10
            while len(coordinator.seated) < 3 and time.monotonic() < until:
                coordinator.enrol(transport)
            assert coordinator.round == 0
        world.stop("b")
        ask_for_epoch(world.store("b"), abandon=True)
        world.start("b", source=others())
        if not rounds_before:
            going.start()
        going.join(60)
        assert not going.is_alive()
        assert coordinator.finished
        assert coordinator.fold.seats["b"].epoch == 1


def test_slow_enrolments_are_still_answers(tmp_path, monkeypatch):
    """Replies that take longer than the server waits before it asks again."""
    monkeypatch.setattr("veilstream.federation.server.coordinator._AGAIN_S", 0.05)

    class Slow(Tampering):
        _late = ()

        def receive(self, timeout_s):
            now = time.monotonic()
            late = [*self._late, *((now + 0.3, what) for what in self._inner.receive(timeout_s))]
            self._late = [each for each in late if each[0] > now]
            return [what for when, what in late if when <= now]

    with World(tmp_path, plan_of(rounds=2)).start_all() as world:
        world.coordinator().go(Slow(world.transport()))
        assert world.coordinator().finished


def test_a_reply_of_another_version_does_not_end_the_server(tmp_path):
    plan = plan_of(rounds=2, federation={"quorum": 0.5, "deadline_s": 0.3, "patience_s": 0.1})
    with World(tmp_path, plan).start_all() as world:

        def change(node, what):
            if node != "b" or isinstance(what, Failure):
                return what
            reply = Reply.read(what, world.keys_of("b").identity.public)
            facts = {"settings": world.daemons["b"].learner.settings}
            return dataclasses.replace(reply, facts=facts).sign(world.keys_of("b").identity)

        world.coordinator().go(Tampering(world.transport(), change))
        assert any("a reply of unknown form" in note for note in world.notes)


def test_a_server_killed_while_it_begins_may_begin_again(world, monkeypatch):
    with killed_at_save(monkeypatch):
        world.coordinator()
    (world.root / "run/.partial-x").write_text("left by a kill")
    assert world.coordinator().round == 0


def test_a_server_killed_before_its_summary_writes_it_when_it_starts(world):
    world.start_all()
    world.coordinator().go(world.transport())
    (world.root / "run/summary.json").unlink()
    assert world.coordinator().finished
    assert (world.root / "run/summary.json").exists()


def test_a_replayed_old_request_seals_nothing(world):
    daemon = world.start("a")
    keys = ServerKeys.load(world.root / "keys/server")
    x = np.zeros(DIM, "<f4").tobytes()
    first = Request("round", "run", "a", "n", 0, None, body=x).sign(keys.identity)
    reply = daemon.handle(first)
    daemon.learner.begin_round(1, np.zeros(DIM, np.float32))
    assert daemon.handle(first) == reply
    assert daemon.learner.pinned
    with pytest.raises(InputError, match="which is open"):
        daemon.learner.begin_round(0, np.zeros(DIM, np.float32))


@pytest.mark.filterwarnings("ignore:learning.projection_radius")
@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("clip_norm", {"clip_norm": 2.0}),
        ("rounds", {"rounds": 7}),
        ("local_steps", {"local_steps": 3}),
        ("projection_radius", {"projection_radius": 3.0}),
        ("ridge", {"ridge": 0.01}),
        ("task", {"task": "least_squares"}),
        ("learners", {"learners": 4}),
    ],
)
def test_another_plan_is_refused_at_enrolment_with_both_values(world, key, changed):
    learning = dataclasses.asdict(world.plan.learning) | changed
    other = dataclasses.replace(
        world.plan,
        learning=Plan.parse(
            world.plan.to_toml(), {f"learning.{k}": v for k, v in learning.items() if v is not None}
        ).learning,
    )
    world.start("a")
    world.start("b", plan=other)
    world.start("c")
    began = time.monotonic()
    with pytest.raises(ProtocolError, match=rf"{key}: server .*, learner "):
        world.coordinator().go(world.transport())
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"step_size": 0.7}, r"step_size: server 0\.1, learner 0\.7"),
        ({"mechanism": "tree"}, "mechanism: server 'buffered'"),
    ],
)
def test_another_method_is_refused_at_enrolment(world, method, said):
    for name in world.names:
        world.start(name, plan=plan_of(method=method))
    with pytest.raises(ProtocolError, match=said):
        world.coordinator().go(world.transport())


def test_another_program_of_one_plan_is_refused_at_enrolment(world, monkeypatch):
    """One bit of one number that the noise is multiplied with."""
    honest = factorization.compile_program
    server = world.coordinator()

    def one_bit_off(*given):
        program = honest(*given)
        first = program.matrices[0].copy()
        first[0, -1] = np.nextafter(first[0, -1], np.float32(2))
        return dataclasses.replace(program, matrices=(first, *program.matrices[1:]))

    monkeypatch.setattr(factorization, "compile_program", one_bit_off)
    world.start_all()
    with pytest.raises(ProtocolError, match=r"program: server '[0-9a-f]{64}', learner '.*SciPy"):
        server.go(world.transport())


def test_another_law_of_noise_is_refused_at_enrolment(world, monkeypatch):
    server = world.coordinator()
    monkeypatch.setattr(terms, "NOISE_LAW", "another")
    world.start_all()
    with pytest.raises(ProtocolError, match=r"noise_law: server .*, learner 'another'"):
        server.go(world.transport())


def test_other_labels_are_refused_where_the_server_knows_its_task(world):
    class Digits(Plain):
        labels = (0.0, 1.0)

    keys = ServerKeys.load(world.root / "keys/server")
    x0 = np.zeros(DIM, np.float32)
    server = Coordinator(world.plan, x0, keys, world.root / "run", task=Digits())
    world.start_all()
    with pytest.raises(ProtocolError, match=r"admits.labels: server .*\[0\.0, 1\.0\].*learner"):
        server.go(world.transport())


def test_settings_with_one_digest_are_the_same_and_every_setting_is_in_it():
    """Whatever is changed, digest and differences both say so."""
    settings = Terms.of(plan_of(), DIM, Plain()).settings
    assert differences(settings, Terms.of(plan_of(), DIM, Plain()).settings) == {}
    assert differences(settings, Terms.of(plan_of(), DIM).settings) == {}  # it knows no task
    assert list(differences(settings, settings | {"digest": "0"})) == ["digest"]
    changes = [
        {"learning": {"ridge": 0.5}},
        {"learning": {"task": "least_squares"}},
        {"method": {"averaging": 3.0}},
        {"method": {"step_decay": 0.5}},
        {"method": {"server_step_size": 1.0}},
        {"method": {"epsilon": 3.0}},
        {"learning": {"model_norm_cap": 5.0}},
        {"learners": 2},
        {"method": {"forgetting": 0.99}},
        {"method": {"newest_weight": 0.1}},
    ]
    for change in changes:
        other = Terms.of(plan_of(**change), DIM).settings
        assert other["digest"] != settings["digest"], change
        found = differences(settings, other)
        assert found, change
        assert "digest" not in found, change


def test_an_unknown_learner_and_a_forged_one_are_refused(tmp_path):
    plan = plan_of(federation={"quorum": 0.5, "deadline_s": 0.5, "patience_s": 0.1})
    with World(tmp_path, plan).start_all() as world:
        stranger = PrivateKey(bytes(32))

        def change(node, what):
            if isinstance(what, Failure) or node == "a":
                return what
            reply = Reply.read(what, ServerKeys.load(world.root / "keys/server").learners[node])
            name = "nobody" if node == "b" else "c"
            return dataclasses.replace(reply, learner=name).sign(stranger)

        with pytest.raises(TimeoutError):
            run_for(world.coordinator(), Tampering(world.transport(), change), 2.0)
        assert any("'nobody', who is not enrolled" in note for note in world.notes)
        assert any("not signed by learner 'c'" in note for note in world.notes)


def run_for(coordinator, transport, seconds: float) -> None:
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > until:
            raise TimeoutError

    coordinator.go(transport, look=look)


def test_a_replayed_reply_is_refused(world):
    world.start_all()
    kept: dict[str, bytes] = {}

    def change(node, what):
        if node == "a" and isinstance(what, bytes):
            reply = Reply.read(what, world.keys_of("a").identity.public)
            if reply.kind == "release":
                return kept.setdefault(node, what)
        return what

    with pytest.raises(TimeoutError):
        run_for(world.coordinator(), Tampering(world.transport(), change), 2.0)
    assert any("to nothing that was asked" in note for note in world.notes)
    assert world.coordinator().round == 1


def test_a_second_learner_with_the_same_name_is_refused_and_the_first_goes_on(tmp_path):
    plan = plan_of(rounds=40)
    with World(tmp_path, plan).start_all() as world:
        twin = World(tmp_path / "twin", plan)
        twin.keys_of = world.keys_of  # the same keys, another store
        twin.start("a")
        from veilstream.federation.loopback import Loopback

        transport = Loopback(world.handlers | {"twin": twin.handlers["a"]})
        coordinator = world.coordinator()
        coordinator.go(transport)
        twin.close()
        assert any("a second learner calls itself 'a'" in note for note in world.notes)
        assert coordinator.finished


def test_a_forged_acknowledgement_is_refused_by_the_learner(world):
    daemon = world.start("a")
    keys = ServerKeys.load(world.root / "keys/server")
    x = np.zeros(DIM, "<f4").tobytes()

    def ask(request: Request, key=keys.identity) -> Reply:
        data = request.sign(key)
        reply = Reply.read(daemon.handle(data), world.keys_of("a").identity.public)
        assert reply.answers == digest(data)
        return reply

    good = Request("round", "run", "a", "n", 0, None, body=x)
    assert ask(good).kind == "release"
    forged = Request("round", "run", "a", "n", 1, (0, "ff" * 32), body=x)
    reply = ask(forged, PrivateKey(bytes(32)))
    assert reply.kind == "refusal"
    assert "not signed by the server" in reply.facts["why"]
    reply = ask(forged)  # signed by the server, and not true: this store would be an old copy
    assert reply.kind == "refusal"
    assert "its store is not the newest" in reply.facts["why"]
    for other in (
        dataclasses.replace(good, learner="b"),
        dataclasses.replace(good, run="another", round=1),
        dataclasses.replace(good, round=5),
        dataclasses.replace(good, round=1, body=b"abc"),
        dataclasses.replace(good, round=1, body=x + x),
    ):
        assert ask(other).kind == "refusal"
    assert ask(good).kind == "release"  # asked again: the same


def test_an_old_request_that_is_sent_again_gets_the_same_bytes_or_nothing(world):
    daemon = world.start("a")
    keys = ServerKeys.load(world.root / "keys/server")
    x = np.zeros(DIM, "<f4").tobytes()
    requests = [Request("round", "run", "a", "n", r, None, body=x).sign(keys.identity) for r in range(3)]
    replies = [daemon.handle(request) for request in requests]
    assert daemon.handle(requests[2]) == replies[2]
    for old in requests[:2]:
        reply = Reply.read(daemon.handle(old), world.keys_of("a").identity.public)
        assert reply.kind == "refusal"


def test_a_server_needs_as_many_learners_as_its_plan_names(world):
    add_learner(world.root / "keys", "d")
    with pytest.raises(InputError, match=r"as many as have keys \(4\)"):
        world.coordinator()


def test_nothing_but_the_release_leaves_and_sizes_do_not_depend_on_the_data(tmp_path):
    """Two learners see opposite worlds: refused records, unusable ones, none at all."""
    sizes = {}
    for kind in ("usual", "hostile", "nobody"):
        with World(tmp_path / kind, plan_of(learners=1), names=("a",)) as world:
            source = source_of(
                {
                    "usual": rows_of(f"{i}" for i in range(40)),
                    "hostile": [{"person": "x", "y": "perhaps", "x0": 1e300}, {"no": 1}] * 20,
                    "nobody": [],
                }[kind]
            )
            daemon = world.start("a", source=source, min_clients=0)
            keys = ServerKeys.load(world.root / "keys/server")
            seen = []
            for r in range(6):
                x = np.full(DIM, 0.1 * r, "<f4").tobytes()
                data = Request("round", "run", "a", "n" * 16, r, None, body=x).sign(keys.identity)
                reply = daemon.handle(data)
                seen.append(len(reply))
                facts = Reply.read(reply, world.keys_of("a").identity.public)
                assert (facts.kind, facts.facts) == ("release", {})
            sizes[kind] = seen
    assert sizes["usual"] == sizes["hostile"] == sizes["nobody"]
    assert len(set(sizes["usual"])) == 1
