"""Settings of `veilstream plan`: how many people are needed, and noise for people who return."""

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


@pytest.mark.parametrize(("visits", "apart"), [(1, 1), (2, 1), (2, 30), (5, 7), (3, 10)])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_the_people_needed_are_the_fewest_who_fill_every_step_in_turn(visits, apart, together):
    needed = replace(SETTING, clients_per_step=together, participation=Participation(visits, apart)).people_needed
    assert steps_by_hand(needed, visits, apart, together, 100) == 100
    assert steps_by_hand(needed - 1, visits, apart, together, 100) < 100


def test_buffers_are_tuned_for_people_who_return_as_in_a_run():
    part = Participation(3, 20)
    setting = replace(SETTING, participation=part)
    row = next(row for row in compare(setting).rows if row.title == "buffered, published")
    run = buffered(100, objective="mean", participation=part)
    assert row.sensitivity == pytest.approx(run.sensitivity(part), rel=1e-12)


def test_noise_beyond_the_range_of_floats_is_refused():
    with pytest.raises(InputError, match="noise std"):
        compare(replace(SETTING, budget=Budget(1e-200, 1e-300)), ["independent"])
