"""Files that are missing, empty, linked, cloned, rewound or written to by others: all refused."""

from __future__ import annotations

import shutil
import sqlite3
import stat

import pytest

from tests.deployment.test_learner import Still, client, model, plan_of, run_round
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger import paths
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.ledger.inspect import inspect, verify
from veilstream.deployment.ledger.rescue import ask_for_epoch, begin_again, renew_witness
from veilstream.deployment.ledger.witness import ENTRY_BYTES, Entry, Witness
from veilstream.errors import InputError, LedgerError, PrivacyError, StoreBusy
from veilstream.files import FileLock, lock_holder


def learner_at(path, **more):
    return Learner(plan_of(), path, Still(), **more)


@pytest.fixture
def store(tmp_path):
    """A learner's store after one round."""
    path = tmp_path / "s.db"
    with learner_at(path, create=True) as learner:
        run_round(learner, 0)
    return path


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".db", ".witness")}


def test_a_missing_store_is_made_only_when_asked_for(tmp_path):
    path = tmp_path / "deep" / "s.db"
    with pytest.raises(InputError, match=r"deep/s\.db.*--new-store.*create=True"):
        learner_at(path)
    assert not list(tmp_path.iterdir())  # no folder, no lock, no witness
    for _ in range(2):  # a restart with the same arguments goes on
        with learner_at(path, create=True) as learner:
            release = run_round(learner, 0)
    with learner_at(path) as learner:
        assert learner.finish_round() == release


@pytest.mark.parametrize("create", [False, True])
def test_a_missing_or_emptied_store_is_refused_while_its_witness_remembers_it(create, store):
    witness = store.with_suffix(".witness").read_bytes()
    store.write_bytes(b"")
    with pytest.raises(LedgerError, match=r"nothing is left in the store .*epoch .* --lost"):
        learner_at(store, create=create)
    assert store.read_bytes() == b""
    store.unlink()
    with pytest.raises(LedgerError, match=r"there is no store .*epoch .* --lost"):
        learner_at(store, create=create)
    assert not store.exists()
    assert store.with_suffix(".witness").read_bytes() == witness


def test_an_empty_store_without_a_witness_is_an_interrupted_first_start(tmp_path):
    path = tmp_path / "s.db"
    path.touch()
    with pytest.raises(LedgerError, match=r"is empty, so it is no store.*--new-store"):
        learner_at(path)
    assert path.read_bytes() == b""
    sqlite3.connect(path).execute("PRAGMA journal_mode=WAL")  # a header, and no table yet
    assert path.stat().st_size
    with pytest.raises(LedgerError, match="is empty, so it is no store"):
        learner_at(path)
    with learner_at(path, create=True) as learner:
        assert learner.round == 0


@pytest.mark.parametrize("ending", ["s.db", "s.db-wal", "s.db-shm", "s.lock", "s.witness"])
def test_a_symbolic_link_is_refused_by_everything_that_opens_a_ledger(ending, store, tmp_path):
    link, elsewhere = tmp_path / ending, tmp_path / "elsewhere"
    if link.exists():
        link.rename(elsewhere)
    else:
        elsewhere.write_bytes(b"someone's")
    link.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    for use in (
        lambda: learner_at(store),
        lambda: learner_at(store, create=True),
        lambda: inspect(store),
        lambda: verify(store),
        lambda: renew_witness(store),
        lambda: ask_for_epoch(store),
        lambda: begin_again(store),
    ):
        with pytest.raises(LedgerError, match=r"is a symbolic link.*give the path of the file"):
            use()
    assert elsewhere.read_bytes() == before


def test_a_link_that_leads_nowhere_is_not_created_through(tmp_path):
    (tmp_path / "s.db").symlink_to(tmp_path / "target.db")
    with pytest.raises(LedgerError, match="symbolic link"):
        learner_at(tmp_path / "s.db", create=True)
    assert not (tmp_path / "target.db").exists()


def test_a_link_that_appears_after_the_check_is_not_followed_either(tmp_path):
    target, link = tmp_path / "target", tmp_path / ".s.witness.new"
    target.write_bytes(b"someone's")
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Witness.create(tmp_path / "s.witness", bytes(32))
    (tmp_path / "s.witness").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Witness(tmp_path / "s.witness")
    assert target.read_bytes() == b"someone's"


