"""The deployed learner: the same round as the simulation, through restarts, once a client."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream as vs
from veilstream.engines.learner import Answer, Learner
from veilstream.engines.plan import Plan
from veilstream.engines.release import HEADER_BYTES
from veilstream.errors import InputError, LedgerError, PrivacyError, StoreBusy
from veilstream.learning.tasks import Logistic, Sample
from veilstream.mechanisms.keystream import NoiseKey, row_opener
from veilstream.mechanisms.normals import fill_normals

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


def prefix_of(release) -> np.ndarray:
    return np.frombuffer(release.payload, "<i8", offset=HEADER_BYTES)


def run_round(learner: Learner, r: int):
    learner.begin_round(r, model(r))
    for t in range(TAU):
        assert learner.observe(f"{r}/{t}", client(r, t)) is Answer.TAKEN
    return learner.finish_round()


@pytest.mark.parametrize("mechanism", list(vs.mechanisms.MECHANISMS))
def test_releases_are_the_literal_algorithm_on_the_grid(mechanism, tmp_path, monkeypatch):
    """Seeds are recorded on their way out of the ledger; all else is computed anew, in float64."""
    seeds: dict[int, bytes] = {}
    original = Learner._open_row

    def recorded(self, step):
        seeds[step] = self._ledger.blob(self._seed_name(step))
        return original(self, step)

    monkeypatch.setattr(Learner, "_open_row", recorded)
    with Learner(plan_of(mechanism), tmp_path / "s.db", Logistic(D)) as learner:
        releases = [run_round(learner, r) for r in range(R)]
        step, std, N = learner.grid.step, learner.noise_std, learner._mechanism.noising_matrix()
    z_rows = []
    for s in range(R * TAU):
        row = np.empty(D, np.float32)
        fill_normals(row_opener(NoiseKey(seeds[s]))(s), row)
        z_rows.append(row)
    B = np.cumsum(N, axis=0) * std
    noise = B @ np.array(z_rows, np.float64)
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
        # A step is rounded towards zero, the noise to nearest; float32 noise adds its own.
        np.testing.assert_allclose(sent, total + noise[s], atol=step * (s + 3) + 2e-5 * std)


def test_a_restart_anywhere_repeats_what_is_stored_to_the_bit(tmp_path):
    store = tmp_path / "s.db"
    sent = {}
    for r in range(R):
        for t in range(TAU):
            with Learner(plan_of(), store, Logistic(D)) as learner:
                learner.begin_round(r, model(r))
                learner.observe(f"{r}/{t}", client(r, t))
                before = learner._prefix.copy()
            with Learner(plan_of(), store, Logistic(D)) as learner:
                np.testing.assert_array_equal(learner._prefix, before)
                assert learner.observe(f"{r}/{t}", client(r, t)) is Answer.TAKEN  # not used again
                np.testing.assert_array_equal(learner._prefix, before)
        with Learner(plan_of(), store, Logistic(D)) as learner:
            sent[r] = learner.finish_round()
        with Learner(plan_of(), store, Logistic(D)) as learner:
            assert learner.finish_round() == sent[r]
            learner.acknowledge(r, sent[r].hash)
    with Learner(plan_of(), store, Logistic(D)) as learner:
        assert learner.horizon_reached
        assert learner._ledger.names("seed/") == []
        with pytest.raises(PrivacyError, match="horizon"):
            learner.begin_round(R, model(R))
        learner.new_epoch()
        assert (learner.epoch, learner.round) == (1, 0)
        learner.begin_round(0, model(0))
        assert learner.observe("0/0", client(0, 0)) is Answer.TAKEN
        assert learner._taken == 0  # took part in epoch 0: never again


def test_steps_that_were_not_stored_get_fresh_seeds(tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Logistic(D)) as learner:
        learner.begin_round(0, model(0))
        learner.observe("a", client(0, 0))
        before = {name: learner._ledger.blob(name) for name in learner._ledger.names("seed/")}
    with Learner(plan_of(), store, Logistic(D)) as learner:
        after = {name: learner._ledger.blob(name) for name in learner._ledger.names("seed/")}
    used, *others = sorted(before)
    assert after[used] == before[used]
    assert all(after[name] != before[name] for name in others)


def test_what_a_server_may_not_ask(tmp_path):
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D)) as learner:
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


def test_clients_data_are_refused_or_count_as_zero(tmp_path):
    bad = [
        Sample(np.zeros(D + 1, np.float32), 1.0), Sample(np.full(D, np.nan), 1.0),
        Sample(np.full(D, np.inf), 1.0), Sample(np.zeros(D), 7.0), Sample("text", 1.0),
        Sample(np.zeros(D, complex), 1.0), Sample(np.full(D, 1e30), 1.0), (1,), None,
    ]  # fmt: skip
    with Learner(plan_of(), tmp_path / "s.db", Logistic(D)) as learner:
        learner.begin_round(0, model(0))
        for i, sample in enumerate(bad):
            assert learner.observe(f"bad {i}", sample) is Answer.REFUSED
        assert learner._taken == 0
        learner._gradient = lambda z, sample: np.full(D, np.nan, np.float32)
        assert learner.observe("nan", client(0, 0)) is Answer.TAKEN
        assert learner._taken == 1
        assert np.isfinite(learner._z.reveal()).all()


def test_one_writer_and_old_copies(tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Logistic(D)) as learner:
        with pytest.raises(StoreBusy):
            Learner(plan_of(), store, Logistic(D))
        run_round(learner, 0)
    old = store.read_bytes()
    with Learner(plan_of(), store, Logistic(D)) as learner:
        run_round(learner, 1)
    newest = store.read_bytes()
    store.write_bytes(old)
    with pytest.raises(LedgerError, match="old copy"):
        Learner(plan_of(), store, Logistic(D))
    store.write_bytes(newest)
    with Learner(plan_of(), store, Logistic(D)) as learner:
        assert learner.round == 2


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_are_refused_or_change_nothing(seed, tmp_path):
    store = tmp_path / "s.db"
    with Learner(plan_of(), store, Logistic(D)) as learner:
        release = run_round(learner, 0)
        learner.begin_round(1, model(1))
        learner.observe("x", client(1, 0))
        prefix = learner._prefix.copy()
    content = bytearray(store.read_bytes())
    rng = np.random.default_rng(seed)
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    store.write_bytes(bytes(content))
    try:
        with Learner(plan_of(), store, Logistic(D)) as learner:
            np.testing.assert_array_equal(learner._prefix, prefix)
            assert learner._last_release() == release
    except LedgerError:
        pass
