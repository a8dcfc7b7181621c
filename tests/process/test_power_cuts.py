"""Power cuts and failing disks: nothing is forgotten, or nothing leaves."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import apsw
import numpy as np
import pytest
from studies.disk import Disk, Fault, PowerCut, ledger_on, mounted
from studies.power_cuts import (
    BROKEN_PROMISES,
    LOSSES,
    ROUNDS,
    TAU,
    D,
    Findings,
    NumpyTask,
    Outside,
    Setting,
    Visitor,
    WatchedLearner,
    learner_class,
    plan_of,
    small_snapshots,
    study,
)

from veilstream.deployment.epochs import secret_name
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.witness import Entry, Witness
from veilstream.errors import PrivacyError, VeilstreamError
from veilstream.files import write_file
from veilstream.learning.tasks import Sample
from veilstream.records.admission import Answer


def total(findings: Findings, kinds: tuple[str, ...]) -> int:
    return sum(findings.violations[kind] for kind in kinds)


def test_with_full_syncs_no_cut_breaks_anything():
    findings = study(Setting(), 150, seed=11)
    assert findings.work["cuts"] == 150
    assert findings.work["epochs ended"] > 10
    assert not findings.violations.total(), findings.as_dict()


def test_with_fewer_syncs_the_same_study_finds_losses_and_the_witness_stops_the_learner():
    findings = study(Setting("NORMAL"), 60, seed=12)
    assert total(findings, LOSSES) > 0
    assert findings.violations["refused to go on"] > 0
    assert total(findings, BROKEN_PROMISES) == 0


def test_without_a_synced_witness_the_same_study_finds_broken_promises():
    findings = study(Setting("NORMAL", witness_syncs=False), 300, seed=17)
    assert total(findings, BROKEN_PROMISES) > 0


def test_the_study_sees_secrets_that_follow_from_the_store_and_the_step(monkeypatch):
    """A step that was computed and not stored then meets its noise again, with another client."""

    def derived(self, count):
        steps = range(self.local.step, self.local.step + count)
        places = [self.ledger.tag_key + secret_name(self.epoch, step).encode() for step in steps]
        return [hashlib.sha256(place).digest() for place in places]

    monkeypatch.setattr(WatchedLearner, "_fresh_seeds", derived)
    findings = study(Setting(), 40, seed=14)
    assert findings.violations["noise row met two gradients"] > 0


def test_the_study_sees_a_witness_that_forgets_to_sync(monkeypatch):
    def append(self: Witness, entries: list[Entry]) -> None:
        data = b"".join(entry.pack() for entry in entries)
        self._end += os.pwrite(self._handle, data, self._end)

    monkeypatch.setattr(Witness, "append", append)
    assert study(Setting(), 40, seed=15).violations["refused to go on"] > 0


@pytest.mark.slow
def test_five_thousand_cuts():
    findings = study(Setting(), 5000, seed=1)
    assert findings.work["cuts"] == 5000
    assert not findings.violations.total(), findings.as_dict()


def outcomes(root: Path, work: Callable[[Disk], None]) -> set[bytes | None]:
    """What a file can hold after a cut at the end of this work."""
    found = set()
    for seed in range(150):
        place = root / str(seed)
        place.mkdir()
        disk = Disk(place, np.random.default_rng(seed))
        with mounted(disk):
            work(disk)
        disk.restart()
        file = place / "file"
        found.add(file.read_bytes() if file.exists() else None)
    return found


def test_a_file_is_there_after_a_cut_only_if_its_directory_was_synced(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert outcomes(tmp_path / "a", lambda disk: write_file(disk.root / "file", b"new")) == {None, b"new"}

    def synced(disk: Disk) -> None:
        write_file(disk.root / "file", b"new")
        disk.sync_names()

    assert outcomes(tmp_path / "b", synced) == {b"new"}


def test_writes_since_the_last_sync_are_kept_dropped_or_torn(tmp_path):
    def work(disk: Disk) -> None:
        (disk.root / "file").touch()
        inode = disk.inode("file")
        disk.sync_names()
        handle = os.open(disk.root / "file", os.O_RDWR)
        disk.write("file", inode, handle, b"a" * 1024, 0)
        disk.sync("file", inode)
        disk.write("file", inode, handle, b"b" * 1024, 0)
        os.close(handle)

    old, new = b"a" * 512, b"b" * 512
    assert outcomes(tmp_path, work) == {old + old, old + new, new + old, new + new}


def test_nothing_works_when_the_power_is_off(tmp_path):
    disk = Disk(tmp_path, np.random.default_rng(0))
    disk.cut_after(1)
    with mounted(disk):
        for _ in range(2):
            with pytest.raises(PowerCut):
                write_file(tmp_path / "file", b"new")
    disk.restart()
    assert list(tmp_path.iterdir()) == []


def fsync_error() -> apsw.Error:
    error = apsw.IOError("fsync failed")
    error.extendedresult = apsw.SQLITE_IOERR_FSYNC
    return error


FAULTS: dict[str, Callable[[], Fault]] = {
    "store: disk full": lambda: Fault("write", "-wal", apsw.FullError),
    "store: fsync error": lambda: Fault("sync", "-wal", fsync_error),
    "store: read-only": lambda: Fault("write", "-wal", apsw.ReadOnlyError),
    "witness: disk full": lambda: Fault("write", ".witness", lambda: OSError(errno.ENOSPC, "No space left on device")),
    "witness: fsync error": lambda: Fault("sync", ".witness", lambda: OSError(errno.EIO, "Input/output error")),
}


def model(number: int) -> np.ndarray:
    return np.full(D, number / 10, np.float32)


def sample(number: int = 0) -> Sample:
    return Sample(np.full(D, 0.1 + number / 10, np.float32), 1.0)


def begun(learner: Learner, rounds: int, clients: int) -> None:
    """So many whole rounds, and so many clients of the next."""
    for r in range(rounds):
        learner.learn_round(r, model(r), [(f"{r}/{t}", sample()) for t in range(TAU)])
    if clients >= 0:
        learner.begin_round(rounds, model(rounds))
        for t in range(clients):
            learner.observe(f"{rounds}/{t}", sample())


CALLS: dict[str, tuple[Callable[[Learner], None], Callable[[Learner], object]]] = {
    "begin_round": (lambda ln: begun(ln, 1, -1), lambda ln: ln.begin_round(1, model(1))),
    "observe": (lambda ln: begun(ln, 1, 0), lambda ln: ln.observe("new", sample())),
    "finish_round": (lambda ln: begun(ln, 1, 1), lambda ln: ln.finish_round()),
    "finish_round, snapshot": (lambda ln: begun(ln, 1, TAU), lambda ln: ln.finish_round()),
    "finish_round, last": (lambda ln: begun(ln, ROUNDS - 1, TAU), lambda ln: ln.finish_round()),
    "acknowledge": (lambda ln: begun(ln, 1, -1), lambda ln: ln.acknowledge(0, ln.sealed_release().hash)),
    "new_epoch": (lambda ln: begun(ln, ROUNDS, -1), lambda ln: ln.new_epoch()),
}


class Place:
    """A learner on a disk of its own."""

    def __init__(self, root: Path, vfs: str, disk: Disk, checkpoint: int = 1000) -> None:
        self.disk, self.store = disk, root / "store.db"
        self.outside = Outside(Findings(Setting()))
        ledger = ledger_on(disk, vfs, wal_autocheckpoint=checkpoint)
        self._learner = learner_class(ledger, self.outside)

    def open(self) -> WatchedLearner:
        return self._learner(plan_of(), self.store, NumpyTask(), create=True)

    def works_again(self) -> None:
        """A fresh learner goes on, and nothing that was answered or sent is lost."""
        visitor = Visitor(self.outside, np.random.default_rng(0))
        for _ in range(2):
            with closing(self.open()) as learner:
                self.outside.compare(learner.ledger._db)
                if learner.pinned:
                    visitor._take(learner, learner.finish_round())
                for _ in range(ROUNDS + 1):
                    visitor.some_round(learner)
        assert not self.outside.findings.violations.total()


@pytest.fixture
def place(tmp_path):
    disk = Disk(tmp_path, np.random.default_rng(0))
    with mounted(disk) as vfs, small_snapshots():
        yield Place(tmp_path, vfs, disk)


def refuses_everything(learner: Learner) -> None:
    """Nothing leaves, nobody is taken or told so, not even after the disk is well again."""
    for call in (
        lambda: learner.observe("somebody", sample(1)),
        lambda: learner.observe("new", sample(2)),
        learner.finish_round,
        lambda: learner.acknowledge(0, "00" * 32),
        learner.new_epoch,
    ):
        with pytest.raises(VeilstreamError):
            call()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_disk_lets_nothing_out(call, fault, place):
    before, during = CALLS[call]
    with closing(place.open()) as learner:
        before(learner)
        place.outside.answered.update(f"0/{t}" for t in range(TAU))
        place.outside.sent.add(learner.sealed_release().hash)
        place.disk.fault = FAULTS[fault]()
        with pytest.raises(PrivacyError):
            during(learner)
        assert place.disk.fault.happened
        place.disk.fault = None
        refuses_everything(learner)
    place.works_again()


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("call", CALLS)
def test_a_checkpoint_that_fails_lets_nothing_out(call, operation, tmp_path):
    """The log is well; the store itself is full or cannot be synced."""
    disk = Disk(tmp_path, np.random.default_rng(0))
    error = apsw.FullError if operation == "write" else fsync_error
    with mounted(disk) as vfs, small_snapshots():
        place = Place(tmp_path, vfs, disk, checkpoint=1)
        before, during = CALLS[call]
        with closing(place.open()) as learner:
            before(learner)
            disk.fault = Fault(operation, "store.db", error)
            with pytest.raises(PrivacyError):
                during(learner)
            assert disk.fault.happened
            disk.fault = None
            refuses_everything(learner)
        place.works_again()


@pytest.mark.parametrize("operation", ["write", "sync", "resize"])
def test_secrets_that_cannot_be_wiped_from_the_log_are_an_error(operation, place):
    """The last message is stored, and the log is to be emptied: it is not sent before that."""
    before, during = CALLS["finish_round, last"]
    with closing(place.open()) as learner:
        before(learner)
        ending = "-wal" if operation == "resize" else "store.db"
        place.disk.fault = Fault(operation, ending, apsw.FullError)
        with pytest.raises(PrivacyError):
            during(learner)
        refuses_everything(learner)
    with suppress(PrivacyError):  # closing may have emptied the log in another way
        place.open().close()
    place.disk.fault = None
    place.works_again()


@pytest.mark.parametrize("call", CALLS)
def test_half_an_entry_in_the_witness_lets_nothing_out(call, place, monkeypatch):
    """`pwrite` may write less than it was given, without an error."""
    before, during = CALLS[call]
    write = place.disk.os_write
    with closing(place.open()) as learner:
        before(learner)
        monkeypatch.setattr(place.disk, "os_write", lambda n, h, data, at: write(n, h, data[:7], at))
        with pytest.raises(PrivacyError):
            during(learner)
        monkeypatch.undo()
        refuses_everything(learner)
    place.works_again()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_learner_that_starts_on_a_failing_disk_takes_no_one(fault, place):
    """A start only reads: nothing has to be drawn anew. The first step is where it ends."""
    with closing(place.open()) as learner:
        begun(learner, 1, 1)
        place.outside.answered.update(f"0/{t}" for t in range(TAU))
    place.disk.fault = FAULTS[fault]()
    with closing(place.open()) as learner:
        with pytest.raises(PrivacyError):
            learner.observe("new", sample())
        assert place.disk.fault.happened
        place.disk.fault = None
        refuses_everything(learner)
    place.works_again()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_is_not_begun_on_a_failing_disk(fault, place):
    place.disk.fault = FAULTS[fault]()
    with pytest.raises(PrivacyError):
        place.open()
    place.disk.fault = None
    place.works_again()


def test_a_client_who_was_answered_stays_answered_after_a_fault(place):
    with closing(place.open()) as learner:
        begun(learner, 0, 1)
        place.disk.fault = FAULTS["store: fsync error"]()
        with pytest.raises(PrivacyError):
            learner.observe("new", sample())
        place.disk.fault = None
    with closing(place.open()) as learner:
        assert learner.local.taken == 1
        assert learner.observe("0/0", sample(5)) is Answer.TAKEN
        assert learner.local.taken == 1
