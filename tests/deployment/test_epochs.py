"""Epochs end before their horizon and follow one another: each client has the promise in one."""

from __future__ import annotations

import dataclasses
import sqlite3

import numpy as np
import pytest

from tests.deployment.test_learner import TAU, Still, client, model, plan_of, run_round
from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.rescue import ask_for_epoch, begin_again
from veilstream.deployment.ledger.store import Ledger
from veilstream.errors import InputError, LedgerError, PrivacyError


def plan_with(epochs: int):
    plan = plan_of()
    return dataclasses.replace(plan, federation=dataclasses.replace(plan.federation, epochs=epochs))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.db"


def learner_at(path, epochs: int = 1) -> Learner:
    return Learner(plan_with(epochs), path, Still(), create=True)


def blobs(path) -> set[str]:
    with sqlite3.connect(path) as db:
        found = {name for (name,) in db.execute("SELECT name FROM blobs")}
    db.close()
    return found


@pytest.mark.parametrize("open_round", [False, True])
def test_an_epoch_that_is_ended_early_holds_no_secret_and_releases_nothing_more(path, open_round):
    with learner_at(path) as learner:
        learner.join("run-1")
        sealed = run_round(learner, 0)
        if open_round:
            learner.begin_round(1, model(1))
            learner.observe("in the open round", client(1, 0))
        noise = learner.local.noise
        secrets = [learner.ledger.blob(name) for name in learner.ledger.names("seed/")]
        assert len(secrets) == TAU + open_round
        learner.end_epoch()
        learner.end_epoch()  # once more changes nothing
        assert learner.over
        assert not learner.horizon_reached
        assert not learner.pinned
        assert learner.local.noise is not noise
        assert learner.sealed_release() == sealed
        with pytest.raises(PrivacyError, match=r"ended after 1 of 4 rounds: nothing was released"):
            learner.begin_round(1, model(1))
    assert blobs(path) == {"message"}
    files = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert not any(secret in files for secret in secrets)
    status = verify(path)
    assert (status.ended, status.secrets, status.pinned, status.round) == (True, 0, False, 1)
    with learner_at(path) as learner:  # after a restart it is the same
        assert learner.over
        assert learner.sealed_release() == sealed
        with pytest.raises(PrivacyError, match="ended after 1 of 4"):
            learner.begin_round(1, model(1))
        learner.new_epoch()
        assert (learner.epoch, learner.over) == (1, False)
        learner.begin_round(0, model(0))
        learner.observe("in the open round", client(1, 0))  # its step was never released, yet
        assert learner.clients_wanted == TAU - (not open_round)  # it counts as having taken part


@pytest.mark.parametrize("began_by", ["study", "deployed"])
def test_a_studys_learner_and_a_deployed_one_never_share_an_epoch(path, began_by):
    parts = {"study": {"parts": LearnerParts()}, "deployed": {}}
    other = "deployed" if began_by == "study" else "study"
    with Learner(plan_with(1), path, Still(), create=True, **parts[began_by]) as learner:
        run_round(learner, 0)
    with pytest.raises(LedgerError, match=r"learner began epoch 0, and a.* one opens it"):
        Learner(plan_with(1), path, Still(), **parts[other])
    ask_for_epoch(path, abandon=True)  # fresh noise, for new clients only
    with Learner(plan_with(1), path, Still(), **parts[other]) as learner:
        assert learner.epoch == 1


def test_a_studys_learner_joins_a_run_only_with_the_very_parts_it_was_made_of(path):
    parts = LearnerParts()
    with Learner(plan_with(1), path, Still(), create=True, parts=parts) as learner:
        for others in ({}, {"parts": LearnerParts()}):
            with pytest.raises(InputError, match="an audit's or a study's, not a deployment's"):
                learner.join("one", **others)
        learner.join("one", parts)
        assert learner.run == "one"


