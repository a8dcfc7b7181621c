"""Steps of several clients: one row of noise, the public number as divisor, one transaction."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.known_secrets import NamedLearner
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.plan import Plan
from veilstream.records.admission import Answer

D, TAU, M, ROUNDS = 3, 2, 5, 3


def plan_of(clients_per_step: int = M, local_steps: int = TAU, clip_norm: float = 0.3, **privacy) -> Plan:
    return Plan(
        learning={
            "rounds": ROUNDS,
            "local_steps": local_steps,
            "clients_per_step": clients_per_step,
            "clip_norm": clip_norm,
            "learners": 1,
        },
        data={"dim": D},
        privacy={"epsilon": 2.0, "delta": 1e-3, **privacy},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


def sample(i: int) -> Sample:
    return Sample(np.random.default_rng(i).normal(size=D), float((-1) ** i))


def people(first: int, count: int) -> list[tuple[str, Sample]]:
    return [(f"p{i}", sample(i)) for i in range(first, first + count)]


def model(r: int) -> np.ndarray:
    return np.full(D, 0.1 * r, np.float32)


def learner_at(store, plan: Plan | None = None, kind: type[Learner] = NamedLearner) -> Learner:
    return kind(plan or plan_of(), store, Logistic(D), create=True)


def logistic_gradient(z: np.ndarray, record: Sample, clip_norm: float) -> np.ndarray:
    """Of -log σ(y·a·z), clipped; written out here."""
    a, y = np.asarray(record.features, np.float32).astype(float), float(record.target)
    g = -y * a / (1.0 + np.exp(y * (a @ z)))
    return g * min(1.0, clip_norm / np.linalg.norm(g))


@pytest.mark.parametrize("came", [M, M - 2, 1])
def test_a_step_is_the_sum_of_its_clients_over_the_public_number(came, tmp_path):
    """However many came: a divisor that counts them would tell how many there were."""
    with learner_at(tmp_path / "s.db", plan_of(local_steps=1)) as learner:
        z = model(3)
        learner.begin_round(0, z)
        learner.observe_many(people(0, came))
        learner.finish_round()
        free = (learner.local.prefix - learner.local.noise.cells) * learner.grid.step
        expected = sum(logistic_gradient(z, sample(i), 0.3) for i in range(came)) / M
        assert np.abs(free - expected).max() < came * learner.grid.step + 1e-6
        assert learner.local.noise.position == 1
    assert verify(tmp_path / "s.db").clients == came


def test_one_client_moves_a_step_by_no_more_than_its_share(tmp_path):
    """What calibration counts: 2·B_g/m between any two records, in whole numbers."""
    found = []
    for world in range(2):
        with learner_at(tmp_path / f"{world}.db", plan_of(local_steps=1)) as learner:
            learner.begin_round(0, np.zeros(D, np.float32))
            one = Sample(np.full(D, 50.0), 1.0 if world else -1.0)
            learner.observe_many([*people(0, 2), ("one", one), *people(3, 2)])
            learner.finish_round()
            found.append(learner.local.prefix.copy())
            guarantee, unit = learner.guarantee, learner.grid.step
    assert guarantee.clients_per_step == M
    apart = np.linalg.norm(found[0] - found[1]) * unit
    assert 0.99 * 2 * 0.3 / M < apart <= 2 * 0.3 / M


@pytest.mark.parametrize("place", range(M))
def test_replacing_a_record_changes_no_other_clients_contribution(place, tmp_path):
    """Not in the last digit either: the others' rows are computed in their places, whatever that record is."""
    prefixes = []
    for record in (sample(70), None, Sample(np.full(D, np.nan), 1.0), Sample(np.zeros(D), 1.0)):
        store = tmp_path / f"{len(prefixes)}.db"
        with learner_at(store, plan_of(local_steps=1)) as learner:
            learner.begin_round(0, model(2))
            offered = people(0, M)
            offered[place] = ("one", record)
            learner.observe_many(offered)
            learner.finish_round()
            prefixes.append(learner.local.prefix - learner.local.noise.cells)
    np.testing.assert_array_equal(prefixes[1], prefixes[2])  # both unusable: zero
    own = np.zeros_like(prefixes[0])
    with learner_at(tmp_path / "alone.db", plan_of(local_steps=1)) as learner:
        learner.begin_round(0, model(2))
        learner.observe_many([*[(f"n{k}", None) for k in range(place)], ("one", sample(70))])
        learner.finish_round()
        own = learner.local.prefix - learner.local.noise.cells
    np.testing.assert_array_equal(prefixes[0] - prefixes[1], own)


