"""A folder, or the files that a pattern names, as one learner's table: file after file, in the order of their names.

Every file has a bookmark of its own, under its name in the folder. A file that appears while the learner runs is
read when those before it are read to their end, wherever its name sorts, and a file that has grown is read on.
Folders called KEY=VALUE (Hive's partitions) are columns of the rows below them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from veilstream.errors import InputError
from veilstream.streams.growing_file import SETTLED_S
from veilstream.streams.intake import SourceBookmark
from veilstream.streams.table import BLOCK_ROWS, Block, Bookmark, Cells, Table

_log = logging.getLogger(__name__)

_TEXT = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
SUFFIXES = (*_TEXT, *(f"{suffix}.gz" for suffix in _TEXT), ".parquet", ".arrow", ".feather")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
PATTERN = frozenset("*?[")


def names_many(path: Path) -> bool:
    """Whether it is a folder, or a pattern of files."""
    return path.is_dir() or (not path.exists() and not PATTERN.isdisjoint(str(path)))


class FolderTable(Table):
    """Files that are read one after the other; they have the same columns.

    Args:
        path: a folder, with those below it, or a pattern.
        open_file: opens one of its files.
        whole: whether nothing is written any more.
        copies: whether a file that says what an earlier one said is to be left out.

    """

    def __init__(
        self, path: Path, open_file: Callable[[Path], Table], *, whole: bool = True, copies: bool = False
    ) -> None:
        self._path, self._open_file, self._whole, self._copies = path, open_file, whole, copies
        self._root = path if path.is_dir() else _fixed_part(path)
        self._marks: dict[str, Bookmark] = {}
        self._sizes: dict[str, int] = {}  # of files that were read to their end, as they were then
        self._latest: tuple[str, Table] | None = None  # of text, which may be read on without beginning again
        self._refused: dict[str, int] = {}  # sizes of files that cannot be read, as they were when that was said
        super().__init__(path.name)
        first = next(iter(self._files()), None)
        if first is None:
            raise InputError(
                "data",
                str(path),
                f"a folder with a file in it that ends in {', '.join(SUFFIXES)}",
                "put the first there",
            )
        table = open_file(first[1])
        if table.columns:  # else each row names its own
            self.columns = (*table.columns, *(k for k in _partition(first[0]) if k not in table.columns))
        self.decimal_comma = table.decimal_comma
        self._mark = SourceBookmark(self.name, Bookmark().as_text())
        others = sum(1 for each in self._all() if not each.name.endswith(SUFFIXES))
        self.notices = [*table.notices, f"{self.name}: files are read in the order of their names, {first[0]} first"]
        if others and path.is_dir():
            self.notices.append(f"{self.name}: {others} files are not read, whose names do not end as tables do")

    @property
    def mark(self) -> SourceBookmark:
        """Behind the last row that was given out, in its file."""
        return self._mark

    def resume(self, marks: Mapping[str, str]) -> None:
        """Go on behind what a ledger knows of each file."""
        self._marks = {name: Bookmark.parse(text) for name, text in marks.items() if ":" in text}

    def skip_to(self, bookmark: Bookmark) -> None:
        """A folder has no place of its own."""
        raise InputError("data", self.name, "a name that no single file had before", "give the folder another name")

    def _read(self) -> Iterator[Cells | None]:
        for block in self.blocks():
            yield from block.rows

    def rows(self) -> Iterator[tuple[int, Cells | None]]:
        """Each with its number in its file."""
        for block in self.blocks():
            yield from enumerate(block.rows, block.first)

    def blocks(self, *, digests: bool = True, most: int = BLOCK_ROWS) -> Iterator[Block]:
        """Of one file each; ends when every file is read as far as it is there now."""
        looked_at: set[str] = set()
        while (found := self._next_file(looked_at)) is not None:
            name, table, about = found
            looked_at.add(name)
            more = _partition(name)
            try:
                for block in table.blocks(digests=True, most=most):
                    given = replace(
                        block,
                        source=name,
                        rows=[row if row is None else {**more, **row} for row in block.rows] if more else block.rows,
                    )
                    self._marks[name], self._mark = table.bookmark, given.mark(len(block.rows) - 1)
                    yield given
            except InputError as error:
                self._leave_out(name, about.st_size, error)
                continue
            if self._whole or time.time() - about.st_mtime >= SETTLED_S:  # else its last line may not be whole yet
                self._sizes[name] = about.st_size
            self._latest = (name, table) if name.endswith(_TEXT) else None

    def _next_file(self, looked_at: set[str]) -> tuple[str, Table, os.stat_result] | None:
        """The first file in which there may be rows that were not read."""
        for name, path in self._files():
            try:
                about = path.stat()
            except OSError:
                continue  # gone meanwhile
            if name in looked_at or about.st_size in (self._sizes.get(name), self._refused.get(name)):
                continue
            if self._latest is not None and self._latest[0] == name:
                return name, self._latest[1], about
            table = self._opened(name, path, about.st_size)
            if table is not None:
                return name, table, about
        return None

    def _opened(self, name: str, path: Path, size: int) -> Table | None:
        """A file behind its bookmark; None if it cannot be read now, which is said once for each size of it."""
        try:
            table = self._open_file(path)
            table.name = name
            lacking = [c for c in self.columns if c not in (*table.columns, *_partition(name))] if table.columns else []
            if lacking:
                raise InputError(
                    "data", name, f"the columns of the first file, also {', '.join(lacking[:12])}", "mend it"
                )
            mark = self._marks.get(name, Bookmark())
            if mark.rows:
                table.skip_to(mark)
            elif self._copies:
                self._check_copy(name, path)
        except InputError as error:
            self._leave_out(name, size, error)
            return None
        self.decimal_comma = table.decimal_comma
        return table

    def _leave_out(self, name: str, size: int, error: InputError) -> None:
        self._refused[name], self._latest = size, None
        _log.warning("%s is left out until it changes: %s", name, error)

    def _check_copy(self, name: str, path: Path) -> None:
        known = {(mark.rows, mark.digest): other for other, mark in self._marks.items() if other != name and mark.rows}
        if not known:
            return
        for block in self._open_file(path).blocks():
            for place, digest in enumerate(block.digests):
                if (other := known.get((block.first + place + 1, digest))) is not None:
                    raise InputError(
                        "data",
                        name,
                        "records that were not read before",
                        f"its first {block.first + place + 1} rows were read as {other}: give new records only",
                    )

    @property
    def files(self) -> list[Path]:
        """The files that are there now, in order."""
        return [path for _, path in self._files()]

    def _files(self) -> list[tuple[str, Path]]:
        """Name in the folder, and path, of each file that is a table, in order."""
        wanted = (path for path in self._all() if path.name.endswith(SUFFIXES) or not self._path.is_dir())
        return sorted((path.relative_to(self._root).as_posix(), path) for path in wanted)

    def _all(self) -> Iterator[Path]:
        found = (
            self._path.rglob("*") if self._path.is_dir() else self._root.glob(str(self._path.relative_to(self._root)))
        )
        for path in found:
            inside = path.relative_to(self._root).parts
            if not any(part.startswith((".", "_")) for part in inside) and path.is_file():
                yield path


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part of a pattern that has a wildcard."""
    parts = pattern.parts
    first = next(place for place, part in enumerate(parts) if not PATTERN.isdisjoint(part))
    return Path(*parts[:first])


def _partition(name: str) -> dict[str, object]:
    """Columns that the folders of a file's name say."""
    pairs = (part.partition("=") for part in name.split("/")[:-1])
    return {unquote(k): None if v == _NO_VALUE else unquote(v) for k, equals, v in pairs if equals and k}
