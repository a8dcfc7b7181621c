"""Your JAX model: what is taken, what is refused and why, and that the vector is the pytree."""

from __future__ import annotations

import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.models.pytree import PytreeTask, check_per_sample, made_up
from veilstream.learning.tasks import Logistic, Sample

EXAMPLE = Sample(np.zeros(3, np.float32), 0)
START = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}


def scores(params, features):
    return features @ params["w"] + params["b"]


def cross_entropy(params, features, target):
    found = scores(params, features)
    return jax.nn.logsumexp(found) - found[target]


def largest(params, features):
    return scores(params, features).argmax(-1)


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=a.shape).astype(np.float32) for name, a in START.items()}


def test_flat_vector_and_pytree_are_the_same_numbers():
    task = PytreeTask(cross_entropy, drawn)
    assert task.dim == 8
    for seed in (0, 5):
        tree = task.unflatten(task.init(seed))
        assert tree.keys() == START.keys()
        for name, array in drawn(seed).items():
            np.testing.assert_array_equal(tree[name], array)
    assert not np.array_equal(task.init(0), task.init(5))


def test_a_pytree_that_can_be_called_is_a_model_not_a_way_to_draw_one():
    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, w):
            self.w = w

        def __call__(self, features):
            return features @ self.w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    task = PytreeTask(lambda m, a, y: (m(a) - y) ** 2, Model(np.ones(3, np.float32)))
    np.testing.assert_array_equal(task.init(4), np.ones(3))
    assert isinstance(task.unflatten(task.init()), Model)


def test_a_logistic_loss_written_as_a_pytree_is_the_logistic_task():
    def loss(params, features, target):
        return jnp.logaddexp(0.0, -target * (features @ params["a"]))

    mine, theirs = PytreeTask(loss, {"a": np.zeros(4, np.float32)}), Logistic(4)
    rng = np.random.default_rng(0)
    x, sample = rng.normal(size=4).astype(np.float32), Sample(rng.normal(size=4), -1.0)
    np.testing.assert_allclose(mine.loss(x, sample), theirs.loss(x, sample), rtol=1e-6)
    np.testing.assert_allclose(mine.gradient(x, sample), theirs.gradient(x, sample), rtol=1e-5)


def test_streams_may_hold_features_flat_and_targets_as_floats():
    def loss(params, image, target):
        assert image.shape == (2, 2)
        assert jnp.issubdtype(target.dtype, jnp.integer)
        return (params["w"][target] - image.sum()) ** 2

    def predict(params, images):
        assert images.shape[1:] == (2, 2)
        return images.sum(axis=(1, 2))

    example = Sample(np.zeros((2, 2), np.float32), 0)
    task = PytreeTask(loss, {"w": np.arange(3, dtype=np.float32)}, predict, example=example)
    x = task.init()
    assert task.loss(x, Sample(np.ones(4, np.uint8), 2.0)) == (2 - 4) ** 2
    np.testing.assert_array_equal(task.predict(x, np.ones((5, 4), np.float32)), np.full(5, 4.0))
    with pytest.raises(InputError, match=r"features = 'shape \(5,\)'.*4 numbers a sample"):
        task.loss(x, Sample(np.ones(5), 2.0))


def test_tasks_reach_other_processes():
    task = PytreeTask(cross_entropy, drawn, largest, classifies=True, example=EXAMPLE)
    copied = pickle.loads(pickle.dumps(task))
    np.testing.assert_array_equal(copied.init(3), task.init(3))
    assert copied.loss(copied.init(), EXAMPLE) == task.loss(task.init(), EXAMPLE)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": np.zeros(3, np.float64)}, r"init\['w'\] = 'float64': expected float32"),
        ({"a": [np.zeros(1, np.float32), np.zeros(2, np.int32)]}, r"init\['a'\]\[1\] = 'int32'"),
        ({"w": np.zeros(3, np.complex64)}, "complex64"),
        ({"w": np.zeros(3, np.float16)}, "float16"),
        ({"n": 3, "w": np.zeros(3, np.float32)}, r"init\['n'\] = 'int'"),
        ({"f": True}, "'bool'"),
        ({"f": "relu"}, "'str'"),
        ({}, "at least one parameter"),
        (None, "at least one parameter"),
        ({"w": np.zeros((0, 3), np.float32)}, "at least one parameter"),
        ({"w": np.array([1.0, np.nan], np.float32)}, "not finite"),
    ],
)
def test_parameters_that_are_not_finite_float32_are_refused_by_name(tree, message):
    for init in (tree, lambda _: tree):
        with pytest.raises(InputError, match=message):
            PytreeTask(cross_entropy, init)


