"""The hash chain: every fact a record, every record bound to all before it.

A *record* is a number, a kind, a `Body` (stored as JSON), and the hash of that and of the record
before. What is secret or large lies beside the records as *blobs*, each bound to one by its own
hash, so that it can be destroyed later while the chain stays whole.

A record with ``before`` is where opening begins: older ones are packed into segments
(`veilstream.deployment.ledger.archive`), which its summary commits to. So memory and the records
that are read one by one stay bounded, however long the chain is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from veilstream.deployment.ledger.archive import NOTHING_PACKED, Row
from veilstream.deployment.ledger.visits import NOBODY, TAG_BYTES, VisitSum, VisitTotal, visit_key
from veilstream.errors import LedgerError

GENESIS = bytes(32)
BOOKMARKS = "bookmark/"
"""Blobs under names that begin so say how far a data source has been read."""


@dataclass(frozen=True)
class Standing:
    """Where the newest epoch stands: all that its records say and that still matters."""

    epoch: int = -1
    settings: dict[str, Any] | None = None
    """What it was begun with; None if there was none, or it was lost with its store."""
    between: bool = True
    """Whether an epoch is to be begun: at first, after a loss, and when one was asked for."""
    ended: bool = False
    """Whether its secrets are destroyed."""
    alike_since: int | None = None
    """The first of the epochs up to this one that were begun on the same terms, one after the other; None: this one."""
    followed: int = 0
    """How many epochs the server led this learner through since its operator last began one."""
    study: bool = False
    """Whether an audit's or a study's learner began it."""
    run: str | None = None
    ordered: bool = False
    """Whether all clients of an epoch with a secret order are written down, and its files are bound to it."""
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
    answered: str | None = None
    """Hash of the last message whose acknowledgement has a record."""
    cleared: bool = False
    """Whether what the last message says is part of a sum that was opened, so that the next begins at zero."""
    unopened: bool = False
    """Whether a round has been begun since, whose clients are part of no opened sum yet."""

    def after(self, kind: str, body: Body) -> Standing:
        """Where it stands after the next record."""
        if kind in ("epoch", "recovered"):
            return Standing(
                body.epoch,
                body.settings,
                between=kind == "recovered",
                alike_since=self._alike_since(kind, body),
                followed=body.followed or 0,
                run=body.run,
                study=bool(body.study),
            )
        now = self if body.epoch == self.epoch else replace(self, epoch=body.epoch)
        match kind:
            case "join":
                return replace(now, run=body.run)
            case "ordered":
                return replace(now, ordered=True)
            case "pin":
                known = now if body.acknowledged is None else now._has(body.acknowledged[0])
                return replace(known, pinned=body.x, unopened=True)
            case "step" | "steps":
                return replace(now, steps=now.steps + (body.steps or 1))
            case "message":
                assert body.round is not None
                sealed = replace(now, rounds=body.round + 1, message=body.hash, cleared=False)
                return replace(sealed, sealed_model=now.pinned, pinned=None)
            case "missed":
                assert body.round is not None
                assert body.steps is not None
                later = replace(now, rounds=body.round + 1, message=body.hash, cleared=False)
                return replace(later, steps=now.steps + body.steps, sealed_model=None)
            case "opened":
                counted = bool(body.counted)
                return replace(now, cleared=now.cleared or counted, unopened=now.unopened and not counted)
            case "ack":
                assert body.round is not None
                return replace(now._has(body.round), answered=body.hash)
            case "end":
                return replace(now, ended=True, pinned=None)
            case "next":
                return replace(now, ended=True, between=True)
        return now

    def _alike_since(self, kind: str, body: Body) -> int:
        same = kind == "epoch" and self.settings is not None and body.settings is not None
        if same and self.settings["digest"] == body.settings["digest"]:  # type: ignore[index]
            return self.epoch if self.alike_since is None else self.alike_since
        return body.epoch

    def _has(self, r: int) -> Standing:
        return replace(self, acknowledged=r if self.acknowledged is None else max(r, self.acknowledged))


@dataclass(frozen=True)
class Summary:
    """All that one must know of the records before one, if they are packed into this archive."""

    head: str
    length: int
    archive: str
    tag_key: str
    visits: VisitTotal
    kept: dict[str, str]
    standing: Standing

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Summary:
        """From JSON."""
        visits, standing = VisitTotal(**stored["visits"]), Standing(**stored["standing"])
        return cls(**{**stored, "visits": visits, "standing": standing})


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a record says. Which fields it has follows from its kind; None is not stored."""

    epoch: int
    """Which mechanism was running."""
    round: int | None = None
    step: int | None = None
    """The step that was taken, or the first of several."""
    steps: int | None = None
    """How many were stored together."""
    tag: str | None = None
    """Who took part in the step, as a keyed hash."""
    tags: str | None = None
    """Who took part in each of several steps, one hash after the other, zeros for nobody."""
    places: int | None = None
    """How many hashes belong to each of those steps, where it is not one."""
    x: str | None = None
    """Hash of the round's model."""
    hash: str | None = None
    """Of the round's message."""
    acknowledged: tuple[int, str] | None = None
    """Round and hash of the last message that the server says it has."""
    attempt: int | None = None
    """Which try to open a round's sum over learners."""
    counted: bool | None = None
    """Whether this learner's increment is part of the sum that was opened."""
    run: str | None = None
    followed: int | None = None
    study: bool | None = None
    settings: dict[str, Any] | None = None
    rounds_left: int | None = None
    kept: dict[str, str] | None = None
    """Names and hashes of blobs that begin with this record."""
    destroyed: list[str] | None = None
    before: Summary | None = None
    tag_key: str | None = None
    """Hash of the key of tags; in the first record."""
    carried: str | None = None
    """Hash of the tags that were carried over from a lost store."""
    visits: VisitTotal | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """As `text` wrote it; `TypeError` or `ValueError` for anything else."""
        stored = json.loads(text)
        if "before" in stored:
            stored["before"] = Summary.read(stored["before"])
        if "visits" in stored:
            stored["visits"] = VisitTotal(**stored["visits"])
        if "acknowledged" in stored:
            stored["acknowledged"] = tuple(stored["acknowledged"])
        return cls(**stored)

    def text(self) -> str:
        """As it is stored and hashed."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps(said, sort_keys=True, separators=(",", ":"), default=asdict)


@dataclass(frozen=True)
class Record:
    """One fact."""

    number: int
    kind: str
    body: Body
    hash: bytes

    @classmethod
    def read(cls, row: Row) -> Record:
        """From its row, without a look at its hash."""
        return cls(row.number, row.kind, Body.read(row.text), row.hash)

    @property
    def visits(self) -> list[tuple[bytes, int]]:
        """Who took part in it, if anyone, and in which step."""
        first = self.body.step or 0
        if self.body.tag is not None:
            return [(bytes.fromhex(self.body.tag), first)]
        tags = bytes.fromhex(self.body.tags or "")
        each = (tags[at : at + TAG_BYTES] for at in range(0, len(tags), TAG_BYTES))
        places = self.body.places or 1
        return [(tag, first + place // places) for place, tag in enumerate(each) if tag != NOBODY]


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
    standing: Standing = field(default_factory=Standing)
    visits: VisitSum = field(init=False)

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

    def summary(self, archive: str) -> Summary:
        """What stands for the records so far, if they are packed into this archive."""
        return Summary(
            self.head.hex(),
            self.length,
            archive,
            digest(self.tag_key),
            self.visits.value(),
            dict(self.kept),
            self.standing,
        )

    @classmethod
    def after(cls, summary: Summary, key: bytes) -> Chain:
        """The chain up to a record that has a summary of those before it."""
        chain = cls(
            key,
            bytes.fromhex(summary.head),
            summary.length,
            archive=summary.archive,
            kept=dict(summary.kept),
            standing=summary.standing,
        )
        chain.visits = VisitSum(key, summary.visits)
        return chain

    def take(self, row: Row) -> Record:
        """Follow a stored record; a `ValueError` unless it is bound to this chain."""
        link = _link(self.head, row.number, row.kind, row.text)
        if row.number != self.length or link != row.hash:
            raise ValueError(f"record {row.number}")
        record = Record.read(row)
        self.follow(record)
        return record

    def follow(self, record: Record) -> None:
        """Take the next record into account."""
        body = record.body
        if body.before is not None:
            self.packed, self.archive = record.number, body.before.archive
        if body.visits is not None:
            self.visits = VisitSum(self.tag_key, body.visits)
        for tag, step in record.visits:
            self.visits.add(visit_key(tag, body.epoch, step))
        self.standing = self.standing.after(record.kind, body)
        for gone in body.destroyed or []:
            self.kept.pop(gone, None)
        self.kept |= body.kept or {}
        self.head, self.length = record.hash, record.number + 1

    def next(self, kind: str, body: Body) -> tuple[Record, str]:
        """The record that would come next, and its body as stored."""
        text = body.text()
        return Record(self.length, kind, body, _link(self.head, self.length, kind, text)), text


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
