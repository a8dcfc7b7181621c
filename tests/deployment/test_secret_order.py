"""A learner whose order is secret: every record in its own step, once, and nothing that says in which."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3

import numpy as np
import pytest

from tests.support.known_secrets import NamedRounds
from tests.support.secret_order import D, model, people, plan_of, sample
from veilstream.deployment.epochs import ORDER_SECRET, LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import inspect, part_of_person, verify
from veilstream.deployment.ledger.rescue import ask_for_epoch
from veilstream.deployment.step_index import index_folder
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.tasks import Logistic, Sample
from veilstream.records.secret_order import chosen_step

SECRET = bytes(range(100, 132))
NAMED = LearnerParts(rounds=lambda terms, epoch: NamedRounds(terms, epoch, "same"), order_secret=lambda: SECRET)


def learner_at(store, plan=None, **more) -> Learner:
    return Learner(plan or plan_of(), store, Logistic(D), create=True, **more)


def logistic_gradient(z: np.ndarray, record: Sample, clip_norm: float) -> np.ndarray:
    """Of -log σ(y·a·z), clipped; written out here."""
    a, y = np.asarray(record.features, np.float32).astype(float), float(record.target)
    g = -y * a / (1.0 + np.exp(y * (a @ z)))
    return g * min(1.0, clip_norm / np.linalg.norm(g))


def sums_by_step(learner: Learner, rounds: int) -> list[np.ndarray]:
    """What each round's steps came to without their noise; every round from the same model, of one step."""
    found, before = [], np.zeros(D)
    for r in range(rounds):
        learner.begin_round(r, model(1))
        learner.finish_round()
        now = (learner.local.prefix - learner.local.noise.cells) * learner.grid.step
        found.append(now - before)
        before = now
    return found


def test_every_record_is_in_the_step_of_its_tag_and_sums_are_divided_by_the_public_number(tmp_path):
    """Whatever a step has: none, one or many. The choice is worked out here with the epoch's secret."""
    plan = plan_of(rounds=12, local_steps=1, clients_per_step=2)
    everyone = [*people(0, 19), ("refused", None), ("p3", sample(99)), ("bad", Sample(np.full(D, np.nan), 1.0))]
    with learner_at(tmp_path / "s.db", plan, parts=NAMED) as learner:
        told = learner.use_records(everyone)
        assert (told.records, told.unusable, told.again) == (21, 2, 1)
        found = sums_by_step(learner, 12)
        unit = learner.grid.step
    steps = {tag: chosen_step(SECRET, tag.encode(), 12) for tag, _ in everyone}
    counts = np.bincount(list(steps.values()), minlength=12)
    assert counts.min() == 0
    assert counts.max() > 2
    for step, value in enumerate(found):
        here = [sample(i) for i in range(19) if steps[f"p{i}"] == step]
        expected = sum((logistic_gradient(model(1), each, 0.3) for each in here), np.zeros(D)) / 2
        assert np.abs(value - expected).max() < (len(here) + 1) * unit + 1e-6


def test_the_secret_is_the_operating_systems_and_new_in_every_epoch(tmp_path):
    drawn = []
    for store in ("a.db", "b.db"):
        with learner_at(tmp_path / store, plan_of(rounds=1)) as learner:
            drawn.append(learner.ledger.blob(ORDER_SECRET))
            learner.use_records(people(0, 20))
            learner.learn_round(0, model(0))
            assert ORDER_SECRET not in learner.ledger.names("")
            learner.new_epoch()
            drawn.append(learner.ledger.blob(ORDER_SECRET))
    assert all(len(secret) == 32 for secret in drawn)
    assert len(set(drawn)) == 4


def test_the_secret_goes_with_the_epoch_and_so_does_the_index(tmp_path):
    store = tmp_path / "s.db"
    with learner_at(store, plan_of(rounds=2)) as learner:
        secret = learner.ledger.blob(ORDER_SECRET)
        learner.use_records(people(0, 30))
        learner.learn_round(0, model(0))
        assert secret in store.read_bytes() + store.with_name("s.db-wal").read_bytes()
        assert inspect(store).secrets > 1
        assert index_folder(store).exists()
        learner.learn_round(1, model(1))
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert secret not in left
    assert not index_folder(store).exists()
    assert inspect(store).secrets == 0
    verify(store)


