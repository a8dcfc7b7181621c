"""A plan's text: read as people save it, syntax errors in plain words, and the line of a key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from veilstream.plans.schema import PlanError

_AT = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)")
_LONGEST_SHOWN = 80
_MARKS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"), (b"PK\x03\x04", "a spreadsheet or an archive"))


def read_plan_text(path: Path) -> str:
    """The file's text, without a byte-order mark."""
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            "plan",
            str(path),
            "a file that can be read",
            f"{reason}: check the path; `veilstream new DIR` writes a plan",
        ) from error
    for mark, what in _MARKS:
        if content.startswith(mark):
            raise PlanError("plan", str(path), f"a text file in UTF-8, and this is {what}", "save it as UTF-8 text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PlanError(
            f"plan (line {line})", str(path), "text in UTF-8, in every line", "save it as UTF-8 in your editor"
        ) from error


def parse_toml(text: str) -> dict[str, Any]:
    """The tables; `PlanError` with the line, its text and the likely mistake."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise PlanError("plan", "<text>", "TOML", "it is nested too deeply") from error
    except ValueError as error:
        said = str(error)
        found = _AT.search(said)
        lines = text.splitlines()
        if found is None and not said.startswith("Invalid"):
            raise PlanError("plan", "<text>", "TOML", said) from error
        number = int(found[1]) if found is not None and found[1] else max(len(lines), 1)
        what = _AT.sub("", said)
        if found is not None and not found[1]:
            number = _last_written(lines)
        if not lines[number - 1 : number] or (
            what.startswith("Illegal character '\\n'") and not lines[number - 1].strip()
        ):
            number = _last_written(lines[: number - 1])
        number = _open_array(lines[:number]) or number
        line = lines[number - 1].strip() if lines else ""
        raise PlanError(
            f"plan (line {number})", _cut(line), f"TOML: {what[:1].lower()}{what[1:]}", _likely(line, what)
        ) from error


def _last_written(lines: list[str]) -> int:
    return next((i for i in range(len(lines), 0, -1) if lines[i - 1].strip()), 1)


def _open_array(lines: list[str]) -> int | None:
    """Line of an array that is not closed, though a table or a key follows it."""
    number = len(lines)
    while number and not re.match(r"\s*[\w.-]+\s*=|\s*\[\[?[\w.]+\]", lines[number - 1]):
        number -= 1
    for before in range(number - 1, 0, -1):
        bare = lines[before - 1].split("#")[0]
        if re.match(r"\s*[\w.-]+\s*=", bare):
            return before if bare.count("[") > bare.count("]") else None
    return None


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 3] + "..."


def _likely(line: str, what: str) -> str:
    """What to write instead."""
    if "twice" in what or "overwrite" in what:
        return "the same key or table stands above: keep one of them"
    if re.search(r"[“”‘’„«»]", line):
        return 'use straight quotes: "'
    bare = line.split("#")[0]
    if bare.count('"') % 2 or bare.count("'") % 2:
        return 'a quote is missing: texts begin and end with "'
    if re.fullmatch(r"\s*\[[^\]]*", bare):
        return "a bracket is missing: ]"
    if bare.count("[") != bare.count("]"):
        return "a bracket is missing: arrays are written [1.0, 2.0]"
    if re.search(r"=\s*[-+]?\d+,\d+\s*$", bare):
        return "numbers have a point: 0.5"
    if re.match(r"\s*[\w.-]+\s*:", bare):
        return "a key and its value stand on either side of =: rounds = 100"
    if re.search(r"=\s*$", bare):
        return "a value is missing behind ="
    if re.search(r"=\s*(True|False|None)\b", bare):
        return "write true or false in small letters, and leave out a key that has no value"
    if re.search(r"\\", bare):
        return "in a path write / or \\\\ in place of \\"
    if re.search(r"=\s*[^\W\d]", bare) or re.search(r"[\[,]\s*[^\W\d]", bare.partition("=")[2]):
        return 'texts stand in quotes: "no"'
    if "=" not in bare:
        return "a line is [table], key = value, or begins with #"
    return 'a text is "in quotes", a number is 0.5, an array is ["no", "yes"]'


def line_of(text: str, content: dict[str, Any], field: str) -> int | None:
    """Line of a key; of its table, where the key is missing; None where neither stands in the text."""
    field = _by_number(content, field)
    table, _, key = field.rpartition(".")
    key = re.sub(r"(\[\d+\])+$", "", key)
    return _line_in(text, table, key) or _line_in(text, field, None) or _line_in(text, table, None)


def _by_number(content: dict[str, Any], field: str) -> str:
    """data.features.hour.low is that of the feature of this name: data.features[3].low."""
    named = re.fullmatch(r"data\.features\.(.+?)(\.vocabulary|\.width|\.low)?", field)
    if named is None:
        return field
    features = content.get("data", {}).get("features", [])
    places = [i for i, each in enumerate(features) if isinstance(each, dict) and each.get("name") == named[1]]
    return f"data.features[{places[0]}]{named[2] or ''}" if places else field


def _line_in(text: str, table: str, key: str | None) -> int | None:
    """Line of a key in a table, or of the table's header."""
    index = 0
    if match := re.fullmatch(r"([\w.]+)\[(\d+)\]", table):
        table, index = match[1], int(match[2])
    current, seen = "", 0 if table == "" else -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]?\]", line):
            current = header[1]
            seen += current == table
            if key is None and (current, seen) == (table, index):
                return number
        elif key is not None and (current, seen) == (table, index) and re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return None
