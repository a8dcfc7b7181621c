"""Was noise used twice? Epoch against epoch, and any two rounds of all learners of an audit.

Rows of whitened residuals (one message, d coordinates) are independent standard normal vectors,
whichever learner, epoch and round they are of. So the correlation of any two has a Beta law over d
coordinates. A seed that comes again, be it derived or drawn from too few, shows as a pair of rows
with correlation one; noise that is partly shared shows as less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import correlation_p
from veilstream.errors import InputError

Floats = NDArray[np.float64]


def epoch_against_epoch(epochs: Sequence[Floats]) -> Check:
    """Judge (R, d) whitened residuals of the epochs of one learner, each against each.

    Every round of one against every round of another, and all of one against all of the other at
    once: noise that repeats in part shows in the sum.
    """
    if len(epochs) < 2:
        raise InputError("epochs", len(epochs), "at least two", "one has nothing to be compared to")
    tests, worst, words = 0, 1.0, ""
    for a in range(len(epochs)):
        for b in range(a):
            one, other = epochs[b], epochs[a]
            rows = _unit(one) @ _unit(other).T
            at = np.unravel_index(int(np.argmax(np.abs(rows))), rows.shape)
            whole = float(_unit(one.reshape(1, -1))[0] @ _unit(other.reshape(1, -1))[0])
            for p, said in (
                (
                    rows.size * float(correlation_p(rows[at], one.shape[1])),
                    f"round {at[0]} of epoch {b} and {at[1]} of epoch {a}: {rows[at]:+.2f}",
                ),
                (float(correlation_p(whole, one.size)), f"all of epochs {b} and {a}: {whole:+.3f}"),
            ):
                tests += 1
                if not words or p < worst:
                    worst, words = p, said
    p = min(1.0, tests * worst)
    return Check(
        "second epoch against the first", p, f"largest correlation, {words}", "an epoch repeats the noise of another"
    )


def repeated_rows(rows: Floats) -> Check:
    """Judge (n, d) whitened residuals, a row for every message of every learner in an audit.

    n rows find seeds of b bits with probability about 1 - exp(-n²/2^(b+1)): a birthday.
    """
    n, d = rows.shape
    unit = _unit(rows)
    gram = unit @ unit.T
    np.fill_diagonal(gram, 0.0)
    at = np.unravel_index(int(np.argmax(np.abs(gram))), gram.shape)
    pairs = n * (n - 1) // 2
    p = min(1.0, pairs * float(correlation_p(gram[at], d)))
    return Check(
        "noise of different steps",
        p,
        f"{pairs:,} pairs of {n} messages: largest correlation {gram[at]:+.2f}",
        "two steps have the same noise",
    )


def _unit(rows: Floats) -> Floats:
    unit: Floats = rows / np.sqrt((rows**2).sum(axis=1, keepdims=True)).clip(min=1e-300)
    return unit
