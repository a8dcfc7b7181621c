"""Records of a table as a deployed learner's clients: read in order, each at most once.

A row becomes a sample by the plan's schema, or is refused for a reason that is counted here only. A refused row
of a named client is handed over without a sample and takes its step; a row that names nobody, or that cannot be read
as cells, stands for a client of its own. So does one of which cannot be said which learner's it is, at every learner
that reads it. Blank rows, and rows of other learners, are skipped. Rows are read ahead
of the round that uses them; each is handed over together with the bookmark behind it.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from veilstream.errors import InputError
from veilstream.records.cells import TimeOrder, as_text, is_missing, time_of
from veilstream.records.encoded_group import encode_group
from veilstream.records.schema import Encoded, RecordSchema, Refusal
from veilstream.streams.folder_table import FolderTable
from veilstream.streams.intake import MayTake, Observe, Offered, SomeRecords, SourceBookmark, Wanted
from veilstream.streams.table import MANY_ROWS, Block, Bookmark, Cells, Table
from veilstream.streams.tables import check_columns

_HELD = 10_000  # rows that are held at most, if a round does not need more
_LOW = (1 << 64) - 1
_BY_CHANCE = 10  # fewer rows than this may be alike in two files by chance; they count at its beginning only


@dataclass
class RowCounts:
    """What became of this learner's rows that were passed: counts only."""

    rows: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)
    clamped: Counter[str] = field(default_factory=Counter)  # moved to the end of their range, by column
    other_learners: int = 0
    not_again: int = 0  # of people who may not take the next step, passed between rounds

    def add(self, record: Encoded | Refusal | None) -> None:
        """Count a record that was passed; None for another learner's."""
        if record is None:
            self.other_learners += 1
            return
        self.rows += 1
        if isinstance(record, Refusal):
            self.refused[record.without_client] += 1
        else:
            self.clamped.update(record.clamped)


@dataclass(frozen=True)
class LookAhead:
    """What the next rows would be; nothing of them is used."""

    counts: RowCounts
    labels: Counter[str]  # empty where the label is a number
    whole: bool  # whether these are all the rows there are


@dataclass(frozen=True)
class _Item:
    record: Encoded | Refusal | None  # None for another learner's row
    mark: SourceBookmark

    @property
    def client(self) -> str | None:
        """Who takes a step; None if the row is skipped."""
        return None if self.record is None else self.record.client


