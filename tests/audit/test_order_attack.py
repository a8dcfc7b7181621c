"""The attack on a secret order, in short; `python -m studies.order_attack` is the long form."""

from __future__ import annotations

import pytest
from studies.mutations import order_bugs
from studies.order_attack import WAYS, attack


@pytest.mark.parametrize("way", WAYS)
def test_one_record_is_guessed_as_often_as_the_law_has_it_and_rounds_look_alike(way):
    """40 learners; false alarm 3e-4: 3.5 standard errors of a share. Lengths, writes and work are compared exactly."""
    found, _ = attack(way, 40)
    assert found.unlike == 0
    assert found.within


def test_a_round_whose_work_is_not_filled_up_is_noticed():
    """Eight learners of ten rounds, of which at least two differ: missed with probability below 1e-9."""
    with order_bugs.PLANTED["time tells the count"]():
        found, _ = attack("still", 8)
    assert found.unlike > 0
    assert not found.within


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_record_of_400_learners(way):
    """False alarm 3e-4. Told the step, the attack is right in 0.83 of runs instead of 0.66: missed in below 1e-6."""
    found, _ = attack(way, 400)
    assert found.within
    assert found.notices
