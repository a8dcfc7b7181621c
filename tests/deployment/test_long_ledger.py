"""A ledger that grows: what is packed, what an opening still notices, and what memory it takes."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import sqlite3
import tracemalloc
from contextlib import closing

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tests.support.ledgers import past_of
from veilstream.deployment.ledger import store as store_module
from veilstream.deployment.ledger.archive import SEGMENT_RECORDS, segment_is_due
from veilstream.deployment.ledger.chain import Body, digest
from veilstream.deployment.ledger.inspect import inspect, verify
from veilstream.deployment.ledger.rescue import begin_again, renew_witness
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.visits import VisitSum, VisitTotal, clients_of, visit_key
from veilstream.errors import LedgerError, PrivacyError

SETTINGS = {"rounds": 50, "guarantee": {}, "digest": "of a plan"}


def message_hash(epoch: int, r: int) -> str:
    return hashlib.sha256(b"%d %d" % (epoch, r)).hexdigest()


def write(ledger: Ledger, kind: str, body: Body, **more: object) -> None:
    ledger.write(kind, body, **more)
    ledger.witness()


def grow(ledger: Ledger, epoch: int, rounds: int, first: int = 0) -> None:
    """Rounds of two steps, with a blob that is replaced and one that lasts for a round."""
    for r in range(first, first + rounds):
        write(ledger, "pin", Body(epoch=epoch, round=r, x=digest(b"x%d" % r)))
        for step in (2 * r, 2 * r + 1):
            body = Body(epoch=epoch, step=step)
            tag = ledger.keyed(b"%d %d" % (epoch, step))
            write(ledger, "step", body, tag=tag, keep={f"seed/{step}": b"s%d" % step})
        sealed = Body(epoch=epoch, round=r, hash=message_hash(epoch, r))
        seeds = [f"seed/{step}" for step in (2 * r, 2 * r + 1)]
        write(ledger, "message", sealed, keep={"message": b"m%d" % r}, destroy=seeds)
        write(ledger, "ack", sealed)


def long_ledger(path, rounds: int = 6) -> None:
    """Two epochs, and the second one's third round just begun."""
    with Ledger(path, create=True) as ledger:
        write(ledger, "epoch", Body(epoch=0, settings=SETTINGS))
        grow(ledger, 0, rounds)
        write(ledger, "next", Body(epoch=0))
        write(ledger, "epoch", Body(epoch=1, settings=SETTINGS))
        write(ledger, "join", Body(epoch=1, run="a run"))
        grow(ledger, 1, 2)
        write(ledger, "pin", Body(epoch=1, round=2, x=digest(b"x2")))


@pytest.fixture(params=[1, 2, 7])
def small_segments(request, monkeypatch):
    """Records after which a segment is packed; at 1, every record has a summary."""
    monkeypatch.setattr(store_module, "segment_is_due", lambda records, kept: records >= size)
    size = request.param
    return size


def changed(path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(statement, values).rowcount == 1


def test_packed_or_not_a_ledger_knows_the_same(tmp_path, small_segments, monkeypatch):
    packed, plain = tmp_path / "packed.db", tmp_path / "plain.db"
    long_ledger(packed)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "segment_is_due", lambda records, kept: False)
        long_ledger(plain)
    with Ledger(packed) as ours, Ledger(plain) as theirs:
        assert 0 < ours.chain.length - ours.chain.packed <= small_segments
        assert theirs.chain.packed == 0
        assert ours.chain.standing == theirs.chain.standing
        assert ours.chain.kept == theirs.chain.kept
        for number, (one, other) in enumerate(zip(ours.records(), theirs.records(), strict=True)):
            assert (number, one.kind) == (other.number, other.kind)
            if number and one.kind != "step":  # the keys of tags differ, and so do the tags
                assert dataclasses.replace(one.body, before=None) == other.body
        for ledger in (ours, theirs):
            assert past_of(ledger, b"0 11")[:3] == (0, 11, 1)
            assert past_of(ledger, b"1 0")[:3] == (1, 0, 1)
            assert past_of(ledger, b"1 4") is None
    keep = ("epoch", "round", "rounds", "pinned", "steps", "clients", "acknowledged", "secrets")
    assert [getattr(verify(packed), name) for name in keep] == [getattr(inspect(plain), name) for name in keep]
    assert (inspect(packed).round, inspect(packed).steps, inspect(packed).clients) == (2, 4, 16)