def test_abandoning_an_epoch_destroys_its_secret(tmp_path):
    store = tmp_path / "s.db"
    with learner_at(store) as learner:
        secret = learner.ledger.blob(ORDER_SECRET)
        learner.use_records(people(0, 30))
        learner.learn_round(0, model(0))
    ask_for_epoch(store, abandon=True)
    assert secret not in b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    with learner_at(store) as learner:
        assert learner.epoch == 1
        assert not index_folder(store).exists()
        with pytest.raises(InputError, match=r"it has 0 \(30 others took part before"):
            learner.use_records(people(0, 30))


def test_no_caller_hands_over_records_in_an_order_of_its_own(tmp_path):
    with learner_at(tmp_path / "s.db") as learner:
        for call in (
            lambda: learner.observe("p1", sample(1)),
            lambda: learner.observe_many(people(0, 3)),
            lambda: learner.take_many(people(0, 3)),
            lambda: learner.learn_round(0, model(0), people(0, 3)),
        ):
            with pytest.raises(InputError, match=r"privacy\.order = 'secret': .*use_records"):
                call()
        with pytest.raises(InputError, match=r"records = None: .*all records of the epoch"):
            learner.begin_round(0, model(0))
        assert not learner.pinned
        assert learner.ledger.chain.visits.value().count == 0
    with learner_at(tmp_path / "known.db", plan_of(order="known")) as learner:
        with pytest.raises(InputError, match=r"privacy\.order = 'known'"):
            learner.use_records(people(0, 3))
        with pytest.raises(InputError, match=r"privacy\.order = 'known'"):
            learner.take_round()


def test_fewer_people_than_steps_are_refused_before_anything_is_spent(tmp_path):
    store = tmp_path / "s.db"
    with learner_at(store) as learner:
        eleven_twice = [*people(0, 11), *people(0, 11)]
        for given in ([], people(0, 11), eleven_twice):
            with pytest.raises(InputError, match=r"at least 12 people.*fewer learning\.rounds"):
                learner.use_records(given)
        assert not index_folder(store).exists()
        assert learner.ledger.chain.visits.value().count == 0
        learner.use_records(people(0, 12))
        learner.learn_round(0, model(0))


def test_what_the_ledger_keeps_says_nothing_of_steps(tmp_path):
    """Two secrets, the same people: but for what is random, both ledgers and witnesses say the same, in one order."""
    said = []
    for number in range(2):
        store = tmp_path / f"{number}.db"
        secret = bytes([number + 1]) * 31 + bytes(range(1))
        parts = LearnerParts(
            order_secret=lambda secret=secret: bytes(a ^ b for a, b in zip(secret, SECRET, strict=True))
        )
        with learner_at(store, parts=parts) as learner:
            key = learner.ledger.tag_key
            learner.use_records(people(0, 700))
            for r in range(6):
                learner.learn_round(r, model(r))
            records = list(learner.ledger.records())
            visits = [visit for record in records for visit in record.visits]
            assert sorted(learner.ledger.keyed(f"p{i}".encode()) for i in range(700)) == [tag for tag, _ in visits]
            assert {step for _, step in visits} == {0}
            assert all(
                record.body.tags is None and record.body.tag is None for record in records if record.kind == "steps"
            )
            said.append([(record.kind, len(record.body.text()) if record.kind == "steps" else 0) for record in records])
            assert key
        assert part_of_person(store, "p5").as_dict() == {
            "used": True,
            "times": 1,
            "last_epoch": 0,
            "carried_over": False,
        }
        assert verify(store).clients == 700
    assert [kind for kind, _ in said[0]] == [kind for kind, _ in said[1]]
    lengths = [[length for kind, length in each if kind == "steps"] for each in said]
    assert max(map(max, lengths)) - min(map(min, lengths)) <= 2  # digits of a step's number


def test_an_epoch_takes_no_more_than_its_steps_count_on_and_leaves_the_others_for_the_next(tmp_path):
    """Else a step would have more people on average than the number that it is divided by."""
    store, plan = tmp_path / "s.db", plan_of(rounds=2, local_steps=1, clients_per_step=10)
    everyone = [*people(0, 15), *people(0, 3), *people(15, 40)]
    with learner_at(store, plan) as learner:
        told = learner.use_records(everyone)
        assert (told.records, told.again) == (17, 3)
        rounds_of(learner, range(2))
        learner.new_epoch()
        assert learner.use_records(everyone).records == 20
        rounds_of(learner, range(2))
        assert learner.may_take("p54")
    assert verify(store).clients == 37


