"""The attack on opened sums: within the promise at h, and within the floor with fewer."""

from __future__ import annotations

import pytest
from studies.sum_attack import attack, terms_of


def test_sums_of_two_learners_give_a_client_away_no_more_than_was_promised():
    """120 pairs: false alarm 3e-4 an assertion; power: without one learner's noise, μ̂ lies 7 standard errors higher."""
    terms = terms_of(2)
    whole, one_fewer = attack(terms, 2, 120), attack(terms, 1, 120)
    assert whole.within
    assert whole.mu > whole.promised - 3.5 * whole.error, "the best test comes up to the promise"
    assert one_fewer.within, "the floor holds"
    assert one_fewer.mu > whole.promised


@pytest.mark.slow
@pytest.mark.parametrize("honest", [2, 8])
def test_sums_of_400_pairs(honest):
    terms = terms_of(honest)
    assert attack(terms, honest).within
    assert attack(terms, honest - 1).within
