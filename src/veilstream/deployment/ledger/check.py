"""Is a store what was written? Once at every opening, and record by record on demand.

Opening parses unpacked records and hashes the rest; verifying takes every record of all time.
Neither keeps more in memory than a segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.archive import (
    NOTHING_PACKED,
    Row,
    archive_digest,
    fold_segment,
    segments,
    tail,
    unpack,
)
from veilstream.deployment.ledger.chain import Chain, Record, damaged, digest, tag_key
from veilstream.deployment.ledger.visits import carried_tags, tables_sum, visit_key


def open_chain(db: Any, path: Path) -> Chain:
    """Where a store's chain has come to; anything that does not agree is a `LedgerError`."""
    _check_sqlite(db, path)
    key = tag_key(db)
    chain = Chain(key)
    for row in tail(db):
        if row.number and not chain.length:
            chain = _chain_before(row, key, path)
        _take(chain, row, path)
    _check_beside(db, chain, path)
    return chain


def verify_chain(db: Any, path: Path, seen: Callable[[Record], None] = lambda record: None) -> Chain:
    """The same from every record, one after the other; ``seen`` is called with each."""
    _check_sqlite(db, path)
    key = tag_key(db)
    chain = Chain(key)
    for row, archive in _all_rows(db):
        before = chain.summary(archive) if archive else None
        record = _take(chain, row, path)
        if record.body.before != before:
            raise damaged(path, f"what record {record.number} says of those before it")
        for tag, step in record.visits:
            visit = visit_key(tag, record.body.epoch, step)
            if db.execute("SELECT 1 FROM visits WHERE visit = ?", (visit,)).fetchone() is None:
                raise damaged(path, "the list of who took part")
        if record.kind == "recovered":
            _check_carried(db, record, path)
        seen(record)
    _check_beside(db, chain, path)
    return chain


def _check_sqlite(db: Any, path: Path) -> None:
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":  # tables that read well from end to end may still be searched wrongly
        raise damaged(path, found)


def _chain_before(row: Row, key: bytes, path: Path) -> Chain:
    """From the first unpacked record's own summary, which its hash binds to the chain."""
    before = Record.read(row).body.before
    if before is None:
        raise damaged(path, f"record {row.number}")
    if before.tag_key != digest(key):
        raise damaged(path, "the key of tags")
    return Chain.after(before, key)


def _take(chain: Chain, row: Row, path: Path) -> Record:
    try:
        record = chain.take(row)
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if row.number == 0 and record.body.tag_key != digest(chain.tag_key):
        raise damaged(path, "the key of tags")
    return record


def _check_beside(db: Any, chain: Chain, path: Path) -> None:
    if archive_digest(db) != chain.archive:
        raise damaged(path, "records that were packed")
    blobs = {name: digest(content) for name, content in db.execute("SELECT * FROM blobs")}
    if blobs != chain.kept:
        raise damaged(path, "what is kept beside the records")
    if tables_sum(db, chain.tag_key) != chain.visits.value():
        raise damaged(path, "the list of who took part")


def _all_rows(db: Any) -> Iterator[tuple[Row, str]]:
    """The first record of a segment, and of the tail, comes with what stands for those before."""
    archive = NOTHING_PACKED
    for first, content in segments(db):
        for row in unpack(first, content):
            yield row, archive if first and row.number == first else ""
        archive = fold_segment(archive, first, content)
    fresh = archive != NOTHING_PACKED
    for row in tail(db):
        yield row, archive if fresh else ""
        fresh = False


def _check_carried(db: Any, record: Record, path: Path) -> None:
    carried = hashlib.sha256()
    for tag in carried_tags(db):
        carried.update(tag)
    if carried.hexdigest() != record.body.carried:
        raise damaged(path, "the list of who took part before a loss")
