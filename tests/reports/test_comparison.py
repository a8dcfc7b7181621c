"""Settings of `veilstream plan`: how many people are needed, and noise for people who return."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from veilstream.errors import InputError
from veilstream.mechanisms import Participation, buffered, independent
from veilstream.plans.comparison import Setting, compare
from veilstream.privacy import Budget, calibrate
from veilstream.privacy.guarantee import Order
from veilstream.reports.promise import promise_of

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


@pytest.mark.parametrize(("window", "people"), [(20, 160), (50, 100), (None, 200)])
def test_a_window_uses_nobody_at_first_and_needs_as_many_people_as_its_other_steps_have_places(window, people):
    """By hand: who arrives in one window of W steps is used in the next, m a step, so the first W steps use nobody."""
    setting = replace(SETTING, order=Order.SECRET, window=window, clients_per_step=2)
    steps = range(setting.horizon)
    used_in = [step for step in steps if window is None or step // window >= 1]
    assert setting.people_needed == 2 * len(used_in) == people
    assert setting.steps_with_people == len(used_in)


@pytest.mark.parametrize("window", [4, None])
def test_the_promise_says_of_a_window_that_its_first_uses_nobody_and_its_last_takes_nobody(window):
    _, guarantee = calibrate(Budget(2.0, 1e-3), independent(12), 1.0, order="secret", window=window)
    said = " ".join(promise_of(guarantee, simulated=False)["rests"])
    assert ("The first window of an epoch uses nobody, and its last takes nobody." in said) == (window is not None)
