"""The ledger by itself: other schemas, lost files, who writes, what is left of secrets."""

from __future__ import annotations

import hashlib
import hmac
import os
import sqlite3
import stat
import struct

import pytest

from veilstream.deployment.ledger.database import SCHEMA
from veilstream.deployment.ledger.inspect import inspect, verify
from veilstream.deployment.ledger.rescue import ask_for_epoch, begin_again, holds_secrets, renew_witness
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.witness import ENTRY_BYTES
from veilstream.errors import InputError, LedgerError, PrivacyError, StoreBusy


def small_ledger(path, steps=3):
    with Ledger(path, create=True) as ledger:
        settings = {"rounds": 5, "guarantee": {}}
        ledger.write("epoch", {"epoch": 0, "settings": settings})
        ledger.witness()
        for step in range(steps):
            tag = ledger.keyed(b"client %d" % step)
            ledger.write("step", {"epoch": 0, "step": step}, keep={"seed/0": b"s" * 32}, tag=tag)
            ledger.witness()


def second_schema(path):
    """A store and witness as 0.3.0 wrote them, from their definition."""
    key = bytes(range(32))
    db = sqlite3.connect(path)
    db.executescript(
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;"
        "CREATE TABLE records (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL,"
        "                      hash BLOB NOT NULL);"
        "CREATE TABLE tags (tag BLOB PRIMARY KEY, epoch INTEGER NOT NULL, step INTEGER NOT NULL,"
        "                   times INTEGER NOT NULL) WITHOUT ROWID;"
        "CREATE TABLE blobs (name TEXT PRIMARY KEY, content BLOB NOT NULL);"
        "INSERT INTO blobs VALUES ('seed/0', 'ssssssssssssssss');"
        "PRAGMA user_version=2;"
    )
    db.execute("INSERT INTO meta VALUES ('tag_key', ?)", (key,))
    start = b"VEILWIT2" + key + bytes(40)
    testimony = start + hashlib.sha256(start).digest()[:16]
    tags = [hmac.new(key, b"client %d" % i, hashlib.sha256).digest() for i in range(2)]
    for number, tag in enumerate(tags):
        db.execute("INSERT INTO tags VALUES (?, 4, ?, 1)", (tag, number))
        entry = struct.pack(">QQ32s32s", number, 4, bytes([number]) * 32, tag)
        testimony += entry + hashlib.sha256(entry).digest()[:16]
    db.commit()
    db.close()
    path.with_suffix(".witness").write_bytes(testimony)


def test_a_store_of_the_released_version_goes_on_from_its_witness_and_leaves_everyone_out(tmp_path):
    path = tmp_path / "s.db"
    second_schema(path)
    for opened in (inspect, verify, renew_witness, Ledger):
        with pytest.raises(LedgerError, match=r"schema 2.*epoch --lost"):
            opened(path)
    aside, carried = begin_again(path)
    assert carried == 2
    assert aside is not None
    assert not holds_secrets(aside)
    with Ledger(path) as ledger:
        assert ledger.past_visits(ledger.keyed(b"client 0")) == (4, -1, 1)
        assert ledger.past_visits(ledger.keyed(b"client 1")) == (4, -1, 1)
        assert ledger.past_visits(ledger.keyed(b"client 2")) is None
        assert ledger.chain.epoch == 4


def test_an_unknown_schema_is_refused(tmp_path):
    path = tmp_path / "s.db"
    small_ledger(path)
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={SCHEMA + 1}")
    db.close()
    with pytest.raises(LedgerError, match=f"schema {SCHEMA + 1}"):
        Ledger(path, create=True)