def test_everyone_indexed_has_taken_part_and_day_two_takes_new_people_only(tmp_path):
    store, plan = tmp_path / "s.db", plan_of(rounds=2)
    with learner_at(store, plan) as learner:
        learner.use_records(people(0, 30))
        assert learner.ledger.chain.visits.value().count == 0  # nothing is spent before a round is asked for
        learner.learn_round(0, model(0))
        assert learner.ledger.chain.visits.value().count == 30
        assert not learner.may_take("p7")
        learner.learn_round(1, model(1))
        with pytest.raises(PrivacyError, match="epoch 0 has ended"):
            learner.use_records(people(0, 30))
        learner.new_epoch()
        with pytest.raises(InputError, match=r"at least 4 people .*it has 0 \(30 others took part before"):
            learner.begin_round(0, model(0))  # the same records again
        told = learner.use_records(people(10, 40))
        assert told.records == 20
        learner.learn_round(0, model(0))
    assert verify(store).clients == 50


def rounds_of(learner: Learner, rounds) -> list[bytes]:
    return [learner.learn_round(r, model(r)).payload for r in rounds]


def test_a_restart_makes_the_same_choices_and_the_same_releases(tmp_path):
    everyone, plan = people(0, 60), plan_of(mechanism="buffered")  # noise with a state, which a restart restores
    with learner_at(tmp_path / "whole.db", plan, parts=NAMED) as learner:
        learner.use_records(everyone)
        expected = rounds_of(learner, range(6))
    store, found = tmp_path / "s.db", []
    for r in range(6):
        with learner_at(store, plan, parts=NAMED) as learner:
            learner.use_records(everyone)
            found += rounds_of(learner, [r])
    assert found == expected


def test_records_that_changed_since_the_first_round_are_refused(tmp_path):
    store, everyone = tmp_path / "s.db", people(0, 40)
    with learner_at(store) as learner:
        learner.use_records(people(0, 30))
        learner.use_records(everyone)  # nothing was spent: other records may be given
        learner.learn_round(0, model(0))
    changed = [*everyone[:7], ("p7", sample(1000)), *everyone[8:]]
    with learner_at(store) as learner:
        for other in (changed, everyone[1:], [*everyone, ("late", sample(5))][:40:2]):
            with pytest.raises(InputError, match=r"they changed since they were indexed.*put the old content back"):
                learner.use_records(other)
        assert learner.use_records(everyone).records == 40
        learner.learn_round(1, model(1))


def test_a_round_is_filled_up_to_one_amount_of_work(tmp_path):
    """The number of gradients that are computed is the same in every round, whatever its steps have."""
    plan, found = plan_of(clients_per_step=4), []
    with learner_at(tmp_path / "s.db", plan) as learner:
        learner.use_records(people(0, 48))
        learner.steps.check()
        gradients = learner.steps.gradients

        def counted(z, clients):
            found[-1] += len(clients)
            return gradients(z, clients)

        learner.steps.gradients = counted
        index = learner._records.index
        came = [[sum(len(p.targets) for p in index.pieces(2 * r + t)) for t in range(2)] for r in range(6)]
        for r in range(6):
            found.append(0)
            learner.learn_round(r, model(r))
    assert len({sum(each) for each in came}) > 2
    assert len(set(found)) == 1


class FailsOnOne(Logistic):
    """NumPy code of somebody's own, which one record in four makes raise; it counts its calls."""

    def __init__(self) -> None:
        super().__init__(D)
        self.calls = 0

    def host_gradient(self, z, record):
        self.calls += 1
        if float(record.features[0]) > 0.5:
            raise ArithmeticError
        return super().host_gradient(z, record)

    def host_gradients(self, z, records):
        return np.stack(
            [self.host_gradient(z, Sample(*each)) for each in zip(records.features, records.target, strict=True)]
        )


def test_a_record_that_makes_a_task_fail_costs_no_more_calls(tmp_path):
    """An array that fails would be asked for again record by record, so arrays of own code are not asked for."""
    task, found = FailsOnOne(), []
    everyone = people(0, 48)
    assert sum(float(record.features[0]) > 0.5 for _, record in everyone) > 6
    with Learner(plan_of(clients_per_step=4), tmp_path / "s.db", task, create=True) as learner:
        learner.use_records(everyone)
        learner.steps.check()
        for r in range(6):
            before = task.calls
            learner.learn_round(r, model(r))
            found.append(task.calls - before)
    assert len(set(found)) == 1
    with Learner(plan_of(order="known", clients_per_step=4), tmp_path / "known.db", task, create=True) as learner:
        assert learner.steps._many is not None


