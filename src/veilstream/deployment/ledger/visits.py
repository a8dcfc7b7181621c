"""Who took part, and when: one row for every visit, never changed and never removed.

A client's tag is bytes, taken as they are, or text in the one form that names of clients have
(`veilstream.records.client_names`). The ledger keeps it as a keyed hash.

A row is one key of 48 bytes: the client's keyed tag (32), the epoch (8), and the step plus one (8;
zero for a client who was carried over from a store that was lost). All of a client's visits lie
side by side, the last one last.

A missing row would let a client in twice, so the ledger keeps a *sum of visits* beside its chain:
how many rows there are, and the sum of a keyed function of each (AES in CBC-MAC form, under a key
made from the key of tags; 128 bits). It grows by one row at a time, does not depend on their order,
and is recomputed from the whole table at C speed whenever a ledger is opened. No accident leaves it
unchanged. Against someone who forges rows and knows the key, `veilstream ledger verify` compares
each visit with its record.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from veilstream.errors import InputError
from veilstream.records.client_names import LONGEST_NAME, client_name
from veilstream.records.participation import PastVisits

TAG_BYTES = 32
NOBODY = bytes(TAG_BYTES)
"""In the place of a tag, for a step without a client."""
VISITS_TABLE = "CREATE TABLE visits (visit BLOB PRIMARY KEY) WITHOUT ROWID"
_WHEN = struct.Struct(">QQ")
_KEY_BYTES = TAG_BYTES + _WHEN.size
_AT_ONCE = 16384
_ASKED_AT_ONCE = 256
_MODULUS = 1 << 64


def tag_of(client: object) -> bytes | None:
    """The one form of a client's tag; None for what is no tag (`checked_tag` says why)."""
    if type(client) is bytes:
        return client if 0 < len(client) <= LONGEST_NAME else None
    name = client_name(client) if type(client) is str else None
    return None if name is None else name.encode()


def checked_tag(client: object) -> bytes:
    """`tag_of`, or an `InputError` that does not show the tag."""
    tag = tag_of(client)
    if tag is None:
        raise InputError(
            "tag",
            "<not shown>",
            f"bytes, or text without control characters, of 1 to {LONGEST_NAME}; not white space alone",
            "give each person a tag that is the same whenever they come",
        )
    return tag


def keyed_tag(key: bytes, tag: bytes) -> bytes:
    """A tag as a ledger keeps it: without the key, the file's rows name nobody."""
    return hmac.digest(key, tag, "sha256")


def visit_key(tag: bytes, epoch: int, step: int) -> bytes:
    """The row of one visit."""
    return tag + _WHEN.pack(epoch, step + 1)


def past_visits(db: Any, tags: Collection[bytes]) -> dict[bytes, PastVisits]:
    """The visits so far of each of these clients who has any, in few queries."""
    found: dict[bytes, PastVisits] = {}
    asked = list(dict.fromkeys(tags))
    for first in range(0, len(asked), _ASKED_AT_ONCE):
        some = asked[first : first + _ASKED_AT_ONCE]
        ranges = ", ".join(["(?, ?)"] * len(some))
        theirs = (
            f"WITH asked(low, high) AS (VALUES {ranges}) "
            "SELECT visit FROM asked CROSS JOIN visits ON visit BETWEEN low AND high ORDER BY visit"
        )
        ends = [end for tag in some for end in (tag + bytes(16), tag + b"\xff" * 16)]
        for (visit,) in db.execute(theirs, ends):
            tag, (epoch, after) = visit[:TAG_BYTES], _WHEN.unpack_from(visit, TAG_BYTES)
            before = found.get(tag)
            if before is None:
                found[tag] = PastVisits(epoch, after - 1, 1, 1, epoch)
            elif before.epoch == epoch:
                found[tag] = before._replace(step=after - 1, times=before.times + 1)
            else:
                carried = before.step < 0
                found[tag] = PastVisits(epoch, -1 if carried else after - 1, 1, before.epochs + 1, before.first_epoch)
    return found