def test_files_are_for_their_owner_alone(tmp_path):
    path = tmp_path / "deep" / "s.db"
    with Ledger(path, create=True) as ledger:
        ledger.write("epoch", {"epoch": 0})
        ledger.witness()
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    assert set(modes) == {"s.db", "s.db-wal", "s.db-shm", "s.lock", "s.witness"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_second_writer_is_told_who_the_first_is(tmp_path):
    path = tmp_path / "s.db"
    with Ledger(path, create=True):
        with pytest.raises(StoreBusy, match=f"process {os.getpid()}"):
            Ledger(path, create=True)
        assert inspect(path).holder == str(os.getpid())
        with pytest.raises(StoreBusy):
            begin_again(path)
    assert inspect(path).holder is None


def test_a_lost_store_begins_anew_and_still_knows_who_took_part(tmp_path):
    path = tmp_path / "s.db"
    small_ledger(path, steps=3)
    path.unlink()
    with pytest.raises(LedgerError, match="no store"):
        Ledger(path, create=True)
    for again in range(2):  # a second loss must not forget the first
        aside, carried = begin_again(path)
        assert (aside is None, carried) == (again == 0, 3)
    assert aside is not None
    assert aside.exists()
    with Ledger(path, create=True) as ledger:
        assert ledger.past_visits(ledger.keyed(b"client 1")) is not None
        assert ledger.past_visits(ledger.keyed(b"client 7")) is None
    assert verify(path).clients == 3


@pytest.mark.parametrize("done", [1, 2, 3])
def test_beginning_anew_can_itself_be_interrupted(done, tmp_path, monkeypatch):
    """Cut before each of its moves: the witness never stands beside a store that knows less."""
    from veilstream.deployment.ledger import rescue

    path = tmp_path / "s.db"
    small_ledger(path)
    path.write_bytes(b"damaged")
    moves = iter(range(10))

    class Cut(BaseException):
        pass

    def counted(real):
        def call(*args, **kw):
            if next(moves) == done - 1:
                raise Cut
            return real(*args, **kw)

        return call

    monkeypatch.setattr(rescue, "_put_aside", counted(rescue._put_aside))
    monkeypatch.setattr(rescue.Witness, "create", counted(rescue.Witness.create))
    monkeypatch.setattr(rescue, "sync_directory", counted(rescue.sync_directory))
    with pytest.raises(Cut):
        begin_again(path)
    monkeypatch.undo()
    try:
        Ledger(path, create=True).close()
    except LedgerError:
        begin_again(path)
    assert verify(path).clients == 3


def test_a_witness_is_renewed_only_from_a_store_that_is_not_behind_it(tmp_path):
    path, witness = tmp_path / "s.db", tmp_path / "s.witness"
    small_ledger(path, steps=1)
    old = path.read_bytes()
    with Ledger(path, create=True) as ledger:
        ledger.write("step", {"epoch": 0, "step": 1}, tag=ledger.keyed(b"x"))
        ledger.witness()
    newest, testimony = path.read_bytes(), witness.read_bytes()
    path.write_bytes(old)
    with pytest.raises(LedgerError, match="the store is old"):
        renew_witness(path)
    path.write_bytes(newest)
    witness.unlink()
    with pytest.raises(LedgerError, match="missing"):
        Ledger(path, create=True)
    assert not witness.exists()
    renew_witness(path)
    assert witness.read_bytes() == testimony


def test_an_old_witness_is_refused_and_a_torn_one_is_not(tmp_path):
    path, witness = tmp_path / "s.db", tmp_path / "s.witness"
    small_ledger(path)
    whole = witness.read_bytes()
    witness.write_bytes(whole[: -2 * ENTRY_BYTES])
    with pytest.raises(LedgerError, match="the witness is an old copy"):
        Ledger(path, create=True)
    witness.write_bytes(whole[:-7])
    Ledger(path, create=True).close()
    assert witness.read_bytes() == whole


def test_two_histories_are_told_apart(tmp_path):
    small_ledger(tmp_path / "a.db")
    small_ledger(tmp_path / "b.db")
    (tmp_path / "a.witness").write_bytes((tmp_path / "b.witness").read_bytes())
    with pytest.raises(LedgerError, match="different histories"):
        Ledger(tmp_path / "a.db", create=True)


def test_an_epoch_is_given_up_only_on_demand_and_leaves_no_secret(tmp_path):
    path = tmp_path / "s.db"
    small_ledger(path)
    assert b"s" * 32 in path.read_bytes()
    with pytest.raises(InputError, match="5 rounds are left"):
        ask_for_epoch(path)
    assert ask_for_epoch(path, abandon=True) == 1
    assert ask_for_epoch(path) == 1
    assert all(b"s" * 32 not in file.read_bytes() for file in tmp_path.iterdir())
    status = verify(path)
    assert (status.ended, status.secrets) == (True, 0)


def test_after_a_failed_write_nothing_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    small_ledger(path)
    with Ledger(path, create=True) as ledger:
        ledger._db.execute("DROP TABLE blobs")
        with pytest.raises(PrivacyError, match="nothing was released"):
            ledger.write("step", {"epoch": 0, "step": 3}, keep={"a": b"b"})
        with pytest.raises(PrivacyError, match="earlier write"):
            ledger.write("step", {"epoch": 0, "step": 3})
        with pytest.raises(PrivacyError, match="earlier write"):
            ledger.check()


def test_a_witness_that_cannot_be_written_stops_everything(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    with Ledger(path, create=True) as ledger:
        ledger.write("epoch", {"epoch": 0})

        def fails(handle):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            with pytest.raises(PrivacyError, match="witness"):
                ledger.witness()
        with pytest.raises(PrivacyError, match="earlier write"):
            ledger.write("step", {"epoch": 0, "step": 0})
    with Ledger(path, create=True) as ledger:
        assert ledger.chain.length == 1


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger(tmp_path / "file" / "s.db", create=True)
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger(tmp_path / "s.db", tmp_path / "file" / "s.witness", create=True)
    (tmp_path / "d.db").mkdir()
    with pytest.raises(LedgerError, match="cannot be used"):
        Ledger(tmp_path / "d.db", create=True)


@pytest.mark.parametrize("what", [inspect, verify, ask_for_epoch, renew_witness])
def test_a_store_that_does_not_exist_is_not_made(what, tmp_path):
    with pytest.raises(InputError, match="a ledger that exists"):
        what(tmp_path / "s.db")
    assert not list(tmp_path.iterdir())


def test_an_epoch_is_not_given_up_while_someone_may_keep_its_secrets(tmp_path):
    path = tmp_path / "s.db"
    small_ledger(path)
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM records").fetchone()
    for _ in range(2):
        with pytest.raises(LedgerError, match="being read"):
            ask_for_epoch(path, abandon=True)
    reader.close()
    assert ask_for_epoch(path) == 1
    assert all(b"s" * 32 not in file.read_bytes() for file in tmp_path.iterdir())


def test_a_store_that_is_put_aside_keeps_no_seeds_if_it_can_be_opened(tmp_path):
    path = tmp_path / "s.db"
    small_ledger(path)
    aside, _ = begin_again(path)
    assert aside is not None
    assert not holds_secrets(aside)
    assert all(b"s" * 32 not in file.read_bytes() for file in tmp_path.iterdir())
    path.write_bytes(b"damaged")
    aside, _ = begin_again(path)
    assert aside is not None
    assert holds_secrets(aside)
