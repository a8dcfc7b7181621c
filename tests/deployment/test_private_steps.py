"""The core of private training loops: its numbers, its ledger, what it refuses."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

import veilstream as vs
from veilstream.deployment.fixed_batches import FixedBatches
from veilstream.deployment.local_rounds import NoisySum
from veilstream.deployment.private_steps import PrivateSteps, StepTerms
from veilstream.errors import HorizonExhausted, InputError, LedgerError, PrivacyError
from veilstream.mechanisms.fine_normals import fine_row
from veilstream.mechanisms.keystream import Row
from veilstream.privacy.gradient_types import RawGradient, clip_onto_grid

DIM, BATCH = 7, 4


def secret(step: int) -> bytes:
    return hashlib.sha256(b"step %d" % step).digest()


class NamedSum(NoisySum):
    """Whose draws follow from the step."""

    def row(self, step: int, secret_: bytes) -> Row:
        return Row(secret(step), step)


def terms(steps: int = 12, passes: int = 3, epsilon: float = 2.0, **more) -> StepTerms:
    part = vs.Participation(passes, steps // passes)
    options = {"clients_per_step": BATCH, "participation": part, "about": {"records": 16}} | more
    mechanism = vs.mechanisms.buffered(steps, 3, participation=part)
    return StepTerms.of(vs.Budget(epsilon, 1e-4), mechanism, 1.0, DIM, **options)


def rows_of(step: int) -> np.ndarray:
    return (3.0 * np.random.default_rng(step).standard_normal((BATCH, DIM))).astype(np.float32)


def names_of(step: int, a_pass: int = 4) -> list[bytes]:
    return [b"%d" % (step % a_pass * BATCH + k) for k in range(BATCH)]


def take(steps: PrivateSteps, **more) -> np.ndarray:
    step = steps.step
    rows = RawGradient(rows_of(step))
    return steps.take(names_of(step), lambda: clip_onto_grid(rows, steps.grid, None, BATCH), **more)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "loop.db"


def test_what_is_handed_out_is_the_rounded_gaussian_release_of_the_decoder(store):
    """Independent of the recurrence: B·ξ from the decoder matrix, rounded, plus clipped sums, differenced."""
    given = terms()
    with PrivateSteps(given, store, noisy_sum=NamedSum) as steps:
        got = np.array([take(steps) for _ in range(12)])
    unit = given.noise.grid.step
    draws = np.array([fine_row(Row(secret(step), step), DIM) for step in range(12)])
    noise = given.noise.mechanism.decoder_matrix() @ draws * given.noise.std
    clipped = []
    for step in range(12):
        raw = rows_of(step).astype(np.float64)
        short = raw * np.minimum(1.0, 1.0 / np.linalg.norm(raw, axis=1))[:, None] / BATCH
        clipped.append(np.trunc(short / unit).sum(axis=0))
    expected = np.diff(np.rint(noise / unit), axis=0, prepend=0.0) + clipped
    assert np.abs(got / unit - expected).max() <= 2.0  # float32 matrices and clipping's last bit
    assert np.abs(got).max() / unit > 1e4


def test_a_restart_goes_on_with_the_same_noise_whenever_it_comes(store, tmp_path, monkeypatch):
    monkeypatch.setattr("veilstream.deployment.private_steps._SNAPSHOT_STEPS", 5)
    with PrivateSteps(terms(), store, noisy_sum=NamedSum) as steps:
        whole = [take(steps) for _ in range(12)]
    parts: list[np.ndarray] = []
    while len(parts) < 12:
        with PrivateSteps(terms(), tmp_path / "often.db", noisy_sum=NamedSum) as steps:
            assert steps.step == len(parts)
            parts += [take(steps) for _ in range(min(1 + len(parts) % 3, 12 - len(parts)))]
    np.testing.assert_array_equal(whole, parts)


def test_deployed_noise_is_fresh_each_time(store, tmp_path):
    with PrivateSteps(terms(), store) as one, PrivateSteps(terms(), tmp_path / "other.db") as other:
        assert not np.array_equal(take(one), take(other))


def test_past_the_horizon_there_is_nothing_and_secrets_are_gone(store):
    with PrivateSteps(terms(), store) as steps:
        for _ in range(12):
            take(steps)
        with pytest.raises(HorizonExhausted, match="step 12 is past the horizon of 12"):
            steps.take([b"someone new"], lambda: pytest.fail("looked at data"))
        assert steps.ledger.chain.standing.ended
        assert not steps.ledger.names("seed/")
    with PrivateSteps(terms(), store) as steps:
        assert steps.over
        with pytest.raises(HorizonExhausted):
            steps.take([b"someone new"], lambda: pytest.fail("looked at data"))


@pytest.mark.parametrize(
    ("clients", "why"),
    [
        ([b"0"], "too soon"),
        ([b"20", b"20"], "at most one record of each client"),
        ([b"%d" % k for k in range(30, 35)], "at most 4"),
    ],
)
def test_who_may_not_be_in_a_step_is_refused_before_anything_is_spent(store, clients, why):
    with PrivateSteps(terms(), store) as steps:
        take(steps)
        with pytest.raises(InputError, match=why):
            steps.take(clients, lambda: pytest.fail("looked at data"))
        assert steps.step == 1
        take(steps)


def test_who_came_as_often_as_promised_comes_no_more(store):
    with PrivateSteps(terms(passes=1), store) as steps:
        take(steps)
        with pytest.raises(InputError, match="too often"):
            steps.take([b"0"], lambda: pytest.fail("looked at data"))


def test_a_gradient_that_fails_spends_nothing_and_its_noise_meets_the_next_one_alone(store):
    drawn = []

    class Watched(NoisySum):
        def row(self, step: int, secret_: bytes) -> Row:
            drawn.append((step, secret_))
            return Row(secret_, step)

    def fails():
        raise ValueError("a record")

    with PrivateSteps(terms(), store, noisy_sum=Watched) as steps:
        with pytest.raises(ValueError, match="a record"):
            steps.take(names_of(0), fails)
        assert steps.step == 0
        take(steps)
        assert steps.step == 1
    assert len(drawn) == 1


def test_a_store_of_other_terms_is_refused(store):
    with PrivateSteps(terms(), store):
        pass
    with pytest.raises(InputError, match=r"store = .*'records': 17.*begun with.*'records': 16"):
        PrivateSteps(terms(about={"records": 17}), store)
    with pytest.raises(InputError, match="a deployed loop's, not a study's"):
        PrivateSteps(terms(), store, noisy_sum=NamedSum)


def test_of_other_terms_the_settings_are_named_and_not_what_follows_from_them(store):
    with PrivateSteps(terms(), store):
        pass
    with pytest.raises(InputError, match=r"= {'guarantee.epsilon': 3.0}: .*begun with: {'guarantee.epsilon': 2.0}"):
        PrivateSteps(terms(epsilon=3.0), store)


def test_a_closed_store_is_not_called_damaged(store):
    with PrivateSteps(terms(), store) as steps:
        take(steps)
    with pytest.raises(LedgerError, match="open it again") as told:
        take(steps)
    assert "damaged" not in str(told.value)


def test_an_old_copy_of_the_store_is_refused(store, tmp_path):
    with PrivateSteps(terms(), store) as steps:
        take(steps)
    old = store.read_bytes()
    with PrivateSteps(terms(), store) as steps:
        take(steps)
    store.write_bytes(old)
    with pytest.raises(LedgerError, match="old copy"):
        PrivateSteps(terms(), store)


def test_another_process_cannot_use_it(store, monkeypatch):
    with PrivateSteps(terms(), store) as steps:
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pytest.raises(PrivacyError, match="another process"):
            take(steps)


def test_state_and_gradients_come_back_from_the_last_kept_step_on(store):
    with PrivateSteps(terms(), store, state_steps=3) as steps:
        assert steps.resumed() is None
        given = [take(steps, state=lambda k=k: b"state %d" % k, note=b"note %d" % k) for k in range(5)]
    with PrivateSteps(terms(), store, state_steps=3) as steps:
        found = steps.resumed()
    assert found is not None
    assert (found.state, found.step, found.notes) == (b"state 3", 3, [b"note 3", b"note 4"])
    np.testing.assert_array_equal(found.gradients, given[3:])


class TestBatches:
    def test_every_record_is_in_each_pass_once_and_returns_a_pass_later(self):
        made = FixedBatches.made(10, 4, 3, shuffled=True)
        assert (made.a_pass, made.horizon, made.participation) == (3, 9, vs.Participation(3, 3))
        passes = [np.concatenate([made.batch(p * 3 + k) for k in range(3)]) for p in range(3)]
        assert sorted(passes[0]) == list(range(10))
        np.testing.assert_array_equal(passes[0], passes[2])

    def test_an_order_is_drawn_anew_for_each_store(self):
        orders = {tuple(FixedBatches.made(100, 10, 1, shuffled=True).order) for _ in range(3)}
        assert len(orders) == 3
        np.testing.assert_array_equal(FixedBatches.made(9, 3, 1, shuffled=False).order, np.arange(9))

    @pytest.mark.parametrize("seed", range(20))
    def test_people_with_several_records_are_priced_for_what_really_happens(self, seed):
        rng = np.random.default_rng(seed)
        clients = rng.permutation(np.repeat(np.arange(20), rng.integers(1, 4, 20))).tolist()
        made = FixedBatches.made(len(clients), 5, 2, shuffled=True, clients=clients)
        visits: dict[int, list[int]] = {}
        for step in range(made.horizon):
            for index in made.batch(step):
                visits.setdefault(clients[index], []).append(step)
        part = made.participation
        assert max(map(len, visits.values())) == part.times
        assert min(b - a for each in visits.values() for a, b in itertools.pairwise(each)) == (part.min_separation)

    def test_two_records_of_one_client_in_a_batch_are_refused(self):
        with pytest.raises(InputError, match="no two records of one client in one batch"):
            _ = FixedBatches.made(4, 4, 1, shuffled=False, clients=["a", "a", "b", "c"]).participation