class TableSource:
    """One table, top to bottom.

    Args:
        table: where rows come from; rows that are appended later are read later.
        schema: what a record is.
        learner: this learner's name; rows with another name in the schema's column of learners are skipped.
        whole: whether nothing is appended any more, so that the last records are no reason to wait for others.
        reopen: the same table from its beginning, for whoever looks at it before it is read.
        path: where it lies, so that a change of it can be seen without reading it.

    """

    def __init__(
        self,
        table: Table,
        schema: RecordSchema,
        learner: str | None = None,
        *,
        whole: bool = False,
        reopen: Callable[[], Table] | None = None,
        path: Path | None = None,
    ) -> None:
        check_columns(table, schema.columns)
        self._path, self._read_at_once = path, False
        self.table, self.schema, self.reopen = table, schema, reopen
        self._whole = whole
        self.least_at_last: int | None = None  # of people who begin a round once no others can come; None: as ever
        self.visits_a_round = 1  # records of one person that a round may take
        self.waiting = 0  # records that `ready` last found too few
        self._learner = learner
        named = learner is not None and schema.learner in (table.columns or (schema.learner,))
        self._learner_column = schema.learner if named else None
        self._held: deque[_Item] = deque()
        self._blocks: Iterator[Block] | None = None
        self._passed = table.mark
        self.counts = RowCounts()
        self.exhausted = False  # whether `ready` last met the end of the table before enough clients

    @property
    def bookmark(self) -> SourceBookmark:
        """Behind the last row that was handed over or passed."""
        return self._passed

    @property
    def rows_left(self) -> int | None:
        """About how many rows are still to come, where the table can tell."""
        if self._read_at_once:
            return None
        left = self.table.rows_left
        return None if left is None else left + len(self._held)

    @property
    def name(self) -> str:
        """The table's."""
        return self.table.name

    def read_whole(self, since: Sequence[SourceBookmark]) -> Iterator[SomeRecords]:
        """This learner's clients in every row behind these bookmarks; counts them anew."""
        if self.reopen is None:
            raise InputError("reopen", None, "a way to read the table again", "TableSource(..., reopen=...)")
        self._read_at_once, table, counts = True, self.reopen(), RowCounts()
        table.resume({mark.source: mark.text for mark in since})
        try:
            for block in table.blocks(most=MANY_ROWS):
                clients, places = [], []
                for place, record in enumerate(self._encoded(block, table)):
                    counts.add(record)
                    if record is not None and record.client is not None:
                        clients.append((record.client, record.sample if isinstance(record, Encoded) else None))
                        places.append(place)
                places.append(len(block.rows))  # behind all of them: behind the block's other rows, too
                yield SomeRecords(clients, partial(_behind, block, places))
        finally:
            self.counts.rows, self.counts.other_learners = counts.rows, counts.other_learners
            self.counts.refused, self.counts.clamped = counts.refused, counts.clamped

    def files_now(self) -> str:
        """Names, sizes and times of its files."""
        paths = [self._path] if self._path is not None else []
        if isinstance(self.table, FolderTable):
            paths = self.table.files
        elif self._path is not None:  # SQLite writes to a second file first
            paths += [each for each in [self._path.with_name(self._path.name + "-wal")] if each.exists()]
        told = []
        for path in paths:
            try:
                about = path.stat()
                told.append([str(path), about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns])
            except OSError:
                told.append([str(path)])
        return json.dumps(told) if told else ""

    def resume(self, bookmarks: list[SourceBookmark]) -> None:
        """Continue after what was read under this table's name."""
        self.table.resume({mark.source: mark.text for mark in bookmarks})
        self._passed = self.table.mark

    def look_ahead(self, rows: int) -> LookAhead:
        """What this learner's next rows would be; uses and passes none."""
        counts, labels, looked_at = RowCounts(), Counter[str](), 0
        while counts.rows < rows:
            if looked_at == len(self._held) and not self._hold_more():
                return LookAhead(counts, labels, whole=True)
            record = self._held[looked_at].record
            looked_at += 1
            counts.add(record)
            if isinstance(record, Encoded) and self.schema.label.classes is not None:
                labels[str(self.schema.label.in_units(float(record.sample.target)))] += 1
        return LookAhead(counts, labels, whole=False)

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whether enough people wait who can be taken; reads ahead, uses nothing.

        Useless rows at the front are passed, as they would be if they were offered at this step.
        """

        def usable(item: _Item) -> bool:
            return item.client is not None and may_take(item.client)

        visits: Counter[str] = Counter()
        waiting, looked_at, ended = 0, 0, False
        while len(self._held) < max(_HELD, most):
            while self._held and not looked_at and not usable(self._held[0]):
                self.counts.not_again += isinstance(self._pass().record, Encoded)
            while looked_at < len(self._held) and waiting < max(minimum, 1):
                item = self._held[looked_at]
                if item.client is not None and usable(item):
                    visits[item.client] += 1
                    waiting += visits[item.client] <= self.visits_a_round
                looked_at += 1
            if waiting >= minimum and len(self._held) >= most:
                break
            if not self._hold_more():
                ended = True
                break
        if ended and self._whole and self.least_at_last is not None:
            minimum = self.least_at_last
        self.exhausted, self.waiting = ended and waiting < max(minimum, 1), waiting
        return waiting >= minimum or (waiting > 0 and not ended)

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Hand over the next records; none at the end of the table."""
        observe(self._clients())

    def _clients(self) -> Iterator[Offered]:
        while self._held or self._hold_more():
            item = self._pass()
            if item.client is not None:
                sample = item.record.sample if isinstance(item.record, Encoded) else None
                yield Offered(item.client, sample, self.bookmark)

    def _pass(self) -> _Item:
        """Take the row at the front; from here on it counts as read."""
        item = self._held.popleft()
        self.counts.add(item.record)
        self._passed = item.mark
        return item

    def _hold_more(self) -> bool:
        blocks, self._blocks = self._blocks or self.table.blocks(), None
        block = next(blocks, None)
        if block is None:  # a later call finds what is appended
            return False
        self._blocks = blocks
        self._held += (_Item(record, block.mark(place)) for place, record in enumerate(self._encoded(block)))
        return True

    def _encoded(self, block: Block, table: Table | None = None) -> list[Encoded | Refusal | None]:
        """What became of each row; None for another learner's."""
        table, column = table or self.table, self._learner_column
        found: list[Encoded | Refusal | None] = [None] * len(block.rows)
        mine: list[int] = []
        nobodys: list[int] = []
        for place, cells in enumerate(block.rows):
            if column is None:
                mine.append(place)
            elif cells is None:  # whose it is cannot be read either
                found[place] = Refusal("not readable", client=block.name(place))
            elif is_missing(cells.get(column, self._learner)):
                nobodys.append(place)
            elif _is_of(cells, self.schema, self._learner):
                mine.append(place)
        group = encode_group(
            self.schema,
            [block.rows[place] for place in mine],
            lambda number: block.name(mine[number]),
            decimal_comma=table.decimal_comma,
        )
        for number, place in enumerate(mine):
            found[place] = group.record(number)
        for place in nobodys:
            said = self.schema.encode(block.rows[place] or {}, row_name=block.name(place))
            found[place] = Refusal("missing", column or "", client=said.client)
        return found


