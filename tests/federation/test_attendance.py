"""A learner that is away costs a round its grace once, says since when and why, and is welcome back."""

from __future__ import annotations

import time

import pytest

from tests.support.federation import Lines, World, plan_of, wait_for
from veilstream.federation.server.attendance import LOST, NO_CLIENTS, NOT_SEEN, Absence, Attendance


@pytest.fixture
def time_now():
    return [100.0]


def attendance(now, grace_s=5.0, first_s=60.0):
    return Attendance(["a", "b"], grace_s, first_s, lambda: now[0], lambda: 1e9 + now[0])


def test_the_grace_counts_once_from_the_moment_a_connection_ended(time_now):
    here = attendance(time_now)
    here.look({"a", "b"})
    time_now[0] = 200.0
    assert here.look({"a"}).away == []
    assert here.absences == {"b": Absence(1e9 + 200.0, LOST)}
    time_now[0] = 204.9
    assert here.look({"a"}).away == []
    time_now[0] = 205.0
    assert here.look({"a"}).away == ["b"]
    assert here.away == {"b"}
    time_now[0] = 5000.0
    assert here.look({"a"}).away == [], "it is said once"
    assert here.away == {"b"}, "later rounds do not wait again"
    assert here.absences["b"].since == 1e9 + 200.0
    assert here.look({"a", "b"}).back == [("b", 4800.0)]
    assert not here.away
    assert not here.absences


def test_a_short_break_is_no_absence(time_now):
    here = attendance(time_now)
    here.look({"a", "b"})
    here.look({"a"})
    time_now[0] += 4.0
    found = here.look({"a", "b"})
    assert (found.away, found.back, here.absences) == ([], [], {})


def test_one_that_was_never_seen_is_waited_for_as_long_as_a_round_may_last(time_now):
    here = attendance(time_now)
    here.look({"a"})
    time_now[0] += 59.0
    assert here.look({"a"}).away == []
    assert here.absences["b"].why == NOT_SEEN
    time_now[0] += 1.0
    assert here.look({"a"}).away == ["b"]


def test_a_reason_keeps_its_time_until_the_learner_takes_part(time_now):
    here = attendance(time_now)
    here.look({"a", "b"})
    here.absent("a", NO_CLIENTS)
    time_now[0] += 50.0
    here.absent("a", NO_CLIENTS)
    assert here.look({"a", "b"}).back == []
    assert here.absences == {"a": Absence(1e9 + 100.0, NO_CLIENTS)}
    here.took_part("a")
    assert not here.absences


def test_rounds_go_on_without_a_learner_that_is_away_and_with_it_when_it_is_back(tmp_path):
    """Each round would last its deadline otherwise: 8 rounds of 20 seconds."""
    rounds = 60
    plan = plan_of(rounds, federation={"quorum": 0.5, "deadline_s": 20.0, "patience_s": 0.1, "grace_s": 0.5})
    with World(tmp_path, plan).start_all() as world:
        lines = Lines("veilstream.federation.server.coordinator")
        transport, coordinator = world.transport(), world.coordinator()
        coordinator.go(transport, 4)
        world.stop("c")
        began = time.monotonic()
        coordinator.go(transport, 12)
        assert time.monotonic() - began < 15.0
        assert coordinator.fold.seats["c"].round <= 5
        assert coordinator.absences["c"].why == LOST
        world.start("c")
        wait_for(lambda: "c" in world.transport().nodes())
        coordinator.go(transport)
        seats = coordinator.fold.seats
        assert seats["a"].round == seats["b"].round == rounds
        assert seats["c"].round > 12 - 8
        assert "c" not in coordinator.absences
        lines.end()
    (away,) = [line for line in lines if "away" in line]
    assert away == ("learner c is away (its connection ended): rounds no longer wait for it, and its weight stays 1/n")
