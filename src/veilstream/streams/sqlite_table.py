"""Records of a SQLite file that others write to while it is read; nothing here can write to it.

A table is read in the order of a key (its rowid, or a column that was named), some rows at a time, each time by a
connection of its own, so that writers are held up no longer than that. Rows with a larger key are new. What
happens to rows behind that is not read: they are counted while the learner runs, and compared when it starts.
A query without a key is run again whole after each change of the file, and what was read must be as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from veilstream.errors import InputError
from veilstream.streams.table import PUT_BACK, Bookmark, Cells, RowDigest, Table, check_names
from veilstream.wording import counted

_log = logging.getLogger(__name__)

_AT_ONCE = 1000  # rows that one connection fetches
_BUSY_S = 5.0  # how long a writer's lock is waited for
_LOOK_BACK_S = 60.0  # between two counts of the rows behind
_ROWIDS = ("rowid", "_rowid_", "oid")
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_NO_FUNCTIONS = {"load_extension", "fts3_tokenizer"}  # both can run code that the query or the file names
_OF_ONE_ROW = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
"""Of a query that began: what it computes cannot be computed of some row (json_extract of no JSON)."""


def sqlite_table(path: Path, query: str | None = None, key: str | None = None) -> Table:
    """The rows of a query, or of the file's only table."""
    if query is None:
        source, found = _only_table(path)
        key = key or found
        if key is None:
            way_out = 'key = "id" in [data], or --key: a column that only grows'
            raise InputError("data.key", None, f"a column that orders the rows of {path.name}", way_out)
        return KeyedTable(path, source, _quoted(key) if key not in _ROWIDS else key)
    return QueriedTable(path, query) if key is None else KeyedTable(path, _in_brackets(query), _quoted(key))


@contextmanager
def _opened(path: Path, *, guarded: bool = True) -> Iterator[sqlite3.Connection]:
    """A connection that reads alone; a driver's error may quote a person's cells, so it is not shown."""
    with closing(_connection(path, guarded=guarded)) as connection:
        try:
            yield connection
        except sqlite3.Error as error:
            raise _unreadable(path, error) from None


def _connection(path: Path, *, guarded: bool = True) -> sqlite3.Connection:
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, check_same_thread=False)
    except sqlite3.Error as error:
        raise _unreadable(path, error) from None
    connection.text_factory = lambda held: held.decode("utf-8", "surrogateescape")
    if guarded:
        connection.set_authorizer(_reading_alone)
    return connection


def _unreadable(path: Path, error: sqlite3.Error) -> InputError:
    why = getattr(error, "sqlite_errorname", type(error).__name__)
    way_out = {
        "SQLITE_BUSY": "a writer holds its lock; it is read again at the next round",
        "SQLITE_CANTOPEN": "check the path; a file in WAL mode also needs its folder to be writable, or its -wal and "
        "-shm files to be there",
        "SQLITE_ERROR": "the query fails on some row: name a key (data.key, --key), then that row alone is refused",
    }.get(why, "the file is damaged or busy: copy it again")
    return InputError("data", path.name, f"rows that can be read to the end ({why})", way_out)


