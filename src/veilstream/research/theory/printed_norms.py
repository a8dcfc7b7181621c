"""The closed forms that the paper prints for the norms of B and C, beside what is true, for T = R·τ steps.

For comparison alone: whatever promises privacy computes its norms from the noise that runs.

eq-bc-logR, for the tree: ‖c‖² <= log2(T) + 1 and ‖b‖² <= log2(T). A prefix sum m uses as
many nodes as m has binary ones. The largest number of ones up to T is floor(log2(T + 1)), reached
at m = 2^k - 1; it is more than log2(T) exactly when T itself is 2^k - 1. Step 1 lies in the nodes
that end at 1, 2, 4, ...: floor(log2 T) + 1 of them when nodes that end after T are left out, and
ceil(log2 T) + 1 in the padded tree that eq-bc draws, which is more than log2(T) + 1 whenever T is
not a power of two.

eq-exmp-iii, for the Toeplitz factorization: both norms <= 1 + ln(4T/5)/π. The true value is
κ(T) = Σ_{j<T} h(j)², which lies about 1/(4πT) below (ln(16T) + γ)/π. Since 1 + ln(4/5)/π = 0.929
is less than (ln 16 + γ)/π = 1.066, the printed bound fails at every T.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from veilstream.mechanisms import Factorization
from veilstream.mechanisms.checks import checked_horizon


class SquaredNorms(NamedTuple):
    """Largest ‖c‖² of the columns of C and largest ‖b‖² of the rows of B, or bounds on them."""

    column: float
    row: float


def largest_norms(factorization: Factorization) -> SquaredNorms:
    """The largest squared norms that a factorization really has, computed from its noise program.

    Args:
        factorization: any mechanism at its horizon.

    Returns:
        The two norms, squared.

    """
    columns, rows = factorization.column_norms_squared(), factorization.row_norms_squared()
    return SquaredNorms(float(columns.max()), float(rows.max()))


def tree_norms(horizon: int, *, padded: bool = False) -> SquaredNorms:
    """What holds for the tree instead of eq-bc-logR, with equality.

    ``padded`` adds the nodes that end after T, as eq-bc draws them; `mechanisms.tree` has none.

    Args:
        horizon: number of steps T = R·τ.
        padded: with the nodes that end after T, as eq-bc draws them; `mechanisms.tree` has none.

    Returns:
        floor(log2 T) + 1, or ceil(log2 T) + 1 when padded, and floor(log2(T + 1)).

    """
    T = checked_horizon(horizon)
    column = (T - 1).bit_length() + 1 if padded else T.bit_length()
    return SquaredNorms(float(column), float((T + 1).bit_length() - 1))


def tree_norms_as_printed(horizon: int) -> SquaredNorms:
    """eq-bc-logR: log2(T) + 1 and log2(T), each too small for some T (see the top of this file).

    Args:
        horizon: number of steps T = R·τ.

    Returns:
        The printed bounds.

    """
    logarithm = math.log2(checked_horizon(horizon))
    return SquaredNorms(logarithm + 1, logarithm)


def toeplitz_norms(horizon: int) -> SquaredNorms:
    """What holds for the Toeplitz factorization instead of eq-exmp-iii: (ln(16T) + γ)/π, twice.

    An upper bound at every T, and sharp: what it has too much falls to 0 like 1/(4πT). From T to
    T + 1 the excess changes by (ln(1 + 1/T) - π·h(T)²)/π. That is negative, since
    ln(1 + 1/T) <= 1/sqrt(T² + T) and π·h(T)² > 1/(T + 1/4 + 1/(32T)), of which the last denominator
    is the smaller one; and an excess that falls to 0 is positive.

    Args:
        horizon: number of steps T = R·τ.

    Returns:
        The bounds.

    """
    value = (math.log(16 * checked_horizon(horizon)) + float(np.euler_gamma)) / math.pi
    return SquaredNorms(value, value)


def toeplitz_norms_as_printed(horizon: int) -> SquaredNorms:
    """eq-exmp-iii: 1 + ln(4T/5)/π for both. Below the true norm at every T.

    Args:
        horizon: number of steps T = R·τ.

    Returns:
        The printed bounds.

    """
    value = 1 + math.log(0.8 * checked_horizon(horizon)) / math.pi
    return SquaredNorms(value, value)
