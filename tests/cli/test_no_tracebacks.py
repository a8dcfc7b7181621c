"""What a user may meet by accident is one clear line with its exit code, never a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import veilstream as vs
from tests.cli.test_plan import veilstream
from tests.test_package import SMALL_PLAN
from veilstream.errors import InputError
from veilstream.simulation import seed_batches
from veilstream.simulation.engine import evaluated_rounds
from veilstream.simulation.memory import MemoryPlan
from veilstream.simulation.run_checkpoint import StateShape, read_checkpoint


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "interrupted" not in done.stderr
    assert done.stderr.startswith("veilstream: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def bare(*arguments: object, absent: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The command, where some packages cannot be imported."""
    code = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.split(".")[0] in {absent!r} else find(name, *rest)
)
from veilstream.cli import main
main()
"""
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("command", "absent", "extras"),
    [
        ("demo", ("jax", "jaxlib", "matplotlib"), "veilstream[jax]"),
        ("run", ("jax", "jaxlib"), "veilstream[jax]"),
        ("reproduce", ("jax", "jaxlib", "matplotlib"), "veilstream[jax,figures]"),
        ("reproduce", ("matplotlib",), "veilstream[figures]"),
    ],
)
def test_a_bare_install_says_which_extra_to_install(command, absent, extras, tmp_path):
    what = {"demo": [], "run": ["demo"], "reproduce": ["logistic", "--smoke"]}[command]
    done = bare(command, *what, "--out", tmp_path / "out", absent=absent)
    assert f"pip install '{extras}'" in one_line(done, 3)
    assert not (tmp_path / "out").exists()


def test_what_needs_no_extra_runs_in_a_bare_install():
    absent = ("jax", "jaxlib", "matplotlib", "flwr", "torch")
    done = bare("plan", "demo", "--set", "learning.rounds=9", "--json", absent=absent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recommended"]


def failing(module: str) -> subprocess.CompletedProcess[str]:
    """A command in the middle of which a module turns out to be missing."""
    code = f"""
from veilstream.cli import app
def command(**_):
    raise ModuleNotFoundError("No module named {module!r}", name={module!r})
app.app = command
app.main()
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(("module", "extra"), [("flwr.app", "flower"), ("jax", "jax")])
def test_a_package_missing_further_down_is_named_too(module, extra):
    assert f"pip install 'veilstream[{extra}]'" in one_line(failing(module), 3)


def test_a_module_that_no_extra_brings_is_a_defect_and_shows():
    done = failing("veilstream.lost")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory) -> Path:
    """A run that was interrupted after six of its twelve rounds."""
    out = tmp_path_factory.mktemp("runs") / "out"
    with pytest.MonkeyPatch.context() as patch:
        fits = MemoryPlan(2, 3, 0)
        patch.setattr(seed_batches, "memory_of", lambda *_, **__: fits)

        def stop(progress) -> None:
            if progress.done >= 6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            vs.run(vs.Plan.parse(SMALL_PLAN), out, on_progress=stop)
    return out


@pytest.fixture
def folder(unfinished, tmp_path) -> Path:
    return Path(shutil.copytree(unfinished, tmp_path / "out"))


def resume(folder: Path) -> subprocess.CompletedProcess[str]:
    plan = folder.parent / "mine.toml"
    plan.write_text(SMALL_PLAN)
    return veilstream("run", str(plan), "--out", str(folder), "--resume", "--json")


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


DAMAGE = {
    "zero bytes": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "a byte short": lambda content: content[:-1],
    "flipped": lambda content: flipped(content, len(content) // 2),
    "text": lambda content: b"not an archive\n",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(how, folder):
    path = folder / "checkpoint.npz"
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    message = resume_here(folder)
    assert message.startswith(f"checkpoint = '{path}': expected a whole checkpoint of this run")
    assert "--resume starts its seeds again" in message
    versions = "versions.json"  # rewritten by every start
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert before | {versions: b""} == after | {versions: b""}


def resume_here(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        vs.run(vs.Plan.parse(SMALL_PLAN), folder, resume=True)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_no_flipped_byte_of_a_checkpoint_goes_unseen(folder):
    """Refused, or without effect: dates and flags that nothing reads."""
    path = folder / "checkpoint.npz"
    whole = path.read_bytes()
    looks = len(evaluated_rounds(vs.Plan.parse(SMALL_PLAN)))
    shape = StateShape(methods=2, seeds=2, rounds=12, looks=looks)
    sound = read_checkpoint(path, shape).arrays()
    refused = 0
    places = np.random.default_rng(0).choice(len(whole), 400, replace=False)
    for at in places.tolist():
        path.write_bytes(flipped(whole, at))
        try:
            state = read_checkpoint(path, shape).arrays()
        except InputError:
            refused += 1
        else:
            assert state.keys() == sound.keys()
            for name in sound:
                np.testing.assert_array_equal(state[name], sound[name])
    assert refused > 250


def test_removing_a_damaged_checkpoint_is_a_way_out(folder):
    (folder / "checkpoint.npz").unlink()
    done = resume(folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"]


def test_the_command_line_says_it_in_one_line(folder):
    (folder / "checkpoint.npz").write_bytes(b"")
    assert "expected a whole checkpoint of this run" in one_line(resume(folder), 2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b'{"seeds": [[0, 1]], "block_rounds": "3", "processes": 1}',
        b'{"seeds": [[0, 1]], "block_rounds": 0, "processes": 1}',
        b'{"seeds": [[0]], "block_rounds": 3, "processes": 1}',
        b'{"seeds": [[0, 7]], "block_rounds": 3, "processes": 1}',
        b'{"seeds": 5, "block_rounds": 3, "processes": 1}',
    ],
)
def test_damaged_seed_batches_are_refused_by_name(content, folder):
    path = folder / "seed_batches.json"
    path.write_bytes(content)
    assert resume_here(folder).startswith(f"seed_batches = '{path}': expected which seeds")


@pytest.mark.parametrize("content", [b"", b"\x00\xff garbage", b"= = =", b"name = 3\n"])
def test_a_garbage_plan_in_a_run_folder_is_refused_by_name(content, folder):
    path = folder / "plan.toml"
    path.write_bytes(content)
    assert f"out = '{path}': expected the plan that the run" in resume_here(folder)
    with pytest.raises(InputError, match=r"restore it, or name another folder"):
        _ = vs.Run(folder).plan
    assert path.read_bytes() == content


def test_a_demo_over_a_garbage_plan_deletes_nothing(tmp_path):
    out = tmp_path / "demo"
    out.mkdir()
    (out / "plan.toml").write_text("= = =")
    line = one_line(veilstream("demo", "--set", "run.seeds=1", "--out", str(out)), 2)
    assert f"{out}/plan.toml" in line
    assert [file.name for file in out.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_damaged_summary_is_refused_by_name(content, folder):
    (folder / "summary.json").write_bytes(content)
    with pytest.raises(InputError, match=r"summary\.json': expected a file that the run wrote"):
        _ = vs.Run(folder).summary
