"""Read a ledger without changing it, even while a learner writes to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.chain import Chain, Record, tag_key
from veilstream.deployment.ledger.check import open_chain, verify_chain
from veilstream.deployment.ledger.database import check_format, find_witness, readable, remembered_witness
from veilstream.deployment.ledger.paths import lock_path, refuse_links, refuse_witness
from veilstream.deployment.ledger.visits import checked_tag, clients_of, keyed_tag, visits_of
from veilstream.deployment.ledger.witness import Entry, Witness, entries_of, missing_witness
from veilstream.errors import InputError, LedgerError
from veilstream.files import lock_holder
from veilstream.privacy.guarantee import Guarantee
from veilstream.progress import progress


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
    """Seeds, snapshots, secrets of an order and records that wait for their window, which the store still holds."""
    guarantee: Guarantee | None
    witnessed: int
    """Records that the witness has seen."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"guarantee": None if self.guarantee is None else self.guarantee.as_dict()}


def inspect(store: Path, witness: Path | str | None = None) -> Status:
    """Status after the checks that opening makes; of the witness, only the last entry is read."""
    where = find_witness(store, witness)
    refuse_links(store, where)
    with reading(store) as db:
        return _status(db, open_chain(db, store), store, where)


def verify(store: Path, witness: Path | str | None = None) -> Status:
    """Every record, all that hangs on it, and every entry of the witness; raises what is wrong.

    A record at a time, so memory does not grow with the chain; with a progress bar.
    """
    where = find_witness(store, witness)
    refuse_links(store, where)
    # The witness first: whatever it holds by now, the store holds when it is read.
    witnessing = Witness(where) if where.exists() and store.exists() else None
    try:
        with reading(store) as db:
            compared = _Comparison(store, where, iter(witnessing.entries() if witnessing else ()))
            total = db.execute("SELECT max(number) FROM records").fetchone()[0] or 0
            with progress("records verified", total) as tick:

                def seen(record: Record) -> None:
                    for entry in entries_of(db, record):
                        compared.next(entry)
                    tick(1)

                status = _status(db, verify_chain(db, store, seen), store, where)
                known = remembered_witness(db)
    finally:
        if witnessing is not None:
            witnessing.close()
    if witnessing is None:
        raise missing_witness(where, store, known)
    compared.finish(status.holder)
    if status.holder is None:
        witnessing.check_torn(compared.lacking)
    return status


class _Comparison:
    """The witness beside the chain, entry by entry; what is wrong is told at the end."""

    def __init__(self, store: Path, where: Path, found: Iterator[Entry]) -> None:
        self._store, self._where, self._found = store, where, found
        self.lacking = 0
        self._lacking_records: set[int] = set()
        self._problem: LedgerError | None = None

    def next(self, expected: Entry) -> None:
        if self._problem is not None:
            return
        try:
            entry = next(self._found, None)
        except LedgerError as error:
            self._problem = error
            return
        if entry is None:
            self.lacking += 1
            self._lacking_records.add(expected.number)
        elif entry != expected:
            self._disagree(entry)

    def finish(self, holder: str | None) -> None:
        if self._problem is None and (more := next(self._found, None)) is not None:
            self._disagree(more)
        if self._problem is not None:
            raise self._problem
        if len(self._lacking_records) > 1 and holder is None:
            raise LedgerError(
                f"the witness {self._where} lacks {len(self._lacking_records)} records of {self._store}",
                "put the newest witness back; if it is lost and this store is the newest there is, "
                "`veilstream ledger verify --renew-witness` writes it anew",
            )

    def _disagree(self, entry: Entry) -> None:
        self._problem = LedgerError(
            f"the witness {self._where} and {self._store} disagree about record {entry.number}",
            "if the witness has more, the store is an old copy: put the newest one back",
        )


def _status(db: Any, chain: Chain, store: Path, where: Path) -> Status:
    standing, settings = chain.standing, chain.standing.settings
    promised = None if settings is None else settings["guarantee"]
    return Status(
        str(store),
        str(where),
        lock_holder(lock_path(store)),
        records=chain.length,
        head=chain.head.hex(),
        epoch=None if settings is None else standing.epoch,
        round=standing.rounds,
        rounds=None if settings is None else settings.get("rounds"),
        pinned=standing.pinned is not None and not standing.between,
        steps=standing.steps,
        clients=clients_of(db),
        acknowledged=standing.acknowledged,
        ended=standing.ended,
        secrets=sum(name.startswith(("seed/", "snapshot", "order/secret", "arrived/")) for name in chain.kept),
        guarantee=Guarantee.from_dict(promised) if promised else None,
        witnessed=_last_witnessed(where),
    )


def _last_witnessed(where: Path) -> int:
    try:
        witness = Witness(where)
    except (OSError, LedgerError):
        return 0
    witness.close()
    last = witness.last()
    return last.number + 1 if last else 0


@dataclass(frozen=True)
class PersonsPart:
    """What a ledger says of one person."""

    used: bool
    times: int
    """Places in steps that this person took, in all epochs.

    Under a secret order nobody can know whether a place's step has come, or came in a round that was sat out.
    """
    last_epoch: int | None
    carried_over: bool
    """Whether only a store that was lost knew in which steps this person took part."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def part_of_person(store: Path, client: object) -> PersonsPart:
    """Look one person up by their tag, in any spelling; a learner may be writing to the store.

    Raises:
        InputError: for what is no tag; the error does not show it.

    """
    tag = checked_tag(client)
    with reading(store) as db:
        visits = visits_of(db, keyed_tag(tag_key(db), tag))
    steps = [(epoch, step) for epoch, step in visits if step >= 0]
    return PersonsPart(
        used=bool(visits),
        times=len(steps),
        last_epoch=max((epoch for epoch, _ in visits), default=None),
        carried_over=bool(visits) and not steps,
    )


@contextmanager
def reading(store: Path) -> Iterator[Any]:
    """A connection that changes nothing and sees one state, whatever is being written."""
    if not store.exists():
        raise InputError("store", str(store), "a ledger that exists", "check the path")
    refuse_witness(store)
    with readable(store):
        db = sqlite3.connect(f"{store.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            db.execute("BEGIN")
            check_format(db, store)
            yield db
        finally:
            db.close()
