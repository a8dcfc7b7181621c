"""Which records come before which, by the plan's column `time`."""

from __future__ import annotations

import re

from veilstream.records.schema import as_number, as_text, is_missing

_SORTS_AS_TEXT = re.compile(r"\d{4}-\d{2}(-\d{2}.*)?|\d{2}:\d{2}.*")


def time_of(cell: object, *, decimal_comma: bool = False) -> float | str | None:
    """A cell as what orders records: a number, else text; None for an empty one."""
    if is_missing(cell):
        return None
    number = as_number(cell, decimal_comma=decimal_comma)
    return as_text(cell) if number is None else number


class TimeOrder:
    """Counts records that come before the one above them."""

    def __init__(self) -> None:
        self._last: dict[str, float | str] = {}
        self.unordered = 0
        self.by_letters = False
        """Whether some time is a text that does not sort as it is meant."""

    def add(self, learner: str, when: float | str) -> None:
        """The next record of a learner."""
        last = self._last.get(learner)
        if isinstance(when, str):
            self.by_letters |= _SORTS_AS_TEXT.fullmatch(when) is None
        if last is not None:
            alike = isinstance(last, str) == isinstance(when, str)
            self.unordered += alike and when < last  # type: ignore[operator]
        self._last[learner] = when
