"""The hash chain: every fact a record, every record bound to all before it.

A *record* is a number, a kind, a body (JSON), and the hash of that and of the record before. What
is secret or large lies beside the records as *blobs*, each bound to one by its own hash, so that it
can be destroyed later while the chain stays whole. Bodies have these keys of common meaning:

    epoch       which mechanism was running
    step, tag   a client (as a keyed hash) took part in this step
    kept        names and hashes of blobs that begin with this record
    destroyed   names of blobs that end with it
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from veilstream.errors import LedgerError

__all__ = [
    "GENESIS",
    "TAG_BYTES",
    "Chain",
    "Record",
    "Visit",
    "carried_tags",
    "damaged",
    "digest",
    "read_chain",
    "tag_key",
]

GENESIS = bytes(32)
TAG_BYTES = 32


@dataclass(frozen=True)
class Record:
    """One fact."""

    number: int
    kind: str
    body: dict[str, Any]
    hash: bytes

    @property
    def tag(self) -> bytes | None:
        """Who took part in it, if anyone."""
        return bytes.fromhex(self.body["tag"]) if "tag" in self.body else None


class Visit(NamedTuple):
    """A client's part so far."""

    epoch: int
    step: int
    """The last one."""
    times: int
    """In this epoch."""


@dataclass
class Chain:
    """Where the chain has come to."""

    head: bytes = GENESIS
    length: int = 0
    epoch: int = -1
    current: list[Record] = field(default_factory=list)
    """Records since the last epoch began, its own included."""
    kept: dict[str, str] = field(default_factory=dict)
    """Hashes of the blobs there are."""
    messages: dict[str, int] = field(default_factory=dict)
    """Hashes of all messages of all epochs, with their rounds."""

    @property
    def secrets(self) -> list[str]:
        """Blobs that an epoch's end destroys: all but its last message and who was carried over."""
        return [name for name in self.kept if name not in ("message", "carried")]

    def follow(self, record: Record) -> None:
        """Take the next record into account."""
        if record.kind in ("epoch", "recovered"):
            self.current = []
        self.epoch = record.body.get("epoch", self.epoch)
        if record.kind == "message":
            self.messages[record.body["hash"]] = record.body["round"]
        self.current.append(record)
        for gone in record.body.get("destroyed", []):
            self.kept.pop(gone, None)
        self.kept |= record.body.get("kept", {})
        self.head, self.length = record.hash, record.number + 1

    def next(self, kind: str, body: dict[str, Any]) -> tuple[Record, str]:
        """The record that would come next, and its body as stored."""
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        link = _link(self.head, self.length, kind, text)
        return Record(self.length, kind, json.loads(text), link), text


def read_chain(db: Any, path: Path, *, with_tags: bool = True) -> Chain:
    """Read every record and all that hangs on it; anything that does not agree is an error."""
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":  # tables that read well from end to end may still be searched wrongly
        raise damaged(path, found)
    chain = Chain()
    visits: dict[bytes, Visit] = {}
    rows = db.execute("SELECT number, kind, body, hash FROM records ORDER BY number")
    for number, kind, text, stored in rows:
        if number != chain.length or _link(chain.head, number, kind, text) != stored:
            raise damaged(path, f"record {number}")
        record = Record(number, kind, json.loads(text), stored)
        if number == 0 and record.body["tag_key"] != digest(tag_key(db)):
            raise damaged(path, "the key of tags")
        if tag := record.tag:
            epoch, step = record.body["epoch"], record.body["step"]
            visits[tag] = Visit(epoch, step, visits[tag].times + 1 if tag in visits else 1)
        if kind == "recovered":
            visits |= dict.fromkeys(carried_tags(db), Visit(record.body["epoch"], -1, 1))
        chain.follow(record)
    blobs = {name: digest(content) for name, content in db.execute("SELECT * FROM blobs")}
    if blobs != chain.kept:
        raise damaged(path, "what is kept beside the records")
    if with_tags:
        found = db.execute("SELECT tag, epoch, step, times FROM tags")
        if {tag: Visit(*visit) for tag, *visit in found} != visits:
            raise damaged(path, "the list of who took part")
    return chain


def tag_key(db: Any) -> bytes:
    """What clients' tags are hashed with."""
    (key,) = db.execute("SELECT value FROM meta WHERE name = 'tag_key'").fetchone()
    return bytes(key)


def carried_tags(db: Any) -> list[bytes]:
    """Tags that a store took over from the witness of one that was lost."""
    row = db.execute("SELECT content FROM blobs WHERE name = 'carried'").fetchone()
    content = row[0] if row else b""
    return [content[at : at + TAG_BYTES] for at in range(0, len(content), TAG_BYTES)]


def _link(previous: bytes, number: int, kind: str, text: str) -> bytes:
    return hashlib.sha256(previous + json.dumps([number, kind, text]).encode()).digest()


def digest(content: bytes) -> str:
    """SHA-256, as records hold it."""
    return hashlib.sha256(content).hexdigest()


def damaged(path: Path, what: str) -> LedgerError:
    """The error for a store that is not what was written."""
    return LedgerError(
        f"{path} is damaged ({what})",
        "put the newest intact store back; if there is none, `veilstream ledger epoch --lost` "
        "begins a new one, with everyone the witness knows of left out",
    )