def test_an_epoch_without_a_round_can_end(path):
    with learner_at(path) as learner:
        learner.end_epoch()
    with learner_at(path) as learner:
        assert learner.over
    assert ask_for_epoch(path) == 1  # nothing is left that one could abandon


def test_a_learner_follows_as_often_as_its_plan_says_and_not_once_more(path):
    with learner_at(path, epochs=3) as learner:
        learner.join("one")
        run_round(learner, 0)
        assert learner.follow("two", ["one"])
        assert (learner.epoch, learner.run, learner.epochs_left) == (1, "two", 1)
    with learner_at(path, epochs=3) as learner:  # how often is remembered
        assert (learner.epoch, learner.run, learner.epochs_left) == (1, "two", 1)
        assert learner.follow("three", ["one", "two"])
        assert learner.epochs_left == 0
        for run in ("four", "five"):
            with pytest.raises(InputError, match=r"at most 3 epochs .*federation\.epochs"):
                learner.follow(run, ["one", "two", "three", "four"])
        assert (learner.epoch, learner.over) == (2, True)
        learner.new_epoch()  # the operator's own word
        assert (learner.epoch, learner.epochs_left) == (3, 2)
    assert verify(path).secrets == 0


@pytest.mark.parametrize(("run", "ended"), [("two", []), ("two", ["zero"]), ("one", ["one"]), ("one", [])])
def test_a_run_that_is_not_said_to_have_ended_goes_on(path, run, ended):
    with learner_at(path, epochs=3) as learner:
        learner.join("one")
        run_round(learner, 0)
        assert not learner.follow(run, ended)
        assert (learner.epoch, learner.over, learner.run) == (0, False, "one")
        if run != "one":
            with pytest.raises(InputError, match="run 'one', which this learner's epoch 0 is for"):
                learner.join(run)
        run_round(learner, 1)


def test_by_default_a_server_leads_nobody_into_another_epoch(path):
    with learner_at(path) as learner:
        learner.join("one")
        with pytest.raises(InputError, match="at most 1 epochs"):
            learner.follow("two", ["one"])
        assert learner.epoch == 0


def test_a_client_has_the_promise_in_one_epoch_whatever_the_server_says(path):
    """A hostile server ends and begins epochs at will; everyone comes again in each."""
    people = [f"person {i}" for i in range(5)]
    rng = np.random.default_rng(1)
    with learner_at(path, epochs=6) as learner:
        runs = ["run 0"]
        learner.join(runs[0])
        for turn in range(1, 9):
            if not learner.over:
                learner.begin_round(learner.round, model(turn))
                for person in rng.permutation(people):
                    if learner.clients_wanted:
                        learner.observe(str(person), client(turn, 0))
                if rng.random() < 0.5:
                    learner.finish_round()
            runs.append(f"run {turn}")
            if turn <= 5:
                assert learner.follow(runs[-1], runs)
            else:
                with pytest.raises(InputError, match="at most 6 epochs"):
                    learner.follow(runs[-1], runs)
        assert learner.epoch == 5
        epochs: dict[str, set[int]] = {}
        for record in learner.ledger.records():
            for tag, _ in record.visits:
                epochs.setdefault(tag.hex(), set()).add(record.body.epoch)
        assert len(epochs) == len(people)
        assert all(len(taken) == 1 for taken in epochs.values())
    assert verify(path).secrets == 0


