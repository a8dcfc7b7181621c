"""The hash chain: every fact a record, every record bound to all before it.

A *record* is a number, a kind, a body (JSON), and the hash of that and of the record before. What
is secret or large lies beside the records as *blobs*, each bound to one by its own hash, so that it
can be destroyed later while the chain stays whole. Bodies have these keys of common meaning:

    epoch       which mechanism was running
    step, tag   a client (as a keyed hash) took part in this step
    steps, tags so many steps from ``step`` on were stored together; who took part in each, as keyed
                hashes one after the other, zeros for nobody
    kept        names and hashes of blobs that begin with this record
    destroyed   names of blobs that end with it
    before      all that one must know of the records before this one (`Chain.summary`)

A record with ``before`` is where opening begins: older ones are packed into segments
(`veilstream.deployment.ledger.archive`), which its summary commits to. So memory and the records
that are read one by one stay bounded, however long the chain is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.archive import NOTHING_PACKED, Row
from veilstream.deployment.ledger.visits import NOBODY, TAG_BYTES, VisitSum, visit_key
from veilstream.errors import LedgerError

GENESIS = bytes(32)
BOOKMARKS = "bookmark/"
"""Blobs under names that begin so say how far a data source has been read."""


@dataclass(frozen=True)
class Record:
    """One fact."""

    number: int
    kind: str
    body: dict[str, Any]
    hash: bytes

    @property
    def visits(self) -> list[tuple[bytes, int]]:
        """Who took part in it, if anyone, and in which step."""
        first: int = self.body.get("step", 0)
        if "tag" in self.body:
            return [(bytes.fromhex(self.body["tag"]), first)]
        tags = bytes.fromhex(self.body.get("tags", ""))
        each = (tags[at : at + TAG_BYTES] for at in range(0, len(tags), TAG_BYTES))
        return [(tag, step) for step, tag in enumerate(each, first) if tag != NOBODY]


@dataclass
class Standing:
    """Where the newest epoch stands: all that its records say and that still matters."""

    epoch: int = -1
    settings: dict[str, Any] | None = None
    """What it was begun with; None if there was none, or it was lost with its store."""
    between: bool = True
    """Whether an epoch is to be begun: at first, after a loss, and when one was asked for."""
    ended: bool = False
    """Whether its secrets are destroyed."""
    followed: int = 0
    """How many epochs the server led this learner through since its operator last began one."""
    run: str | None = None
    """The server's run that it belongs to."""
    steps: int = 0
    rounds: int = 0
    """Rounds that are sealed."""
    pinned: str | None = None
    """Hash of the open round's model."""
    sealed_model: str | None = None
    """Hash of the last sealed round's model."""
    message: str | None = None
    """Hash of the last sealed round's message."""
    acknowledged: int | None = None
    """The last round that the server is known to have."""
    answered: dict[str, Any] | None = None
    """The last record of an acknowledgement."""

    def follow(self, kind: str, body: dict[str, Any]) -> None:
        """Take the next record into account."""
        if kind in ("epoch", "recovered"):
            fresh = Standing(
                self.epoch,
                body.get("settings"),
                between=kind == "recovered",
                followed=body.get("followed", 0),
                run=body.get("run"),
            )
            self.__dict__.update(fresh.__dict__)
        self.epoch = body.get("epoch", self.epoch)
        match kind:
            case "join":
                self.run = body["run"]
            case "pin":
                self.pinned = body["x"]
                if body.get("acknowledged"):
                    self._has(body["acknowledged"][0])
            case "step" | "steps":
                self.steps += body.get("steps", 1)
            case "message":
                self.rounds = body["round"] + 1
                self.message = body["hash"]
                self.sealed_model, self.pinned = self.pinned, None
            case "ack":
                self._has(body["round"])
                self.answered = body
            case "end":
                self.ended, self.pinned = True, None
            case "next":
                self.ended = self.between = True

    def _has(self, r: int) -> None:
        self.acknowledged = r if self.acknowledged is None else max(r, self.acknowledged)


@dataclass
class Chain:
    """Where the chain has come to."""

    tag_key: bytes = b""
    head: bytes = GENESIS
    length: int = 0
    packed: int = 0
    """Records before this one are in segments."""
    archive: str = NOTHING_PACKED
    """Stands for all segments (`archive_digest`)."""
    kept: dict[str, str] = field(default_factory=dict)
    """Hashes of the blobs there are."""
    standing: Standing = field(default_factory=Standing)
    visits: VisitSum = field(init=False)
    """Stands for all visits."""

    def __post_init__(self) -> None:
        self.visits = VisitSum(self.tag_key)

    @property
    def epoch(self) -> int:
        """The newest epoch; -1 before the first."""
        return self.standing.epoch

    @property
    def secrets(self) -> list[str]:
        """Blobs that an epoch's end destroys: all but its last message, and how far was read."""
        return [n for n in self.kept if n != "message" and not n.startswith(BOOKMARKS)]

    def summary(self, archive: str) -> dict[str, Any]:
        """All that one must know of the records so far, if they are packed into this archive."""
        return {
            "head": self.head.hex(),
            "length": self.length,
            "archive": archive,
            "tag_key": digest(self.tag_key),
            "visits": self.visits.value(),
            "kept": dict(self.kept),
            "standing": asdict(self.standing),
        }

    @classmethod
    def after(cls, summary: dict[str, Any], key: bytes) -> Chain:
        """The chain up to a record that has a summary of what was before it."""
        chain = cls(
            key,
            bytes.fromhex(summary["head"]),
            summary["length"],
            archive=summary["archive"],
            kept=dict(summary["kept"]),
            standing=Standing(**summary["standing"]),
        )
        chain.visits = VisitSum(key, *summary["visits"])
        return chain

    def take(self, row: Row) -> Record:
        """Follow a stored record; a `ValueError` unless it is bound to this chain."""
        link = _link(self.head, row.number, row.kind, row.text)
        if row.number != self.length or link != row.hash:
            raise ValueError(f"record {row.number}")
        record = Record(row.number, row.kind, json.loads(row.text), row.hash)
        self.follow(record)
        return record

    def follow(self, record: Record) -> None:
        """Take the next record into account."""
        body = record.body
        if "before" in body:
            self.packed, self.archive = record.number, body["before"]["archive"]
        if record.kind == "recovered":
            self.visits = VisitSum(self.tag_key, *body["visits"])
        for tag, step in record.visits:
            self.visits.add(visit_key(tag, body["epoch"], step))
        plain = {key: value for key, value in body.items() if key != "before"}
        self.standing.follow(record.kind, plain)
        for gone in body.get("destroyed", []):
            self.kept.pop(gone, None)
        self.kept |= body.get("kept", {})
        self.head, self.length = record.hash, record.number + 1

    def next(self, kind: str, body: dict[str, Any]) -> tuple[Record, str]:
        """The record that would come next, and its body as stored."""
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        link = _link(self.head, self.length, kind, text)
        return Record(self.length, kind, json.loads(text), link), text


def tag_key(db: Any) -> bytes:
    """What clients' tags are hashed with."""
    (key,) = db.execute("SELECT value FROM meta WHERE name = 'tag_key'").fetchone()
    return bytes(key)


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
