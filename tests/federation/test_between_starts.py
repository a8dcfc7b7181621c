"""What may change between two starts of one run: how people wait, who has keys, certificates, a disk with room."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import errno
import json
import ssl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509

from tests.support.federation import DIM, Plain, World, plan_of
from veilstream.errors import InputError, StorageError
from veilstream.federation.certificate_files import CertificateFiles
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.keys.new_keys import add_learner, make_keys, remove_learner, renew_learner, renew_server
from veilstream.federation.keys.shown_keys import certificates_in
from veilstream.federation.server.checkpoint import ModelFile
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.successive_runs import open_run
from veilstream.plans.plan import Plan


def with_federation(plan: Plan, **changes: object) -> Plan:
    return dataclasses.replace(plan, federation=dataclasses.replace(plan.federation, **changes))


def operations(run: Path) -> list[tuple[str, str, str]]:
    with (run / "operations.csv").open() as file:
        return [(row["operation"], row["about"], row["why"]) for row in csv.DictReader(file)]


def test_how_the_server_waits_may_change_and_is_written_down(tmp_path):
    with World(tmp_path, plan_of(rounds=6, learners=2), names=("a", "b")).start_all() as world:
        world.coordinator().go(world.transport(), until=2)
        world.plan = with_federation(world.plan, deadline_s=7.5, quorum=0.5)
        again = world.coordinator()
        again.go(world.transport(), until=4)
        assert again.round == 4
        assert Plan.load(tmp_path / "run/plan.toml") == world.plan
        assert operations(tmp_path / "run") == [
            ("setting", "federation.quorum", "1.0 to 0.5"),
            ("setting", "federation.deadline_s", "20.0 to 7.5"),
        ]
        world.coordinator()  # nothing has changed since: nothing more is written
        assert len(operations(tmp_path / "run")) == 2


def test_what_was_agreed_may_not_change_and_the_error_names_it(tmp_path):
    with World(tmp_path, plan_of(rounds=6, learners=1), names=("a",)).start_all() as world:
        world.coordinator().go(world.transport(), until=2)
        before = (tmp_path / "run/plan.toml").read_text()
        learning = dataclasses.replace(world.plan.learning, clip_norm=2.0)
        world.plan = dataclasses.replace(with_federation(world.plan, deadline_s=7.5), learning=learning)
        with pytest.raises(InputError, match=r"learning.clip_norm = 2.0 \(was 1.0\)"):
            world.coordinator()
        assert (tmp_path / "run/plan.toml").read_text() == before


def test_a_learner_that_is_added_does_not_keep_a_run_from_going_on(tmp_path, caplog):
    plan = with_federation(plan_of(rounds=3, learners=1), epochs=2)
    with World(tmp_path, plan, names=("a",)).start_all() as world:
        world.coordinator().go(world.transport(), until=2)
        add_learner(tmp_path / "keys", "d")
        with caplog.at_level("INFO"):
            again = world.coordinator()
        assert "d: keys are known, but this run was begun without" in caplog.text
        again.go(world.transport())
        assert again.finished
        opening = open_run(tmp_path / "run", world.plan, Plain(), next_run=True)
        assert opening.among == {"a"}
        keys = ServerKeys.load(tmp_path / "keys/server")
        following = Coordinator(
            world.plan, opening.x0, keys, opening.folder, start=opening.start, among=opening.among, task=Plain()
        )
        following.go(world.transport())
        assert set(following.fold.seats) == {"a"}
        assert following.finished
    with pytest.raises(InputError, match="as many as have keys"):  # a first run is another matter
        Coordinator(world.plan, np.zeros(DIM, np.float32), keys, tmp_path / "other")


def test_a_learner_whose_keys_were_removed_has_no_seat_any_more(tmp_path):
    plan = plan_of(rounds=4, learners=2, federation={"quorum": 0.5})
    with World(tmp_path, plan, names=("a", "b")).start_all() as world:
        world.coordinator().go(world.transport(), until=2)
        remove_learner(tmp_path / "keys", "b")
        again = world.coordinator()
        assert again.fold.seats["b"].state == "void"
        assert operations(tmp_path / "run") == [("void", "b", "its keys were removed")]
        again.go(world.transport())
        assert again.finished


def test_a_server_whose_disk_is_full_ends_with_a_code_and_goes_on_later(tmp_path, monkeypatch):
    with World(tmp_path, plan_of(rounds=4, learners=1), names=("a",)).start_all() as world:
        world.coordinator().go(world.transport(), until=2)
        coordinator = world.coordinator()

        def no_room(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(ModelFile, "write", no_room)
            with pytest.raises(StorageError, match=r"the run's folder .* could not be written"):
                coordinator.go(world.transport())
        again = world.coordinator()
        assert again.round == 2
        again.go(world.transport())
        assert np.allclose(again.fold.x, world_model(world), atol=1e-6)


def world_model(world: World) -> np.ndarray:
    for name in list(world.daemons):
        world.stop(name)
    return world.model_by_ledgers()


def test_a_renewed_pair_is_taken_once_and_never_half(tmp_path):
    make_keys(tmp_path / "keys", ["127.0.0.1"], [])
    server = tmp_path / "keys/server"
    old = {name: (server / name).read_bytes() for name in ("tls.pem", "tls.key")}
    files = CertificateFiles(server / "tls.pem", server / "tls.key")
    assert files.renewed() is None
    renew_server(tmp_path / "keys", [])
    new = {name: (server / name).read_bytes() for name in old}
    assert new["tls.pem"] != old["tls.pem"]
    (server / "tls.pem").write_bytes(old["tls.pem"])  # copied one after the other: the key is new already
    assert files.renewed() is None
    (server / "tls.pem").unlink()
    assert files.renewed() is None
    (server / "tls.pem").write_bytes(new["tls.pem"])
    assert isinstance(files.renewed(), ssl.SSLContext)
    assert files.renewed() is None


def test_keys_are_shown_with_the_days_that_they_last(tmp_path):
    make_keys(tmp_path / "keys", ["fl.example.org"], ["north"], days=90)
    renew_learner(tmp_path / "keys", "north", days=10)
    everything = {each.whose: each for each in certificates_in(tmp_path / "keys")}
    assert {whose: each.days_left for whose, each in everything.items()} == {
        "server": 89,
        "learner north": 9,
        "CA": 3649,
    }
    assert everything["server"].names == ("fl.example.org",)
    pem = (tmp_path / "keys/server/tls.pem").read_bytes()
    ends = x509.load_pem_x509_certificate(pem).not_valid_after_utc
    assert everything["server"].ends == ends.strftime("%Y-%m-%dT%H:%M:%SZ")
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=20)
    (learner, _) = certificates_in(tmp_path / "keys/learners/north", later)
    assert (learner.whose, learner.days_left) == ("learner north", -11)
    assert [each.whose for each in certificates_in(tmp_path / "keys/server")] == ["server", "CA"]
    with pytest.raises(InputError, match="a folder of keys"):
        certificates_in(tmp_path)


def test_one_command_renews_everyones_certificates(tmp_path):
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["north", "south"], days=10)
    keys_command("renew", str(tmp_path / "keys"), "--all")
    shown = json.loads(keys_command("show", str(tmp_path / "keys"), "--json"))
    days = {each["whose"]: each["days_left"] for each in shown["certificates"]}
    assert {days.pop("CA")} == {3649}
    assert days == {"server": 824, "learner north": 824, "learner south": 824}
    assert "824 days left" in keys_command("show", str(tmp_path / "keys/server"))


def keys_command(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "veilstream", "keys", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
