"""Every task, whoever wrote the model, keeps what engines and clipping rely on.

To add a task, add a line to `CASES`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.learning.algorithm import StepRule, local_round
from veilstream.learning.cnn import Cnn
from veilstream.learning.image_features import FEATURES, FeatureSoftmax
from veilstream.learning.models.linear_dicts import DictLogistic, DictRegression
from veilstream.learning.models.pytree import PytreeTask
from veilstream.learning.tasks import (
    LeastSquares,
    Logistic,
    Ripple,
    Sample,
    Task,
    TaskDetails,
    admission_of,
    check_members,
)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    features: Callable[[np.random.Generator, int], np.ndarray]
    targets: Callable[[np.random.Generator, int], np.ndarray]
    double: bool = True  # Computes in float64 when asked to; else slopes are compared in float32
    answers: bool = True  # Predicts something for each sample
    scale: float = 1.0  # How far from x⁰ the tests look
    heavy: bool = False  # Slow to compile: looked at from fewer sides


def vectors(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, count: rng.standard_normal((count, *shape)).astype(np.float32)


def pixels(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 256, (count, 784)).astype(np.uint8)


def records(rng: np.random.Generator, count: int) -> np.ndarray:
    cities = ("Oslo", "Lima", "Pune")
    rows = [{"age": rng.normal(), "city": cities[rng.integers(3)]} for _ in range(count)]
    return DictLogistic(16).encode(rows)


def signs(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], count).astype(np.float32)


def values(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal(count).astype(np.float32)


def classes(number: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, count: rng.integers(0, number, count).astype(np.int32)


def jax_scores(params, features):
    hidden = jnp.tanh(features @ params["in"]["w"] + params["in"]["b"])
    return hidden @ params["out"]


def jax_mlp() -> PytreeTask:
    def init(seed):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)  # noqa: E731
        return {"in": {"w": draw(6, 5), "b": np.zeros(5, np.float32)}, "out": draw(5, 3)}

    def loss(params, features, target):
        scores = jax_scores(params, features)
        return jax.nn.logsumexp(scores) - scores[target]

    def predict(params, features):
        return jax_scores(params, features).argmax(-1)

    example = Sample(np.zeros(6, np.float32), 0)
    return PytreeTask(loss, init, predict, classifies=True, example=example)


def torch_mlp():
    import torch
    from torch import nn

    from veilstream.learning.models.torch_model import TorchTask

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    example = Sample(np.zeros(6, np.float32), 0)
    return TorchTask(module, nn.functional.cross_entropy, classifies=True, example=example)


def torch_convolutions():
    import torch
    from torch import nn

    from veilstream.learning.models.torch_model import TorchTask

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1))
    example = Sample(np.zeros((1, 6, 6), np.float32), np.zeros(1, np.float32))
    return TorchTask(module, nn.functional.mse_loss, example=example)


CASES = {
    "logistic": Case(lambda: Logistic(5), vectors(5), signs),
    "logistic-ridge": Case(lambda: Logistic(5, ridge=0.3), vectors(5), signs),
    "least-squares": Case(lambda: LeastSquares(5, 0.2), vectors(5), values),
    "ripple": Case(lambda: Ripple(5), vectors(5), values, answers=False),
    "dict-logistic": Case(lambda: DictLogistic(16), records, signs),
    "dict-regression": Case(lambda: DictRegression(16), records, values),
    "pytree-mlp": Case(jax_mlp, vectors(6), classes(3)),
    "cnn": Case(Cnn, pixels, classes(10), scale=0.01, heavy=True),
    **{
        f"features-{name}": Case(lambda name=name: FeatureSoftmax(name), pixels, classes(10), heavy=True)
        for name in FEATURES
    },
    "torch-mlp": Case(torch_mlp, vectors(6), classes(3), double=False),
    "torch-convolutions": Case(
        torch_convolutions,
        vectors(36),
        lambda rng, count: rng.standard_normal((count, 1)).astype(np.float32),
        double=False,
    ),
}
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")


def tasks(*, heavy: bool = True) -> pytest.MarkDecorator:
    chosen = [name for name, case in CASES.items() if heavy or not case.heavy]
    marked = [pytest.param(n, marks=needs_torch) if n.startswith("torch") else n for n in chosen]
    return pytest.mark.parametrize("name", marked)


every_task = tasks()
light_tasks = tasks(heavy=False)


@cache
def task_of(name: str) -> Any:
    return CASES[name].make()


def samples(name: str, count: int, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    return Sample(CASES[name].features(rng, count), CASES[name].targets(rng, count))


def models(name: str, count: int, seed: int = 1) -> np.ndarray:
    task, rng = task_of(name), np.random.default_rng(seed)
    moves = CASES[name].scale * 0.5 * rng.standard_normal((count, task.dim))
    return (np.asarray(task.init(0)) + moves).astype(np.float32)


def one(batch: Sample, index: int) -> Sample:
    return Sample(batch.features[index], batch.target[index])


@every_task
def test_details_agree_with_the_records_that_the_task_is_for(name):
    """Shape and labels, which simulations and learners refuse by, and room to compute in."""
    task, batch = task_of(name), samples(name, 8)
    assert isinstance(task, Task)
    check_members(task)
    details = TaskDetails.of(task)
    assert details.features_shape is not None
    assert details.takes(batch.features.shape[1:])
    assert not details.takes((*batch.features.shape[1:], 2))
    assert details.workspace >= task.dim
    if details.labels is not None:
        assert task.classifies
        assert np.isin(batch.target, details.labels).all()


@every_task
def test_records_that_a_task_is_for_are_admitted_by_a_deployed_learner(name):
    task = task_of(name)
    admission = admission_of(task)
    record = one(samples(name, 1), 0)
    if np.ndim(record.target):
        pytest.skip("a deployed learner's targets are numbers")
    offered = Sample(np.reshape(record.features, admission.shape), record.target)
    admitted = admission.admitted(offered)
    assert admitted is not None
    x = models(name, 1)[0]
    gradient = np.asarray(task.gradient(x, admitted))
    np.testing.assert_allclose(gradient, task.gradient(x, record), rtol=1e-5, atol=1e-6)


def test_a_task_that_says_little_gets_defaults():
    class Bare:
        dim = 7

    details = TaskDetails.of(Bare())
    assert details == TaskDetails(None, None, False, 14, None, None, None)
    assert details.takes((3, 4))
    with pytest.raises(InputError, match="lacks classifies, init, loss, gradient, predict"):
        check_members(Bare())
    with pytest.raises(InputError, match="features_shape or an example"):
        admission_of(Bare())


def test_features_shape_follows_from_an_example_and_what_a_task_says_comes_first():
    task = jax_mlp()
    assert TaskDetails.of(task).features_shape == (6,)
    task.features_shape = (2, 3)
    assert TaskDetails.of(task).features_shape == (2, 3)


@every_task
def test_start_is_flat_float32_and_follows_from_the_seed(name):
    task, again = task_of(name), CASES[name].make()
    for seed in (0, 7):
        start = task.init(seed)
        assert start.shape == (task.dim,)
        assert start.dtype == np.float32
        np.testing.assert_array_equal(start, task.init(seed))
        np.testing.assert_array_equal(start, again.init(seed))
    np.testing.assert_array_equal(task.init(), task.init(0))


@every_task
def test_gradient_is_the_slope_of_the_loss(name):
    """Central differences along random directions and along the gradient itself."""
    case, task = CASES[name], task_of(name)
    kind, step, tolerance = (np.float64, 1e-6, 1e-6) if case.double else (np.float32, 5e-3, 2e-3)
    rng = np.random.default_rng(3)
    with jax.enable_x64(case.double):
        loss, gradient_of = jax.jit(task.loss), jax.jit(task.gradient)
        for i in range(3):
            x = models(name, 3)[i].astype(kind)
            sample = one(samples(name, 3), i)
            gradient = np.asarray(gradient_of(x, sample))
            assert gradient.shape == x.shape
            size = float(np.linalg.norm(gradient))
            assert size > 0
            for direction in (gradient, rng.standard_normal(task.dim)):
                unit = (direction / np.linalg.norm(direction)).astype(kind)
                ahead, behind = loss(x + step * unit, sample), loss(x - step * unit, sample)
                slope = (float(ahead) - float(behind)) / (2 * step)
                assert slope == pytest.approx(float(gradient @ unit), abs=tolerance * max(1, size))


@every_task
def test_a_gradient_without_jax_is_the_same(name):
    """Where a task has one; a deployed learner then uses it."""
    task = task_of(name)
    host_gradient = TaskDetails.of(task).host_gradient
    if host_gradient is None:
        pytest.skip("it has none")
    for i in range(3):
        x = np.asarray(models(name, 3)[i], np.float32)
        sample = one(samples(name, 3), i)
        expected = np.asarray(task.gradient(x, sample))
        got = host_gradient(x, Sample(np.asarray(sample.features), np.asarray(sample.target)))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@cache
def loss_and_gradient(name: str, mapped: str = "") -> Any:
    """Compiled, for one sample; or for (models, samples), with one vmap inside the other."""
    task = task_of(name)

    def both(x, sample):
        return task.loss(x, sample), task.gradient(x, sample)

    if mapped == "samples inside":
        both = jax.vmap(jax.vmap(both, in_axes=(None, 0)), in_axes=(0, None))
    if mapped == "models inside":
        both = jax.vmap(jax.vmap(both, in_axes=(0, None), out_axes=0), in_axes=(None, 0), out_axes=1)
    return jax.jit(both)


@every_task
def test_mapped_equals_one_at_a_time(name):
    x, batch, single = models(name, 2), samples(name, 4), loss_and_gradient(name)
    alone = [[single(x[m], one(batch, i)) for i in range(4)] for m in range(2)]
    for nesting in ("samples inside", "models inside")[: 1 if CASES[name].heavy else 2]:
        mapped = loss_and_gradient(name, nesting)(x, batch)
        for part in (0, 1):
            each = np.array([[pair[part] for pair in row] for row in alone])
            near = {"rtol": 1e-4, "atol": 1e-5 * np.abs(each).max()}
            np.testing.assert_allclose(mapped[part], each, **near)


@light_tasks
def test_compiled_equals_eager(name):
    task, x, sample = task_of(name), models(name, 1)[0], one(samples(name, 1), 0)
    loss, gradient = loss_and_gradient(name)(x, sample)
    assert loss.dtype == gradient.dtype == np.float32
    np.testing.assert_allclose(loss, task.loss(x, sample), rtol=1e-4)
    eager = np.asarray(task.gradient(x, sample))
    np.testing.assert_allclose(gradient, eager, rtol=1e-4, atol=1e-5 * np.abs(eager).max())


@every_task
def test_each_sample_is_predicted_for_by_itself(name):
    if not CASES[name].answers:
        pytest.skip("predicts nothing about samples")
    x, batch, predict = models(name, 2), samples(name, 5), task_of(name).predict
    together = jax.jit(jax.vmap(predict, in_axes=(0, None)))(x, batch.features)
    assert together.shape == (2, *batch.target.shape)
    single = jax.jit(predict)
    alone = [[single(x[m], batch.features[i : i + 1])[0] for i in range(5)] for m in range(2)]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


@every_task
def test_gradient_of_one_client_ignores_the_others(name):
    """What per-client clipping rests on, whatever the others bring."""
    x, batch, gradients = (models(name, 2), samples(name, 4), loss_and_gradient(name, "samples inside"))
    before = np.asarray(gradients(x, batch)[1])
    hostile = samples(name, 4, seed=9)
    hostile.features[0], hostile.target[0] = batch.features[0], batch.target[0]
    if np.issubdtype(hostile.features.dtype, np.floating):
        hostile.features[1], hostile.features[2] = np.nan, 1e30
    after = np.asarray(gradients(x, hostile)[1])
    largest = np.abs(before[:, 0]).max()
    np.testing.assert_allclose(after[:, 0], before[:, 0], rtol=1e-5, atol=1e-6 * largest)
    assert not np.allclose(after[:, 3], before[:, 3], rtol=1e-3)


@light_tasks
def test_local_rounds_run_compiled_and_move_by_no_more_than_the_clip_norm(name):
    task, learners, steps, bound = task_of(name), 2, 3, 0.25
    batch = samples(name, learners * steps)
    clients = jax.tree.map(lambda a: a.reshape(learners, steps, 1, *a.shape[1:]), batch)
    noise = np.zeros((steps, learners, task.dim), np.float32)

    def learner(x, clients, noise):
        return local_round(task, StepRule(bound), x, clients, noise, 0.1)

    x = models(name, 1)[0]
    releases = np.asarray(jax.jit(jax.vmap(learner, in_axes=(None, 0, 1)))(x, clients, noise))
    sizes = np.linalg.norm(releases, axis=1)
    assert (sizes > 0).all()
    assert (sizes <= bound * (1 + 1e-5)).all()
