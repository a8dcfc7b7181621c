"""Simulation needs NumPy, SciPy, JAX, platformdirs, tomli-w: a GPU host may have nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import veilstream as vs
from tests.simulation.test_run_folder import FILES
from veilstream.research.learning_figure import draw_run

ROOT = Path(__file__).parent.parent.parent

ABSENT = ("pydantic", "cryptography", "threadpoolctl", "typer", "click", "rich", "matplotlib", "flwr")

# None stands for "not here", to `import` and to `find_spec` alike.
HIDE = f"""
import sys

sys.modules.update(dict.fromkeys({ABSENT!r}))
"""


def on_a_bare_host(code: str, *arguments: object) -> str:
    script = HIDE + textwrap.dedent(code)  # arguments are sys.argv[1:]
    out = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_the_host_is_bare():
    code = f"""
    import importlib.util

    for name in {ABSENT!r}:
        assert importlib.util.find_spec(name) is None
        try:
            __import__(name)
        except ImportError as error:
            assert name in str(error)
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
    from veilstream.plans.prepare import prepare
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


def test_a_whole_run_leaves_a_folder_that_can_be_read_elsewhere(tmp_path):
    """`vs.run` as on a GPU host; noise is made in JAX, unasked."""
    code = """
    import veilstream as vs

    small = {"learning.rounds": 20, "run.seeds": 1}
    run = vs.run(vs.Plan.load("experiments/demo.toml", small), sys.argv[1])
    print(run.summary["methods"]["tree"]["final"]["accuracy"]["mean"])
    """
    out = tmp_path / "out"
    told = on_a_bare_host(code, out)
    run = vs.Run(out)
    assert float(told) == run.summary["methods"]["tree"]["final"]["accuracy"]["mean"]
    assert run.summary["complete"]
    assert run.plan == vs.Plan.load(ROOT / "experiments" / "demo.toml", {"learning.rounds": 20, "run.seeds": 1})
    assert json.loads((out / "versions.json").read_text())["noise"] == "device"
    assert {p.name for p in out.iterdir()} == FILES
    assert run.history("loss")["optimal"].shape == (1, 20)
    assert run.summary["methods"]["tree"]["final"]["dynamic_regret"] is not None
    assert all(path.exists() for path in draw_run(run))


def test_the_plans_of_a_figure_are_there_and_a_missing_package_is_named(tmp_path):
    code = """
    import veilstream as vs
    from veilstream.plans.experiments import figure_of

    plans = list(figure_of("cnn").plans({"learning.rounds": 3}, smoke=True))
    print([folder for folder, plan in plans])
    try:
        vs.run(vs.Plan.load("experiments/demo.toml", {"run.noise": "host"}), sys.argv[1])
    except vs.errors.MissingExtra as error:
        print(error)
    """
    folders, refusal = on_a_bare_host(code, tmp_path).splitlines()
    assert folders == "['tau-1', 'tau-2', 'tau-4']"
    assert refusal.endswith("pip install veilstream")


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
            ciphers.Cipher = None
            ciphers.modes = types.SimpleNamespace(CTR=None)
            ciphers.algorithms = types.SimpleNamespace(AES256=None)
        try:
            vs.mechanisms.tree(8).noise(dim=3, seed=1)
        except MissingExtra as error:
            print(error)
    """
    assert on_a_bare_host(code).splitlines() == [
        "drawing noise from a keystream needs cryptography, which is not installed: pip install veilstream",
        "correlating noise on the CPU needs threadpoolctl, which is not installed: pip install veilstream",
    ]