def test_more_clients_than_a_round_is_filled_up_to_are_rarer_than_promised():
    """Bernstein's bound against the exact binomial tail, over all rounds."""
    from scipy.stats import binom

    from veilstream.deployment.epoch_records import MORE_THAN_THAT, most_of_a_round

    for clients, rounds in itertools.product((12, 100, 6000, 10**7), (1, 2, 6, 100, 10_000)):
        most = most_of_a_round(clients, rounds)
        assert rounds * binom.sf(most, clients, 1 / rounds) <= MORE_THAN_THAT
        assert most <= clients


def test_large_steps_need_no_more_than_one_transaction(tmp_path):
    """More clients than a learner stores together elsewhere."""
    with learner_at(tmp_path / "s.db", plan_of(rounds=2, local_steps=1, clients_per_step=750)) as learner:
        learner.use_records(people(0, 1500))
        before = learner.ledger.chain.length
        learner.learn_round(0, model(0))
        kinds = [record.kind for record in learner.ledger.records(before)]
        assert kinds == ["clients"] * 3 + ["ordered", "pin", "steps", "message"]
    assert verify(tmp_path / "s.db").clients == 1500


def test_an_interrupted_enrolment_goes_on(tmp_path, monkeypatch):
    store = tmp_path / "s.db"
    with learner_at(store, parts=NAMED) as learner:
        learner.use_records(people(0, 700))
        seen = []

        def stop(point):
            seen.append(point)
            if seen.count("clients-witnessed") == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(type(learner.ledger), "reached", staticmethod(stop))
        with pytest.raises(KeyboardInterrupt):
            learner.begin_round(0, model(0))
        monkeypatch.undo()
    assert verify(store).clients == 512
    with learner_at(store, parts=NAMED) as learner:
        assert learner.use_records(people(0, 700)).records == 700
        learner.learn_round(0, model(0))
        assert learner.ledger.chain.visits.value().count == 700
    assert verify(store).clients == 700


def test_a_damaged_or_missing_index_is_made_anew(tmp_path):
    store = tmp_path / "s.db"
    with learner_at(store, parts=NAMED) as learner:
        learner.use_records(people(0, 60))
        learner.learn_round(0, model(0))
    records = index_folder(store) / "records"
    content = bytearray(records.read_bytes())
    content[100] ^= 1
    records.write_bytes(content)
    with learner_at(store, parts=NAMED) as learner:
        learner.use_records(people(0, 60))
        learner.learn_round(1, model(1))


def test_a_page_that_is_damaged_under_a_running_learner_stops_it(tmp_path):
    store = tmp_path / "s.db"
    with learner_at(store) as learner:
        learner.use_records(people(0, 60))
        learner.learn_round(0, model(0))
        records = index_folder(store) / "records"
        content = bytearray(records.read_bytes())
        content[60] ^= 1
        records.write_bytes(content)
        learner.begin_round(1, model(1))
        with pytest.raises(LedgerError, match="damaged"):
            learner.finish_round()
        with pytest.raises(PrivacyError, match="start the learner again"):
            learner.finish_round()


def test_no_log_line_or_error_names_a_step_or_the_secret(tmp_path, caplog):
    caplog.set_level("DEBUG")
    with learner_at(tmp_path / "s.db", parts=NAMED) as learner:
        learner.use_records(people(0, 60))
        for r in range(6):
            learner.learn_round(r, model(r))
    text = caplog.text
    assert SECRET.hex() not in text
    assert re.search(r"\bp\d+\b", text) is None
    assert "60 people have a step each that only this learner knows" in text


def test_the_store_alone_holds_the_secret(tmp_path):
    """Not the witness, which may lie on another device."""
    store = tmp_path / "s.db"
    with learner_at(store) as learner:
        secret = learner.ledger.blob(ORDER_SECRET)
        learner.use_records(people(0, 60))
        learner.learn_round(0, model(0))
    assert secret not in store.with_suffix(".witness").read_bytes()
    db = sqlite3.connect(store)
    (body,) = db.execute("SELECT body FROM records WHERE kind = 'epoch'").fetchone()
    db.close()
    assert secret.hex() not in body
    assert json.loads(body)["kept"][ORDER_SECRET] != secret.hex()