def test_a_python_float_is_a_parameter():
    task = PytreeTask(lambda p, a, y: p["scale"] * a.sum(), {"scale": 2.0})
    assert task.init().dtype == np.float32
    assert task.dim == 1


def test_a_start_that_does_not_follow_from_the_seed_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="two results for seed 0"):
        PytreeTask(cross_entropy, lambda _: {"w": rng.normal(size=3).astype(np.float32)})
    grows = PytreeTask(cross_entropy, lambda seed: {"w": np.zeros(2 + seed, np.float32)})
    with pytest.raises(InputError, match="another structure for seed 1"):
        grows.init(1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, a, y: scores(p, a), r"loss = 'float32, shape \(2,\)'"),
        (lambda p, a, y: scores(p, a).argmax(), r"loss = 'int32, shape \(\)'"),
        (lambda p, a, y: None, "loss = 'NoneType'"),
        (lambda p, a, y: {"loss": scores(p, a).sum()}, "loss = 'dict'"),
    ],
)
def test_a_loss_that_is_no_number_is_refused_at_construction_or_at_first_use(loss, message):
    with pytest.raises(InputError, match=message):
        PytreeTask(loss, START, example=EXAMPLE)
    task = PytreeTask(loss, START)
    with pytest.raises(InputError, match=message):
        task.loss(task.init(), EXAMPLE)


def test_a_loss_that_is_not_finite_near_the_start_is_refused():
    with pytest.raises(InputError, match="nan at the example"):
        PytreeTask(lambda p, a, y: jnp.sqrt(-1.0 - p["w"].sum() ** 2), START, example=EXAMPLE)
    with pytest.raises(InputError, match="finite gradient"):
        PytreeTask(lambda p, a, y: jnp.linalg.norm(p["b"] * 0.0), START, example=EXAMPLE)


def test_labels_need_a_rule_and_one_for_each_sample():
    with pytest.raises(InputError, match="since the task classifies"):
        PytreeTask(cross_entropy, START, classifies=True)
    with pytest.raises(InputError, match="one label a sample"):
        PytreeTask(cross_entropy, START, scores, classifies=True, example=EXAMPLE)
    task = PytreeTask(cross_entropy, START)
    with pytest.raises(InputError, match="pass predict"):
        task.predict(task.init(), np.zeros((1, 3)))
    with pytest.raises(InputError, match=r"shape \(2, 8\)"):
        PytreeTask(cross_entropy, START, largest).predict(np.zeros((2, 8)), np.zeros((1, 3)))


def batch_norm(params, features):
    centred = features - features.mean(axis=0)
    return (centred / jnp.sqrt(features.var(axis=0) + 1e-5)) @ params["w"]


def layer_norm(params, features):
    centred = features - features.mean(axis=-1, keepdims=True)
    return (centred / jnp.sqrt(features.var(axis=-1, keepdims=True) + 1e-5)) @ params["w"]


@pytest.mark.parametrize("ends", [lambda s: s, lambda s: s.argmax(-1)], ids=["values", "labels"])
def test_predictions_that_mix_samples_are_refused_with_the_reason(ends):
    """Even where the last layer starts at zero, which would hide it."""

    def task(normalise):
        return PytreeTask(cross_entropy, START, lambda p, a: ends(normalise(p, a)), example=EXAMPLE)

    with pytest.raises(InputError, match=r"clip norm would not bound .* group or layer norm"):
        task(batch_norm)
    task(layer_norm)
    task(scores)


def test_check_per_sample_wants_one_answer_for_each():
    batch = made_up(np.zeros(3, np.float32))
    with pytest.raises(InputError, match="one answer a sample"):
        check_per_sample(lambda features: features.sum(), batch)
    with pytest.raises(InputError, match="one answer a sample"):
        check_per_sample(lambda features: np.zeros((8, 2)), batch)
    check_per_sample(lambda features: features.sum(axis=1), batch)


def test_made_up_samples_differ_and_keep_integers_in_range():
    tokens = made_up(np.array([5, 9, 2, 7, 1, 3, 8, 0]))
    assert tokens.dtype == np.int64
    assert (np.sort(tokens) == [0, 1, 2, 3, 5, 7, 8, 9]).all()
    assert len(np.unique(tokens, axis=0)) == len(tokens)


def test_a_pytorch_model_without_torch_says_what_to_install(monkeypatch):
    from veilstream.learning.models.torch_model import TorchTask

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"PyTorch model needs torch.*veilstream\[torch\]"):
        TorchTask(object(), object(), example=EXAMPLE)
