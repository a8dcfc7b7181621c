"""A disk that loses what was not synced, under SQLite and under the witness.

What programs see are real files in one directory. Beside them the disk remembers, for every file,
what is *durable* and which writes came since the last sync. When the power fails, each of those may
be kept, dropped, or torn: kept by sectors of 512 bytes, any subset of them. A file may have grown
without its data. New names, renamed and removed ones are durable only once their directory was
synced. `Disk.restart` draws one such outcome and makes the files so; the next life reads them.

Two layers write to it:

* SQLite, through a VFS (apsw). Like SQLite's own for Unix, it syncs the directory when it first
  syncs a log that is new, and claims "powersafe overwrite": a sector is written whole or not at
  all, and a write does not harm its neighbours. The witness relies on the same.
  A VFS in Python has no shared memory, so connections use ``locking_mode=EXCLUSIVE``: SQLite then
  keeps the index of its log in the heap. What is written to files, and in what order, is the same.
* Everything else in the directory (the witness), through `os`: while a disk is mounted, its own
  `os.pwrite`, `os.fsync`, `os.replace` and `os.unlink` serve the files in its directory. What was
  written in other ways is noticed at the next sync or rename. The ledger's own code runs unchanged:
  a sync that it forgot would be missed.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import apsw
import numpy as np

from veilstream.deployment.ledger.store import Ledger

__all__ = ["SECTOR", "Disk", "Fault", "PowerCut", "ledger_on", "mounted", "scratch"]

SECTOR = 512
_numbers = itertools.count()
_real = SimpleNamespace(pwrite=os.pwrite, fsync=os.fsync, replace=os.replace, unlink=os.unlink)


def scratch() -> str | None:
    """Where thousands of small files cost least: in memory where that is, else the usual place."""
    memory = Path("/dev/shm")
    return str(memory) if os.access(memory, os.W_OK) else None


class PowerCut(BaseException):
    """The power failed. No program can catch this and go on; `except Exception` does not."""


@dataclass(frozen=True)
class Write:
    """Bytes on their way to the disk."""

    moment: int
    offset: int
    data: bytes

    def pieces(self) -> list[tuple[int, bytes]]:
        """The same bytes, sector by sector."""
        end = self.offset + len(self.data)
        starts = [self.offset, *range(self.offset // SECTOR * SECTOR + SECTOR, end, SECTOR)]
        stops = [*starts[1:], end]
        return [(a, self.data[a - self.offset : b - self.offset]) for a, b in zip(starts, stops, strict=True)]


@dataclass(frozen=True)
class Resize:
    """A new length on its way to the disk."""

    moment: int
    size: int


@dataclass
class Inode:
    """A file, whatever its name."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write | Resize] = field(default_factory=list)

    def live(self) -> bytearray:
        """What programs see, as far as this disk knows."""
        content = bytearray(self.durable)
        for change in self.pending:
            _apply(content, change)
        return content


@dataclass(frozen=True)
class Naming:
    """A change of the directory: ``name`` leads to ``inode`` (or nowhere), ``gone`` disappears."""

    moment: int
    name: str
    inode: Inode | None
    gone: str | None = None

    def apply(self, names: dict[str, Inode]) -> None:
        """Make the change."""
        if self.gone is not None:
            names.pop(self.gone, None)
        if self.inode is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.inode


@dataclass
class Fault:
    """What goes wrong, where, until it is mended."""

    operation: str
    """write, sync or resize."""
    ending: str
    """Of the names of files that it happens to."""
    error: Callable[[], Exception]
    happened: int = 0

    def check(self, operation: str, name: str) -> None:
        """Raise the error if this is the place."""
        if operation == self.operation and name.endswith(self.ending):
            self.happened += 1
            raise self.error()


