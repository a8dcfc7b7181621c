"""Tables and numbers of measured results in the pages, tied to the files in docs/results.

    python docs/result_tables.py            write the tables that are made from stored files
    python docs/result_tables.py --check    exit 1 and say which table, paragraph or number has no such file behind it

A page ties what it shows by a comment. `<!-- table: MODULE.FUNCTION -->` ... `<!-- end -->` holds a
table that a function of docs/tables makes. `<!-- numbers: FILE ... -->` says that every number in
the block after it, up to the next blank line, stands in these files, to the digits shown; after
`not:` come numbers that are settings, not results. In place of a file, `table MODULE.FUNCTION` means the table.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from result_numbers import MOST, missing, numbers_of_file, shown_numbers
from tables.cells import RESULTS, Table

__all__ = ["PAGES", "faults", "main", "untied_tables", "with_tables"]

DOCS = Path(__file__).resolve().parent
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]

MODULES = {path.stem: importlib.import_module(f"tables.{path.stem}") for path in (DOCS / "tables").glob("[a-z]*.py")}

_TABLE = re.compile(r"(<!-- table: (\w+)\.(\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_NUMBERS = re.compile(r"<!-- numbers: ([^>]*?) -->\n(.*?)(?=\n[ \t]*\n|\Z)", re.DOTALL)
_FENCE = re.compile(r"^(\s*)```[^\n`]*\n.*?^\1```\s*$", re.MULTILINE | re.DOTALL)
_ROWS = re.compile(r"(?:^\|.*\|[ \t]*\n)+", re.MULTILINE)


def table(module: str, function: str) -> Table:
    """The table of this name, from its stored files."""
    made = getattr(MODULES[module], function)()
    assert isinstance(made, Table)
    return made


def with_tables(text: str) -> str:
    """A page with its tables as the stored files have them."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found[2], found[3])}\n{found[5]}", text)


def _stored(where: str) -> Iterator[float]:
    """Numbers of the files and tables that a comment names."""
    for made, module, function, name in re.findall(r"(table) (\w+)\.(\w+)|([\w.-]+)", where):
        if made:
            yield from (shown.value for shown in shown_numbers(str(table(module, function))))
            continue
        numbers = numbers_of_file(name, (RESULTS / name).read_text(encoding="utf-8"))
        if len(numbers) > MOST:
            raise ValueError(f"{name} has {len(numbers)} numbers: of more than {MOST} make a table (docs/tables)")
        yield from numbers


def faults(text: str) -> list[str]:
    """What a page shows that its files do not say."""
    found = [f"table {module}.{name} is not current" for module, name in _stale(text)]
    for where, block in _NUMBERS.findall(text):
        files, _, settings = where.partition(", not:")
        gone = missing(block, list(_stored(files)), settings.split())
        found += [f"{each} is not in {files} ({block.strip()[:60]}...)" for each in gone]
    return found


def _stale(text: str) -> Iterator[tuple[str, str]]:
    for _, module, name, rows, _ in _TABLE.findall(text):
        if rows != f"{table(module, name)}\n":
            yield module, name


def untied_tables(text: str) -> list[str]:
    """Header lines of the tables with digits in their cells that are tied to no file."""
    tied = _FENCE.sub("", _NUMBERS.sub("", _TABLE.sub("", text)))
    found = []
    for rows in _ROWS.findall(f"{tied}\n"):
        header, _, *body = rows.splitlines()
        if re.search(r"\d", re.sub(r"`[^`]*`|\]\([^)]*\)", "", "\n".join(body))):
            found.append(header)
    return found


def main() -> int:
    """Write, or check."""
    wrong = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if "--check" not in sys.argv[1:] and with_tables(text) != text:
            text = with_tables(text)
            page.write_text(text, encoding="utf-8")
        for fault in faults(text):
            wrong += 1
            print(f"{page.name}: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