def test_clients_fill_steps_in_order_and_those_who_may_not_are_made_up_for(tmp_path):
    with learner_at(tmp_path / "s.db") as learner:
        learner.begin_round(0, model(0))
        assert learner.clients_wanted == TAU * M
        first = [*people(0, 2), ("p0", sample(1)), ("", sample(2)), *people(2, 6)]
        answers = learner.observe_many(first)
        assert answers == [Answer.TAKEN] * 3 + [Answer.REFUSED] + [Answer.TAKEN] * 6
        assert learner.local.taken == 2  # five, and the three that were left when the call ended
        assert learner.clients_wanted == 0
        learner.finish_round()
        learner.begin_round(1, model(1))
        assert learner.observe("p20", sample(20)) is Answer.TAKEN  # a step of its own
        assert learner.clients_wanted == (TAU - 1) * M
    report = verify(tmp_path / "s.db")
    assert (report.clients, report.steps) == (9, 3)


def test_a_restart_repeats_batches_to_the_bit(tmp_path):
    sealed = []
    for restart in (False, True):
        store, own = tmp_path / f"{restart}.db", []
        learner = learner_at(store)
        for r in range(ROUNDS):
            learner.begin_round(r, model(r))
            for first in range(0, TAU * M, M):
                learner.observe_many(people(100 * r + first, M))
                if restart:
                    learner.close()
                    learner = learner_at(store)
            own.append(bytes(learner.finish_round().payload))
        learner.close()
        sealed.append(own)
    assert sealed[0] == sealed[1]


def test_a_batch_is_one_transaction(tmp_path, monkeypatch):
    with learner_at(tmp_path / "s.db", plan_of(64, 8)) as learner:
        learner.begin_round(0, model(0))
        commits: list[str] = []
        write = Ledger.write
        monkeypatch.setattr(Ledger, "write", lambda s, *a, **k: (commits.append(a[0]), write(s, *a, **k)))
        learner.observe_many(people(0, 64 * 7 + 3))
        assert commits == ["steps", "steps"]  # 256 and the rest
        assert learner.local.taken == 8


def test_people_who_return_are_kept_apart_in_steps_not_in_clients(tmp_path):
    plan = plan_of(3, 4, participations=2, min_separation=2)
    with learner_at(tmp_path / "s.db", plan) as learner:
        learner.begin_round(0, model(0))
        offered = [("a", sample(0)), *people(1, 2), ("a", sample(1)), *people(3, 3), ("a", sample(2)), *people(6, 2)]
        learner.observe_many(offered)
        visits = [(tag, step) for record in learner.ledger.records() for tag, step in record.visits]
        own = [step for tag, step in visits if tag == learner.ledger.keyed(b"a")]
        assert own == [0, 2]


def test_more_clients_than_a_write_holds_are_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"clients_per_step = 257: expected at most 256 .*one write"):
        Terms.of(plan_of(257), D)


def test_a_store_of_single_clients_is_no_store_of_batches(tmp_path):
    learner_at(tmp_path / "s.db", plan_of(1), kind=Learner).close()
    with pytest.raises(InputError, match=r"learning.clients_per_step.*5.*begun with"):
        learner_at(tmp_path / "s.db", plan_of(), kind=Learner)


def test_gradients_that_mix_a_steps_clients_are_refused(tmp_path):
    class Mixing(Logistic):
        def host_gradients(self, params, samples):
            found = super().host_gradients(params, samples)
            return found - found.mean(axis=0)

    with Learner(plan_of(), tmp_path / "s.db", Mixing(D), create=True) as learner:  # noqa: SIM117
        with pytest.raises(InputError, match="no row depends on another"):
            learner.begin_round(0, model(0))


def test_gradients_of_a_step_that_are_not_the_tasks_own_are_refused(tmp_path):
    class Other(Logistic):
        def host_gradient(self, params, sample):
            return 2.0 * super().host_gradient(params, sample)

    with Learner(plan_of(), tmp_path / "s.db", Other(D), create=True) as learner:  # noqa: SIM117
        with pytest.raises(InputError, match="host_gradients"):
            learner.begin_round(0, model(0))


class Raising(Logistic):
    """Cannot compute a step in which somebody has a large feature."""

    def host_gradients(self, params, samples):
        if np.abs(samples.features).max() == 7.5:
            raise ZeroDivisionError
        return super().host_gradients(params, samples)


def test_a_record_at_which_the_task_fails_takes_no_other_clients_gradient_with_it(tmp_path):
    """One record moves one client's share, whatever it makes the task do: the others' bits stay as they were."""
    prefixes = []
    for world, value in enumerate((0.0, 7.5)):
        with Learner(plan_of(local_steps=1), tmp_path / f"{world}.db", Raising(D), create=True) as learner:
            learner.begin_round(0, model(1))
            first = Sample(np.full(D, value), 1.0)
            learner.observe_many([("first", first), *people(1, M - 1)])
            prefixes.append(np.array(learner.local.prefix - learner.local.noise.cells))
    assert prefixes[0].any()
    assert np.array_equal(prefixes[0], prefixes[1])  # zeros have a zero gradient