def test_a_witness_on_the_store_s_device_is_named(store, monkeypatch):
    with learner_at(store) as learner:
        (notice,) = learner.ledger.notices
    assert "on the same device" in notice
    assert str(store.with_suffix(".witness")) in notice
    assert "--witness" in notice
    real = paths._device
    monkeypatch.setattr(paths, "_device", lambda p: real(p) + (p.suffix == ".witness"))
    with learner_at(store) as learner:
        assert learner.ledger.notices == []


def test_files_that_others_may_read_are_closed_to_them_and_named(store):
    witness = store.with_suffix(".witness")
    store.chmod(0o640)
    witness.chmod(0o604)
    with learner_at(store) as learner:
        notices = learner.ledger.notices
    assert str(store) in notices[0]
    assert str(witness) in notices[1]
    assert sum("open to other accounts" in notice for notice in notices) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in (store, witness)} == {0o600}


def harm_longer(witness, _):
    with witness.open("ab") as file:
        file.write(Entry(99, 0, bytes(32), None).pack())


def harm_shorter(witness, _):
    with witness.open("r+b") as file:
        file.truncate(witness.stat().st_size - ENTRY_BYTES)


def harm_last_entry(witness, _):
    with witness.open("r+b") as file:
        file.seek(-ENTRY_BYTES, 2)
        file.write(Entry(1, 0, bytes(32), None).pack())


def harm_replaced(witness, folder):
    """The same bytes, in another file."""
    (folder / "other").write_bytes(witness.read_bytes())
    (folder / "other").replace(witness)


def harm_gone(witness, _):
    witness.unlink()


HARMS = [harm_longer, harm_shorter, harm_last_entry, harm_replaced, harm_gone]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("at", ["pin", "step", "message"])
def test_a_witness_that_moved_on_stops_a_running_learner(harm, at, store, tmp_path):
    """At whatever write comes next; nothing is overwritten and nothing leaves, then or later."""
    witness = store.with_suffix(".witness")
    with learner_at(store) as learner:
        if at != "pin":
            learner.begin_round(1, model(1))
        if at == "message":
            for t in range(learner.clients_wanted):
                learner.observe(f"client {t}", client(1, t))
        harm(witness, tmp_path)
        left = witness.read_bytes() if witness.exists() else None
        steps = inspect(store).steps
        next_write = {
            "pin": lambda: learner.begin_round(1, model(1)),
            "step": lambda: learner.observe("someone", client(1, 0)),
            "message": learner.finish_round,
        }[at]
        with pytest.raises(LedgerError, match=r"moved on without this process.*clone, or a snaps"):
            next_write()
        for again in (lambda: learner.observe("x", client(1, 1)), learner.finish_round):
            with pytest.raises(PrivacyError, match="nothing was released"):
                again()
        assert (witness.read_bytes() if witness.exists() else None) == left
        assert inspect(store).steps == steps  # nor was the store written to


def test_a_witness_that_moves_between_store_and_witness_is_not_overwritten(store, tmp_path):
    """The narrow case: after the store's write, before the witness's."""
    witness = store.with_suffix(".witness")
    with learner_at(store) as learner:
        learner.ledger.write("ack", Body(epoch=0, round=0, hash=""))
        harm_longer(witness, tmp_path)
        left = witness.read_bytes()
        with pytest.raises(LedgerError, match="moved on"):
            learner.ledger.witness()
        with pytest.raises(PrivacyError, match="nothing was released"):
            learner.finish_round()
    assert witness.read_bytes() == left


def test_a_torn_end_is_no_sign_of_another_writer(store):
    witness = store.with_suffix(".witness")
    whole = witness.read_bytes()
    with witness.open("ab") as file:
        file.write(b"torn" * 70)  # more than two entries long
    with learner_at(store) as learner:
        run_round(learner, 1)
        run_round(learner, 2)
    assert witness.read_bytes().startswith(whole)
    verify(store)


