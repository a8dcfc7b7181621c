"""Old records, packed: a million of them are read, hashed and searched as a thousand segments.

A segment is compressed lines of kind, hash and body. It is packed in one transaction with the next
record, whose body commits to it (`chain`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

SEGMENT_RECORDS = 1024
SEGMENTS_TABLE = "CREATE TABLE segments (first INTEGER PRIMARY KEY, content BLOB NOT NULL)"
NOTHING_PACKED = "0" * 64


class Row(NamedTuple):
    """A record as stored."""

    number: int
    kind: str
    text: str
    hash: bytes


def segment_is_due(records: int, kept: int) -> bool:
    """Whether so many unpacked records are enough.

    What a segment's successor says of the blobs that are kept must not outgrow the segment.
    """
    return records >= max(SEGMENT_RECORDS, 4 * kept)


def pack(rows: Iterable[Row]) -> bytes:
    """Rows as a segment."""
    lines = "".join(f"{row.kind}\t{row.hash.hex()}\t{row.text}\n" for row in rows)
    return zlib.compress(lines.encode(), 1)


def unpack(first: int, content: bytes) -> Iterator[Row]:
    """A segment's rows; a `ValueError` if it is none."""
    for number, line in enumerate(_lines(first, content).split("\n")[:-1], first):
        kind, link, text = line.split("\t", 2)
        yield Row(number, kind, text, bytes.fromhex(link))


def _lines(first: int, content: bytes) -> str:
    try:
        return zlib.decompress(content).decode()
    except zlib.error as error:
        raise ValueError(f"the segment of record {first}: {error}") from error


def fold_segment(before: str, first: int, content: bytes) -> str:
    """What stands for all segments up to this one."""
    own = hashlib.sha256(content).hexdigest()
    return hashlib.sha256(f"{before} {first} {own}".encode()).hexdigest()


def archive_digest(db: Any) -> str:
    """What stands for all segments there are."""
    found = NOTHING_PACKED
    for first, content in segments(db):
        found = fold_segment(found, first, content)
    return found


def segments(db: Any, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Number of the first record, and content, from the segment that holds ``first`` on."""
    query = (
        "SELECT first, content FROM segments WHERE first >= "
        "(SELECT coalesce(max(first), 0) FROM segments WHERE first <= ?) ORDER BY first"
    )
    yield from db.execute(query, (first,))


def tail(db: Any, first: int = 0) -> Iterator[Row]:
    """Records that are not packed yet."""
    query = "SELECT number, kind, body, hash FROM records WHERE number >= ? ORDER BY number"
    for row in db.execute(query, (first,)):
        yield Row(*row)


def rows_from(db: Any, first: int = 0) -> Iterator[Row]:
    """All records from this number on, one after the other."""
    for start, content in segments(db, first):
        for row in unpack(start, content):
            if row.number >= first:
                yield row
    yield from tail(db, first)


def hash_at(db: Any, number: int) -> bytes | None:
    """The hash of this record; None if there is none."""
    for row in rows_from(db, number):
        return row.hash if row.number == number else None
    return None


def mentions_of(db: Any, message: str) -> Iterator[Row]:
    """Records, the newest first, in whose body this hash of a message stands."""
    words = f'"hash":"{message}"'
    unpacked = "SELECT number, kind, body, hash FROM records WHERE instr(body, ?) ORDER BY number DESC"
    for row in db.execute(unpacked, (words,)):
        yield Row(*row)
    for first, content in db.execute("SELECT first, content FROM segments ORDER BY first DESC"):
        if words in _lines(first, content):
            yield from (row for row in unpack(first, content) if words in row.text)