def _reading_alone(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Allow reads and functions; not ATTACH, which VACUUM INTO also needs, nor PRAGMA, nor extensions.

    A plan comes from outside: read-only mode still let `VACUUM INTO` copy the file to where others can read it.
    """
    function = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _NO_FUNCTIONS
    return sqlite3.SQLITE_OK if function or action in _READS else sqlite3.SQLITE_DENY


def _only_table(path: Path) -> tuple[str, str | None]:
    """The only table of a file, quoted, and its key: the rowid, or a primary key of one column."""
    with _opened(path, guarded=False) as db:  # our own statements alone
        names = [
            name
            for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            if not name.startswith("sqlite_")
        ]
        if len(names) != 1:
            raise InputError(
                "data.query",
                None,
                f"which records of {path.name}, which has {counted(len(names), 'table')}",
                f'query = "SELECT * FROM ...", or --query{": " + ", ".join(names[:12]) if names else ""}',
            )
        about = db.execute("SELECT lower(name), pk FROM pragma_table_info(?)", names).fetchall()
        columns, primary = {name for name, _ in about}, [name for name, pk in about if pk]
        table = _quoted(names[0])
        rowid = next((name for name in _ROWIDS if name not in columns), None)
        try:
            db.execute(f"SELECT {rowid} FROM {table} LIMIT 0")
        except sqlite3.Error:  # made WITHOUT ROWID
            rowid = None
    return table, rowid or (primary[0] if len(primary) == 1 else None)


def _in_brackets(query: str) -> str:
    return f"(\n{query.strip().rstrip(';')}\n)"  # a comment at its end ends there


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


class KeyedTable(Table):
    """Rows in the order of a key that is different in each, and larger in newer ones."""

    def __init__(self, path: Path, source: str, key: str) -> None:
        """``source`` is a table's name or a query in brackets, ``key`` a column of it, as SQL has them."""
        self._path, self._source, self._by = path, source, f"q.{key}"
        self._of = hashlib.blake2b(f"{source}\0{key}".encode(), digest_size=4).hexdigest()
        self._key: Any = None  # of the last row that was given out
        self._given: list[Any] = []
        self._fetched: deque[tuple[Any, ...]] = deque()
        self._counted_at = time.monotonic()
        self._said = 0
        with closing(_connection(path)) as db:
            columns = _columns(db, f"SELECT {self._by}, q.* FROM {source} AS q LIMIT 0")[1:]
        check_names(path.name, columns)
        super().__init__(path.name, columns)
        self.notices.append(f"{self.name}: rows are read in the order of {key.strip(chr(34))}; new ones have larger")

    def _read(self) -> Iterator[Cells | None]:
        while self._fetched or self._fetch():
            key, *cells = self._fetched.popleft()
            self._check_key(key)
            self._key = key
            self._given.append(key)
            yield dict(zip(self.columns, cells, strict=True)) if cells else None
        self._look_back()

    def _fetch(self) -> bool:
        where, least = ("", ()) if self._key is None else (f"WHERE {self._by} > ?", (self._key,))
        query = f"SELECT {self._by}, q.* FROM {self._source} AS q {where} ORDER BY {self._by} LIMIT {_AT_ONCE}"
        with _opened(self._path) as db:
            try:
                self._fetched += db.execute(query, least).fetchall()
            except sqlite3.Error as error:
                if error.sqlite_errorcode not in _OF_ONE_ROW:
                    raise
                self._fetched += self._one_by_one(db, where, least)
        return bool(self._fetched)

    def _one_by_one(self, db: sqlite3.Connection, where: str, least: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """The next rows, of which one at least cannot be computed: it is its key alone."""
        keys = f"SELECT {self._by} FROM {self._source} AS q {where} ORDER BY {self._by} LIMIT {_AT_ONCE}"
        query = f"SELECT {self._by}, q.* FROM {self._source} AS q WHERE {self._by} BETWEEN ? AND ? ORDER BY {self._by}"
        parts = deque([[key for (key,) in db.execute(keys, least)]])
        while parts:
            some = parts.popleft()
            try:
                yield from db.execute(query, (some[0], some[-1])).fetchall() if some else ()
            except sqlite3.Error as error:
                if error.sqlite_errorcode not in _OF_ONE_ROW:
                    raise
                half = len(some) // 2
                if half:
                    parts.extendleft([some[half:], some[:half]])
                else:
                    yield (some[0],)

    def _digest_to(self, key: Any) -> tuple[int, str]:
        """How many rows there are up to a key, and their digest."""
        query = f"SELECT q.* FROM {self._source} AS q WHERE {self._by} <= ?"
        with _opened(self._path) as db:
            try:
                return _digested(self.columns, db.execute(query, (key,)))
            except sqlite3.Error as error:
                if error.sqlite_errorcode not in _OF_ONE_ROW:
                    raise
            where, least = f"WHERE {self._by} <= ?", [key]
            count, said, digest = 0, f"{0:032x}", RowDigest()
            while some := list(self._one_by_one(db, where, least)):
                rows = [dict(zip(self.columns, cells, strict=True)) if cells else None for _, *cells in some]
                count, said = count + len(rows), digest.add(rows)[-1]
                where, least = f"WHERE {self._by} > ? AND {self._by} <= ?", [some[-1][0], key]
        return count, said

    def _check_key(self, key: object) -> None:
        if not isinstance(key, int | float | str) or key == self._key:
            why = "it is there twice" if key is not None and key == self._key else "a cell in it is none"
            raise InputError(
                "data.key",
                self._by.removeprefix("q."),
                f"a number or a text that is different in each row ({why})",
                "name a column that says which row it is, such as INTEGER PRIMARY KEY AUTOINCREMENT",
            )

    def _places(self, rows: int) -> tuple[list[str], list[str]]:
        """Rows are named by their keys, which stay when other rows go."""
        keys, self._given = self._given[-rows:], []
        return [json.dumps([key, self._of]) for key in keys], [str(key) for key in keys]

    @property
    def rows_left(self) -> int | None:
        """How many rows of a table follow; None for a query, of which all rows would be made."""
        if self._source.startswith("("):
            return None
        where, least = ("", ()) if self._key is None else (f"WHERE {self._by} > ?", (self._key,))
        try:
            with _opened(self._path) as db:
                return int(db.execute(f"SELECT count(*) FROM {self._source} AS q {where}", least).fetchone()[0])
        except InputError:
            return None

    def skip_to(self, bookmark: Bookmark) -> None:
        """Go on behind a key; say if what was read before it is no longer there as it was."""
        if not bookmark.place:
            super().skip_to(bookmark)
            return
        key, of = json.loads(bookmark.place)
        if of != self._of:
            raise InputError(
                "data.query",
                self.name,
                f"the table or query by which {counted(bookmark.rows, 'row')} of it were read before",
                "go on with that one; another one needs a file name of its own (a link will do)",
            )
        there, said = self._digest_to(key)
        self._key, self.bookmark, self._digest = key, bookmark, RowDigest(bookmark.digest)
        self._said = bookmark.rows - there
        if said != bookmark.digest:
            self._say(there, "changed, deleted or inserted")

    def _look_back(self) -> None:
        """Once a while, at the end: whether as many rows are behind as were read."""
        if time.monotonic() - self._counted_at < _LOOK_BACK_S or self._key is None:
            return
        query = f"SELECT count(*) FROM {self._source} AS q WHERE {self._by} <= ? OR {self._by} IS NULL"
        with _opened(self._path) as db:
            there = int(db.execute(query, (self._key,)).fetchone()[0])
        self._counted_at = time.monotonic()
        if self.bookmark.rows - there != self._said:
            self._said = self.bookmark.rows - there
            self._say(there, "deleted or inserted")

    def _say(self, there: int, what: str) -> None:
        _log.warning(
            "%s: %s were read, and %d are there now up to the last one: some were %s since. Such rows are not read: "
            "what was learned from a row stays, and a row that is to be read needs a larger key than all before",
            self.name,
            counted(self.bookmark.rows, "row"),
            there,
            what,
        )


class QueriedTable(Table):
    """Rows of a query that orders them by itself."""

    def __init__(self, path: Path, query: str) -> None:
        self._path, self._query = path, query
        self._running: Iterator[Cells] | None = None
        self._seen: tuple[object, ...] | None = None  # the file as it was when the query was last run
        with closing(_connection(path)) as db:
            columns = _columns(db, query)
        check_names(path.name, columns)
        super().__init__(path.name, columns)
        self.notices.append(
            f"{self.name}: the query is run again whole after each change, and what was read must be as it was. Name "
            "a key (data.key, --key) if rows are added to it: then only new ones are read"
        )

    def _read(self) -> Iterator[Cells | None]:
        self._running = self._running or self._run()
        while True:
            running, self._running = self._running, None
            row = next(running, None)
            if row is None:
                return
            self._running = running  # goes on here if it is asked again
            yield row

    def _run(self) -> Iterator[Cells]:
        now = _as_it_is(self._path)
        if now == self._seen:
            return
        with _opened(self._path) as db:
            rows, read = db.execute(self._query), self.bookmark
            if read.rows and _digested(self.columns, itertools.islice(rows, read.rows))[1] != read.digest:
                raise InputError(
                    "data",
                    self.name,
                    f"a query whose first {counted(read.rows, 'row')} are as they were read",
                    f"rows were changed, deleted or inserted among them: {PUT_BACK}, or name a key (data.key, --key)",
                )
            for row in rows:
                yield dict(zip(self.columns, row, strict=True))
        self._seen = now


def _digested(columns: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> tuple[int, str]:
    """How many rows there are, and their digest."""
    count, said, digest = 0, f"{0:032x}", RowDigest()
    while some := [dict(zip(columns, row, strict=True)) for row in itertools.islice(rows, _AT_ONCE)]:
        count, said = count + len(some), digest.add(some)[-1]
    return count, said


def _as_it_is(path: Path) -> tuple[object, ...]:
    """What changes whenever somebody writes to a SQLite file, in either of its modes."""
    found = []
    for part in (path, path.with_name(path.name + "-wal")):
        try:
            about = part.stat()
            found.append((about.st_ino, about.st_size, about.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _run_at_all(db: Any, query: str) -> Any:
    """Where only what the first row says makes a query fail, its columns are known all the same."""
    try:
        return db.execute(query)
    except sqlite3.Error as error:
        with contextlib.suppress(sqlite3.Error):
            return db.execute(f"SELECT * FROM {_in_brackets(query)} LIMIT 0")
        raise error from None


def _columns(db: Any, query: str) -> tuple[str, ...]:
    """Names of a query's columns; refuses one that cannot be run."""
    try:
        cursor = _run_at_all(db, query)
    except Exception as error:  # drivers raise their own kinds
        denied = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH
        why = f"{error} (of a SQLite file, a query may read and do nothing else)" if denied else str(error)
        raise InputError("data.query", query, "a query that can be run", why) from error
    names = tuple(str(column[0]) for column in cursor.description or ())
    if not names:
        raise InputError("data.query", query, "a query that returns rows", "SELECT ... FROM ...")
    return names
