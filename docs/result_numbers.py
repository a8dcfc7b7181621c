"""Whether the numbers that a page shows are in a stored file, to the digits that are shown."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["MOST", "Shown", "missing", "numbers_of_file", "shown_numbers"]

MOST = 300
"""Numbers of a file that text may be compared with: among many more, a wrong one would be found by chance."""

_NUMBER = re.compile(r"(?<![\w.])([-+−]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?:[eE]([-+]?\d+))?(%?)(?![\w])")
_UNITS = re.compile(r"(?<=\d)(?=x\b|s\b|ms\b|ns\b|kB\b|MiB\b|GiB\b)")
_NOT_TEXT = re.compile(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A number as text shows it."""

    text: str
    value: float
    half_unit: float  # of its last digit
    has_sign: bool
    percent: bool

    def agrees_with(self, stored: float) -> bool:
        """Whether rounding the stored number gives the shown one. A sign counts only where one is shown."""
        candidates = [stored, 100 * stored] if self.percent else [stored]
        if not self.has_sign:
            candidates = [abs(each) for each in candidates]
        slack = self.half_unit * (1 + 1e-9) + 1e-12 * abs(self.value)
        return any(abs(each - self.value) <= slack for each in candidates)


def shown_numbers(text: str) -> Iterator[Shown]:
    """Every number of some Markdown, without those in `code`, in links' targets and in comments."""
    plain = _UNITS.sub(" ", _NOT_TEXT.sub(" ", text))
    for match in _NUMBER.finditer(plain):
        sign, whole, fraction, power, percent = match.groups()
        exponent = int(power or 0)
        digits = len(fraction or ".") - 1
        value = float(f"{whole.replace(',', '')}{fraction or ''}e{exponent}")
        yield Shown(
            text=match[0].strip(),
            value=-value if sign in ("-", "−") else value,
            half_unit=0.5 * 10.0 ** (exponent - digits),
            has_sign=bool(sign),
            percent=bool(percent),
        )


def numbers_of_file(name: str, text: str) -> list[float]:
    """All numbers of a stored file, remarks and words that hold numbers included."""
    if name.endswith(".json"):
        return list(_numbers_in(json.loads(text)))
    if name.endswith(".csv"):
        lines = (line for line in text.splitlines() if not line.startswith("#"))
        return list(_numbers_in(list(csv.reader(io.StringIO("\n".join(lines))))))
    return [shown.value for shown in shown_numbers(text.replace("`", " "))]


def _numbers_in(content: Any) -> Iterator[float]:
    match content:
        case bool() | None:
            return
        case int() | float():
            yield float(content)
        case str():
            yield from (shown.value for shown in shown_numbers(content))
        case dict():
            for key, value in content.items():
                yield from _numbers_in(key)
                yield from _numbers_in(value)
        case list():
            for each in content:
                yield from _numbers_in(each)


def missing(text: str, stored: Collection[float], settings: Collection[str] = ()) -> list[str]:
    """The numbers of a text that no stored number rounds to.

    Args:
        text: Markdown.
        stored: numbers of the files that it is tied to.
        settings: numbers, as the text shows them, that are no results.

    Returns:
        As the text shows them.

    """
    found = [shown for shown in shown_numbers(text) if shown.text not in settings]
    return [shown.text for shown in found if not any(shown.agrees_with(each) for each in stored)]