def visits_of(db: Any, tag: bytes) -> list[tuple[int, int]]:
    """Epoch and step of each of a client's visits, the last one last; step -1: carried over."""
    mine = "SELECT visit FROM visits WHERE visit BETWEEN ? AND ? ORDER BY visit"
    rows = db.execute(mine, (tag + bytes(16), tag + b"\xff" * 16)).fetchall()
    found = (_WHEN.unpack_from(row[0], TAG_BYTES) for row in rows)
    return [(epoch, after - 1) for epoch, after in found]


@dataclass(frozen=True)
class VisitTotal:
    """Stands for a set of visits, as a record holds it."""

    count: int = 0
    sum: str = "0" * 32


class VisitSum:
    """Sums visits up, in any order."""

    def __init__(self, tag_key: bytes, so_far: VisitTotal | None = None) -> None:
        so_far = so_far or VisitTotal()
        self._key = hashlib.sha256(b"veilstream sum of visits" + tag_key).digest()
        self._count = so_far.count
        self._total = [int(so_far.sum[:16], 16), int(so_far.sum[16:], 16)]
        self._waiting = bytearray()

    def add(self, keys: bytes) -> None:
        """One more visit, or several, one after the other."""
        self._waiting += keys
        if len(self._waiting) >= _AT_ONCE * _KEY_BYTES:
            self._settle()

    def value(self) -> VisitTotal:
        """What they come to."""
        self._settle()
        return VisitTotal(self._count, "".join(f"{half:016x}" for half in self._total))

    def _settle(self) -> None:
        if not self._waiting:
            return
        # Here, since a ledger without visits is looked at without it.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        rows = np.frombuffer(bytes(self._waiting), "<u8").reshape(-1, _KEY_BYTES // 8)
        state = np.zeros((len(rows), 2), "<u8")
        for block in range(0, rows.shape[1], 2):
            encryptor = Cipher(algorithms.AES(self._key), modes.ECB()).encryptor()
            mixed = encryptor.update((state ^ rows[:, block : block + 2]).tobytes())
            state = np.frombuffer(mixed, "<u8").reshape(-1, 2)
        sums = state.sum(axis=0, dtype=np.uint64)  # whole numbers modulo 2^64
        self._total = [(a + int(b)) % _MODULUS for a, b in zip(self._total, sums, strict=True)]
        self._count += len(rows)
        self._waiting.clear()


def tables_sum(db: Any, tag_key: bytes) -> VisitTotal:
    """Of the whole table."""
    total = VisitSum(tag_key)
    for keys in _pieces(db):
        total.add(keys)
    return total.value()


def clients_of(db: Any) -> int:
    """How many clients there are in the table."""
    clients, last = 0, b""
    for keys in _pieces(db):
        tags = np.frombuffer(keys, f"V{_KEY_BYTES}").view(np.uint8).reshape(-1, _KEY_BYTES)
        tags = tags[:, :TAG_BYTES]
        clients += int((tags[1:] != tags[:-1]).any(axis=1).sum()) + (tags[0].tobytes() != last)
        last = tags[-1].tobytes()
    return clients


def carried_tags(db: Any) -> Iterator[bytes]:
    """Clients whom a store took over from the witness of one that was lost, in order of tags."""
    for keys in _pieces(db):
        for at in range(0, len(keys), _KEY_BYTES):
            if keys[at + TAG_BYTES + 8 : at + _KEY_BYTES] == bytes(8):
                yield keys[at : at + TAG_BYTES]


def _pieces(db: Any) -> Iterator[bytes]:
    """The table from end to end, in pieces of many rows; rows that are out of order are an error.

    (SQLite joins the rows, which is several times faster than fetching them.)
    """
    piece = (
        "SELECT CAST(group_concat(visit, '') AS BLOB) FROM "
        f"(SELECT visit FROM visits WHERE visit > ? ORDER BY visit LIMIT {_AT_ONCE})"
    )
    last = b""
    while keys := db.execute(piece, (last,)).fetchone()[0]:
        rows = np.frombuffer(keys, f"S{_KEY_BYTES}")
        if keys[:_KEY_BYTES] <= last or not (rows[1:] > rows[:-1]).all():
            raise ValueError("the list of who took part is out of order")
        yield keys
        last = keys[-_KEY_BYTES:]