class Disk:
    """One directory."""

    def __init__(self, root: Path, rng: np.random.Generator, *, witness_syncs: bool = True) -> None:
        self.root = root
        self.rng = rng
        self.witness_syncs = witness_syncs
        """False: `os.fsync` says yes and does nothing, as some drives do."""
        self.moment = 0
        """Events so far: every write, sync and change of a name is one."""
        self.cut_at: int | None = None
        self.off = False
        self.fault: Fault | None = None
        self._names: dict[str, Inode] = {}
        self._durable_names: dict[str, Inode] = {}
        self._namings: list[Naming] = []

    # --- what may happen to it -------------------------------------------------------------------

    def cut_after(self, events: int) -> None:
        """Let the power fail so many events from now."""
        self.cut_at = self.moment + events

    def _event(self, operation: str, name: str, effect: Callable[[], Any]) -> Any:
        """One event; where the power fails, it may or may not have begun."""
        if self.off:
            raise PowerCut
        if self.fault is not None:
            self.fault.check(operation, name)
        self.moment += 1
        last = self.cut_at is not None and self.moment >= self.cut_at
        result = effect() if not last or self.rng.random() < 0.5 else None
        if last:
            self.off = True
            raise PowerCut
        return result

    # --- files -----------------------------------------------------------------------------------

    def inode(self, name: str) -> Inode:
        """The file of this name; one that was made past the disk is taken over, not yet durable."""
        if name not in self._names:
            self._name(Naming(self.moment, name, Inode()))
        return self._names[name]

    def write(self, name: str, inode: Inode, handle: int, data: bytes, offset: int) -> int:
        """Write to the file; not durable before `sync`."""

        def effect() -> int:
            inode.pending.append(Write(self.moment, offset, bytes(data)))
            return _real.pwrite(handle, data, offset)

        return int(self._event("write", name, effect))

    def resize(self, name: str, inode: Inode, handle: int, size: int) -> None:
        """Cut or extend the file; not durable before `sync`."""

        def effect() -> None:
            inode.pending.append(Resize(self.moment, size))
            os.ftruncate(handle, size)

        self._event("resize", name, effect)

    def sync(self, name: str, inode: Inode, *, honest: bool = True) -> None:
        """Make the file's content durable; its name is another matter."""

        def effect() -> None:
            for change in inode.pending if honest else []:
                _apply(inode.durable, change)
            if honest:
                inode.pending = []

        self._event("sync", name, effect)

    # --- names -----------------------------------------------------------------------------------

    def create(self, name: str) -> Inode:
        """A new name; its (real) file is there already."""
        inode = Inode()
        self._event("create", name, lambda: self._name(Naming(self.moment, name, inode)))
        return inode

    def remove(self, name: str) -> None:
        """A name goes."""

        def effect() -> None:
            self._name(Naming(self.moment, name, None))
            _real.unlink(self.root / name)

        self._event("remove", name, effect)

    def rename(self, name: str, target: str) -> None:
        """A name changes, in one piece."""

        def effect() -> None:
            inode = self._notice(name)
            self._name(Naming(self.moment, target, inode, gone=name))
            _real.replace(self.root / name, self.root / target)

        self._event("rename", target, effect)

    def sync_names(self, *, honest: bool = True) -> None:
        """Make all names durable."""

        def effect() -> None:
            if honest:
                self._durable_names, self._namings = dict(self._names), []

        self._event("sync", "", effect)

    def _name(self, naming: Naming) -> None:
        naming.apply(self._names)
        self._namings.append(naming)

    def _notice(self, name: str) -> Inode:
        """Learn what was written past this disk, through a buffered file."""
        inode = self.inode(name)
        content = (self.root / name).read_bytes()
        if inode.live() != content:
            inode.pending.append(Resize(self.moment, len(content)))
            inode.pending.append(Write(self.moment, 0, content))
        return inode

    # --- through `os` ----------------------------------------------------------------------------

    def name_of(self, handle: int) -> str | None:
        """Which of our files this is; "" for the directory itself, None for anyone else's."""
        status = os.fstat(handle)
        if os.path.samestat(status, self.root.stat()):
            return ""
        for path in self.root.iterdir():
            if path.suffix != ".lock" and os.path.samestat(status, path.stat()):
                return path.name
        return None

    def os_write(self, name: str, handle: int, data: bytes, offset: int) -> int:
        """`os.pwrite`."""
        return self.write(name, self.inode(name), handle, data, offset)

    def os_sync(self, name: str) -> None:
        """`os.fsync`, of a file or of the directory."""
        if name:
            self.sync(name, self._notice(name), honest=self.witness_syncs)
        else:
            self.sync_names(honest=self.witness_syncs)

    # --- after a cut -----------------------------------------------------------------------------

    def restart(self) -> None:
        """Make the files what a cut left of them: one outcome of many, drawn at random."""
        fate = _Fate(self.rng, self._oldest_pending(), self.moment)
        names = dict(self._durable_names)
        for naming in self._namings:
            if fate.keeps(naming.moment):
                naming.apply(names)
        for inode in names.values():
            fate.settle(inode)
        self._names, self._durable_names, self._namings = names, dict(names), []
        self._write_out()
        self.off, self.cut_at, self.fault = False, None, None

    def _oldest_pending(self) -> int:
        inodes = {id(inode): inode for inode in self._names.values()}.values()
        moments = [change.moment for inode in inodes for change in inode.pending]
        return min([*moments, *(naming.moment for naming in self._namings)], default=self.moment)

    def _write_out(self) -> None:
        for path in self.root.iterdir():
            if path.suffix != ".lock":  # held by nobody after a cut; its content says nothing
                _real.unlink(path)
        for name, inode in self._names.items():
            (self.root / name).write_bytes(inode.durable)


