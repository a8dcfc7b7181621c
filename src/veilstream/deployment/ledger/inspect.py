"""Looking at a ledger without changing it, also while a learner writes to it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.chain import read_chain
from veilstream.deployment.ledger.database import SCHEMA, readable
from veilstream.deployment.ledger.lock import holder
from veilstream.deployment.ledger.paths import lock_path, refuse_links, witness_path
from veilstream.deployment.ledger.witness import Witness, entries_of, missing_witness
from veilstream.errors import InputError, LedgerError

__all__ = ["Status", "inspect", "verify"]


@dataclass(frozen=True)
class Status:
    """What a ledger says of its learner."""

    store: str
    witness: str
    holder: str | None
    """Process that writes to it now."""
    records: int
    head: str
    epoch: int | None
    """The mechanism that is running, or ran last; None before the first."""
    round: int
    """Rounds of this epoch that are sealed."""
    rounds: int | None
    """Rounds of its horizon."""
    pinned: bool
    """Whether a round has been begun and not sealed."""
    steps: int
    """Steps of this epoch that are stored."""
    clients: int
    """Who took part, in all epochs."""
    acknowledged: int | None
    """The last round of this epoch that the server is known to have."""
    ended: bool
    """Whether the epoch is over and its secrets are destroyed."""
    secrets: int
    """Seeds and snapshots that the store still holds."""
    guarantee: dict[str, Any] | None
    witnessed: int
    """Records that the witness has seen."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def inspect(store: Path, witness: Path | str | None = None) -> Status:
    """Read and check the whole chain; the witness is only counted (`verify` compares it)."""
    where = witness_path(store, witness)
    refuse_links(store, where)
    db = _read_only(store)
    try:
        with readable(store):
            db.execute("BEGIN")  # one state, whatever is being written meanwhile
            chain = read_chain(db, store)
            (clients,) = db.execute("SELECT count(*) FROM tags").fetchone()
    finally:
        db.close()
    kinds = Counter(record.kind for record in chain.current)
    epochs = [record.body for record in chain.current if record.kind == "epoch"]
    settings = epochs[0]["settings"] if epochs else None
    acks = [
        record.body["acknowledged"][0] if record.kind == "pin" else record.body["round"]
        for record in chain.current
        if record.kind == "ack" or (record.kind == "pin" and record.body.get("acknowledged"))
    ]
    seen = _last_witnessed(where)
    return Status(
        str(store), str(where), holder(lock_path(store)),
        records=chain.length, head=chain.head.hex(),
        epoch=chain.epoch if epochs else None,
        round=kinds["message"], rounds=settings and settings["rounds"],
        pinned=kinds["pin"] > kinds["message"] and not kinds["next"],
        steps=kinds["step"], clients=clients,
        acknowledged=max(acks, default=None), ended=bool(kinds["end"] or kinds["next"]),
        secrets=sum(name.startswith(("seed/", "snapshot")) for name in chain.kept),
        guarantee=settings and settings["guarantee"], witnessed=seen,
    )  # fmt: skip


def verify(store: Path, witness: Path | str | None = None) -> Status:
    """`inspect`, and every entry of the witness against the chain; raises what is wrong."""
    status = inspect(store, witness)
    where = witness_path(store, witness)
    if not where.exists():
        raise missing_witness(where, store)
    witnessing = Witness(where)
    db = _read_only(store)
    try:
        expected = entries_of(db, 0)
        found = None if witnessing.outdated else list(witnessing.entries())
    finally:
        db.close()
        witnessing.close()
    if found is None:
        raise LedgerError(f"the witness {where} has its first form", "start the learner once")
    for place, entry in enumerate(found):
        if place >= len(expected) or expected[place] != entry:
            raise LedgerError(
                f"the witness {where} and {store} disagree about record {entry.number}",
                "if the witness has more, the store is an old copy: put the newest one back",
            )
    if len(expected) - len(found) > 1 and status.holder is None:
        raise LedgerError(
            f"the witness {where} lacks {len(expected) - len(found)} records of {store}",
            "put the newest witness back; if it is lost and this store is the newest there is, "
            "`veilstream ledger verify --renew-witness` writes it anew",
        )
    return status


def _last_witnessed(where: Path) -> int:
    try:
        witness = Witness(where)
    except (OSError, LedgerError):
        return 0
    witness.close()
    last = witness.last()
    return last.number + 1 if last else 0


def _read_only(store: Path) -> sqlite3.Connection:
    if not store.exists():
        raise InputError("store", str(store), "a ledger that exists", "check the path")
    with readable(store):
        db = sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found != SCHEMA:
            db.close()
            raise LedgerError(
                f"{store} has schema {found}, this program knows {SCHEMA}",
                "start the learner once: it brings an older store up to date",
            )
        return db