def test_a_store_that_moved_on_or_was_replaced_stops_a_running_learner(store, tmp_path):
    def rewound(ledger):
        """As a file system that was rolled back would show it."""
        ledger._db.execute("DELETE FROM records WHERE number = ?", (ledger.chain.length - 1,))

    def ahead(ledger):
        row = (ledger.chain.length, "step", "{}", bytes(32))
        ledger._db.execute("INSERT INTO records VALUES (?, ?, ?, ?)", row)

    def replaced(ledger):
        shutil.copy(store, tmp_path / "other")
        (tmp_path / "other").replace(store)

    backup = contents(tmp_path)
    for harm, said in [
        (rewound, "moved on without this process"),
        (ahead, "moved on without this process"),
        (replaced, "another file has taken its place"),
    ]:
        with learner_at(store) as learner:
            harm(learner.ledger)
            with pytest.raises(LedgerError, match=said):
                learner.begin_round(1, model(1))
            with pytest.raises(PrivacyError, match="nothing was released"):
                learner.finish_round()
        for name, data in backup.items():
            (tmp_path / name).write_bytes(data)


def clone_of(store, where):
    """Store and witness as they are now, in another folder."""
    where.mkdir()
    for part in store.parent.glob("s.*"):
        shutil.copy(part, where / part.name)
    return where / store.name


def test_a_clone_of_the_store_beside_the_same_witness_is_refused(store, tmp_path):
    witness = store.with_suffix(".witness")
    other = clone_of(store, tmp_path / "clone")
    with learner_at(store), pytest.raises(StoreBusy, match="one writer"):
        learner_at(other, witness=witness)  # at once, on the same machine
    with learner_at(store) as learner:
        run_round(learner, 1)
    with pytest.raises(LedgerError, match="old copy"):
        learner_at(other, witness=witness)


