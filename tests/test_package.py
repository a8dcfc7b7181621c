"""The package as a stranger meets it: names, import cost, errors, locks."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import veilstream as vs
from veilstream import errors

ROOT = Path(__file__).parent.parent


def test_public_names_are_pinned():
    assert sorted(vs.__all__) == [
        "Answer",
        "Budget",
        "Factorization",
        "Guarantee",
        "Learner",
        "Participation",
        "Plan",
        "PrivateModel",
        "PrivateSum",
        "Release",
        "Run",
        "Sample",
        "Server",
        "Site",
        "VeilstreamError",
        "Workload",
        "__version__",
        "audit",
        "calibrate",
        "clip",
        "decode",
        "errors",
        "load",
        "make_keys",
        "mechanisms",
        "models",
        "optax",
        "privacy",
        "privacy_of",
        "run",
        "streams",
        "tasks",
        "theory",
        "torch",
    ]
    assert list(vs.mechanisms.MECHANISMS) == [
        "independent",
        "tree",
        "tree_online",
        "tree_full",
        "optimal",
        "toeplitz",
        "toeplitz_normalised",
        "buffered",
        "banded",
        "banded_inverse",
    ]
    for module in (vs, vs.mechanisms, vs.privacy, vs.errors):
        for name in module.__all__:
            assert hasattr(module, name), name


def test_import_is_light():
    """Heavy packages stay out of the core; the CPU time itself is printed by benchmarks/."""
    heavy = (
        "jax",
        "flwr",
        "matplotlib",
        "scipy.linalg",
        "scipy.optimize",
        "rich",
        "typer",
        "cryptography",
        "threadpoolctl",
    )
    code = f"import sys, veilstream; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_names_of_the_design_work_as_written():
    f = vs.mechanisms.toeplitz(64)
    assert f.sensitivity() > 1
    assert f.max_error() > f.mean_error()
    assert f.decoder_matrix().shape == f.strategy_matrix().shape == (64, 64)
    assert sum(1 for _ in f.noise(std=1.0, dim=100, seed=7)) == 64
    std, guarantee = vs.calibrate(vs.Budget(2.0, 1e-3), f, clip_norm=1.0, accounting="exact")
    assert guarantee.noise_std == std


def test_a_plan_runs_from_python(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(SMALL_PLAN)
    run = vs.run(plan, out=tmp_path / "out")
    assert 0.0 <= run.summary["final"]["accuracy"]["mean"] <= 1.0
    assert run.summary["main_method"] == "tree"


def test_changelog_and_version_agree():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == vs.__version__


def test_the_version_is_written_once():
    """In the package; the build reads it there. A citation is a page of its own."""
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == vs.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/veilstream/__init__.py"


SMALL_PLAN = """
[learning]
rounds = 12
local_steps = 2
learners = 3
[data]
dim = 5
held_out = 40
[privacy]
epsilon = 2.0
delta = 1e-3
[run]
seeds = 2
[[methods]]
name = "free"
kind = "noise-free"
step_size = 0.1
[[methods]]
name = "tree"
mechanism = "tree"
step_size = 0.1
"""

ALL_ERRORS = [
    errors.InputError("privacy.epsilon", -1, "> 0", "try 1"),
    errors.UnknownName("mechanism", "treee", ["tree", "optimal"]),
    errors.MissingExtra("jax", "jax", "noise on a GPU"),
    errors.MissingExtra("cryptography", None, "drawing noise from a keystream"),
    errors.PrivacyError("no"),
    errors.HorizonExhausted(10, 10),
    errors.LedgerError("the store is damaged", "restore it"),
    errors.StoreBusy("store.lock", "123"),
    errors.SolverError("no"),
]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda e: type(e).__name__)
def test_errors_share_a_root_survive_pickling_and_have_documented_codes(error):
    assert isinstance(error, errors.VeilstreamError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert re.search(rf"{type(error).__name__}\b.* exit {error.exit_code}\b", errors.__doc__ or "")


def test_a_missing_package_says_what_to_install():
    extra, core = ALL_ERRORS[2:4]
    assert str(extra).endswith("not installed: pip install 'veilstream[jax]'")
    assert str(core).endswith("needs cryptography, which is not installed: pip install veilstream")


def test_error_message_names_field_value_rule_and_way_out():
    message = str(errors.InputError("privacy.epsilon", -1, "> 0", "try 1"))
    assert message == "privacy.epsilon = -1: expected > 0 (try 1)"


def test_lock_files_pin_hashes_and_name_no_host():
    for lock in (ROOT / "requirements").glob("*.lock"):
        text = lock.read_text()
        assert "://" not in text
        assert "--index-url" not in text
        for requirement in re.findall(r"^\S+==.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL):
            assert "--hash=sha256:" in requirement


def test_locks_of_the_clone_are_parts_of_the_test_lock():
    def pins(name):
        text = (ROOT / "requirements" / name).read_text()
        return set(re.findall(r"^([\w.-]+)(?:\[.*?\])?(==\S+)", text, re.M))

    assert pins("run.lock") < pins("docs.lock") < pins("test.lock")
