"""Simulation needs Python, NumPy, SciPy and JAX only: a GPU host may have nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

ABSENT = ("pydantic", "cryptography", "threadpoolctl", "typer", "click", "rich", "matplotlib",
          "flwr")  # fmt: skip

HIDE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ImportError(f"{{name}} is not on this host")

sys.meta_path.insert(0, Absent())
"""


def on_a_bare_host(code: str, *arguments: object) -> str:
    script = HIDE + textwrap.dedent(code)
    out = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_the_host_is_bare():
    code = f"""
    for name in {ABSENT!r}:
        try:
            __import__(name)
        except ImportError as error:
            assert "not on this host" in str(error)
        else:
            raise AssertionError(name)
    """
    on_a_bare_host(code)


def test_every_mechanism_is_built_and_calibrated():
    code = """
    import veilstream as vs

    for name in vs.mechanisms.MECHANISMS:
        mechanism = vs.mechanisms.build(name, 32)
        std, guarantee = vs.calibrate(vs.Budget(1.0, 1e-5), mechanism, clip_norm=1.0)
        assert std > 0 and guarantee.noise_std == std
    """
    on_a_bare_host(code)


def test_a_plan_is_loaded_prepared_and_its_noise_made_in_jax():
    code = """
    import jax
    import numpy as np

    import veilstream as vs
    from veilstream.engines.build import prepare
    from veilstream.mechanisms.jax_noise import JaxNoise

    plan = vs.Plan.load("experiments/demo.toml", {"learning.rounds": 20})
    prepared = {method.name: prepare(plan, method) for method in plan.methods}
    assert prepared["noise-free"].guarantee is None
    assert all(p.guarantee for name, p in prepared.items() if name != "noise-free")

    optimal = prepared["optimal"]
    noise = JaxNoise(optimal.factorization.program)
    state, increments = noise.block(
        jax.random.key(0), noise.initial_state(plan.data.dim), 0, optimal.noise_std
    )
    assert increments.shape == (optimal.factorization.program.block_length, plan.data.dim)
    assert np.isfinite(increments).all() and np.asarray(increments).any()
    """
    on_a_bare_host(code)


# A whole run belongs here: vs.run(plan, sys.argv[1]) with run.noise = "device", called as
# on_a_bare_host(code, tmp_path / "out").


def test_noise_that_needs_a_missing_package_says_so_before_any_is_drawn():
    code = """
    import veilstream as vs
    from veilstream.errors import MissingExtra

    for stub in (None, "cryptography"):
        if stub:  # as if only threadpoolctl were missing
            import types
            for name in ("", ".hazmat", ".hazmat.primitives", ".hazmat.primitives.ciphers"):
                sys.modules[stub + name] = types.ModuleType(stub + name)
            ciphers = sys.modules[stub + ".hazmat.primitives.ciphers"]
            ciphers.Cipher = ciphers.algorithms = ciphers.modes = None
        try:
            vs.mechanisms.tree(8).noise(dim=3, seed=1)
        except MissingExtra as error:
            print(error)
    """
    assert on_a_bare_host(code).splitlines() == [
        "drawing noise from a keystream needs cryptography, which is not installed: "
        "pip install veilstream",
        "correlating noise on the CPU needs threadpoolctl, which is not installed: "
        "pip install veilstream",
    ]