def _behind(block: Block, places: Sequence[int], clients: int) -> SourceBookmark:
    """Behind so many of the clients in these rows: in front of the next one's row."""
    return block.mark(max(0, places[clients] - 1))


def check_not_read_before(table: Table, bookmarks: list[SourceBookmark]) -> bool:
    """Refuse a table with rows that were read under another name; whether an undetected copy is possible.

    Records of a copy would count as further visits. A copy is found by what its rows say, also behind new rows; one
    in which rows were changed is not.
    """
    if isinstance(table, FolderTable):  # looks at each file when it opens it
        return False
    stands = {mark.source: Bookmark.parse(mark.text) for mark in bookmarks if ":" in mark.text}  # others count no rows
    own = stands.pop(table.name, None)
    if not any(mark.rows for mark in stands.values()):
        return False
    if own is not None:
        table.skip_to(own)
    seen = _SeenBefore(stands, int(table.bookmark.digest or "0", 16))
    for block in table.blocks():
        for number, digest in enumerate(block.digests, block.first):
            if (known := seen.look(digest)) is not None:
                name, rows = known
                raise InputError(
                    "data",
                    table.name,
                    "records that were not read before",
                    f"its rows {number + 2 - rows} to {number + 1} were read as {name}: go on under "
                    "that name, or give new records only",
                )
    return own is None


class _SeenBefore:
    """Finds all rows of a bookmark, in any order, behind any number of other rows, by its digest."""

    def __init__(self, bookmarks: Mapping[str, Bookmark], begins: int) -> None:
        """``begins`` is the digest of this table before the first row that is looked at."""
        self._marks = {name: (mark.rows, int(mark.digest, 16) & _LOW) for name, mark in bookmarks.items() if mark.rows}
        self._sums = array("Q", [begins & _LOW])

    def look(self, digest: str) -> tuple[str, int] | None:
        """The digest behind the next row; name and number of the rows that end here, if any do."""
        low = int(digest, 16) & _LOW
        self._sums.append(low)
        row = len(self._sums) - 1
        for name, (rows, wanted) in self._marks.items():
            first = row - rows
            counts = first == 0 or (first > 0 and rows >= _BY_CHANCE)
            if counts and (low - self._sums[first]) & _LOW == wanted:
                return name, rows
        return None


def order_of_rows(table: Table, schema: RecordSchema, learner: str | None = None) -> tuple[TimeOrder, int]:
    """In which order this learner's rows are, and how many have a time; reads all."""
    order, rows = TimeOrder(), 0
    if schema.time is None or schema.time not in (table.columns or (schema.time,)):
        return order, rows
    for block in table.blocks(digests=False, most=MANY_ROWS):
        for cells in block.rows:
            if cells is None or not _is_of(cells, schema, learner):
                continue
            when = time_of(cells.get(schema.time), decimal_comma=table.decimal_comma)
            if when is not None:
                order.add("", when)
                rows += 1
    return order, rows


def _is_of(cells: Cells, schema: RecordSchema, learner: str | None) -> bool:
    """Whether a row is this learner's; one without a name is."""
    if learner is None or schema.learner is None:
        return True
    return as_text(cells.get(schema.learner, learner)) == learner
