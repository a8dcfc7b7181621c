"""Privacy in the types: a checker refuses to send what is not noised, and nothing prints it."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from veilstream.learning.tasks import Sample
from veilstream.privacy.gradient_types import ClippedGradient, Hidden, RawGradient, clip_onto_grid
from veilstream.privacy.grid import Grid

PRELUDE = """
import numpy as np
from veilstream.deployment.release import Payload, Release, encode
from veilstream.privacy.grid import Grid
from veilstream.privacy.gradient_types import Noised, RawGradient, add_noise, clip_onto_grid

raw = RawGradient(np.zeros(3, np.float32))
grid = Grid(2.0**-20, 1.0)
clipped = clip_onto_grid(raw, grid)
noised = add_noise(clipped, np.zeros(3, np.int64))
"""
RIGHT = "Release(0, 0, encode(0, 0, 1, grid.step, noised), 'hash')"
WRONG = [
    "Release(0, 0, raw, 'hash')",
    "Release(0, 0, clipped, 'hash')",
    "Release(0, 0, raw.reveal().tobytes(), 'hash')",
    "encode(0, 0, 1, grid.step, raw)",
    "encode(0, 0, 1, grid.step, clipped)",
    "encode(0, 0, 1, grid.step, clipped.reveal())",
    "encode(0, 0, 1, grid.step, raw.reveal())",
    "add_noise(raw, np.zeros(3, np.int64))",
    "clip_onto_grid(raw.reveal(), grid)",
]


def test_mypy_refuses_raw_and_clipped_gradients_in_a_release(tmp_path):
    source = tmp_path / "send.py"
    source.write_text(PRELUDE + "\n".join([RIGHT, *WRONG]) + "\n")
    options = ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent"]
    command = [sys.executable, "-m", "mypy", *options, str(source)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    first = len(PRELUDE.splitlines()) + 1
    assert lines == set(range(first + 1, first + 1 + len(WRONG))), checked.stdout
    exec(compile(textwrap.dedent(PRELUDE + RIGHT), "send", "exec"), {})  # and the right one runs


@pytest.mark.parametrize("kind", [Hidden, RawGradient, ClippedGradient])
def test_hidden_values_leave_no_text_and_no_pickle(kind, caplog):
    secret = kind(np.full(3, 1234.5, np.float32))
    logging.getLogger("test").warning("%s %r {%s}", secret, secret, [secret])
    for text in (str(secret), repr(secret), f"{secret}", f"{[secret]}", caplog.text):
        assert "1234" not in text
    with pytest.raises(TypeError, match="not to be written"):
        pickle.dumps(secret)


def test_samples_leave_no_text():
    sample = Sample(np.full(3, 1234.5), 77.0, None)
    assert "1234" not in f"{sample} {[sample]!r}"
    assert "77" not in f"{sample}"


def test_clipping_onto_the_grid_hides_and_bounds():
    grid = Grid(2.0**-20, 1.0)
    clipped = clip_onto_grid(RawGradient(np.full(3, 5.0, np.float32)), grid)
    units = clipped.reveal().astype(object)
    assert sum(int(u) ** 2 for u in units) <= (2**20) ** 2
    assert "5" not in repr(clipped)
