"""One cell of a table: as text, as a number, as a time, or missing."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MISSING_TEXTS = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
_NUMBERS_OR_TEXT = frozenset({int, float, str})
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(\.\d{3})+(,\d*)?")
_ZONE = re.compile(r".*?\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?\s*(Z|UTC|GMT|[-+]\d{2}(?::?\d{2})?)?", re.IGNORECASE)
_DAY_FIRST = re.compile(r"(0?[1-9]|[12]\d|3[01])\.(0?[1-9]|1[0-2])\.(\d{4})((?:,? |T)\d.*)?")
_YEAR_FIRST = re.compile(r"(\d{4})[/.](0?[1-9]|1[0-2])[/.](0?[1-9]|[12]\d|3[01])((?:,? |T)\d.*)?")
_SORTS_AS_TEXT = re.compile(r"\d{4}-\d{2}(-\d{2}.*)?|\d{2}:\d{2}.*")


def as_text(value: object) -> str:
    """A cell as text, in one form: 3, 3.0 and "3" are the same."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, bool | np.bool_):
        return "1" if value else "0"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return unicodedata.normalize("NFC", str(value)).strip()


def is_missing(value: object) -> bool:
    """Whether a cell is empty, NaN, or a word for that."""
    if value is None:
        return True
    if isinstance(value, float | np.floating):
        return math.isnan(value)
    return isinstance(value, str) and value.strip().lower() in MISSING_TEXTS


def as_number(value: object, *, decimal_comma: bool = False) -> float | None:
    """A cell as a finite number, or None; true and false are not numbers."""
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, str):
        text = value.strip()
        if decimal_comma and "." in text and has_thousands(text):
            if "," not in text:
                return None  # see `has_two_readings`
            text = text.replace(".", "")
        if decimal_comma and "," in text and "." not in text and text.count(",") == 1:
            text = text.replace(",", ".")
        if "_" in text:  # 1_000 is a number in Python only
            return None
        value = text
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def has_thousands(text: str) -> bool:
    """Whether points cut a number into thousands: 1.300 or 1.300,50."""
    return _THOUSANDS.fullmatch(text) is not None


def has_two_readings(value: object, *, decimal_comma: bool) -> bool:
    """Whether a cell is 1.300 where commas are decimal: 1.3 to some programs, 1300 to others."""
    return decimal_comma and isinstance(value, str) and "," not in value and has_thousands(value.strip())


def plain_numbers(cells: Sequence[object], *, decimal_comma: bool = False) -> NDArray[np.float64] | None:
    """`as_number` of each cell, at less cost; None where not all of them are plainly numbers."""
    if decimal_comma or not set(map(type, cells)) <= _NUMBERS_OR_TEXT:
        return None
    plain: Any = cells
    try:
        numbers = np.fromiter(map(float, plain), np.float64, len(cells))
    except (ValueError, OverflowError):
        return None
    if "_" in "".join(cell for cell in plain if type(cell) is str) or not np.isfinite(numbers).all():
        return None
    return numbers


def as_numbers(cells: Sequence[object], *, decimal_comma: bool = False) -> NDArray[np.float64]:
    """`as_number` of each cell; NaN for a cell that is none."""
    numbers = plain_numbers(cells, decimal_comma=decimal_comma)
    if numbers is None:
        found = (None if is_missing(cell) else as_number(cell, decimal_comma=decimal_comma) for cell in cells)
        numbers = np.array([math.nan if number is None else number for number in found], np.float64)
    return numbers


def with_decimal_point(value: object) -> object:
    """A number written with a decimal comma gets a point, one with two readings is none any more."""
    if has_two_readings(value, decimal_comma=True):
        return f"{value}?"
    if isinstance(value, str) and "," in value:
        number = as_number(value, decimal_comma=True)
        return value if number is None else value.replace(".", "").replace(",", ".")
    return value


def time_of(cell: object, *, decimal_comma: bool = False) -> float | str | None:
    """A cell of the plan's column `time`: a number, else text; None for an empty one.

    Dates that can be read in one way only become texts that sort: 31.1.2026 and 2026/1/31 are 2026-01-31.
    """
    if is_missing(cell):
        return None
    number = as_number(cell, decimal_comma=decimal_comma)
    if number is not None:
        return number
    text = as_text(cell)
    if date := _DAY_FIRST.fullmatch(text):
        return f"{date[3]}-{date[2]:0>2}-{date[1]:0>2}{_clock(date[4])}"
    if date := _YEAR_FIRST.fullmatch(text):
        return f"{date[1]}-{date[2]:0>2}-{date[3]:0>2}{_clock(date[4])}"
    return text


def _clock(text: str | None) -> str:
    """9:05 and T09:05 as 09:05, behind a space; nothing where there is none."""
    told = (text or "").strip(" ,T")
    return f" {told:0>5}" if re.fullmatch(r"\d:\d\d", told[:4]) and len(told) == 4 else f" {told}" if told else ""


_UTC = dict.fromkeys(("Z", "UTC", "GMT", "+00", "+0000", "+00:00", "-00:00"), "UTC")


class TimeOrder:
    """Counts records that are earlier than their learner's record before."""

    def __init__(self) -> None:
        self._last: dict[str, float | str] = {}
        self.unordered = 0
        self.by_letters = False  # whether some time is a text that does not sort as time
        self.zones: Counter[str] = Counter()  # of times that are text; "" for one without

    def add(self, learner: str, when: float | str) -> None:
        """The next record of a learner."""
        last = self._last.get(learner)
        if isinstance(when, str):
            self.by_letters |= _SORTS_AS_TEXT.fullmatch(when) is None
            if zoned := _ZONE.fullmatch(when):
                self.zones[_UTC.get((zone := zoned[1] or "").upper(), zone)] += 1
        if last is not None:
            alike = isinstance(last, str) == isinstance(when, str)
            self.unordered += alike and when < last  # type: ignore[operator]
        self._last[learner] = when

    def remark_on_zones(self, column: str) -> list[str]:
        """A notice if times of several zones would be ordered by their letters; else none."""
        if len(self.zones) < 2:
            return []
        shown = ", ".join(f"{zone or 'none'} {count}" for zone, count in self.zones.most_common(6))
        return [
            f"the times in {column} have {len(self.zones)} time zones ({shown}), and are ordered by their letters: "
            "12:00+02:00 is then after 11:00Z. Write all of them in UTC"
        ]
