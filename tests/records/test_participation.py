"""Who may take a step: the one rule, against every pattern of visits by definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from veilstream.mechanisms.participation import Participation
from veilstream.records.participation import Epochs, PastVisits, VisitsInMemory, spent

SOME = Participation(2, 3)


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40))
def test_nobody_is_taken_more_often_or_sooner_than_allowed_and_everyone_else_is(times, apart, arrivals):
    """Arrivals are (client, steps since the last arrival)."""
    visits, step = VisitsInMemory(Participation(times, apart)), 0
    taken: dict[str, list[int]] = {}
    for number, wait in arrivals:
        step += wait
        client = str(number)
        own = taken.setdefault(client, [])
        may = len(own) < times and all(step - before >= apart for before in own)
        assert (visits.take(client, step) is None) == may
        own += [step] if may else []


def test_a_client_of_another_epoch_is_spent_however_long_ago():
    assert spent([PastVisits(0, 1, 1)], 99, SOME, Epochs(1)) == "other epoch"
    assert spent([PastVisits(1, 1, 1)], 99, SOME, Epochs(1)) is None


def test_a_person_is_in_as_many_epochs_as_the_plan_grants_of_those_on_the_same_terms():
    two = Epochs(now=5, a_person=2, alike_since=3)
    assert spent([PastVisits(4, 90, 2)], 0, SOME, two) is None  # visits of an earlier epoch are no visits here
    assert spent([PastVisits(4, 90, 2, 2, 3)], 0, SOME, two) == "other epoch"  # two epochs before this one
    assert spent([PastVisits(5, 3, 1, 2, 4)], 9, SOME, two) is None  # one before, and this one
    assert spent([PastVisits(5, 3, 2, 2, 4)], 9, SOME, two) == "too often"
    assert spent([PastVisits(5, 8, 1, 2, 4)], 9, SOME, two) == "too soon"
    assert spent([PastVisits(2, 90, 1)], 0, SOME, two) == "other epoch"  # other terms: their epsilon is not counted
    assert spent([PastVisits(5, -1, 1)], 9, SOME, two) == "other epoch"  # carried over: in how many is not known


def test_visits_under_all_tags_of_a_client_count_together():
    assert spent([PastVisits(0, 1, 1), PastVisits(0, 5, 1)], 50, SOME) == "too often"
    assert spent([PastVisits(0, 1, 1)], 3, SOME) == "too soon"
    assert spent([PastVisits(0, 1, 1)], 4, SOME) is None
    assert spent([], 0, SOME) is None
