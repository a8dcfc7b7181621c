"""Steps that are stored together: the same to the bit as one by one, and all of them or none."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.support.known_secrets import NamedLearner
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.rescue import begin_again
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.witness import ENTRY_BYTES, Witness
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.tasks import Logistic, Sample
from veilstream.plans.plan import Plan
from veilstream.records.admission import Answer
from veilstream.streams.intake import SourceBookmark

D, TAU, ROUNDS = 3, 12, 3


def plan_of(local_steps: int = TAU, **privacy) -> Plan:
    return Plan(
        learning={"rounds": ROUNDS, "local_steps": local_steps, "learners": 1},
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


@pytest.fixture
def one_by_one(tmp_path) -> list[bytes]:
    """Messages of a learner that stores every step by itself."""
    sealed = []
    with learner_at(tmp_path / "single.db") as learner:
        for r in range(ROUNDS):
            learner.begin_round(r, model(r))
            for tag, record in people(TAU * r, TAU):
                assert learner.observe(tag, record) is Answer.TAKEN
            sealed.append(bytes(learner.finish_round().payload))
    return sealed


@pytest.mark.parametrize("sizes", [(TAU,), (5, 7), (1, 4, 1, 6), (2, 1, 9)])
def test_messages_are_those_of_steps_stored_one_by_one(sizes, one_by_one, tmp_path):
    """Also with a restart after every group, which repeats what was stored to the bit."""
    store, sealed = tmp_path / "s.db", []
    for r in range(ROUNDS):
        done = 0
        for size in sizes:
            with learner_at(store) as learner:
                learner.begin_round(r, model(r))
                answers = learner.observe_many(people(TAU * r + done, size))
                assert answers == [Answer.TAKEN] * size
                done += size
        with learner_at(store) as learner:
            learner.begin_round(r, model(r))
            sealed.append(bytes(learner.finish_round().payload))
    assert sealed == one_by_one
    assert verify(store).clients == TAU * ROUNDS


def test_a_group_is_one_transaction_and_one_append(tmp_path, monkeypatch):
    with learner_at(tmp_path / "s.db", plan_of(600)) as learner:
        learner.begin_round(0, model(0))
        commits, appends, syncs = [], [], []
        write, append, fsync = Ledger.write, Witness.append, os.fsync
        monkeypatch.setattr(Ledger, "write", lambda s, *a, **k: (commits.append(a), write(s, *a, **k)))
        monkeypatch.setattr(Witness, "append", lambda s, e: (appends.append(len(e)), append(s, e)))
        monkeypatch.setattr(os, "fsync", lambda h: (syncs.append(h), fsync(h)))
        learner.observe_many(people(0, 520))
        assert [kind for kind, _ in commits] == ["steps"] * 3
        assert appends == [256, 256, 8]
        assert len(syncs) == 3
        learner.finish_round()
        assert [kind for kind, *_ in commits[3:]] == ["steps", "message", "snapshot"]  # 80 empty
    assert verify(tmp_path / "s.db").steps == 600


def test_no_more_is_consumed_than_the_round_can_use(tmp_path):
    stream = iter(people(0, 100))
    with learner_at(tmp_path / "s.db") as learner:
        with pytest.raises(InputError, match="a round that has been begun"):
            learner.observe_many(stream)
        learner.begin_round(0, model(0))
        bad = [("", sample(0)), ("x", Sample(np.ones(D), 7.0)), ("p0", sample(0)), ("p0", sample(1))]
        assert learner.observe_many(bad) == [Answer.REFUSED, Answer.REFUSED, Answer.TAKEN, Answer.TAKEN]
        assert learner.clients_wanted == TAU - 2  # x has taken its place, whatever its record says
        assert len(learner.observe_many(stream)) == TAU - 1  # p0 again, and who was new
        assert learner.observe_many(stream) == []
        assert next(stream)[0] == f"p{TAU - 1}"


def test_what_an_iterator_gave_before_it_failed_is_taken(tmp_path):
    def failing():
        yield from people(0, 3)
        raise OSError("the line went dead")

    with learner_at(tmp_path / "s.db") as learner:
        learner.begin_round(0, model(0))
        with pytest.raises(OSError, match="dead"):
            learner.observe_many(failing())
        assert learner.clients_wanted == TAU - 3
        assert not learner.epochs.broken
    assert verify(tmp_path / "s.db").clients == 3


@pytest.mark.parametrize("together", [1, 4, TAU])
def test_in_a_group_participation_counts_the_steps_before(together, tmp_path):
    """At most twice, at least three steps apart; which records count is worked out by hand."""
    comes = ["a", "a", "b", "a", "c", "a", "b", "d", "e", "b", "a", "f"]
    counts = ["a", "b", "c", "a", "b", "d", "e", "f"]
    plan = plan_of(participations=2, min_separation=3)
    with learner_at(tmp_path / "s.db", plan) as learner:
        learner.begin_round(0, model(0))
        for first in range(0, len(comes), together):
            learner.observe_many((who, sample(first)) for who in comes[first : first + together])
        by_step = {step: tag for record in learner.ledger.records() for tag, step in record.visits}
        names = {learner.ledger.keyed(who.encode()): who for who in comes}
    assert [names[by_step[step]] for step in sorted(by_step)] == counts


@pytest.mark.parametrize("point", ["step-computed", "step-stored", "step-witnessed"])
@pytest.mark.parametrize("visit", [1, 4])
def test_an_interrupted_group_is_stored_whole_or_not_at_all(point, visit, one_by_one, tmp_path, monkeypatch):
    store, left = tmp_path / "s.db", [visit]
    mark = SourceBookmark("source", "behind the group")

    class Killed(BaseException):
        pass

    def reached(here):
        if here == point:
            left[0] -= 1
            if not left[0]:
                raise Killed

    with learner_at(store) as learner:
        learner.begin_round(0, model(0))
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "reached", staticmethod(reached))
            group = [(tag, record, mark) for tag, record in people(0, 5)]
            if visit == 1 or point == "step-computed":
                with pytest.raises(Killed):
                    learner.observe_many(group)
                assert learner.epochs.broken
                with pytest.raises(PrivacyError):
                    learner.observe_many(people(5, 1))
                with pytest.raises(PrivacyError):
                    learner.finish_round()
            else:
                learner.observe_many(group)
    stored = 0 if point == "step-computed" else 5
    assert verify(store).steps == stored
    with learner_at(store) as learner:
        assert learner.bookmarks() == ([mark] if stored else [])
        assert len(learner.ledger.names("seed/")) == (stored > 0)
        assert learner.observe_many(people(0, TAU)) == [Answer.TAKEN] * TAU
        assert bytes(learner.finish_round().payload) == one_by_one[0]


GROUP = 40
SECTOR = 512


@pytest.fixture
def grouped(tmp_path):
    """A store whose last write is a group, its witness before and after, and all files before."""
    store = tmp_path / "s.db"
    plan = plan_of(2 * GROUP)
    with learner_at(store, plan) as learner:
        learner.begin_round(0, model(0))
        learner.observe_many(people(0, 7))
    old = {p: p.read_bytes() for p in tmp_path.iterdir() if p.name.startswith("s.")}
    before = store.with_suffix(".witness").read_bytes()
    with learner_at(store, plan) as learner:
        learner.observe_many(people(7, GROUP))
    after = store.with_suffix(".witness").read_bytes()
    assert len(after) - len(before) == GROUP * ENTRY_BYTES
    return store, plan, before, after, old


def torn(before: bytes, after: bytes, rng: np.random.Generator) -> bytes:
    """Any sectors of the last append, the others empty, and the file of any length."""
    content = bytearray(after)
    for first in range(len(before) - len(before) % SECTOR, len(after), SECTOR):
        if rng.random() < 0.5:
            start = max(first, len(before))
            content[start : first + SECTOR] = bytes(min(first + SECTOR, len(after)) - start)
    return bytes(content[: rng.integers(len(before), len(after) + 1)])


@pytest.mark.parametrize("seed", range(40))
def test_a_torn_append_is_completed_by_the_store(seed, grouped):
    store, plan, before, after, _ = grouped
    witness = store.with_suffix(".witness")
    witness.write_bytes(torn(before, after, np.random.default_rng(seed)))
    with learner_at(store, plan) as learner:
        assert learner.clients_wanted == 2 * GROUP - 7 - GROUP
        learner.observe_many(people(7 + GROUP, 2))
    assert witness.read_bytes()[: len(after)] == after
    assert verify(store).clients == 7 + GROUP + 2


@pytest.mark.parametrize("seed", range(40))
def test_an_entry_of_a_torn_append_is_evidence_against_an_old_store(seed, grouped):
    """And so is an empty end that is longer than anything the store could complete."""
    store, plan, before, after, old = grouped
    witness = store.with_suffix(".witness")
    left = torn(before, after, np.random.default_rng(seed))
    for path, content in old.items():
        path.write_bytes(content)
    witness.write_bytes(left)
    whole = [left[at : at + 96] for at in range(len(before), len(left) - 95, 96)]
    if len(whole) > 2 or any(piece in after for piece in whole if any(piece)):
        with pytest.raises(LedgerError, match=r"old copy|damaged"):
            learner_at(store, plan)
    else:
        learner_at(store, plan).close()


@pytest.mark.parametrize("cut", [1, 95, 96, 97, 20 * 96 + 50, 39 * 96 + 95])
def test_a_lost_store_is_begun_again_from_a_torn_witness(cut, grouped):
    """Whoever is in the part that is there is left out; of the others nothing was let out."""
    store, plan, before, after, _ = grouped
    store.with_suffix(".witness").write_bytes(after[: len(before) + cut])
    _, clients = begin_again(store)
    assert clients == 7 + cut // ENTRY_BYTES
    with learner_at(store, plan) as learner:
        learner.begin_round(0, model(0))
        learner.observe_many(people(0, 7 + GROUP))
        assert learner.ledger.chain.standing.steps == GROUP - cut // ENTRY_BYTES


def test_a_damaged_entry_of_a_group_is_no_torn_end(grouped):
    """In the middle of the last append it is made good by the store, and by nothing else."""
    store, plan, before, after, _ = grouped
    witness = store.with_suffix(".witness")
    broken = bytearray(after)
    broken[len(before) + 10 * ENTRY_BYTES + 20] ^= 1
    witness.write_bytes(broken)
    with pytest.raises(LedgerError, match="middle of its last append"):
        verify(store)
    with pytest.raises(LedgerError, match="middle of its last append"):
        begin_again(store)
    learner_at(store, plan).close()
    assert verify(store).clients == 7 + GROUP
    broken = bytearray(after)
    broken[len(before) - 3 * ENTRY_BYTES + 20] ^= 1  # of the group before
    witness.write_bytes(broken)
    with pytest.raises(LedgerError, match="damaged"):
        verify(store)