def test_every_message_of_every_epoch_is_known_and_no_other(tmp_path, small_segments):
    path = tmp_path / "s.db"
    long_ledger(path)
    with Ledger(path) as ledger:
        for epoch, rounds in ((0, 6), (1, 2)):
            for r in range(rounds):
                assert ledger.knows_message(r, message_hash(epoch, r))
                assert not ledger.knows_message(r + 1, message_hash(epoch, r))
        assert not ledger.knows_message(0, message_hash(2, 0))
        for odd in ("", "%", '"', "x" * 64, digest(b"x1")):  # the last: a model's, not a message's
            assert not ledger.knows_message(1, odd)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM visits WHERE visit = (SELECT min(visit) FROM visits)", "who took part"),
        ("INSERT INTO visits SELECT zeroblob(48)", "who took part"),
        ("DELETE FROM segments WHERE first = 0", "packed|record"),
        (
            "UPDATE segments SET content = CAST(substr(content, 1, length(content) - 1) || x'00' "
            "AS BLOB) WHERE first = 0",
            "packed|record 0",
        ),
        ("DELETE FROM records WHERE number = (SELECT min(number) FROM records)", "damaged|ends"),
        ("UPDATE blobs SET content = x'6d39' WHERE name = 'message'", "kept beside"),
        ("UPDATE meta SET value = zeroblob(32)", "key of tags"),
    ],
)
@pytest.mark.parametrize("opened", [Ledger, inspect, verify])
def test_an_opening_notices_what_is_changed_however_old(tmp_path, small_segments, statement, said, opened):
    path = tmp_path / "s.db"
    long_ledger(path)
    verify(path)
    changed(path, statement)
    with pytest.raises(LedgerError, match=said):
        opened(path)


def test_a_visit_moved_to_another_client_is_noticed(tmp_path, small_segments):
    """As many rows as before, of the same form."""
    path = tmp_path / "s.db"
    long_ledger(path)
    with closing(sqlite3.connect(path)) as db, db:
        (visit,) = db.execute("SELECT max(visit) FROM visits").fetchone()
        other = bytes([visit[0] ^ 1]) + visit[1:]
        db.execute("UPDATE visits SET visit = ? WHERE visit = ?", (other, visit))
    with pytest.raises(LedgerError, match="who took part"):
        Ledger(path)


def test_verify_finds_a_summary_that_was_false_when_it_was_written(tmp_path, small_segments, monkeypatch):
    """Its links and segments agree, so only what the records themselves say tells it."""
    from veilstream.deployment.ledger.chain import Chain

    path = tmp_path / "s.db"
    honest = Chain.summary

    def false(self, archive):
        told = honest(self, archive)
        if self.standing.acknowledged == 3:
            standing = dataclasses.replace(told.standing, run="another run")
            return dataclasses.replace(told, standing=standing)
        return told

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "summary", false)
        long_ledger(path)
    Ledger(path).close()
    with pytest.raises(LedgerError, match="says of those before it"):
        verify(path)


