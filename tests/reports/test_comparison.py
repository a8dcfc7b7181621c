"""Settings of `veilstream plan`: who is needed, and how far those who are there suffice."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from veilstream.errors import InputError
from veilstream.mechanisms import Participation, buffered
from veilstream.plans.comparison import Setting, compare
from veilstream.privacy import Budget

SETTING = Setting(budget=Budget(1.0, 1e-5), rounds=100, local_steps=1, clip_norm=1.0)


def steps_by_hand(people: int, visits: int, apart: int, together: int, horizon: int) -> int:
    """A queue: whoever has waited longest goes first; a step that cannot be filled is the end."""
    queue = deque((-apart, 0) for _ in range(people))  # last step, visits so far
    for step in range(horizon):
        for _ in range(together):
            if not queue or step - queue[0][0] < apart:
                return step
            _, count = queue.popleft()
            if count + 1 < visits:
                queue.append((step, count + 1))
    return horizon


@pytest.mark.parametrize("people", [1, 3, 7, 10, 29, 30, 31, 60])
@pytest.mark.parametrize(("visits", "apart"), [(1, 1), (2, 1), (2, 30), (5, 7), (3, 10)])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_people_suffice_for_as_many_steps_as_taking_them_in_turn(people, visits, apart, together):
    setting = replace(SETTING, people=people, clients_per_step=together, participation=Participation(visits, apart))
    taken = steps_by_hand(people, visits, apart, together, 10_000)
    assert setting.steps_in_reach == taken
    assert (setting.shortage is None) == (taken >= setting.horizon)
    if setting.shortage is not None and people >= together:
        assert f"They suffice for {taken} step" in setting.shortage
    needed = setting.people_needed
    assert steps_by_hand(needed, visits, apart, together, 100) == 100
    assert steps_by_hand(needed - 1, visits, apart, together, 100) < 100


def test_buffers_asked_for_by_name_are_tuned_for_people_who_return_as_in_a_run():
    part = Participation(3, 20)
    setting = replace(SETTING, participation=part)
    options = {"workload": setting.published, "participation": part}
    (row,) = compare(setting, ["buffered"], options=options).rows
    run = buffered(100, workload=setting.published, participation=part)
    assert row.sensitivity == pytest.approx(run.sensitivity(part), rel=1e-12)


def test_noise_beyond_the_range_of_floats_is_refused():
    with pytest.raises(InputError, match="noise std"):
        compare(replace(SETTING, budget=Budget(1e-200, 1e-300)), ["independent"])
