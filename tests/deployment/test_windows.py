"""Records that arrive in one window are used in the next, once, and nothing says at which step."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest

from tests.deployment.test_secret_order import NAMED, SECRET, logistic_gradient
from tests.support.secret_order import D, model, people, plan_of, sample
from veilstream.deployment import learner_epochs, window_records
from veilstream.deployment.epochs import ARRIVED, LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import inspect, part_of_person, verify
from veilstream.deployment.ledger.rescue import ask_for_epoch
from veilstream.errors import InputError, LedgerError
from veilstream.learning.tasks import Logistic, Sample
from veilstream.records.admission import Admission, Answer
from veilstream.records.secret_order import chosen_step

WINDOW, ROUNDS, TAU, MANY = 4, 6, 2, 3
A_ROUND = TAU * MANY


def window_plan(rounds: int = ROUNDS, local_steps: int = TAU, clients_per_step: int = MANY, **more):
    return plan_of(rounds, local_steps, clients_per_step, window=more.pop("window", WINDOW), **more)


def learner_at(store, plan=None, **more) -> Learner:
    return Learner(plan or window_plan(), store, Logistic(D), create=True, **more)


def arrivals(r: int) -> list[tuple[str, Sample]]:
    return people(A_ROUND * r, A_ROUND)


def run(learner: Learner, rounds=range(ROUNDS)) -> list[bytes]:
    return [learner.learn_round(r, model(r), arrivals(r)).payload for r in rounds]


def test_every_record_is_in_the_step_of_the_next_window_that_its_tag_chooses(tmp_path):
    """Steps are of one round each, so each release shows one; the choice is worked out here with the epoch's secret."""
    plan = window_plan(rounds=12, local_steps=1)
    with learner_at(tmp_path / "s.db", plan, parts=NAMED) as learner:
        found, before = [], np.zeros(D)
        for r in range(12):
            learner.begin_round(r, model(1))
            learner.observe_many([*people(MANY * r, MANY - 1), (f"refused {r}", None), ("p0", sample(77))])
            learner.finish_round()
            now = (learner.local.prefix - learner.local.noise.cells) * learner.grid.step
            found.append(now - before)
            before = now
        unit = learner.grid.step
    used = {i: (i // MANY // WINDOW + 1) * WINDOW + chosen_step(SECRET, b"p%d" % i, WINDOW) for i in range(36)}
    counts = Counter(step for i, step in used.items() if i % MANY < 2 and step < 12)
    assert counts.total() == 16
    assert min(counts[step] for step in range(4, 12)) < max(counts.values())
    for step, value in enumerate(found):
        here = [sample(i) for i, at in used.items() if at == step and i % MANY < 2]
        expected = sum((logistic_gradient(model(1), each, 0.3) for each in here), np.zeros(D)) / MANY
        assert np.abs(value - expected).max() < (len(here) + 1) * unit + 1e-6


def test_a_round_takes_its_number_of_people_and_the_last_window_nobody(tmp_path):
    with learner_at(tmp_path / "s.db") as learner:
        for r in range(ROUNDS):
            learner.begin_round(r, model(r))
            last = r >= 4
            assert learner.clients_wanted == (0 if last else A_ROUND)
            assert learner.takes_clients == (not last)
            stream = iter(people(100 * r, 50))
            assert learner.observe_many(stream) == ([] if last else [Answer.TAKEN] * A_ROUND)
            assert len(list(stream)) == (50 if last else 50 - A_ROUND)  # the others are not consumed
            with pytest.raises(InputError, match="in an epoch's last window" if last else "at most 6 clients a round"):
                learner.observe("p99999", sample(1))
            assert learner.clients_due == (0 if r < 2 else 2 * A_ROUND)
            learner.finish_round()
        assert not learner.takes_clients
    assert verify(tmp_path / "s.db").clients == 4 * A_ROUND


def test_a_person_is_in_once_an_epoch_whenever_they_come_again(tmp_path):
    store = tmp_path / "s.db"
    with learner_at(store) as learner:
        learner.begin_round(0, model(0))
        twice = [("p1", sample(1)), (" p1", sample(2)), ("p2", None), ("", sample(3))]
        told = learner.take_many(twice)
        assert [(each.answer, each.used) for each in told] == [
            (Answer.TAKEN, True),
            (Answer.TAKEN, False),
            (Answer.REFUSED, True),
            (Answer.REFUSED, False),
        ]
        learner.finish_round()
        assert not learner.may_take("p1")
        for r in range(1, ROUNDS):
            learner.begin_round(r, model(r))
            assert learner.clients_wanted == (A_ROUND if r < 4 else 0)
            if r < 4:
                assert learner.observe("p1", sample(5)) is Answer.TAKEN
                assert learner.clients_wanted == A_ROUND
            learner.finish_round()
        assert learner.ledger.chain.visits.value().count == 2
        learner.new_epoch()
        assert not learner.may_take("p1")
    assert part_of_person(store, "p1").times == 1


def test_a_restart_between_any_two_calls_makes_the_same_releases(tmp_path):
    plan = window_plan(mechanism="buffered")  # noise with a state, which a restart restores
    with learner_at(tmp_path / "whole.db", plan, parts=NAMED) as learner:
        expected = run(learner)
    store, found = tmp_path / "s.db", []
    for r in range(ROUNDS):
        for some in (arrivals(r)[:2], arrivals(r)[2:]):
            with learner_at(store, plan, parts=NAMED) as learner:
                if not learner.pinned:
                    learner.begin_round(r, model(r))
                learner.observe_many(some)
        with learner_at(store, plan, parts=NAMED) as learner:
            found.append(learner.finish_round().payload)
    assert found == expected


def test_what_the_ledger_keeps_says_nothing_of_steps(tmp_path):
    """Two secrets, the same people: but for what is random, both ledgers say the same, in one order and length."""
    said = []
    for number in range(2):
        store = tmp_path / f"{number}.db"
        parts = LearnerParts(order_secret=lambda number=number: bytes(range(40 * number, 40 * number + 32)))
        with learner_at(store, window_plan(clients_per_step=40), parts=parts) as learner:
            for r in range(ROUNDS):
                learner.learn_round(r, model(r), people(80 * r, 80))
            records = list(learner.ledger.records())
            assert {step for record in records for _, step in record.visits} == {0}
            assert all(record.body.tags is None for record in records if record.kind != "arrived")
            for record in (record for record in records if record.kind == "arrived"):
                tags = [tag for tag, _ in record.visits]
                assert tags == sorted(tags)
            said.append([(record.kind, len(record.body.text())) for record in records])
    assert [kind for kind, _ in said[0]] == [kind for kind, _ in said[1]]
    pairs = zip(*said, strict=True)
    assert all(abs(a - b) <= 2 for (kind, a), (_, b) in pairs if kind != "epoch")  # digits of what is random


def test_records_wait_encrypted_and_go_after_their_window(tmp_path):
    """A record's numbers, and its step, stand nowhere in a file; its blob is destroyed when the next window begins."""
    store = tmp_path / "s.db"
    odd = Sample(np.full(D, 1.2345678), 1.0)
    with learner_at(store) as learner:
        for r in range(ROUNDS - 1):
            learner.learn_round(r, model(r), [(f"odd {r}", odd)] if r < 4 else ())
            content = store.read_bytes() + store.with_name("s.db-wal").read_bytes()
            assert odd.features.astype(np.float32).tobytes() not in content
            rounds = {int(name.split("/")[1]) for name in learner.ledger.names(ARRIVED)}
            assert rounds == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {2, 3}][r]
        assert inspect(store).secrets > 0
        learner.learn_round(ROUNDS - 1, model(5))
        assert not learner.ledger.names(ARRIVED)
    assert inspect(store).secrets == 0
    assert verify(store).clients == 4


@pytest.mark.parametrize("how", ["ended", "followed", "abandoned"])
def test_what_waited_when_an_epoch_ended_has_taken_part_and_is_destroyed(how, tmp_path, caplog):
    store = tmp_path / "s.db"
    with learner_at(store) as learner:
        if how == "followed":
            learner.join("one")
        learner.learn_round(0, model(0), arrivals(0))
        if how != "abandoned":
            with caplog.at_level(logging.INFO):
                if how == "ended":
                    learner.end_epoch()
                else:
                    with pytest.raises(InputError, match=r"federation\.epochs"):
                        learner.follow("two", ["one"])
            assert "6 people had arrived for a window that did not begin" in caplog.text
            learner.new_epoch()
    if how == "abandoned":
        ask_for_epoch(store, abandon=True)
    with learner_at(store) as learner:
        assert learner.epoch == 1
        assert not learner.ledger.names(ARRIVED)
        assert not learner.may_take("p3")
        learner.learn_round(0, model(0), arrivals(0))
        assert learner.ledger.chain.visits.value().count == 6
    assert verify(store).clients == 6


def test_a_round_is_filled_up_to_one_amount_of_work_whoever_arrived(tmp_path):
    """The number of gradients that are computed is the same in every round, also where nobody is due."""
    found = []
    with learner_at(tmp_path / "s.db") as learner:
        learner.steps.check()
        gradients = learner.steps.gradients

        def counted(z, clients):
            found[-1] += len(clients)
            return gradients(z, clients)

        learner.steps.gradients = counted
        for r in range(ROUNDS):
            found.append(0)
            learner.learn_round(r, model(r), people(10 * r, (r * 5) % 7))
    assert len(set(found)) == 1


@pytest.mark.parametrize("window", [8, None])
def test_a_round_is_stored_when_all_of_its_work_is_done_however_large_its_steps_are(window, tmp_path, monkeypatch):
    """A store's length and times are seen on this machine: they must not tell which steps of a round had people."""
    monkeypatch.setattr(learner_epochs, "_GROUP_BYTES", 8 * D)  # noise of one step at a time, as for large models
    names = [f"p{i}" for i in range(600)]
    crowd = [(name, sample(1)) for name in names if chosen_step(SECRET, name.encode(), 8) in (1, 6)]
    plan = window_plan(rounds=4, local_steps=4, clients_per_step=60, window=window)
    stored, arrays = [], [0]
    with learner_at(tmp_path / "s.db", plan, parts=NAMED) as learner:
        share = learner.steps._share

        def counted(local, some):
            arrays[0] += 1
            return share(local, some)

        def point(reached):
            if reached == "step-stored":
                stored.append((learner.local.round, arrays[0]))

        monkeypatch.setattr(learner.steps, "_share", counted)
        monkeypatch.setattr(type(learner.ledger), "reached", staticmethod(point))
        if window is None:
            learner.use_records([(name, sample(i)) for i, name in enumerate(names)])
        for r in range(4):
            arrays[0] = 0
            learner.begin_round(r, model(r))
            if window is not None and r == 0:
                learner.observe_many(crowd)
            learner.finish_round()
        monkeypatch.undo()
    assert [r for r, _ in stored] == [0, 1, 2, 3]
    assert len({done for _, done in stored}) == 1
    assert stored[0][1] > 4


def test_large_records_are_stored_and_handed_on_few_at_a_time_and_let_go_at_the_end(tmp_path, monkeypatch):
    """The same releases; no blob or page is above the bound, and nothing of a window stays in memory."""
    with learner_at(tmp_path / "whole.db", parts=NAMED) as learner:
        expected = run(learner)
    monkeypatch.setattr(window_records, "_GROUP_BYTES", 2 * learner._arrivals._layout.itemsize)
    found = []
    with learner_at(tmp_path / "s.db", parts=NAMED) as learner:
        for r in range(ROUNDS):
            found += run(learner, [r])
            names = learner.ledger.names(ARRIVED)
            assert all(int(name.split("/")[3]) <= 2 for name in names)
            assert (learner._arrivals._due is None) == (r == ROUNDS - 1)
            steps = [learner._arrivals.records(step) for step in range(r * TAU, r * TAU + TAU) if r < ROUNDS - 1]
            assert all(len(page) <= 2 for step in steps for page in step)
    assert found == expected


def test_as_many_records_are_read_in_every_round_and_the_measure_of_a_round_has_its_arrivals(tmp_path, monkeypatch):
    """Each record that a step has costs time to make: what others have not is made for nobody."""
    made, packed = [], []
    with learner_at(tmp_path / "s.db") as learner:
        from_arrays, pack = Admission.from_arrays, learner._arrivals.packed

        def counted(admission, features, targets):
            made[-1] += len(features)
            return from_arrays(admission, features, targets)

        def noted(clients):
            packed.append(len(clients))
            return pack(clients)

        monkeypatch.setattr(learner._arrivals, "packed", noted)
        length, files = learner.ledger.chain.length, set(tmp_path.iterdir())
        assert learner.round_work_s() > 0.0
        assert packed == [A_ROUND]  # one group is a whole round's here
        assert (learner.ledger.chain.length, set(tmp_path.iterdir())) == (length, files)
        assert learner.may_take("made up 0")
        monkeypatch.setattr(Admission, "from_arrays", counted)
        for r in range(ROUNDS):
            made.append(0)
            learner.learn_round(r, model(r), people(10 * r, (r * 5) % 7))
        assert made == [learner._arrivals.most_a_round] * ROUNDS


def test_a_whole_table_and_takers_of_another_order_are_refused_by_name(tmp_path):
    with learner_at(tmp_path / "s.db") as learner:
        with pytest.raises(InputError, match=r"privacy\.window = 4.*observe_many"):
            learner.use_records(people(0, 30))
        with pytest.raises(InputError, match="a round that has been begun"):
            learner.observe("p1", sample(1))
    with pytest.raises(InputError, match=r"privacy\.window = 3: .*multiple of local_steps = 2.*window = 4"):
        learner_at(tmp_path / "other.db", window_plan(window=3))
    with pytest.raises(InputError, match=r"privacy\.window = 12: .*nobody is used in the first window"):
        window_plan(window=12)
    with pytest.raises(InputError, match=r"privacy\.window = 5: .*a divisor of 12"):
        window_plan(window=5)


@pytest.mark.parametrize("point", ["arrived-stored", "arrived-witnessed", "window-stored", "window-witnessed"])
def test_an_interruption_at_every_write_loses_and_repeats_nobody(point, tmp_path, monkeypatch):
    """The callers come again, as those who were not answered do; the releases are those of a run without it."""
    with learner_at(tmp_path / "whole.db", parts=NAMED) as learner:
        expected = run(learner)
    store, found, cuts = tmp_path / "s.db", [], []
    for r in range(ROUNDS):
        with learner_at(store, parts=NAMED) as learner:

            def cut(reached, r=r):
                if reached == point and r in (2, 4) and r not in cuts:
                    cuts.append(r)
                    raise KeyboardInterrupt

            monkeypatch.setattr(type(learner.ledger), "reached", staticmethod(cut))
            try:
                found += run(learner, [r])
            except KeyboardInterrupt:
                with learner_at_again(learner, store) as again:
                    if not again.pinned:
                        again.begin_round(r, model(r))
                    again.observe_many(arrivals(r))
                    found.append(again.finish_round().payload)
            monkeypatch.undo()
    assert cuts
    assert found == expected
    assert verify(store).clients == 4 * A_ROUND


def learner_at_again(broken: Learner, store) -> Learner:
    broken.close()
    return learner_at(store, parts=NAMED)


def test_an_old_copy_that_was_put_back_is_refused(tmp_path):
    store, copy = tmp_path / "s.db", tmp_path / "copy.db"
    with learner_at(store) as learner:
        run(learner, [0])
    copy.write_bytes(store.read_bytes())
    with learner_at(store) as learner:
        run(learner, [1])
    store.write_bytes(copy.read_bytes())
    with pytest.raises(LedgerError, match="old copy"):
        learner_at(store)
