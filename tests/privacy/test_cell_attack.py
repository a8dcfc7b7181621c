"""Cells have the Gaussian's own probabilities: knowing float32 helps no adversary any more."""

from __future__ import annotations

import pytest
from studies.cell_attack import attack, planted, study

RUNS = 60


@pytest.mark.parametrize("mechanism", ["buffered", "optimal"])
def test_the_first_clients_gradient_is_told_no_more_often_than_promised(mechanism):
    """False alarms: 0.1% over both, by Clopper and Pearson's bound."""
    case = attack(mechanism, 1, 0, RUNS)
    assert not case.surely_more(tests=4), case


def test_the_attack_tells_it_nearly_always_from_float32_noise():
    with planted():
        case = attack("buffered", 1, 0, RUNS)
    assert case.surely_more(tests=4), case
    assert case.fine >= 0.8 * RUNS, case  # 95% seen; the promise allows 61%


@pytest.mark.slow
def test_no_client_of_any_mechanism_is_told_more_often_than_promised():
    from veilstream.mechanisms import MECHANISMS

    cases = study(400, list(MECHANISMS))
    assert not [case for case in cases if case.surely_more(tests=2 * len(cases))]
