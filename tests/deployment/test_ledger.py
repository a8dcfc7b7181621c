"""The ledger by itself: other formats, lost files, who writes, what is left of secrets."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing

import pytest

from tests.support.ledgers import past_of
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.ledger.database import FORMAT
from veilstream.deployment.ledger.inspect import inspect, verify
from veilstream.deployment.ledger.rescue import ask_for_epoch, begin_again, holds_secrets, renew_witness
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.witness import ENTRY_BYTES
from veilstream.errors import InputError, LedgerError, PrivacyError, StoreBusy


def small_ledger(path, steps=3):
    with Ledger(path, create=True) as ledger:
        settings = {"rounds": 5, "guarantee": {}}
        ledger.write("epoch", Body(epoch=0, settings=settings))
        ledger.witness()
        for step in range(steps):
            tag = ledger.keyed(b"client %d" % step)
            ledger.write("step", Body(epoch=0, step=step), keep={"seed/0": b"s" * 32}, tag=tag)
            ledger.witness()


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_store_of_an_earlier_version_is_refused_by_name_and_left_alone(version, tmp_path):
    path, witness = tmp_path / "s.db", tmp_path / "s.witness"
    small_ledger(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={version}")
    before = path.read_bytes()
    for opened in (inspect, verify, renew_witness, Ledger):
        with pytest.raises(LedgerError, match=rf"earlier veilstream \(format {version}\).*other clients only"):
            opened(path)
    assert path.read_bytes() == before
    witness.write_bytes(b"VEILWIT2" + witness.read_bytes()[8:])
    with pytest.raises(LedgerError, match="a witness of an earlier veilstream"):
        begin_again(path)
    assert path.read_bytes() == before


def test_an_unknown_format_is_refused(tmp_path):
    path = tmp_path / "s.db"
    small_ledger(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
    with pytest.raises(LedgerError, match="no store that this veilstream can read"):
        Ledger(path, create=True)


def test_files_are_for_their_owner_alone(tmp_path):
    path = tmp_path / "deep" / "s.db"
    with Ledger(path, create=True) as ledger:
        ledger.write("epoch", Body(epoch=0))
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
        assert past_of(ledger, b"client 1") is not None
        assert past_of(ledger, b"client 7") is None
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
        ledger.write("step", Body(epoch=0, step=1), tag=ledger.keyed(b"x"))
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
            ledger.write("step", Body(epoch=0, step=3), keep={"a": b"b"})
        with pytest.raises(PrivacyError, match="earlier write"):
            ledger.write("step", Body(epoch=0, step=3))
        with pytest.raises(PrivacyError, match="earlier write"):
            ledger.check()


def test_a_witness_that_cannot_be_written_stops_everything(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    with Ledger(path, create=True) as ledger:
        ledger.write("epoch", Body(epoch=0))

        def fails(handle):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            with pytest.raises(PrivacyError, match="witness"):
                ledger.witness()
        with pytest.raises(PrivacyError, match="earlier write"):
            ledger.write("step", Body(epoch=0, step=0))
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
