"""Learners whose records arrive while the epoch runs and are used in the next window: daemons, files, callers."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.federation.test_secret_order import people_of, secret_plan, write_csv, write_json, write_sqlite
from tests.support.federation import DIM, Plain, World, connect_here, rows_of, wait_for
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.ledger.store import Ledger
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.learner_api import LearnerApi
from veilstream.federation.learner.local_account import LocalAccount
from veilstream.federation.learner.process import LearnerService
from veilstream.federation.learner.reply_times import SEAL_S, SLOT_S
from veilstream.plans.data_source import open_file, open_source
from veilstream.records.admission import Answer
from veilstream.streams.waiting_source import LiveSource

ROUNDS, TAU, MANY, WINDOW = 6, 2, 3, 4
A_ROUND = TAU * MANY
PATIENCE_S = 0.4


def window_plan(learners: int = 1, **changes):
    learning = {"clients_per_step": MANY} | changes.pop("learning", {})
    federation = {"patience_s": PATIENCE_S, "deadline_s": 60.0, "min_clients": None} | changes.pop("federation", {})
    return secret_plan(
        ROUNDS, learners, privacy={"window": WINDOW}, learning=learning, federation=federation, **changes
    )


def run_of(world: World) -> None:
    coordinator = world.coordinator()
    coordinator.go(world.transport())
    assert coordinator.finished


def visits_in(store: Path) -> list[tuple[bytes, int]]:
    with Ledger(store) as ledger:
        return [visit for record in ledger.records() for visit in record.visits]


WRITE = {"people.csv": write_csv, "people.jsonl": write_json, "people.sqlite": write_sqlite}


@pytest.mark.parametrize("name", WRITE)
def test_a_table_is_read_a_round_at_a_time_up_to_the_last_window(name, tmp_path):
    data = tmp_path / name
    WRITE[name](data, people_of(40))
    with World(tmp_path, window_plan(), ("a",)) as world:
        world.start("a", source=open_file(data, world.plan), min_clients=A_ROUND)
        run_of(world)
        status = verify(world.store("a"))
        assert (status.round, status.clients) == (ROUNDS, 4 * A_ROUND)
    assert {step for _, step in visits_in(world.store("a"))} == {0}
    with Learner(world.plan, world.store("a"), Plain()) as learner:  # day two: the rows that are left
        learner.new_epoch()
        source = open_file(data, world.plan)
        source.resume(learner.bookmarks())
        learner.begin_round(0, np.zeros(DIM, np.float32))
        source.serve(0, learner.observe_many, lambda: learner.clients_wanted)
        learner.finish_round()
    assert verify(world.store("a")).clients == 5 * A_ROUND


def test_rounds_go_on_while_somebody_waits_and_are_sat_out_when_nobody_does(tmp_path):
    """The file ends after two rounds; its people are used in the next window, and then it ends with its file."""
    data = tmp_path / "people.csv"
    write_csv(data, people_of(A_ROUND + 2))
    plan = window_plan()
    with World(tmp_path, plan, ("a",)) as world:
        learner = Learner(plan, world.store("a"), Plain(), create=True)
        source = open_file(data, plan, whole=True)
        source.least_at_last = 1
        daemon = Daemon(learner, world.keys_of("a"), source, replies="when done", min_clients=A_ROUND)
        began = []
        for r in range(ROUNDS):
            assert not daemon.file_has_ended() or r >= 4
            began.append(daemon.wait_here())
            if not began[-1]:
                break
            learner.begin_round(r, np.zeros(DIM, np.float32))
            daemon.take(r)
            learner.finish_round()
        assert began == [True] * 4 + [False]
        assert learner.ledger.chain.visits.value().count == A_ROUND + 2
        assert daemon.takes_nobody is not None
        daemon.close()


def endless(consumed: int):
    yield from rows_of([f"p{i}" for i in range(consumed, consumed + 500)])


def test_a_function_is_read_a_round_at_a_time_and_its_last_records_wait_for_the_next_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.federation.test_windows.endless", endless, raising=False)
    with World(tmp_path, window_plan(), ("a",)) as world:
        source = open_source(f"{__name__}:endless", world.plan, "a")
        from veilstream.federation.learner.source_start import resume_source

        daemon = world.start("a", source=source, min_clients=A_ROUND, replies="when done")
        resume_source(source, daemon.learner, "a")
        run_of(world)
        assert verify(world.store("a")).clients == 4 * A_ROUND
        (mark,) = daemon.learner.bookmarks()
        assert mark.text == str(4 * A_ROUND)


def test_callers_are_told_that_they_are_used_within_the_next_window_and_never_when(tmp_path, caplog):
    """By the learner API, beside a server that asks for rounds; the last window takes nobody and says so (410)."""
    caplog.set_level(logging.INFO)
    plan = window_plan()
    with World(tmp_path, plan, ("a",)) as world:
        source = LiveSource(plan.federation.patience_s)
        learner = Learner(plan, world.store("a"), Plain(), create=True)
        account = LocalAccount(learner, source)
        daemon = Daemon(learner, world.keys_of("a"), source, replies="when done", account=account)
        world.daemons["a"], world.handlers["a"] = daemon, daemon.handle
        api = LearnerApi(daemon, source, ("127.0.0.1", 0), "t" * 43)
        answers: list[tuple[int, dict]] = []

        def call() -> None:
            with httpx.Client(base_url=f"http://127.0.0.1:{api.port}", trust_env=False) as http:
                http.headers["Authorization"] = "Bearer " + "t" * 43
                for row in people_of(60):
                    reply = http.post("/observe", json={"record": row}, timeout=30)
                    answers.append((reply.status_code, reply.json()))
                    if reply.status_code == 410:
                        return

        caller = threading.Thread(target=call)
        caller.start()
        run_of(world)
        caller.join(30)
        api.close()
        taken = [body for status, body in answers if status == 200]
        assert taken
        assert all(body == {"answer": "taken", "used": "within the next window"} for body in taken)
        assert answers[-1][0] == 410
        assert "last window" in answers[-1][1]["why"] or "has ended" in answers[-1][1]["why"]
        assert {status for status, _ in answers} == {200, 410}
        assert verify(world.store("a")).clients == len(taken)
        assert account.counts.used == len(taken)
        assert account.counts.empty_steps == 0
        assert "window 1 of 3: 0 people" in caplog.text
        assert "nobody is taken any more" in caplog.text


def test_replies_leave_at_a_time_that_was_fixed_before_the_first_round(tmp_path):
    """After the time in which people may call, and several times a full window's work; also after a restart in a
    round."""
    plan = window_plan()
    with World(tmp_path, plan, ("a",)) as world:
        for _ in range(2):
            source = LiveSource(plan.federation.patience_s)
            daemon = world.start("a", source=source)
            people = [source.offer for _ in range(3)]
            threads = [threading.Thread(target=offer, args=(f"q{i}", None)) for i, offer in enumerate(people)]
            for thread in threads:
                thread.start()
            if not daemon.learner.pinned:
                wait_for(lambda source=source: source.waiting == 3)
                assert daemon.wait_here()
                daemon.learner.begin_round(0, np.zeros(DIM, np.float32))
            else:
                with daemon.turn(0):
                    pass
            assert daemon._replies.after_s >= PATIENCE_S + SEAL_S + SLOT_S
            assert daemon._replies.late_slot_s == SLOT_S
            source.release()
            for thread in threads:
                thread.join()
            world.stop("a")


def test_live_sources_and_functions_of_the_command_are_taken_with_a_window(tmp_path):
    """`veilstream learner --data live`: its service opens, takes callers, and answers a server's rounds."""
    plan = window_plan()
    world = World(tmp_path, plan, ("a",))
    service = LearnerService(
        plan,
        tmp_path / "keys/learners/a",
        world.store("a"),
        "live",
        ("127.0.0.1", 1),
        new_store=True,
        task=Plain(),
        reply_after_s=PATIENCE_S,
    )
    connect_here(service, world.handlers)
    stop, sources = threading.Event(), []
    opened = LiveSource.__init__

    def remembered(self, *given, **more):
        opened(self, *given, **more)
        sources.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LiveSource, "__init__", remembered)
        thread = threading.Thread(target=service.run, args=(stop,))
        thread.start()
        wait_for(lambda: "a" in world.handlers and sources, 30)
    done, told = threading.Event(), []

    def call() -> None:
        for i in range(200):
            if done.is_set():
                return
            told.append(sources[0].offer(f"p{i}", None, 2.0))

    caller = threading.Thread(target=call)
    caller.start()
    run_of(world)
    done.set()
    caller.join(30)
    stop.set()
    thread.join(30)
    world.close()
    status = verify(world.store("a"))
    assert status.round == ROUNDS
    assert status.clients == told.count(Answer.REFUSED) > 0