def test_another_number_of_epochs_is_another_plan(path):
    with learner_at(path, epochs=2):
        pass
    with pytest.raises(InputError, match=r"'federation.epochs': 3.*begun with: .*'federation.epochs': 2"):
        learner_at(path, epochs=3)


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["end", "epoch"])
@pytest.mark.parametrize("moment", ["before", "stored", "witnessed"])
def test_a_kill_on_the_way_into_the_next_epoch_is_made_good_by_asking_again(path, monkeypatch, kind, moment):
    """The server asks again; then it has begun one epoch, and no secret of the old one is left."""
    write, witness = Ledger.write, Ledger.witness
    last: list[str] = []

    def killed_write(self, given, body, **more):
        last[:] = [given]
        if (given, moment) == (kind, "before"):
            raise _Killed
        record = write(self, given, body, **more)
        if (given, moment) == (kind, "stored"):
            raise _Killed
        return record

    def killed_witness(self):
        witness(self)
        if (last, moment) == ([kind], "witnessed"):
            raise _Killed

    with learner_at(path, epochs=2) as learner:
        learner.join("one")
        run_round(learner, 0)
        learner.begin_round(1, model(1))
        learner.observe("someone", client(1, 0))
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "write", killed_write)
            patch.setattr(Ledger, "witness", killed_witness)
            with pytest.raises(_Killed):
                learner.follow("two", ["one"])
        with pytest.raises(PrivacyError):  # what is left of it in memory does nothing any more
            learner.follow("two", ["one"])
    with learner_at(path, epochs=2) as learner:
        learner.follow("two", ["one"])
        learner.join("two")
        assert (learner.epoch, learner.round, learner.run, learner.epochs_left) == (1, 0, "two", 0)
        assert learner.ledger.names("seed/") == []
        begun = [r.body.epoch for r in learner.ledger.records() if r.kind == "epoch"]
        assert begun == [0, 1]
        learner.begin_round(0, model(0))
        learner.observe("someone", client(1, 0))
        assert learner.clients_wanted == TAU
    verify(path)


def granting(a_person: int, epsilon: float | None = None):
    plan = plan_with(9)
    privacy = dataclasses.replace(plan.privacy, epochs_per_person=a_person)
    if epsilon is not None:
        privacy = dataclasses.replace(privacy, epsilon=epsilon)
    return dataclasses.replace(plan, privacy=privacy)


def may_take_in_next_epoch(path, plan, person: str) -> bool:
    """Begin an epoch, and take the person if that is allowed."""
    with Learner(plan, path, Still(), create=True) as learner:
        learner.begin_round(0, model(0))
        before = learner.clients_wanted
        learner.observe(person, client(0, 0))
        used = learner.clients_wanted < before
        learner.end_epoch()
    ask_for_epoch(path)
    return used


def test_a_plan_grants_a_person_a_number_of_epochs_and_the_ledger_keeps_to_it(path):
    plan = granting(2)
    assert [may_take_in_next_epoch(path, plan, "ann") for _ in range(4)] == [True, True, False, False]
    assert may_take_in_next_epoch(path, plan, "ben")
    assert verify(path).clients == 2


def test_epochs_on_other_terms_are_not_counted_together_and_so_refused(path):
    assert may_take_in_next_epoch(path, granting(3, epsilon=1.0), "ann")
    assert not may_take_in_next_epoch(path, granting(3, epsilon=2.0), "ann")
    assert may_take_in_next_epoch(path, granting(3, epsilon=2.0), "ben")
    assert may_take_in_next_epoch(path, granting(3, epsilon=2.0), "ben")
    assert not may_take_in_next_epoch(path, granting(3, epsilon=2.0), "ann")


def test_whose_epochs_only_a_lost_store_knew_takes_part_in_none_again(path):
    plan = granting(5)
    assert may_take_in_next_epoch(path, plan, "ann")
    path.unlink()
    begin_again(path)
    assert not may_take_in_next_epoch(path, plan, "ann")
    assert may_take_in_next_epoch(path, plan, "ben")


def test_the_learners_guarantee_says_the_epsilon_of_all_epochs(path):
    with Learner(granting(4), path, Still(), create=True) as learner:
        assert learner.guarantee.epochs == 4
        assert f"{learner.guarantee.epsilon_over_epochs:.4g}" in str(learner.guarantee)
        assert learner.settings["guarantee"]["epsilon_over_epochs"] == learner.guarantee.epsilon_over_epochs
