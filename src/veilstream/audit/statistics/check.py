"""A check: one hypothesis that correct code fulfils, and how well what was seen agrees with it.

Figures are lower bounds at `CONFIDENCE`. All tests of one audit of correct code together raise an
*alarm* with probability at most `FALSE_ALARMS`, so a bound above the claim is not yet an alarm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CONFIDENCE = 0.99
FALSE_ALARMS = 1e-6


@dataclass(frozen=True)
class Check:
    """The outcome of one test.

    Guarantees: for correct code, P(``p`` <= x) <= x for every x.
    """

    name: str
    p: float
    figure: str
    means: str
    """What it means if the p-value is small."""

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {"check": self.name, "p": self.p, "figure": self.figure}


def alarming(checks: Iterable[Check], false_alarms: float = FALSE_ALARMS) -> tuple[Check, ...]:
    """Those that raise an alarm: on correct code, any at all with probability ``false_alarms``."""
    every = tuple(checks)
    return tuple(check for check in every if check.p * len(every) < false_alarms)