class _Fate:
    """How one cut deals with what was pending.

    Several kinds of cut, since one kind hides what another finds: a disk that stopped at one moment
    for all files, one that reordered whole writes, one that tore them, and the two extremes.
    """

    _KINDS = ("nothing", "everything", "one moment", "one moment", "writes", "sectors")

    def __init__(self, rng: np.random.Generator, oldest: int, newest: int) -> None:
        self._rng = rng
        self._kind = str(rng.choice(self._KINDS))
        self._share = rng.choice([0.1, 0.5, 0.9])
        self._stop = int(rng.integers(oldest, newest + 2))
        self._grows = rng.choice([0.0, 0.5])

    def keeps(self, moment: int) -> bool:
        """Whether a change that cannot be torn is kept."""
        if self._kind in ("nothing", "everything"):
            return self._kind == "everything"
        if self._kind == "one moment":
            return moment < self._stop
        return bool(self._rng.random() < self._share)

    def settle(self, inode: Inode) -> None:
        """What becomes of a file."""
        for change in inode.pending:
            if isinstance(change, Resize):
                if self.keeps(change.moment):
                    _apply(inode.durable, change)
                continue
            for offset, data in self._survivors(change):
                _apply(inode.durable, Write(change.moment, offset, data))
            end = change.offset + len(change.data)
            if end > len(inode.durable) and self._rng.random() < self._grows:
                _apply(inode.durable, Resize(change.moment, end))  # it grew; the data are lost
        inode.pending = []

    def _survivors(self, change: Write) -> list[tuple[int, bytes]]:
        torn = self._kind == "one moment" and change.moment == self._stop
        if self._kind != "sectors" and not torn:
            return [(change.offset, change.data)] if self.keeps(change.moment) else []
        share = 0.5 if torn else self._share
        return [piece for piece in change.pieces() if self._rng.random() < share]


def _apply(content: bytearray, change: Write | Resize) -> None:
    """As the file system would; a hole reads as zeros."""
    end = change.size if isinstance(change, Resize) else change.offset + len(change.data)
    if end > len(content):
        content.extend(bytes(end - len(content)))
    if isinstance(change, Resize):
        del content[change.size :]
    else:
        content[change.offset : end] = change.data


# --- under SQLite --------------------------------------------------------------------------------


