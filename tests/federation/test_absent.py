"""Learners without clients sit a round out: nothing is spent, weights stay, nothing else leaves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.federation import DIM, World, plan_of, rows_of, seeds_by_name, source_of
from veilstream.deployment.ledger.inspect import verify
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import PrivateKey, ServerKeys
from veilstream.federation.learner.local_account import LocalAccount, read_account
from veilstream.federation.learner.prequential_score import Score
from veilstream.federation.protocol.messages import Reply, Request
from veilstream.plans.plan import PlanError

PEOPLE = [f"person {i}" for i in range(40)]


def test_a_run_goes_on_without_a_learner_whose_records_have_ended(tmp_path):
    plan = plan_of(federation={"quorum": 0.5})
    with World(tmp_path, plan) as world:
        world.start("a")
        world.start("b")
        world.start("c", source=source_of(rows_of(PEOPLE[:4])))
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        assert coordinator.finished
        rounds = {name: seat.round for name, seat in coordinator.fold.seats.items()}
        assert rounds == {"a": 6, "b": 6, "c": 2}
        model = coordinator.models.read(6)
        world.close()
        np.testing.assert_allclose(model, world.model_by_ledgers(), rtol=1e-6)  # 1/n for everyone
        status = verify(world.store("c"))
        assert (status.round, status.steps, status.pinned) == (2, 4, False)
    listed = (tmp_path / "run/rounds.csv").read_text().splitlines()[1:]
    assert [line.endswith(",c") for line in listed] == [False, False, True, True, True, True]


def test_a_round_that_needs_an_absent_learner_waits_and_asks_again(tmp_path, monkeypatch):
    monkeypatch.setattr("veilstream.federation.server.coordinator._ABSENT_AGAIN_S", 0.05)
    asked = []

    class Later:
        """Nobody at first."""

        def __init__(self, inner):
            self._inner = inner

        def ready(self, minimum, most, may_take):
            asked.append(minimum)
            return len(asked) > 3 and self._inner.ready(minimum, most, may_take)

        def serve(self, round_, observe, wanted):
            self._inner.serve(round_, observe, wanted)

    with World(tmp_path, plan_of(rounds=2, learners=1), names=("a",)) as world:
        world.start("a", source=Later(source_of(rows_of(PEOPLE))))
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        assert coordinator.fold.seats["a"].round == 2
        assert any("a of 1 learners have no clients now" in note for note in world.notes)
    assert len(asked) == 5


def ask(world, r: int, **changes) -> Reply:
    keys = ServerKeys.load(world.root / "keys/server")
    x = np.full(DIM, 0.1, "<f4").tobytes()
    request = Request("round", "run", "a", "n" * 16, r, None, body=x).sign(keys.identity)
    return Reply.read(world.daemons["a"].handle(request), world.keys_of("a").identity.public)


def test_an_absent_reply_says_nothing_else_and_has_one_form(tmp_path):
    """Whether the file is empty, refused or of people who came before."""
    replies = []
    unusable = [[], [{"person": "x", "y": "perhaps"}] * 30, rows_of(PEOPLE[:2]) + rows_of(PEOPLE[:2]) * 9]
    for kind, rows in enumerate(unusable):
        with World(tmp_path / str(kind), plan_of(learners=1), names=("a",)) as world:
            world.start("a", source=source_of(rows))
            first = ask(world, 0)
            replies.append(ask(world, 1) if first.kind == "release" else first)
    assert {(r.kind, r.body, str(r.facts)) for r in replies} == {("absent", b"", "{}")}


def test_a_minimum_counts_people_and_not_records(tmp_path):
    plan = plan_of(learners=1)
    with World(tmp_path, plan, names=("a",)) as world:
        source = source_of(rows_of(["ann", "ann", "ann"]))
        world.start("a", source=source, min_clients=2)
        assert ask(world, 0).kind == "absent"
        assert world.daemons["a"].learner.round == 0


def test_a_wrong_request_is_refused_also_where_nobody_waits(tmp_path):
    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        world.start("a", source=source_of([]))
        assert ask(world, 3).kind == "refusal"


def test_a_source_that_fails_before_a_round_spends_nothing(tmp_path, caplog):
    class Failing:
        def ready(self, minimum, most, may_take):
            raise RuntimeError("1234.5")

    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        world.start("a", source=Failing())
        assert [ask(world, 0).kind for _ in range(3)] == ["absent"] * 3
        assert world.daemons["a"].learner.ledger.chain.standing.steps == 0
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        "no round begins: the data source failed (RuntimeError)"
    ]


def test_a_plan_cannot_want_more_clients_than_a_round_takes():
    with pytest.raises(PlanError, match=r"min_clients = 3: expected at most 2, a round's clients"):
        plan_of(federation={"min_clients": 3})


def test_an_absent_reply_with_anything_in_it_is_no_reply():
    key = PrivateKey(b"\x07" * 32)
    said = Reply("absent", "a", "0" * 64, {"records": 3}).sign(key)
    with pytest.raises(ProtocolError, match="unknown form"):
        Reply.read(said, key.public)


def test_what_leaves_is_the_same_with_and_without_the_account(tmp_path, monkeypatch):
    seeds_by_name(monkeypatch)
    left = []
    for kind in ("with", "without"):
        with World(tmp_path / kind, plan_of(learners=1), names=("a",)) as world:
            rows = rows_of(PEOPLE[:9])
            rows[3]["y"] = "perhaps"
            daemon = world.start("a", source=source_of(rows))
            if kind == "with":
                path = tmp_path / "a.local.json"
                daemon.account = LocalAccount(daemon.learner, daemon._source, path=path)
            replies = [ask(world, r) for r in range(5)]
            left.append([(r.kind, r.facts, r.body) for r in replies])
            if kind == "with":
                shown = daemon.account.as_dict()
    assert left[0] == left[1]
    assert [kind for kind, _, _ in left[0]] == ["release"] * 5  # whose record is refused takes a step too
    assert (shown["used"], shown["refused"]) == (8, {"y: unknown label": 1})
    assert (shown["empty_steps"], shown["rounds_left"]) == (1, 1)
    assert shown["score"]["records"] == 8
    assert shown["clipped_share"] == 0.0  # features have norm 1 at most, and so have gradients


def test_an_account_goes_on_after_a_restart_and_is_shown_by_ledger_status(tmp_path):
    import json

    from tests.cli.test_plan import veilstream

    rows = rows_of(PEOPLE[:8])
    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        from veilstream.federation.learner.local_account import account_path

        for life in range(2):
            source = source_of(rows[4 * life : 4 * life + 4])
            daemon = world.start("a", source=source)
            path = account_path(world.store("a"))
            daemon.account = LocalAccount(daemon.learner, source, path=path)
            for r in (2 * life, 2 * life + 1):
                assert ask(world, r).kind == "release"
            daemon.account.save()
            world.stop("a")
        shown = read_account(world.store("a"))
        assert (shown["used"], shown["score"]["records"]) == (8, 8)
        assert path.stat().st_mode & 0o077 == 0
        done = veilstream("ledger", "status", str(world.store("a")))
        assert "Local         8 records used, 0 steps without a client" in done.stdout
        assert "never sent" in done.stdout
        done = veilstream("ledger", "status", str(world.store("a")), "--json")
        assert json.loads(done.stdout)["local"]["used"] == 8


def test_why_rounds_are_sat_out_is_a_notice_while_they_are(tmp_path):
    rows = rows_of(PEOPLE[:4])
    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        source = source_of(rows[:2])
        daemon = world.start("a", source=source)
        account = daemon.account = LocalAccount(daemon.learner, source)
        assert ask(world, 0).kind == "release"
        files = account.as_dict()["notices"]
        assert ask(world, 1).kind == "absent"
        notices = account.as_dict()["notices"]
        assert notices[1:] == files
        assert "has ended: rounds are sat out, and cost nothing" in notices[0]
        assert account.as_dict()["places_left"] == 5 * 2
        daemon._source = account._source = source_of(rows[2:])
        assert ask(world, 1).kind == "release"
        assert account.as_dict()["notices"] == files


def test_the_time_that_is_left_is_counted_from_rounds_and_not_from_the_start(tmp_path):
    """An hour before the first round, then ten seconds a round."""
    now = [0.0]
    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        daemon = world.start("a", source=source_of(rows_of(PEOPLE)))
        account = LocalAccount(daemon.learner, daemon._source, clock=lambda: now[0])
        daemon.account = account
        now[0] = 3600.0
        assert ask(world, 0).kind == "release"
        assert account.as_dict()["seconds_left"] is None
        for r in (1, 2):
            now[0] += 10.0
            assert ask(world, r).kind == "release"
        assert account.as_dict()["rounds_left"] == 3
        assert account.as_dict()["seconds_left"] == 30.0


def test_scores_are_prequential_and_beside_their_baselines():
    """Against counts by hand: labels - + + + -, a model that always says +."""
    score = Score()
    for target in (-1.0, 1.0, 1.0, 1.0, -1.0):
        score.take(1.0, target, classifies=True)
    assert score.shown(classifies=True, unit=1.0) == pytest.approx(
        # majority before each: none, -, - (1 of each: the first seen), +, +
        {"model": 3 / 5, "majority": 1 / 5, "no_change": 2 / 5}
    )
    score = Score()
    for target in (0.0, 0.5, 1.0):
        score.take(0.5, target, classifies=False)
    errors = {"model": (0.25 + 0 + 0.25) / 3, "mean": (0 + 0.25 + 0.5625) / 3, "no_change": (0 + 0.25 + 0.25) / 3}
    assert score.shown(classifies=False, unit=25.0) == pytest.approx(
        {name: 25 * np.sqrt(e) for name, e in errors.items()}
    )


def test_a_model_that_cannot_predict_does_not_stop_a_learner(tmp_path):
    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        daemon = world.start("a", source=source_of(rows_of(PEOPLE)))
        daemon.account = LocalAccount(daemon.learner, daemon._source)
        daemon.learner.task.predict = None
        assert ask(world, 0).kind == "release"
        assert daemon.account.as_dict()["score"]["records"] == 0


def test_a_file_that_is_asked_for_its_end_must_be_one(tmp_path):
    from veilstream.federation.learner.process import LearnerService

    World(tmp_path, plan_of(learners=1), names=("a",)).close()
    service = LearnerService(
        plan_of(learners=1), tmp_path / "keys/learners/a", tmp_path / "a.db", "plan:0", None, end_with_file=True
    )
    with pytest.raises(InputError, match="a file as --data"):
        service.run()
