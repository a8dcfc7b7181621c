"""From older schemas to the present one: one transaction, and a record that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.chain import read_chain
from veilstream.deployment.ledger.database import SCHEMA, TAGS_TABLE, TAKE_PART

__all__ = ["from_first_schema"]


def from_first_schema(db: Any, path: Path) -> None:
    """Schema 1 did not say in which epoch and step a client took part; its records do."""
    chain = read_chain(db, path, with_tags=False)
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute("DROP TABLE tags")
        db.execute(TAGS_TABLE)
        for (body,) in db.execute("SELECT body FROM records ORDER BY number").fetchall():
            content = json.loads(body)
            if "tag" in content:
                part = (bytes.fromhex(content["tag"]), content["epoch"], content["step"])
                db.execute(TAKE_PART, part)
        record, text = chain.next("migrated", {"from": 1, "to": SCHEMA})
        db.execute(
            "INSERT INTO records VALUES (?, ?, ?, ?)",
            (record.number, record.kind, text, record.hash),
        )
        db.execute(f"PRAGMA user_version={SCHEMA}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
