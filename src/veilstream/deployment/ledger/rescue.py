"""Repairs that keep the promise.

A lost witness is written anew from the newest store. A lost store is begun anew from the witness,
which knows who took part. With both lost, a learner may only begin again with other clients.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.archive import hash_at, rows_from
from veilstream.deployment.ledger.chain import Body, Chain, Record, digest, tag_key
from veilstream.deployment.ledger.check import verify_chain
from veilstream.deployment.ledger.database import (
    check_format,
    create_tables,
    find_witness,
    open_sqlite,
    readable,
    remember_witness,
)
from veilstream.deployment.ledger.paths import lock_store, refuse_links, refuse_witness
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.visits import carried_tags, tables_sum, visit_key
from veilstream.deployment.ledger.witness import Entry, Witness, entries_of
from veilstream.errors import InputError, LedgerError
from veilstream.files import sync_directory


def renew_witness(store: Path, witness: Path | str | None = None) -> int:
    """Write the witness anew; returns how many records it holds. Only for the newest store."""
    where = find_witness(store, witness)
    refuse_links(store, where)
    if not store.exists():
        raise InputError("store", str(store), "a ledger that exists", "check the path")
    refuse_witness(store)
    lock = lock_store(store)
    try:
        with readable(store):
            db = open_sqlite(store)
            try:
                check_format(db, store)
                length = verify_chain(db, store).length
                _refuse_if_ahead(where, db, store)
                Witness.create(where, tag_key(db), _all_entries(db)).close()
                remember_witness(db, store, where)
            finally:
                db.close()
    finally:
        lock.close()
    return length


def _all_entries(db: Any) -> Iterator[Entry]:
    for row in rows_from(db):
        yield from entries_of(db, Record.read(row))


def _refuse_if_ahead(where: Path, db: Any, store: Path) -> None:
    """Evidence that a store is old is never overwritten."""
    try:
        old = Witness(where)
    except (OSError, LedgerError):
        return
    old.close()
    last = old.last()
    if last is None:
        return
    if hash_at(db, last.number) != last.hash:
        raise LedgerError(
            f"the witness {where} saw record {last.number}, which {store} does not have",
            "the witness is right and the store is old: put the newest store back, or give its "
            "epoch up with `veilstream ledger epoch --lost`",
        )


def ask_for_epoch(store: Path, witness: Path | str | None = None, *, abandon: bool = False) -> int:
    """Have the next learner on this store begin a new epoch, with its own plan; returns which.

    Secrets of the old one are destroyed. An epoch with rounds left is given up only on demand:
    what it has released stays released, what it has not is lost.
    """
    if not store.exists():
        raise InputError("store", str(store), "a ledger that exists", "check the path")
    refuse_witness(store)
    with Ledger(store, witness) as ledger:
        chain, standing = ledger.chain, ledger.chain.standing
        if standing.between:
            _forget(ledger)
            return chain.epoch + 1  # already so
        assert standing.settings is not None
        left = standing.settings["rounds"] - standing.rounds
        if left and not standing.ended and not abandon:
            raise InputError(
                "epoch",
                chain.epoch,
                f"an epoch whose horizon has ended ({left} rounds are left)",
                "go on with it, or give it up with --abandon",
            )
        ledger.write("next", Body(epoch=chain.epoch, rounds_left=left), destroy=chain.secrets)
        ledger.witness()
        _forget(ledger)
        return chain.epoch + 1


def _forget(ledger: Ledger) -> None:
    if not ledger.forget():
        raise LedgerError(
            f"{ledger.path} is being read, so destroyed secrets may stay in its log",
            "close what reads it, then run this again",
        )


def begin_again(store: Path, witness: Path | str | None = None) -> tuple[Path | None, int]:
    """A new store in place of one that is lost, damaged or old.

    Returns where the old one was put aside (None if it was gone) and how many clients are carried
    over. The next learner on it begins a new epoch. May be repeated if it was interrupted.
    Secrets in the old one are destroyed if it can still be opened (`holds_secrets`).
    """
    where = find_witness(store, witness)
    refuse_links(store, where)
    if not where.exists():
        raise InputError(
            "witness",
            str(where),
            "a witness that exists",
            "if it lies elsewhere, say where: --witness PATH (witness= in Python). If it is lost too, nobody knows who "
            "took part: begin another store, with other clients only",
        )
    lock = lock_store(store)
    try:
        fresh = store.with_name(f".{store.name}.new")
        for leftover in _with_logs(fresh):
            leftover.unlink(missing_ok=True)
        witnessing = Witness(where)
        db = None
        try:
            db = open_sqlite(fresh)
            fresh.chmod(0o600)
            clients = _fill(db, witnessing, store)
            aside = _put_aside(store)
            if aside is not None:
                _wipe(aside)
            Witness.create(where, witnessing.tag_key, _all_entries(db)).close()
        finally:
            witnessing.close()
            if db is not None:
                db.close()
        fresh.replace(store)
        sync_directory(store.parent)
    finally:
        lock.close()
    return aside, clients


def _fill(db: Any, witness: Witness, store: Path) -> int:
    """One record: who took part before. Returns how many they are."""
    key = witness.tag_key
    epoch = max((entry.epoch for entry in witness.entries()), default=0)
    create_tables(db, key, store, witness.path)
    db.execute("BEGIN IMMEDIATE")
    tags = (entry.tag for entry in witness.entries() if entry.tag)
    rows = ((visit_key(tag, epoch, -1),) for tag in tags)
    db.executemany("INSERT OR IGNORE INTO visits VALUES (?)", rows)
    carried = hashlib.sha256()
    for tag in carried_tags(db):
        carried.update(tag)
    visits = tables_sum(db, key)
    body = Body(epoch=epoch, carried=carried.hexdigest(), visits=visits, tag_key=digest(key))
    record, text = Chain(key).next("recovered", body)
    row = (record.number, record.kind, text, record.hash)
    db.execute("INSERT INTO records VALUES (?, ?, ?, ?)", row)
    db.execute("COMMIT")
    return visits.count


def _put_aside(store: Path) -> Path | None:
    """Move a store out of the way, with its log; nothing is deleted."""
    number = 1
    while (aside := store.with_name(f"{store.name}.lost-{number}")).exists():
        number += 1
    for part in _with_logs(store):
        if part.exists():
            part.rename(part.with_name(part.name.replace(store.name, aside.name, 1)))
    sync_directory(store.parent)
    return aside if aside.exists() else None


def holds_secrets(aside: Path) -> bool:
    """Whether a store that was put aside may still hold seeds: then its files must be destroyed."""
    try:
        db = open_sqlite(aside)
        try:
            (left,) = db.execute("SELECT count(*) FROM blobs").fetchone()
        finally:
            db.close()
    except Exception:  # it cannot be opened, so nobody can say
        return True
    return bool(left)


def _wipe(aside: Path) -> None:
    """Destroy all that is kept beside the records, as far as the file can be opened."""
    with contextlib.suppress(Exception):
        db = open_sqlite(aside)
        try:
            db.execute("DELETE FROM blobs")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            db.close()


def _with_logs(store: Path) -> list[Path]:
    return [store.with_name(store.name + end) for end in ("-wal", "-shm", "")]