class _File:
    """A file that SQLite has open. Locks are not modelled: `FileLock` sees to one connection."""

    def __init__(self, disk: Disk, name: str, flags: list[int]) -> None:
        self._disk, self._name = disk, name
        path = disk.root / name
        new = not path.exists()
        if new and disk.off:
            raise PowerCut
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if new:
            try:
                self._inode = disk.create(name)
            except BaseException:
                os.close(self._handle)
                raise
        else:
            self._inode = disk.inode(name)
        log = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL
        self._sync_directory = bool(new and flags[0] & log)
        flags[1] = flags[0]

    def xRead(self, amount: int, offset: int) -> bytes:
        return os.pread(self._handle, amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.write(self._name, self._inode, self._handle, data, offset)

    def xTruncate(self, size: int) -> None:
        self._disk.resize(self._name, self._inode, self._handle, size)

    def xSync(self, flags: int) -> None:
        self._disk.sync(self._name, self._inode)
        if self._sync_directory:
            self._disk.sync_names()
            self._sync_directory = False

    def xFileSize(self) -> int:
        return os.fstat(self._handle).st_size

    def xClose(self) -> None:
        os.close(self._handle)

    def xLock(self, level: int) -> None:
        pass

    def xUnlock(self, level: int) -> None:
        pass

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096  # what SQLite assumes on Unix

    def xDeviceCharacteristics(self) -> int:
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE


class _Vfs(apsw.VFS):
    """SQLite's view of a disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.name = f"veilstream-{next(_numbers)}"
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> _File:
        path = name if isinstance(name, str) else name.filename()
        return _File(self._disk, Path(path).name, flags)

    def xAccess(self, path: str, flags: int) -> bool:
        return Path(path).exists()

    def xDelete(self, path: str, sync_directory: bool) -> None:
        self._disk.remove(Path(path).name)
        if sync_directory:
            self._disk.sync_names()

    def xFullPathname(self, name: str) -> str:
        return name


class _Rows:
    """A cursor that has been read to its end."""

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = iter(rows)

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(self._rows, None)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._rows


class _Connection:
    """As much of `sqlite3.Connection` as a ledger uses, over apsw."""

    def __init__(self, disk: Disk, path: Path, vfs: str, pragmas: tuple[str, ...]) -> None:
        self._disk = disk
        with _sqlite3_errors():
            self._inner = apsw.Connection(str(path), vfs=vfs)
        try:
            for pragma in pragmas:
                self.execute(f"PRAGMA {pragma}")
        except BaseException:
            self.close()
            raise

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> _Rows:
        with _sqlite3_errors():
            return _Rows(list(self._inner.execute(statement, values)))

    def executemany(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        with _sqlite3_errors():
            self._inner.executemany(statement, rows)

    def close(self) -> None:
        """Also when the power is off, when SQLite's last wishes are not heard."""
        with suppress(PowerCut), _sqlite3_errors():
            self._inner.close()


@contextmanager
def _sqlite3_errors() -> Iterator[None]:
    """The errors that the standard library's module would raise."""
    try:
        yield
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise sqlite3.DatabaseError(str(error)) from error
    except apsw.ConstraintError as error:
        raise sqlite3.IntegrityError(str(error)) from error
    except apsw.Error as error:
        raise sqlite3.OperationalError(str(error)) from error


def ledger_on(disk: Disk, vfs: str, *, synchronous: str = "FULL", wal_autocheckpoint: int = 1000) -> type[Ledger]:
    """A ledger whose SQLite writes to this disk; all other settings are those of `open_sqlite`."""
    pragmas = (
        "locking_mode=EXCLUSIVE",
        "page_size=16384",
        "journal_mode=WAL",
        f"synchronous={synchronous}",
        "secure_delete=ON",
        f"wal_autocheckpoint={wal_autocheckpoint}",
    )

    class OnDisk(Ledger):
        _connect = staticmethod(lambda path: _Connection(disk, path, vfs, pragmas))

    return OnDisk


# --- under everything else -----------------------------------------------------------------------


class _WatchedOs:
    """Functions of `os`, for files of one disk; all other files are left alone."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def pwrite(self, handle: int, data: bytes, offset: int) -> int:
        if name := self._disk.name_of(handle):
            return self._disk.os_write(name, handle, data, offset)
        return _real.pwrite(handle, data, offset)

    def fsync(self, handle: int) -> None:
        name = self._disk.name_of(handle)
        if name is None:
            _real.fsync(handle)
        else:
            self._disk.os_sync(name)

    def replace(self, source: Any, target: Any, **more: Any) -> None:
        if Path(source).parent == self._disk.root:
            self._disk.rename(Path(source).name, Path(target).name)
        else:
            _real.replace(source, target, **more)

    def unlink(self, path: Any, **more: Any) -> None:
        if Path(path).parent == self._disk.root and Path(path).exists():
            self._disk.remove(Path(path).name)
        else:
            _real.unlink(path, **more)


@contextmanager
def mounted(disk: Disk) -> Iterator[str]:
    """Have all that is written to its directory go to this disk; yields the VFS for SQLite."""
    vfs = _Vfs(disk)
    watched = _WatchedOs(disk)
    with ExitStack() as stack:
        stack.callback(vfs.unregister)
        for name in vars(_real):
            stack.enter_context(mock.patch.object(os, name, getattr(watched, name)))
        yield vfs.name