def test_a_clone_that_holds_the_same_witness_is_stopped_at_its_next_write(store, tmp_path):
    """As on two machines that share the witness's device, where locks do not reach."""
    witness = store.with_suffix(".witness")
    other = clone_of(store, tmp_path / "clone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Witness, "hold", lambda _: None)
        with learner_at(store) as first, learner_at(other, witness=witness) as second:
            release = run_round(first, 1)
            with pytest.raises(LedgerError, match="moved on"):
                second.begin_round(1, model(1))
            with pytest.raises(PrivacyError, match="nothing was released"):
                second.finish_round()
            assert run_round(first, 1) == release


def test_clones_with_a_witness_each_are_told_apart_by_the_server_s_next_request(store, tmp_path):
    """Not before: each has sent a message of the same round. Then the second one is refused."""
    other = clone_of(store, tmp_path / "clone")
    with learner_at(store) as first, learner_at(other) as second:
        accepted, rejected = run_round(first, 1), run_round(second, 1)
        assert accepted.hash != rejected.hash
        first.begin_round(2, model(2), acknowledged=(1, accepted.hash))
        taken = inspect(other).steps
        with pytest.raises(LedgerError, match="the server has accepted round 1"):
            second.begin_round(2, model(2), acknowledged=(1, accepted.hash))
        assert inspect(other).steps == taken


def test_a_snapshot_of_both_files_is_told_by_the_server_and_one_of_the_store_by_the_witness(store, tmp_path):
    before = contents(tmp_path)
    with learner_at(store) as learner:
        release = run_round(learner, 1)
    store.write_bytes(before["s.db"])
    with pytest.raises(LedgerError, match="old copy"):
        learner_at(store)
    store.with_suffix(".witness").write_bytes(before["s.witness"])
    with learner_at(store) as learner:
        assert learner.round == 1
        with pytest.raises(LedgerError, match="old copies"):
            learner.begin_round(2, model(2), acknowledged=(1, release.hash))


def test_a_witness_whose_end_was_wiped_is_damaged_and_not_torn(store):
    """One append may be torn; an end of many entries that say nothing hides how far it had come."""
    witness = store.with_suffix(".witness")
    whole = witness.read_bytes()
    old = {p.name: p.read_bytes() for p in store.parent.iterdir() if p.name.startswith("s.db")}
    with learner_at(store) as learner:
        run_round(learner, 1)
    grown = len(witness.read_bytes()) - len(whole)
    assert grown > 3 * ENTRY_BYTES
    witness.write_bytes(whole + bytes(grown))
    for name, content in old.items():
        (store.parent / name).write_bytes(content)
    with pytest.raises(LedgerError, match="is damaged in its last"):
        learner_at(store)


def test_a_second_name_of_a_store_or_witness_is_refused(store, tmp_path):
    for path in (store, store.with_suffix(".witness")):
        (tmp_path / "second").hardlink_to(path)
        with pytest.raises(LedgerError, match="second name"):
            learner_at(store)
        (tmp_path / "second").unlink()
    learner_at(store).close()


def test_a_key_that_was_wiped_while_the_learner_ran_is_noticed(store):
    witness = store.with_suffix(".witness")
    with learner_at(store) as learner:
        learner.begin_round(1, model(1))
        with witness.open("r+b") as file:
            file.write(bytes(ENTRY_BYTES))
        with pytest.raises(LedgerError, match="damaged at its start"):
            learner.observe("someone", client(1, 0))


@pytest.fixture
def elsewhere(tmp_path):
    """A store after one round whose witness is on another device, so to say."""
    (tmp_path / "usb").mkdir()
    path, witness = tmp_path / "s.db", tmp_path / "usb/w.witness"
    with learner_at(path, witness=witness, create=True) as learner:
        run_round(learner, 0)
    return path, witness


def test_everything_that_opens_a_ledger_finds_the_witness_where_it_was(elsewhere, monkeypatch):
    path, witness = elsewhere
    monkeypatch.chdir(path.parent)  # what is remembered does not depend on where one stands
    with learner_at(path.name) as learner:
        run_round(learner, 1)
    assert not path.with_suffix(".witness").exists()
    assert inspect(path).witness == str(witness)
    assert inspect(path).witnessed == verify(path).records
    witness.unlink()
    renew_witness(path)
    assert verify(path).witness == str(witness)
    assert ask_for_epoch(path, abandon=True) == 1
    assert begin_again(path)[1] == 6
    assert verify(path).witness == str(witness)  # the new store remembers it too


def test_a_witness_that_is_not_where_it_was_is_named_with_the_ways_out(elsewhere):
    path, witness = elsewhere
    moved = witness.rename(witness.with_name("moved.witness"))
    for use in (learner_at, verify):
        with pytest.raises(LedgerError, match=r"w\.witness of .* is missing \(where it was") as error:
            use(path)
        assert "--witness" in str(error.value)
        assert str(error.value).index("mount its device") < str(error.value).index("renew-witness")
    beside = path.with_suffix(".witness")
    with pytest.raises(LedgerError, match=r"s\.witness .* is missing .*w\.witness is where it was"):
        learner_at(path, witness=beside)
    assert not beside.exists()
    with learner_at(path, witness=moved) as learner:  # said once
        run_round(learner, 1)
    with learner_at(path) as learner:
        assert learner.ledger.witness_path == moved
    moved.rename(beside)
    with learner_at(path, witness=beside):
        pass
    shutil.copytree(path.parent, path.parent / "new")  # beside the store it moves along with it
    for name in ("s.db", "s.witness"):
        path.with_name(name).unlink()
    with learner_at(path.parent / "new/s.db") as learner:
        assert learner.round == 2


def test_a_witness_that_a_link_has_taken_the_place_of_is_refused_where_it_is_remembered(elsewhere):
    path, witness = elsewhere
    witness.rename(witness.with_name("real"))
    witness.symlink_to(witness.with_name("real"))
    for use in (learner_at, inspect, verify, renew_witness, ask_for_epoch, begin_again):
        with pytest.raises(LedgerError, match=r"w\.witness is a symbolic link"):
            use(path)


def test_a_lock_is_not_taken_through_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "s.lock"
    target.write_bytes(b"someone's")
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(link, RuntimeError)
    assert lock_holder(link) is None
    assert target.read_bytes() == b"someone's"


def test_a_witness_that_is_given_for_a_store_is_named_as_one(store):
    witness = store.with_suffix(".witness")
    for use in (learner_at, inspect, verify, renew_witness, ask_for_epoch):
        with pytest.raises(InputError, match=r"this file is a witness.*name the store .*s\.db"):
            use(witness)
