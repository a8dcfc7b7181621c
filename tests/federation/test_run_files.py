"""A server's files, cut off at every write: it goes on to the same bits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.federation import DIM, plan_of
from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.federation.server.checkpoint import CHECKPOINT, MESSAGES, Position
from veilstream.federation.server.run_files import RunFiles
from veilstream.privacy.gradient_types import Noised

NAMES, ROUNDS = ["a", "b", "c"], 5
X0 = np.zeros(DIM, np.float32)


class Cut(BaseException):
    """The process is gone, here."""


class World:
    """A server without a network: what learners send is a function of name and round."""

    def __init__(self, folder: Path, method: dict | None = None) -> None:
        self.plan = plan_of(rounds=ROUNDS, method=method or {})
        self.terms = Terms.of(self.plan, DIM)
        self.folder = folder

    def payload(self, name: str, round_: int, epoch: int) -> bytes:
        rng = np.random.default_rng([NAMES.index(name), round_, epoch])
        prefix = Noised(rng.integers(-9, 9, DIM))
        steps = self.terms.local_steps * (round_ + 1)
        return encode(epoch, round_, steps, self.terms.grid.step, prefix)

    def go(self) -> None:
        """To the end, or to where it is cut. Learner c is away in round 1, and in its second epoch
        from round 3 on."""
        files = RunFiles(self.folder, self.plan, self.terms)
        fold = files.open(X0, NAMES)
        while not fold.finished:
            r = fold.round
            for name in NAMES:
                seat, epoch = fold.seats[name], int(name == "c" and r >= 3)
                fold.enrol(name, epoch, seat.round if epoch == seat.epoch else 0)
            for name in NAMES:
                seat = fold.seats[name]
                if not (name == "c" and r == 1):
                    assert fold.accept(name, self.payload(name, seat.round, seat.epoch))
            files.close_round(fold, fold.close_round(), 0.0)

    def models(self) -> bytes:
        return (self.folder / "models.f32").read_bytes()


def cut_after(count: int, monkeypatch, keep: float) -> list[str]:
    """Raise at the count-th change of a file; of that one, write only a part."""
    done: list[str] = []
    real = {"pwrite": os.pwrite, "fsync": os.fsync, "replace": Path.replace}

    def here(what: str) -> bool:
        done.append(what)
        return len(done) > count

    def pwrite(handle, data, at):
        if here("pwrite"):
            real["pwrite"](handle, bytes(data)[: int(keep * len(data))], at)
            raise Cut
        return real["pwrite"](handle, data, at)

    def fsync(handle):
        if here("fsync"):
            raise Cut
        return real["fsync"](handle)

    def replace(self, target):
        if here("replace"):
            raise Cut
        return real["replace"](self, target)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    return done


@pytest.mark.parametrize("keep", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("method", [{}, {"averaging": 1.0}, {"forgetting": 0.9, "newest_weight": 0.5}])
def test_a_server_cut_off_at_any_write_goes_on_to_the_same_bits(tmp_path, monkeypatch, method, keep):
    whole = World(tmp_path / "whole", method)
    with monkeypatch.context() as patch:
        done = cut_after(10**9, patch, keep)
        whole.go()
        writes = len(done)
    assert writes > 6 * ROUNDS
    for count in range(writes):
        world = World(tmp_path / "cut", method)
        with monkeypatch.context() as patch:
            cut_after(count, patch, keep)
            with pytest.raises(Cut):
                world.go()
        world.go()
        assert world.models() == whole.models(), f"cut at write {count} of {writes}"
        shutil.rmtree(world.folder)


def cut_at_save(world: World, number: int) -> None:
    """Until the checkpoint of this number, counted from 1, would be written."""
    saved, save = 0, Position.save

    def counted(self, folder):
        nonlocal saved
        saved += 1
        if saved == number:
            raise Cut
        save(self, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Position, "save", counted)
        with pytest.raises(Cut):
            world.go()


def test_what_the_disk_wrote_too_early_does_no_harm(tmp_path):
    """A cut after messages and models of the next round, all of them, before the checkpoint."""
    world, whole = World(tmp_path / "cut"), World(tmp_path / "whole")
    whole.go()
    world.go()
    after = {name: (world.folder / name).read_bytes() for name in (MESSAGES, "models.f32")}
    shutil.rmtree(world.folder)
    cut_at_save(world, 5)
    assert (world.folder / MESSAGES).read_bytes() != after[MESSAGES]
    world.go()
    assert world.models() == whole.models() == after["models.f32"]


@pytest.mark.parametrize("name", [CHECKPOINT, MESSAGES])
def test_damage_is_named(tmp_path, name):
    world = World(tmp_path / "run")
    world.go()
    path = world.folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    slots = bytes(data) if name == CHECKPOINT else bytes(byte ^ 1 for byte in data)
    path.write_bytes(slots)
    with pytest.raises(InputError, match=name):
        world.go()


def test_a_checkpoint_of_another_version_is_refused_by_name(tmp_path):
    world = World(tmp_path / "run")
    world.go()
    path = world.folder / CHECKPOINT
    path.write_bytes(b"VEILCKP1" + path.read_bytes()[8:])
    with pytest.raises(InputError, match=r"a checkpoint of version 1.*another veilstream wrote it"):
        world.go()


def test_a_missing_file_of_messages_is_named(tmp_path):
    world = World(tmp_path / "run")
    world.go()
    (world.folder / MESSAGES).unlink()
    with pytest.raises(InputError, match="put it back"):
        world.go()


@pytest.mark.parametrize("name", ["rounds.csv", "releases.csv"])
def test_a_line_cut_short_is_removed_before_the_next_is_written(tmp_path, name):
    world = World(tmp_path / "run")
    cut_at_save(world, 4)
    path = world.folder / name
    path.write_bytes(path.read_bytes()[:-3])
    world.go()
    header, *lines = path.read_text().splitlines()
    assert all(line.count(",") == header.count(",") for line in lines)
    assert {int(line.split(",")[0]) for line in lines} == set(range(ROUNDS))
