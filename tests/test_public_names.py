"""The names by which the outside calls the package, as DESIGN and the documentation write them."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import veilstream as vs
from tests.support.pages import PAGES, ROOT, blocks_in, name_of
from tests.test_package import SMALL_PLAN

MECHANISMS = (
    "independent",
    "tree",
    "tree_online",
    "tree_full",
    "optimal",
    "toeplitz",
    "toeplitz_normalised",
    "buffered",
    "banded",
)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_is_a_function_of_the_horizon(name):
    f = getattr(vs.mechanisms, name)(16)
    assert isinstance(f, vs.Factorization)
    assert f.horizon == 16


def test_a_factorization_says_what_it_costs():
    f = vs.mechanisms.toeplitz(4096)
    h = np.cumprod(np.concatenate([[1.0], 1.0 - 0.5 / np.arange(1, 4096)]))  # C = B
    squared = float(h @ h)
    assert f.sensitivity() == pytest.approx(squared**0.5, rel=1e-6)
    assert f.max_error() == pytest.approx(squared**2, rel=1e-5)  # a variance
    assert f.mean_error() < f.max_error()
    B, C = f.decoder_matrix(), f.strategy_matrix()
    assert B.shape == C.shape == (4096, 4096)
    np.testing.assert_allclose(B[-1] @ C, 1.0, atol=1e-4)


def test_noise_is_an_iterator_over_the_increments():
    f = vs.mechanisms.toeplitz(64)
    first, again = (list(f.noise(std=1.0, dim=100, seed=7)) for _ in range(2))
    assert len(first) == 64
    assert all(increment.shape == (100,) for increment in first)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, list(f.noise(std=1.0, dim=100, seed=8)))


def test_calibration_answers_with_noise_and_guarantee():
    f = vs.mechanisms.toeplitz(64)
    std, guarantee = vs.calibrate(vs.Budget(2.0, 1e-3), f, clip_norm=1.0, accounting="exact")
    assert isinstance(guarantee, vs.Guarantee)
    assert guarantee.noise_std == std
    assert vs.privacy_of(std, f, clip_norm=1.0).epsilon(1e-3) == pytest.approx(2.0)


@pytest.mark.parametrize("form", [str, Path, vs.Plan.load])
def test_a_plan_runs_from_a_file_or_a_plan(form, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(SMALL_PLAN)
    run = vs.run(form(path), out=tmp_path / "out")
    assert isinstance(run, vs.Run)
    assert 0.0 <= run.summary["final"]["accuracy"]["mean"] <= 1.0


def test_a_learner_releases_what_decode_reads(tmp_path):
    plan = vs.Plan.parse(SMALL_PLAN, {"data.dim": 2})
    store, witness = tmp_path / "north.db", tmp_path / "north.witness"
    task = vs.tasks.Logistic(dim=2)
    with vs.Learner(plan, str(store), task, witness=str(witness), create=True) as learner:
        learner.begin_round(0, np.zeros(2, np.float32))
        assert learner.observe("alice", vs.Sample(np.array([0.6, -0.8]), 1.0)) in vs.Answer
        release = learner.finish_round()
    assert isinstance(release, vs.Release)
    message = vs.decode(release.payload)
    assert (message.epoch, message.round, message.steps) == (0, 0, 2)
    assert message.grid == learner.grid.step
    assert message.prefix.shape == (2,)
    assert message.prefix.dtype == np.int64


def test_private_sums_release_what_decode_reads():
    f = vs.mechanisms.tree(4)
    private = vs.PrivateSum(f, vs.Budget(2.0, 1e-3), clip_norm=1.0, dim=3)
    private.add(np.ones(3))
    message = vs.decode(private.add(np.ones(3)))
    assert (message.epoch, message.round, message.steps) == (0, 1, 2)


NAMES = {
    "tasks": ("Task", "DetailedTask", "TaskDetails", "FromLoss", "Sample", "Logistic", "LeastSquares", "Ripple"),
    "models": ("PytreeTask", "TorchTask", "DictLogistic", "DictRegression", "DictEncoder"),
    "streams": (
        "Stream",
        "SyntheticStream",
        "RippleStream",
        "PoolStream",
        "EvenSplit",
        "DirichletSplit",
        "PaperSplit",
        "WriterSplit",
        "TableSource",
        "LiveSource",
        "load_mnist",
        "mnist_stream",
    ),
    "theory": ("Constants", "dynamic_regret_bound", "static_regret_bound", "main_theorem_rate", "advised_step_size"),
    "audit": ("audit", "AuditReport"),
    "privacy": ("Budget", "Guarantee", "calibrate", "privacy_of", "GaussianCurve", "ZcdpCurve"),
}


@pytest.mark.parametrize("module", NAMES)
def test_modules_have_their_names_at_the_top(module):
    found = getattr(vs, module)
    for name in NAMES[module]:
        assert name in dir(found)
        assert getattr(found, name) is not None
    for name in found.__all__:
        assert hasattr(found, name), name


# --- the documentation ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_documentation_calls_everything_by_its_name_at_the_top(page):
    for block in blocks_in(name_of(page), "python"):
        assert re.findall(r"from veilstream\b.*|import veilstream\.\S*", block) == []
    # `veilstream.x.y` in prose is a deep name too; commands and files are not.
    prose = re.sub(r"python -m veilstream\.\S+", "", page.read_text())
    assert re.findall(r"`veilstream\.\w+\.[\w.]+`", prose) == []


CALLED = (
    "calibrate",
    "privacy_of",
    "run",
    "clip",
    "decode",
    "Learner",
    "PrivateSum",
    "Run",
    "PrivateModel",
    *(f"PrivateModel.{name}" for name in ("simulated", "learn_one", "predict_one", "predict_proba_one")),
    *(f"models.{name}" for name in NAMES["models"]),
    *(f"mechanisms.{name}" for name in MECHANISMS),
    "tasks.Logistic",
    "tasks.LeastSquares",
    "tasks.Ripple",
    *(f"Learner.{name}" for name in ("begin_round", "observe", "learn_round", "acknowledge")),
    *(f"theory.{name}" for name in vs.theory.__all__ if name.islower()),
    "audit.audit",
    "optax.make_private",
    "torch.make_private",
    "streams.load_mnist",
    "streams.mnist_stream",
)


@pytest.mark.parametrize("name", CALLED)
def test_what_people_call_documents_every_argument(name):
    item = attrgetter(name)(vs)
    text = inspect.getdoc(item) or ""
    assert "Args:" in text
    for argument in inspect.signature(item).parameters.keys() - {"self"}:
        assert re.search(rf"^    {re.escape(argument)}: \S", text, re.MULTILINE), argument
    if inspect.isfunction(item) and inspect.signature(item).return_annotation not in (None, "None"):
        assert "Returns:" in text


def glossary() -> str:
    return (ROOT / "docs/glossary.md").read_text()


@pytest.mark.parametrize(
    "word", ["witness", "epoch", "release", "tag", "round", "step", "learner", "client", "cell", "grid", "transport"]
)
def test_words_that_are_ours_stand_in_the_glossary(word):
    assert re.search(rf"^\| {word}\b[^|]*\| \S.* \|$", glossary(), re.MULTILINE)


def test_the_glossary_is_found_from_the_readme_and_the_guides():
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text()
    for page in ("privacy", "handbook", "quickstart"):
        assert "(glossary.md)" in (ROOT / "docs" / f"{page}.md").read_text()


def test_every_kind_of_method_has_its_name():
    from veilstream.learning.methods import METHODS

    kinds = {"ours", "auto", "independent", "liu", "dp-ftrl", "undeclared", "noise-free", "gao"}
    assert set(METHODS) == kinds
    assert {kind for kind, method in METHODS.items() if method.chooses_steps} == {"auto"}
