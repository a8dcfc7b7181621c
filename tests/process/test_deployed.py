"""Images' steps and roles without a container tool: accounts and roots."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.federation import csv_of, rows_of, table_plan_of, wait_for
from veilstream.federation.addresses import free_port
from veilstream.federation.keys.new_keys import make_keys

pytest.importorskip("packaging")
pytest.importorskip("grpc")

from tests.support.containers import ROOT, Image, build

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's"),
    pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="needs root, to become other accounts"),
    pytest.mark.skipif(
        shutil.which("unshare") is None or shutil.which("setpriv") is None, reason="needs unshare and setpriv"
    ),
]

ROUNDS = 3
PATIENCE_S = 180  # on a machine that does much else besides
LEARNER = 10001
MARK = "person-4711"  # in every record's tag
CONTAINERFILE = ROOT / "deploy/Containerfile"


@pytest.fixture(scope="module")
def world():
    """A folder that other accounts may enter, as /var/lib is; what lies in it is closed."""
    with tempfile.TemporaryDirectory(prefix="veilstream-deployed-") as folder:
        Path(folder).chmod(0o711)
        works = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False)
        if works.returncode:
            pytest.skip("this machine allows no new namespaces")
        yield Path(folder)


@pytest.fixture(scope="module")
def images(world) -> dict[str, Image]:
    (world / "images").mkdir(mode=0o711)
    done: dict[str, Image] = {}
    for role in ("server", "learner"):
        build(CONTAINERFILE, role, world / "images", done)
    return done


@pytest.fixture(scope="module")
def federation(world) -> Path:
    """Keys, plan and records as an operator lays them out for the images' accounts."""
    home = world / "federation"
    make_keys(home / "keys", ["127.0.0.1"], ["north", "south"])
    home.chmod(0o711)
    (home / "plan.toml").write_text(table_plan_of(ROUNDS, 2).to_toml())
    for name in ("north", "south"):
        rows = rows_of(f"{MARK}-{name}-{i}" for i in range(12))
        (home / f"{name}.csv").write_text(csv_of(rows))
        (home / f"{name}.csv").chmod(0o600)
        os.chown(home / f"{name}.csv", LEARNER, LEARNER)
    for path in [home / "keys", *(home / "keys").rglob("*")]:
        os.chown(path, LEARNER, LEARNER)
    return home


def volume(path: Path, uid: int = LEARNER, gid: int = LEARNER, mode: int = 0o700) -> Path:
    path.mkdir(parents=True)
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def learner(image: Image, federation: Path, name: str, *options: str, **places):
    """A learner's container, as compose.yaml starts it."""
    state = volume(federation / f"{name}-store-{len(list(federation.iterdir()))}")
    witness = volume(state.with_name(f"{state.name}-witness"))
    volumes = {"/var/lib/veilstream": state, "/var/lib/veilstream-witness": witness}
    volumes |= places.pop("volumes", {})
    return state, image.start(
        *image.entrypoint,
        "--plan",
        "/etc/veilstream/plan.toml",
        "--keys",
        f"/etc/veilstream/{name}",
        "--data",
        "/data/records.csv",
        "--store",
        f"/var/lib/veilstream/{name}.db",
        "--witness",
        f"/var/lib/veilstream-witness/{name}.witness",
        "--new-store",
        *options,
        volumes=volumes,
        secrets={
            f"/etc/veilstream/{name}": federation / "keys/learners" / name,
            "/etc/veilstream/plan.toml": federation / "plan.toml",
            "/data/records.csv": federation / f"{name}.csv",
        },
        log=Path(f"{state}.log"),
        **places,
    )


def end(*processes: subprocess.Popen) -> None:
    """`unshare --kill-child` forgets its child when that changes its account."""
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            os.kill(inside(process), signal.SIGKILL)  # the first of its namespace: all die with it
        process.kill()
        process.wait(20)


def inside(process: subprocess.Popen) -> int:
    """The number, on this machine, of the program in the namespaces."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_server_and_learners_run_from_their_images(images, federation):
    port, out = free_port(), volume(federation / "server-state")
    server = images["server"].start(
        *images["server"].entrypoint,
        "--plan",
        "/etc/veilstream/plan.toml",
        "--keys",
        "/etc/veilstream/server",
        "--listen",
        f"127.0.0.1:{port}",
        "--out",
        "/var/lib/veilstream/run",
        volumes={"/var/lib/veilstream": out},
        secrets={
            "/etc/veilstream/server": federation / "keys/server",
            "/etc/veilstream/plan.toml": federation / "plan.toml",
        },
        log=federation / "server.log",
    )
    started = [server]
    try:
        for name in ("north", "south"):
            _, process = learner(images["learner"], federation, name, "--server", f"127.0.0.1:{port}")
            started.append(process)
        wait_for(lambda: "north" in (federation / "server.log").read_text(), PATIENCE_S)
        for process in started:
            facts = status(inside(process))
            assert set(facts["Uid"].split()) == set(facts["Gid"].split()) == {str(LEARNER)}
            assert (facts["NoNewPrivs"], int(facts["CapBnd"], 16), facts["Groups"]) == ("1", 0, "")
        history = out / "run/rounds.csv"
        wait_for(lambda: history.exists() and history.read_text().count("\n") > ROUNDS, PATIENCE_S)
    finally:
        end(*started)
    files = [path for path in federation.rglob("*") if path.suffix in (".db", ".witness")]
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


LOOK = """
import importlib.util, os
for path in ("/x", "/opt/x", "/etc/x", "/usr/x", os.environ["PATH"].split(":")[0] + "/x"):
    try:
        open(path, "w")
        print("wrote", path)
    except OSError as error:
        assert error.errno in (13, 30), error
try:
    os.setuid(0)
    print("became root")
except PermissionError:
    pass
print(sorted(m for m in ("jax", "flwr", "pip", "hatchling", "grpc", "numpy")
             if importlib.util.find_spec(m)))
"""


def test_an_image_holds_what_its_role_needs_and_nobody_writes_there(images):
    for role in ("server", "learner"):
        done = images[role].run("python3", "-c", LOOK)
        assert (done.stdout.strip(), done.returncode) == ("['grpc', 'numpy']", 0), done.stderr