def test_records_that_changed_under_a_learner_are_not_packed(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    due = False
    monkeypatch.setattr(store_module, "segment_is_due", lambda records, kept: due)
    long_ledger(path)
    with Ledger(path) as ledger:
        ledger._db.execute("UPDATE records SET body = '{}' WHERE number = 5")
        due = True
        with pytest.raises(LedgerError, match="damaged"):
            ledger.write("step", Body(epoch=1, step=4))
        with pytest.raises(PrivacyError, match="earlier write"):
            ledger.check()
        (segments,) = ledger._db.execute("SELECT count(*) FROM segments").fetchone()
        assert segments == 0


def test_a_long_witness_is_renewed_and_a_long_store_begun_again(tmp_path, small_segments):
    path, witness = tmp_path / "s.db", tmp_path / "s.witness"
    long_ledger(path)
    testimony = witness.read_bytes()
    witness.unlink()
    renew_witness(path)
    assert witness.read_bytes() == testimony
    witness.write_bytes(testimony[:1000] + b"?" + testimony[1001:])
    with pytest.raises(LedgerError, match="damaged at byte 960"):
        verify(path)
    witness.write_bytes(testimony)
    _, carried = begin_again(path)
    assert carried == 16
    with Ledger(path) as ledger:
        assert past_of(ledger, b"0 3")[:3] == (1, -1, 1)
        write(ledger, "epoch", Body(epoch=2, settings=SETTINGS))
        grow(ledger, 2, 3)
    assert verify(path).clients == 16 + 6
    changed(path, "DELETE FROM visits WHERE visit = (SELECT min(visit) FROM visits)")
    with pytest.raises(LedgerError, match="who took part"):
        Ledger(path)


def test_a_client_of_several_visits_is_one_client(tmp_path):
    path = tmp_path / "s.db"
    with Ledger(path, create=True) as ledger:
        write(ledger, "epoch", Body(epoch=0, settings=SETTINGS))
        for step, who in enumerate([b"a", b"b", b"a", b"c", b"a"]):
            write(ledger, "step", Body(epoch=0, step=step), tag=ledger.keyed(who))
        assert past_of(ledger, b"a")[:3] == (0, 4, 3)
        assert past_of(ledger, b"b")[:3] == (0, 1, 1)
        assert clients_of(ledger._db) == 3
    assert verify(path).clients == 3


def test_the_sum_of_visits_is_that_of_cbc_macs_in_any_order():
    """Against the cipher's own CBC mode, row by row, in whole numbers of Python."""
    rng = np.random.default_rng(0)
    tag_key = rng.bytes(32)
    rows = [visit_key(rng.bytes(32), int(rng.integers(3)), i) for i in range(40)]
    key = hashlib.sha256(b"veilstream sum of visits" + tag_key).digest()
    halves = [0, 0]
    for row in rows:
        mac = Cipher(algorithms.AES(key), modes.CBC(bytes(16))).encryptor().update(row)[-16:]
        for half in range(2):
            halves[half] += int.from_bytes(mac[8 * half : 8 * half + 8], "little")
    expected = VisitTotal(40, "".join(f"{half % 2**64:016x}" for half in halves))
    for order in (rows, rows[::-1]):
        total = VisitSum(tag_key)
        for row in order[:30]:
            total.add(row)
        resumed = VisitSum(tag_key, total.value())
        resumed.add(b"".join(order[30:]))
        assert resumed.value() == expected
    assert VisitSum(bytes(32), VisitSum(bytes(32)).value()).value() == VisitTotal(0, "0" * 32)


def test_summaries_do_not_outgrow_what_they_summarise():
    assert not segment_is_due(SEGMENT_RECORDS - 1, 0)
    assert segment_is_due(SEGMENT_RECORDS, SEGMENT_RECORDS // 4)
    assert not segment_is_due(SEGMENT_RECORDS, SEGMENT_RECORDS)


def test_memory_does_not_grow_with_the_chain(tmp_path, monkeypatch):
    """After 600 records and after 3,000, all that is kept is the same to 20 kB.

    (One record in memory is more than 500 bytes, so keeping them would show as 1.2 MB.)
    """
    monkeypatch.setattr(store_module, "segment_is_due", lambda records, kept: records >= 50)
    path = tmp_path / "s.db"
    with Ledger(path, create=True) as ledger:
        ledger._db.execute("PRAGMA synchronous=OFF")
        write(ledger, "epoch", Body(epoch=0, settings=SETTINGS))
        tracemalloc.start()
        grow(ledger, 0, 120)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        grow(ledger, 0, 480, first=120)  # to the same place in a segment
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        kept = len(Body(epoch=0, before=ledger.chain.summary("")).text())
    assert after - before < 20_000, (before, after)
    assert kept < 2_000
