"""The deployed learner: the same round as the simulation, through restarts, once a client."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import sqlite3
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import veilstream as vs
from tests.support.known_secrets import known_secrets, unguarded
from veilstream import progress
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.rescue import ask_for_epoch, begin_again
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.release import HEADER_BYTES
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.tasks import Logistic, Sample
from veilstream.mechanisms.fine_normals import fine_row
from veilstream.mechanisms.keystream import Row, fresh_secret
from veilstream.plans.plan import Plan
from veilstream.records.admission import Answer

D, R, TAU = 6, 4, 3


def plan_of(mechanism: str = "buffered") -> Plan:
    return Plan(
        learning={"rounds": R, "local_steps": TAU, "learners": 1},
        data={"dim": D},
        privacy={"epsilon": 4.0, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": mechanism, "step_size": 0.1}],
    )


def client(r: int, t: int) -> Sample:
    rng = np.random.default_rng([r, t])
    return Sample(rng.standard_normal(D).astype(np.float32), float(rng.choice([-1.0, 1.0])))


def model(r: int) -> np.ndarray:
    return np.random.default_rng(100 + r).standard_normal(D).astype(np.float32)


def test_a_task_of_another_size_than_the_plan_says_is_refused(tmp_path):
    with pytest.raises(InputError, match=rf"data\.dim = {D}: expected the 2 parameters of the task"):
        Learner(plan_of(), tmp_path / "s.db", Logistic(2), create=True)
    assert not list(tmp_path.iterdir())


def prefix_of(release) -> np.ndarray:
    return np.frombuffer(release.payload, "<i8", offset=HEADER_BYTES)


def run_round(learner: Learner, r: int):
    learner.begin_round(r, model(r))
    for t in range(TAU):
        assert learner.observe(f"{r}/{t}", client(r, t)) is Answer.TAKEN
    return learner.finish_round()


@pytest.mark.parametrize("mechanism", list(vs.mechanisms.MECHANISMS))
def test_releases_are_the_literal_algorithm_on_the_grid(mechanism, tmp_path, monkeypatch):
    """Secrets are read where the ledger keeps them; all else is computed anew, in float64."""
    kept: dict[str, bytes] = {}
    write = Ledger.write

    def recorded(self, kind, body, *, keep=None, **more):
        kept.update({name: blob for name, blob in (keep or {}).items() if "seed/" in name})
        write(self, kind, body, keep=keep, **more)

    monkeypatch.setattr(Ledger, "write", recorded)
    with Learner(plan_of(mechanism), tmp_path / "s.db", Logistic(D), create=True) as learner:
        releases = [run_round(learner, r) for r in range(R)]
        step, std, N = (learner.grid.step, learner.noise_std, learner.terms.mechanism.noising_matrix())
    secrets = [kept[f"seed/0/{s:010d}"] for s in range(R * TAU)]
    assert len(set(secrets)) == R * TAU
    draws = np.array([fine_row(Row(secret, s), D) for s, secret in enumerate(secrets)])
    B = np.cumsum(N, axis=0) * std
    noise = B @ draws
    total = np.zeros(D)
    for r in range(R):
        z = model(r).astype(np.float64)
        for t in range(TAU):
            s = r * TAU + t
            a, y, _ = client(r, t)
            gradient = -y * a.astype(np.float64) / (1 + np.exp(y * (a @ z)))
            gradient *= min(1.0, 1.0 / np.linalg.norm(gradient))
            total += gradient
            z -= 0.1 * (gradient + noise[s] - (noise[s - 1] if s else 0.0))
        sent = prefix_of(releases[r]) * step
        # Gradients are rounded towards zero: below `total` in size, by a unit a step at most. They
        # are float32, of size one at most. The noise is rounded to nearest.
        np.testing.assert_allclose(sent, total + noise[s], atol=step * (s + 1.5) + 1e-6 * (s + 1))


def test_a_restart_anywhere_repeats_what_is_stored_to_the_bit(tmp_path):
    store = tmp_path / "s.db"
    sent = {}
    for r in range(R):
        for t in range(TAU):
            with Learner(plan_of(), store, Logistic(D), create=True) as learner:
                learner.begin_round(r, model(r))
                learner.observe(f"{r}/{t}", client(r, t))
                before = learner.local.prefix.copy()
            with Learner(plan_of(), store, Logistic(D), create=True) as learner:
                np.testing.assert_array_equal(learner.local.prefix, before)
                assert learner.observe(f"{r}/{t}", client(r, t)) is Answer.TAKEN  # not used again
                np.testing.assert_array_equal(learner.local.prefix, before)
        with Learner(plan_of(), store, Logistic(D), create=True) as learner:
            sent[r] = learner.finish_round()
        with Learner(plan_of(), store, Logistic(D), create=True) as learner:
            assert learner.finish_round() == sent[r]
            learner.acknowledge(r, sent[r].hash)
    with Learner(plan_of(), store, Logistic(D), create=True) as learner:
        assert learner.horizon_reached
        assert learner.ledger.names("seed/") == []
        with pytest.raises(PrivacyError, match="horizon"):
            learner.begin_round(R, model(R))
        learner.new_epoch()
        assert (learner.epoch, learner.round) == (1, 0)
        learner.begin_round(0, model(0))
        assert learner.observe("0/0", client(0, 0)) is Answer.TAKEN
        assert learner.local.taken == 0  # took part in epoch 0: never again


@pytest.mark.parametrize("mechanism", list(vs.mechanisms.MECHANISMS))
def test_noise_alone_is_the_mechanisms_to_half_a_unit(mechanism, tmp_path):
    """No gradients: what is sent is B·z, rounded; 1e-9 std is all that float64 may add."""
    secrets: list[bytes] = []

    def drawn():
        secrets.append(hashlib.sha256(b"%d" % len(secrets)).digest())
        return secrets[-1]

    with known_secrets(drawn), Learner(plan_of(mechanism), tmp_path / "s.db", Still(), create=True) as learner:
        sent = [prefix_of(run_round(learner, r)) * learner.grid.step for r in range(R)]
        step, std = learner.grid.step, learner.noise_std
        B = np.cumsum(learner.terms.mechanism.noising_matrix(), axis=0)
    noise = std * B @ np.array([fine_row(Row(secret, s), D) for s, secret in enumerate(secrets)])
    np.testing.assert_allclose(sent, noise[TAU - 1 :: TAU], atol=step / 2 + 1e-9 * std, rtol=0)


def test_a_steps_secret_is_drawn_in_the_step_and_stored_with_it(tmp_path, monkeypatch):
    """A round that has been begun holds none; a step that was not stored has none either."""
    store = tmp_path / "s.db"
    drawn: list[bytes] = []

    def fresh():
        drawn.append(fresh_secret())
        return drawn[-1]

    def killed(point):
        if point == "step-computed":
            raise KeyboardInterrupt

    monkeypatch.setattr("veilstream.deployment.learner_epochs.fresh_secret", fresh)
    monkeypatch.setattr("veilstream.deployment.learner_epochs.check_generator_once", unguarded)
    with Learner(plan_of(), store, Still(), create=True) as learner:
        learner.begin_round(0, model(0))
        assert drawn == learner.ledger.names("seed/") == []
        learner.observe("a", client(0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "reached", staticmethod(killed))
            with pytest.raises(KeyboardInterrupt):
                learner.observe("b", client(0, 1))
    assert len(drawn) == 2
    with Learner(plan_of(), store, Still()) as learner:
        assert _secrets(learner) == [drawn[0]]
        learner.observe("b", client(0, 1))
        assert len(drawn) == 3
        assert _secrets(learner) == [drawn[0], drawn[2]]
        assert len(set(drawn)) == 3


def _secrets(learner: Learner) -> list[bytes]:
    return [learner.ledger.blob(name) for name in sorted(learner.ledger.names("seed/"))]


def test_what_a_server_may_not_ask(tmp_path):
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D), create=True) as learner:
        for bad in (np.full(D, np.nan), np.zeros(D + 1), np.full(D, 1e30), "x", None):
            with pytest.raises(InputError):
                learner.begin_round(0, bad)
        with pytest.raises(InputError):
            learner.begin_round(1, model(1))
        learner.begin_round(0, model(0))
        with pytest.raises(PrivacyError, match="another model"):
            learner.begin_round(0, model(1))
        with pytest.raises(LedgerError, match="old copies"):
            learner.begin_round(0, model(0), acknowledged=(3, "ff" * 32))


def test_what_is_pinned_is_what_is_used(tmp_path):
    """A masked array would be used without its masked entries, and stored with them."""
    hidden = np.ma.masked_array(np.full(D, 1e20, np.float32), mask=[True] * D)
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D), create=True) as learner:
        with pytest.raises(InputError, match="norm"):
            learner.begin_round(0, hidden)
        learner.begin_round(0, np.ma.masked_array(model(0), mask=[True] + [False] * (D - 1)))
        assert type(learner.local.model.reveal()) is np.ndarray
        np.testing.assert_array_equal(learner.local.model.reveal(), model(0))


@pytest.mark.parametrize("r", [-1, pytest.param(10**5000, id="huge"), 0.0, True, "0", None, np.zeros(2)])
def test_rounds_that_are_no_rounds(r, tmp_path):
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D), create=True) as learner:
        with pytest.raises(InputError):
            learner.begin_round(r, model(0))
        with pytest.raises(InputError):
            learner.begin_round(0, model(0), acknowledged=(r, "ab"))
        with pytest.raises(InputError):
            learner.acknowledge(r, "ab")


def test_a_record_that_cannot_be_used_takes_its_step_with_a_zero_gradient(tmp_path):
    bad = [
        Sample(np.zeros(D + 1, np.float32), 1.0),
        Sample(np.full(D, np.nan), 1.0),
        Sample(np.full(D, np.inf), 1.0),
        Sample(np.zeros(D), 7.0),
        Sample("text", 1.0),
        Sample(np.zeros(D, complex), 1.0),
        Sample(np.full(D, 1e30), 1.0),
        (1,),
        None,
    ]
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D), create=True) as learner:
        for i, sample in enumerate(bad):
            if not learner.pinned:
                learner.begin_round(learner.round, model(learner.round))
            steps, noise = learner.local.step, learner.local.noise.cells
            assert learner.observe("", sample) is Answer.REFUSED  # nobody: no step
            assert learner.local.step == steps
            before = learner.local.prefix.copy()
            assert learner.observe(f"bad {i}", sample) is Answer.REFUSED
            assert learner.observe(f"bad {i}", sample) is Answer.REFUSED  # the same for one who came before
            assert learner.local.step == steps + 1
            np.testing.assert_array_equal(learner.local.prefix - before, learner.local.noise.cells - noise)
            if not learner.clients_wanted:
                learner.finish_round()
        if not learner.pinned:
            learner.begin_round(learner.round, model(learner.round))
        taken = learner.local.taken

    class NotANumber(Logistic):
        def host_gradient(self, z, sample):
            return np.full(D, np.nan, np.float32)

    with Learner(plan_of(), tmp_path / "s.db", NotANumber(D)) as learner:
        assert learner.observe("nan", client(0, 0)) is Answer.TAKEN
        assert learner.local.taken == taken + 1
        assert np.isfinite(learner.local.model.reveal()).all()


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_are_refused_or_change_nothing(seed, tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Logistic(D), create=True) as learner:
        release = run_round(learner, 0)
        learner.begin_round(1, model(1))
        learner.observe("x", client(1, 0))
        prefix = learner.local.prefix.copy()
    content = bytearray(store.read_bytes())
    rng = np.random.default_rng(seed)
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    store.write_bytes(bytes(content))
    try:
        with Learner(plan_of(), store, Logistic(D), create=True) as learner:
            np.testing.assert_array_equal(learner.local.prefix, prefix)
            assert learner.sealed_release() == release
    except LedgerError:
        pass


class Still:
    """A task in NumPy, whose gradient the test chooses."""

    dim, features_shape, labels, classifies = D, (D,), (-1.0, 1.0), True

    def __init__(self, gradient=lambda z, sample: np.zeros(D, np.float32)):
        self.host_gradient = gradient


def test_a_client_takes_part_as_often_as_the_plan_says_and_no_oftener(tmp_path):
    plan = Plan(
        learning={"rounds": R, "local_steps": TAU, "learners": 1},
        data={"dim": D},
        privacy={"epsilon": 4.0, "delta": 1e-3, "participations": 2, "min_separation": 4},
        methods=[{"name": "ours", "mechanism": "toeplitz", "step_size": 0.1}],
    )
    with Learner(plan, tmp_path / "s.db", Still(), create=True) as learner:
        assert learner.guarantee.participation.times == 2
        once, _ = vs.calibrate(vs.Budget(4.0, 1e-3), vs.mechanisms.toeplitz(R * TAU), 1.0, accounting="exact")
        assert learner.noise_std > once  # two visits cost noise
        steps = []
        for r in range(R):
            learner.begin_round(r, model(r))
            while learner.clients_wanted:
                before = learner.local.taken
                assert learner.observe("often", client(0, 0)) is Answer.TAKEN
                if learner.local.taken > before:
                    steps.append(r * TAU + before)
                else:
                    learner.observe(f"{r}/{before}", client(0, 0))
            learner.finish_round()
        assert steps == [0, 4]  # twice, four steps apart
        learner.new_epoch()
        learner.begin_round(0, model(0))
        learner.observe("often", client(0, 0))
        assert learner.clients_wanted == TAU  # no client spans two epochs


def test_an_epoch_under_another_law_of_noise_is_not_continued(tmp_path, monkeypatch):
    """As a store of an earlier version: its state would meet other noise than it was promised."""
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Still(), create=True) as learner:
        run_round(learner, 0)
        sealed = learner.finish_round()
    with monkeypatch.context() as patch:
        patch.setattr("veilstream.deployment.terms.NOISE_LAW", "another")
        with pytest.raises(InputError, match=r"noise_law': 'another'.*ledger epoch"):
            Learner(plan_of(), store, Still())
    with Learner(plan_of(), store, Still()) as learner:
        assert learner.finish_round() == sealed


def test_an_epoch_that_was_asked_for_begins_with_the_next_start_and_another_plan(tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of("tree"), store, Still(), create=True) as learner:
        run_round(learner, 0)
    with pytest.raises(InputError, match="begun with"):
        Learner(plan_of("independent"), store, Still(), create=True)
    ask_for_epoch(store, abandon=True)
    with Learner(plan_of("independent"), store, Still(), create=True) as learner:
        assert (learner.epoch, learner.round) == (1, 0)
        learner.begin_round(0, model(0))
        learner.observe("0/0", client(0, 0))
        assert learner.clients_wanted == TAU


def test_a_learner_goes_on_after_the_loss_of_its_store_with_new_clients_only(tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Still(), create=True) as learner:
        run_round(learner, 0)
    store.write_bytes(store.read_bytes()[:5000])
    with pytest.raises(LedgerError):
        Learner(plan_of(), store, Still(), create=True)
    begin_again(store)
    with Learner(plan_of(), store, Still(), create=True) as learner:
        assert (learner.epoch, learner.round) == (1, 0)
        learner.begin_round(0, model(0))
        for t in range(TAU):
            assert learner.observe(f"0/{t}", client(0, 0)) is Answer.TAKEN
        assert learner.clients_wanted == TAU
    verify(store)


def test_a_clients_data_are_gone_when_observe_returns(tmp_path):
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D), create=True) as learner:
        learner.begin_round(0, model(0))
        features = np.array(client(0, 0).features)
        gone = weakref.ref(features)
        learner.observe("a", Sample(features, 1.0))
        del features
        gc.collect()
        assert gone() is None


def test_a_stream_is_read_no_further_than_needed_and_nothing_of_it_stays(tmp_path):
    alive = []

    def clients():
        for i in range(100):
            features = np.array(client(0, i).features)
            alive.append(weakref.ref(features))
            yield f"c{i}", Sample(features, 1.0)
            del features

    with Learner(plan_of(), tmp_path / "s.db", Still(), create=True) as learner:
        release = learner.learn_round(0, model(0), clients())
        assert len(alive) == TAU
        assert release.round == 0
        gc.collect()
        assert sum(ref() is not None for ref in alive) == 0


def test_no_seed_is_left_anywhere_at_the_end_of_the_horizon(tmp_path):
    store = tmp_path / "s.db"
    seeds, states = set(), set()
    some = Still(lambda z, sample: np.full(D, 0.1, np.float32))  # or messages were the bare noise
    with Learner(plan_of(), store, some, create=True) as learner:
        for r in range(R):
            learner.begin_round(r, model(r))
            for t in range(TAU):
                learner.observe(f"{r}/{t}", client(r, t))
                seeds |= set(_secrets(learner))
                noise = learner.local.noise
                held = np.concatenate([noise.state, noise.known[None]])
                for part in (noise.cells, noise.fraction, held):
                    states.add(part.tobytes())
            learner.finish_round()
        assert len(seeds) == R * TAU
        files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        assert len(files["s.db-wal"]) == 0
        for secret in seeds | states:
            assert not any(secret in content for content in files.values())
    status = verify(store)
    assert (status.ended, status.secrets, status.round) == (True, 0, R)


def test_snapshots_replace_seeds_and_change_nothing(tmp_path, monkeypatch):
    """The same seeds, with a snapshot after every round and without any: the same bytes."""
    payloads = []
    for steps in (1, 10**6):
        drawn = iter(hashlib.sha256(b"%d" % i).digest() for i in range(100))
        monkeypatch.setattr("veilstream.deployment.learner_epochs.fresh_secret", partial(next, drawn))
        monkeypatch.setattr("veilstream.deployment.learner_epochs.check_generator_once", unguarded)
        monkeypatch.setattr("veilstream.deployment.epochs._SNAPSHOT_STEPS", steps)
        store = tmp_path / f"{steps}.db"
        sent = []
        for r in range(R):
            with Learner(plan_of("optimal"), store, Still(), create=True) as learner:
                sent.append(run_round(learner, r).payload)
                held = len(learner.ledger.names("seed/"))
                assert held == (0 if steps == 1 or r == R - 1 else (r + 1) * TAU)
        payloads.append(sent)
    assert payloads[0] == payloads[1]


def test_an_interrupted_step_breaks_the_learner_until_it_is_started_again(tmp_path, monkeypatch):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Still(), create=True) as learner:
        learner.begin_round(0, model(0))

        def interrupted(point):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "reached", staticmethod(interrupted))
            with pytest.raises(KeyboardInterrupt):
                learner.observe("a", client(0, 0))
        for call in (lambda: learner.observe("b", client(0, 1)), learner.finish_round):
            with pytest.raises(PrivacyError, match="half-way"):
                call()
    with Learner(plan_of(), store, Still(), create=True) as learner:
        assert learner.clients_wanted == TAU
        run_round(learner, 0)


@pytest.mark.parametrize(
    "gradient",
    [
        lambda z, s: 1 / 0,
        lambda z, s: np.full(D, np.inf, np.float32),
        lambda z, s: None,
        lambda z, s: np.zeros(D + 1, np.float32),
        lambda z, s: "text",
        lambda z, s: np.full(D, 1e300),
        lambda z, s: np.zeros(D, complex),
        lambda z, s: np.full(D, 1e-45, np.float32),
    ],
)
def test_an_unusable_gradient_counts_as_zero_and_sends_the_same(gradient, tmp_path, monkeypatch):
    sent = []
    for i, task in enumerate([Still(gradient), Still()]):
        drawn = iter(hashlib.sha256(b"%d" % j).digest() for j in range(100))
        monkeypatch.setattr("veilstream.deployment.learner_epochs.fresh_secret", partial(next, drawn))
        monkeypatch.setattr("veilstream.deployment.learner_epochs.check_generator_once", unguarded)
        with Learner(plan_of(), tmp_path / f"{i}.db", task, create=True) as learner:
            sent.append(run_round(learner, 0).payload)
    assert sent[0] == sent[1]


def test_no_decision_uses_the_clock(tmp_path, monkeypatch):
    def no_clock(*args):
        raise AssertionError("a clock was read")

    for name in ("time", "time_ns", "monotonic", "monotonic_ns"):
        monkeypatch.setattr(time, name, no_clock)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.0))  # a bar decides nothing
    with Learner(plan_of(), tmp_path / "s.db", Still(), create=True) as learner:
        for r in range(R):
            run_round(learner, r)
        learner.new_epoch()


def test_the_servers_acknowledgement_of_an_earlier_epoch_is_still_known(tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Still(), create=True) as learner:
        last = [run_round(learner, r) for r in range(R)][-1]
        learner.new_epoch()
    with Learner(plan_of(), store, Still(), create=True) as learner:
        learner.begin_round(0, model(0), acknowledged=(last.round, last.hash))


def test_a_reader_at_the_end_of_the_horizon_delays_forgetting_and_nothing_else(tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Still(), create=True) as learner:
        for r in range(R - 1):
            run_round(learner, r)
        reader = sqlite3.connect(store)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM records").fetchone()
        assert run_round(learner, R - 1).round == R - 1
        with pytest.raises(LedgerError, match="being read"):
            learner.new_epoch()
        reader.close()
        learner.new_epoch()
        assert learner.epoch == 1


def test_a_witness_that_was_being_made_leaves_no_copy_of_the_key(tmp_path):
    store = tmp_path / "s.db"
    (tmp_path / ".s.witness.new").write_bytes(b"left by a kill")
    Learner(plan_of(), store, Still(), create=True).close()
    assert not (tmp_path / ".s.witness.new").exists()


class Slow:
    """Features that take their time."""

    def __init__(self) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def __array__(self, dtype=None, copy=None):
        self.asked.set()
        assert self.goes_on.wait(10)
        return np.ones(D, np.float32)


def test_a_client_who_comes_twice_at_once_is_taken_once(tmp_path):
    slow, answers = Slow(), []
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D), create=True) as learner:
        learner.begin_round(0, model(0))
        first = threading.Thread(target=lambda: answers.append(learner.observe("alice", Sample(slow, 1.0))))
        first.start()
        assert slow.asked.wait(10)
        second = threading.Thread(target=lambda: answers.append(learner.observe("alice", client(0, 0))))
        second.start()
        slow.goes_on.set()
        first.join(10)
        second.join(10)
        assert answers == [Answer.TAKEN, Answer.TAKEN]
        assert learner.clients_wanted == TAU - 1
        threads = [threading.Thread(target=lambda i=i: _tried(learner, f"client {i}")) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert learner.clients_wanted == 0
        assert vs.decode(learner.finish_round().payload).steps == TAU
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D)) as learner:
        assert learner.round == 1


def _tried(learner: Learner, tag: str) -> None:
    with contextlib.suppress(InputError):  # the round is full
        learner.observe(tag, client(0, 1))


def test_a_learner_cannot_be_copied(tmp_path):
    with (
        Learner(plan_of(), tmp_path / "s.db", Logistic(D), create=True) as learner,
        pytest.raises(TypeError, match="copied"),
    ):
        copy.copy(learner)
