"""One client's record as the learning algorithm takes it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sample(NamedTuple):
    """One client's record, or arrays of many."""

    features: Any
    target: Any
    present: Any = None
    """1 where there is a client, 0 where its learner met none: a zero gradient, with its noise."""

    def __repr__(self) -> str:
        return "Sample(<hidden>)"  # people's data, not for logs
