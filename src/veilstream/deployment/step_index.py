"""An epoch's records sorted by the secret step of their clients: one file, which only the epoch's secret opens.

Reading a table in an order that only this learner knows would need every row at random. So each record is encoded
once, in the order of the table, and written to a part by its step and its client's tag; parts are then sorted one
by one. Memory is that of one part (a 256th of all), however many records there are. A client who comes twice has
one step, so both records lie side by side, and the first row is kept.

The file lies beside the store, as its owner's alone (mode 0600, in a folder of mode 0700). It says who is used when,
so it is encrypted (AES-256 in counter mode) and sealed under keys that follow from the epoch's secret: when the
ledger destroys that, no copy of this file can be read any more.

    start    8 bytes  VSORDER1
             32 bytes salt, new for each file
    then     records in the order of their steps, all of one length; clients' keyed tags in their own order;
             what the file holds (JSON), where each step begins, a digest of every page of records: all encrypted
    end      8 bytes where that last part begins, 32 bytes its seal
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import LedgerError
from veilstream.files import sync_directory

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

_MAGIC = b"VSORDER1"
_SALT_BYTES = _SEAL_BYTES = _TAG_BYTES = 32
_START_BYTES = len(_MAGIC) + _SALT_BYTES
_END = struct.Struct("<Q32s")
_COUNT = struct.Struct("<Q")
_PARTS = 256
_TOGETHER = 16_384
"""Records that are dealt out to parts at once."""
_BUFFER_BYTES = 1 << 16
PAGE_RECORDS = 1024
_PAGE_BYTES = 1 << 16
_DIGEST_BYTES = 16

Int64s = NDArray[np.int64]
Tick = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an index says of itself."""

    epoch: int
    steps: int
    """Of the epoch; each of its clients has one."""
    shape: tuple[int, ...]
    """Of one record's features."""
    records: int = 0
    """Clients, each with one record."""
    unusable: int = 0
    """Of them, records that keep their place with a zero gradient."""
    again: int = 0
    """Further rows of the same clients, which are left out."""
    since: tuple[tuple[str, str], ...] = ()
    """How far each source had been read before."""
    until: tuple[tuple[str, str], ...] = ()
    """How far each has been read now."""
    files: str = ""
    """The files as they were; empty where that is not known."""

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON."""
        stored = json.loads(text)
        for name in ("since", "until"):
            stored[name] = tuple((source, told) for source, told in stored[name])
        return cls(**{**stored, "shape": tuple(stored["shape"])})


class Rows(NamedTuple):
    """Some clients of one step: arrays, a row for each."""

    features: NDArray[np.float32]
    targets: NDArray[np.float64]
    usable: NDArray[np.bool_]


def index_folder(store: Path) -> Path:
    """Where the index of a store's epoch is."""
    return store.with_suffix(".order")


def remove_index(store: Path) -> None:
    """Remove the index, or what an interruption left of one."""
    folder = index_folder(store)
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
        sync_directory(folder.parent)


