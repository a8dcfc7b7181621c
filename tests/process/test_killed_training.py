"""A training loop that is killed with -9 wherever it stands goes on, and no row of noise meets two gradients."""

from __future__ import annotations

import difflib
import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from veilstream.deployment.ledger.inspect import verify

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/pytorch"

LOOP = """
import hashlib, json, os, signal, sys
import numpy as np
import veilstream as vs
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.private_steps import PrivateSteps, StepTerms
from veilstream.privacy.gradient_types import RawGradient, clip_onto_grid
import veilstream.deployment.private_steps as module

store, told, point, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
module._SNAPSHOT_STEPS = 4
left = [count]

def reached(name):
    if name == point:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

Ledger.reached = staticmethod(reached)
terms = StepTerms.of(vs.Budget(2.0, 1e-4), vs.mechanisms.buffered(12, 3), 1.0, 5, clients_per_step=2,
                     participation=vs.Participation(), about={})
out = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def say(**what):
    os.write(out, (json.dumps(what) + "\\n").encode())

with PrivateSteps(terms, store, state_steps=3) as steps:
    found = steps.resumed()
    if found:
        for k, gradient in enumerate(found.gradients):
            say(step=found.step + k, gradient=gradient.tobytes().hex())
    while not steps.over:
        step = steps.step
        rows = RawGradient(np.random.default_rng(step).standard_normal((2, 5)).astype(np.float32))
        given = steps.take([b"%d" % (2 * step), b"%d" % (2 * step + 1)],
                           lambda: clip_onto_grid(rows, steps.grid, None, 2), lambda: b"state")
        say(step=step, gradient=given.tobytes().hex())
"""

POINTS = [("step-computed", 2), ("step-stored", 2), ("step-witnessed", 3), ("snapshot-stored", 1), ("epoch-closed", 1)]


def test_kills_between_any_two_writes_release_no_step_twice(tmp_path):
    """Every gradient that was ever handed out for a step is the same one, and all twelve come."""
    store, told = tmp_path / "loop.db", tmp_path / "told"
    for point, count in [*POINTS, ("none", 1)]:
        command = [sys.executable, "-c", LOOP, str(store), str(told), point, str(count)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        assert done.returncode == (0 if point == "none" else -signal.SIGKILL)
    given: dict[int, set[str]] = {}
    for line in told.read_text().splitlines():
        one = json.loads(line)
        given.setdefault(one["step"], set()).add(one["gradient"])
    assert sorted(given) == list(range(12))
    assert all(len(each) == 1 for each in given.values())
    status = verify(store)
    assert (status.steps, status.clients, status.ended, status.secrets) == (12, 24, True, 0)


def test_the_example_is_the_ordinary_script_with_at_most_ten_more_lines():
    plain, private = ((EXAMPLES / f"{name}.py").read_text().splitlines()[1:] for name in ("plain", "private"))
    changes = [line for line in difflib.ndiff(plain, private) if line[:2] in ("+ ", "- ")]
    assert all(line.startswith("+ ") for line in changes), changes
    assert 0 < len([line for line in changes if line.strip() != "+"]) <= 10


def write_images(folder: Path) -> None:
    """Bright halves, in the format of MNIST: label 0 above, 1 below."""
    draws = np.random.default_rng(0)
    for part, count in (("train", 120), ("t10k", 40)):
        labels = draws.integers(0, 2, count).astype(np.uint8)
        pixels = draws.integers(0, 90, (count, 28, 28)).astype(np.uint8)
        for k, label in enumerate(labels):
            pixels[k, 14 * label : 14 * label + 14] += 150
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + pixels.tobytes()))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + labels.tobytes()))


@pytest.mark.all
def test_the_example_is_killed_goes_on_and_halts_at_its_horizon(tmp_path):
    pytest.importorskip("torch")
    write_images(tmp_path)
    store = tmp_path / "store.db"
    settings = {"data": tmp_path, "epochs": 4, "batch-size": 10, "rate": 0.2, "store": store, "out": tmp_path / "m.pt"}
    options = [str(each) for name, value in settings.items() for each in (f"--{name}", value)]
    command = [sys.executable, str(EXAMPLES / "private.py"), *options]
    kills = 0
    for _ in range(20):
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        before = verify(store).steps if store.exists() else 0
        deadline = time.monotonic() + 120
        while kills < 3 and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if store.exists() and store.stat().st_size and verify(store).steps >= before + 7:
                child.kill()
                kills += 1
                break
        said, _ = child.communicate(timeout=300)
        if child.returncode == 0:
            break
    assert kills == 3
    assert "(8, 1e-05)-local differential privacy" in said
    assert "at most 4 times, at least 12 steps apart, over 48 steps" in said
    status = verify(store)
    assert (status.steps, status.clients, status.ended) == (48, 120, True)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "epoch" not in again.stdout  # no step is left
    assert verify(store).steps == 48
