"""Who is measured on: nobody is on both sides, and a split by time measures on what came last."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from veilstream.streams.held_out import parted


class Visit(NamedTuple):
    client: str
    when: int


def visits(*clients: str) -> list[Visit]:
    return [Visit(client, place) for place, client in enumerate(clients)]


def clients(part) -> set[str]:
    return {visit.client for own in part.values() for visit in own}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=60), min_size=1, max_size=3),
    st.floats(0.01, 0.9),
    st.sampled_from(["time", "people"]),
)
def test_nobody_is_on_both_sides_and_no_record_is_in_both(learners, share, by):
    rows = {f"l{i}": visits(*(f"{i}:{c}" for c in own)) for i, own in enumerate(learners)}
    parts = parted(rows, share, by)
    assert not clients(parts.learned) & clients(parts.held_out)
    for name, own in rows.items():
        assert set(parts.learned[name]) | set(parts.held_out[name]) <= set(own)
        if parts.by == "time" and parts.held_out[name]:
            assert max(v.when for v in parts.learned[name]) < min(v.when for v in parts.held_out[name])


def test_the_last_fifth_of_each_learner_is_held_out():
    rows = {"a": visits(*map(str, range(10))), "b": visits(*map(str, range(100, 120)))}
    parts = parted(rows, 0.2, "time")
    assert [v.when for v in parts.held_out["a"]] == [8, 9]
    assert [v.when for v in parts.held_out["b"]] == [16, 17, 18, 19]
    assert (parts.by, parts.notices) == ("time", ())


def test_later_visits_of_people_who_were_learned_from_are_in_neither_part_and_that_is_said():
    rows = {"a": visits(*"abcdefgh", "a", "z")}
    parts = parted(rows, 0.2, "time")
    assert [v.client for v in parts.held_out["a"]] == ["z"]
    assert len(parts.learned["a"]) == 8
    assert "1 of those 2 are of people who were learned from before" in parts.notices[0]


def test_where_everyone_returns_people_are_held_out_and_that_is_said():
    rows = {"a": visits(*"abcdefghij" * 10)}
    parts = parted(rows, 0.3, "time")
    assert parts.by == "people"
    assert clients(parts.learned) | clients(parts.held_out) == set("abcdefghij")
    assert "held out by people, not by time: of the 30 records at the end, 30" in parts.notices[0]


def test_a_share_of_nothing_holds_nobody_out():
    for by in ("time", "people"):
        parts = parted({"a": visits("x", "y")}, 0.0, by)
        assert clients(parts.learned) == {"x", "y"}
        assert not clients(parts.held_out)


def test_one_record_is_learned_from_whatever_the_share():
    assert len(parted({"a": visits("x", "y")}, 0.9, "time").learned["a"]) == 1