class StepIndex:
    """One epoch's records, to be read step by step. Open until `close`."""

    def __init__(self, store: Path, secret: bytes) -> None:
        """Open what `IndexWriter` wrote.

        Raises:
            FileNotFoundError: there is none.
            LedgerError: it is damaged, or of another secret.

        """
        self.path = index_folder(store) / "records"
        self._handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._read_end(secret)
        except (ValueError, TypeError, KeyError, struct.error) as error:
            self.close()
            raise self._damaged() from error
        except BaseException:
            self.close()
            raise

    def _read_end(self, secret: bytes) -> None:
        start = os.pread(self._handle, _START_BYTES, 0)
        size = os.fstat(self._handle).st_size
        if not start.startswith(_MAGIC) or size < _START_BYTES + _END.size:
            raise self._damaged()
        self._keys = _Keys(secret, start[len(_MAGIC) :])
        at, seal = _END.unpack(os.pread(self._handle, _END.size, size - _END.size))
        end = size - _END.size - _START_BYTES
        if not 0 <= at <= end:
            raise self._damaged()
        told = self._plain(at, end - at)
        if not hmac.compare_digest(self._keys.seal(told), seal):
            raise self._damaged()
        (length,) = _COUNT.unpack_from(told)
        self.contents = Contents.read(told[_COUNT.size : _COUNT.size + length].decode())
        numbers = np.frombuffer(told, "<i8", self.contents.steps + 1, _COUNT.size + length)
        self._begins: Int64s = numbers.astype(np.int64)
        self._digests = told[_COUNT.size + length + numbers.nbytes :]
        self._layout = _layout(self.contents.shape)
        self._page_records = _page_records(self._layout)
        self._tags_at = self.contents.records * self._layout.itemsize

    def pieces(self, step: int) -> Iterator[Rows]:
        """The clients of one step, some at a time, in an order that their tags alone decide."""
        first, last = int(self._begins[step]), int(self._begins[step + 1])
        while first < last:
            page, place = divmod(first, self._page_records)
            rows = self._page(page)[place : place + last - first]
            yield Rows(
                rows["features"].reshape(len(rows), *self.contents.shape), rows["target"], rows["usable"].astype(bool)
            )
            first += len(rows)

    def tags(self, first: int = 0) -> Iterator[list[bytes]]:
        """All clients' keyed tags in order, some at a time, from the ``first`` on."""
        for at in range(first, self.contents.records, PAGE_RECORDS):
            count = min(PAGE_RECORDS, self.contents.records - at)
            some = self._plain(self._tags_at + at * _TAG_BYTES, count * _TAG_BYTES)
            yield [some[place : place + _TAG_BYTES] for place in range(0, len(some), _TAG_BYTES)]

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __repr__(self) -> str:
        return "StepIndex(<hidden>)"

    def _page(self, page: int) -> NDArray[Any]:
        size = self._layout.itemsize
        first = page * self._page_records
        content = self._plain(first * size, min(self._page_records, self.contents.records - first) * size)
        at = page * _DIGEST_BYTES
        if not hmac.compare_digest(self._keys.of_page(page, content), self._digests[at : at + _DIGEST_BYTES]):
            raise self._damaged()
        return np.frombuffer(content, self._layout)

    def _plain(self, at: int, size: int) -> bytes:
        content = os.pread(self._handle, size, _START_BYTES + at)
        if len(content) != size:
            raise self._damaged()
        return self._keys.cipher(b"records", at // 16).update(bytes(at % 16) + content)[at % 16 :]

    def _damaged(self) -> LedgerError:
        return LedgerError(
            f"{self.path} is damaged, or belongs to another epoch",
            "remove its folder and start the learner again: it is made anew from the same records",
        )


class IndexWriter:
    """Takes records in any order of steps, and sorts them. For one thread.

    A kill leaves parts behind, encrypted; the next writer, and `remove_index`, remove them.
    """

    def __init__(self, store: Path, secret: bytes, steps: int, shape: tuple[int, ...]) -> None:
        self._store, self._secret, self._steps, self._shape = store, secret, steps, shape
        self._folder = index_folder(store)
        if self._folder.is_symlink():
            raise LedgerError(f"{self._folder} is a symbolic link", "remove it: an index lies beside its store")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        for leftover in self._folder.glob("part-*"):
            leftover.unlink()
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._keys = _Keys(secret, self._salt)
        self._final = _layout(shape)
        self._unsorted = np.dtype([("tag", "<u8", (4,)), ("row", "<u8"), ("step", "<u4"), ("record", self._final)])
        self._parts = _Parts(self._folder, b"steps", self._keys, self._unsorted)
        self._held: list[NDArray[Any]] = []
        self._holds = self._rows = 0

    def add(self, tags: Sequence[bytes], steps: Int64s, rows: Rows) -> None:
        """Some clients' records by their keyed tags and steps, in the order of the source."""
        many = np.zeros(len(tags), self._unsorted)
        many["tag"] = np.frombuffer(b"".join(tags), ">u8").reshape(-1, 4)
        many["row"] = np.arange(self._rows, self._rows + len(tags))
        many["step"] = steps
        record = many["record"]
        record["features"], record["target"] = rows.features.reshape(len(tags), -1), rows.targets
        record["usable"] = rows.usable
        self._rows += len(tags)
        self._holds += len(tags)
        self._held.append(many)
        if self._holds >= _TOGETHER:
            self._deal_out()

    def _deal_out(self) -> None:
        if self._held:
            many = np.concatenate(self._held)
            place = many["step"].astype(np.int64) * _PARTS + (many["tag"][:, 0] >> np.uint64(56)).astype(np.int64)
            self._parts.add(place // self._steps, many)
            self._held, self._holds = [], 0

    def finish(self, contents: Contents, tick: Tick = lambda count: None) -> StepIndex:
        """Sort all, write the file whole, and open it; ``tick`` is told of every record."""
        self._deal_out()
        clients = _Parts(self._folder, b"clients", self._keys, np.dtype(("<u8", (4,))))
        partial, counts = self._folder / "part-whole", np.zeros(self._steps, np.int64)
        written = _Written(partial, self._salt, self._keys)
        unusable = again = 0
        pages = _Pages(written, self._keys, _page_records(self._final) * self._final.itemsize)
        for part in self._parts.whole():
            order = np.lexsort((part["row"], *(part["tag"][:, k] for k in (3, 2, 1, 0)), part["step"]))
            part = part[order]
            twice = np.zeros(len(part), bool)
            twice[1:] = (part["tag"][1:] == part["tag"][:-1]).all(axis=1)  # a client's records all have one step
            again += int(twice.sum())
            tick(len(part))
            part = part[~twice]
            unusable += int((part["record"]["usable"] == 0).sum())
            counts += np.bincount(part["step"], minlength=self._steps)
            pages.add(part["record"].tobytes())
            clients.add((part["tag"][:, 0] >> np.uint64(56)).astype(np.int64), part["tag"])
        pages.end()
        for tags in clients.whole():
            written.add(tags[np.lexsort(tuple(tags[:, k] for k in (3, 2, 1, 0)))].astype(">u8").tobytes())
        told = asdict(contents) | {"records": int(counts.sum()), "unusable": unusable, "again": again}
        text = json.dumps(told).encode()
        begins = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
        written.end(_COUNT.pack(len(text)) + text + begins.tobytes() + b"".join(pages.digests))
        partial.replace(self._folder / "records")
        sync_directory(self._folder)
        return StepIndex(self._store, self._secret)

    def give_up(self) -> None:
        """Remove what was written; an index that was there stays."""
        if not self._folder.exists():
            return
        for leftover in self._folder.glob("part-*"):
            leftover.unlink()
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


def keyed_cipher(secret: bytes, purpose: bytes, block: int = 0) -> CipherContext:
    """Encrypts and decrypts what has one purpose, from this block of 16 bytes on, under a key of that purpose alone."""
    # Here, since a learner without a secret order runs without it.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = hmac.digest(secret, purpose, "sha256")
    return Cipher(algorithms.AES(key), modes.CTR(block.to_bytes(16, "big"))).encryptor()


class _Keys:
    """What an index is encrypted and sealed with; of one secret and one file."""

    def __init__(self, secret: bytes, salt: bytes) -> None:
        self._secret = hmac.digest(secret, b"veilstream index by step\0" + salt, "sha256")
        self._sealing = self._key(b"seal")

    def _key(self, purpose: bytes) -> bytes:
        return hmac.digest(self._secret, purpose, "sha256")

    def cipher(self, purpose: bytes, block: int = 0) -> CipherContext:
        return keyed_cipher(self._secret, purpose, block)

    def seal(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_SEAL_BYTES, key=self._sealing, person=b"index").digest()

    def of_page(self, page: int, content: bytes) -> bytes:
        sealed = hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=self._sealing, salt=page.to_bytes(8, "big"))
        return sealed.digest()


class _Parts:
    """Rows of one kind in files by a number from 0 to 255; the files go as they are read."""

    def __init__(self, folder: Path, name: bytes, keys: _Keys, layout: np.dtype[Any]) -> None:
        self._folder, self._name, self._keys, self._layout = folder, name, keys, layout
        self._waiting = [bytearray() for _ in range(_PARTS)]
        self._ciphers: dict[int, CipherContext] = {}

    def add(self, part_of_each: Int64s, rows: NDArray[Any]) -> None:
        order = np.argsort(part_of_each, kind="stable")
        rows, ends = rows[order], np.searchsorted(part_of_each[order], np.arange(_PARTS + 1))
        for part, (first, last) in enumerate(itertools.pairwise(ends.tolist())):
            if first < last:
                self._waiting[part] += rows[first:last].tobytes()
                if len(self._waiting[part]) >= _BUFFER_BYTES:
                    self._write(part)

    def whole(self) -> Iterator[NDArray[Any]]:
        """Every part in turn."""
        for part in range(_PARTS):
            if part in self._ciphers:
                self._write(part)
                path = self._path(part)
                content = self._keys.cipher(self._purpose(part)).update(path.read_bytes())
                path.unlink()
                del self._ciphers[part]
            else:
                content, self._waiting[part] = bytes(self._waiting[part]), bytearray()
            yield np.frombuffer(content, self._layout.base).reshape(-1, *self._layout.shape)

    def _write(self, part: int) -> None:
        content, self._waiting[part] = self._waiting[part], bytearray()
        if part not in self._ciphers:
            self._ciphers[part] = self._keys.cipher(self._purpose(part))
        with _appended(self._path(part)) as file:
            file.write(self._ciphers[part].update(bytes(content)))

    def _path(self, part: int) -> Path:
        return self._folder / f"part-{self._name.decode()}-{part}"

    def _purpose(self, part: int) -> bytes:
        return self._name + bytes([part])


class _Written:
    """A file that is encrypted as it is written."""

    def __init__(self, path: Path, salt: bytes, keys: _Keys) -> None:
        self._keys, self._cipher, self._at = keys, keys.cipher(b"records"), 0
        self._file = _appended(path)
        self._file.write(_MAGIC + salt)

    def add(self, content: bytes) -> None:
        self._file.write(self._cipher.update(content))
        self._at += len(content)

    def end(self, told: bytes) -> None:
        at = self._at
        self.add(told)
        self._file.write(_END.pack(at, self._keys.seal(told)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class _Pages:
    """Cuts records into pages, with a digest of each."""

    def __init__(self, written: _Written, keys: _Keys, page_bytes: int) -> None:
        self._written, self._keys, self._page_bytes = written, keys, page_bytes
        self._waiting = bytearray()
        self.digests: list[bytes] = []

    def add(self, content: bytes) -> None:
        self._waiting += content
        whole = len(self._waiting) - len(self._waiting) % self._page_bytes
        for at in range(0, whole, self._page_bytes):
            self._take(bytes(self._waiting[at : at + self._page_bytes]))
        del self._waiting[:whole]

    def end(self) -> None:
        if self._waiting:
            self._take(bytes(self._waiting))
            self._waiting.clear()

    def _take(self, page: bytes) -> None:
        self.digests.append(self._keys.of_page(len(self.digests), page))
        self._written.add(page)


def _page_records(layout: np.dtype[Any]) -> int:
    """How many records are read and checked together."""
    return max(1, min(PAGE_RECORDS, _PAGE_BYTES // layout.itemsize))


def _layout(shape: tuple[int, ...]) -> np.dtype[Any]:
    """Of a record."""
    size = int(np.prod(shape, dtype=np.int64))
    return np.dtype([("usable", "u1"), ("target", "<f8"), ("features", "<f4", (size,))])


def _appended(path: Path) -> Any:
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, how, 0o600), "ab")
