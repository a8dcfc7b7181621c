"""Independent noise: C = I, B = A. The baseline (eqn:indp)."""

from __future__ import annotations

import numpy as np

from veilstream.mechanisms.checks import checked_horizon
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.steps import ConstantSteps


def independent(horizon: int) -> Factorization:
    """Fresh noise at every step: sensitivity 1, and an error that grows with the horizon.

    Args:
        horizon: number of steps T = R·τ.

    Returns:
        The factorization, with its noise program.

    Raises:
        InputError: for a horizon that is not a whole number from 1.

    """
    T = checked_horizon(horizon)
    none = np.zeros(0)
    return Factorization("independent", T, ConstantSteps(np.zeros((0, 0)), none, none, 1.0))
