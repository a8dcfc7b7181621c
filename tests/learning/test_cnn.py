"""The paper's network, against the same network written three other ways.

Images are few and their shapes are shared, since every shape is compiled for seconds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veilstream.learning.cnn import Cnn
from veilstream.learning.tasks import Sample

TASK = Cnn()
DIGITS = np.arange(10)


class Layers(NamedTuple):
    """The vector's parts in their order, cut by hand. Rows of a kernel are (i, j, channel)."""

    w1: np.ndarray
    b1: np.ndarray
    w2: np.ndarray
    b2: np.ndarray
    w3: np.ndarray
    b3: np.ndarray
    w4: np.ndarray
    b4: np.ndarray


def layers(flat) -> Layers:
    return Layers(
        flat[:288].reshape(3, 3, 1, 32),
        flat[288:320],
        flat[320:9536].reshape(3, 3, 32, 32),
        flat[9536:9568],
        flat[9568:60768].reshape(5, 5, 32, 64),
        flat[60768:60832],
        flat[60832:61472].reshape(64, 10),
        flat[61472:],
    )


def start() -> np.ndarray:
    return np.asarray(TASK.init(3))


def anywhere() -> np.ndarray:
    """Biases away from zero. The seed keeps every maximum and ReLU 7e-5 away from its kink, so that
    no rounding of float32 can decide where a gradient flows; at the start it is 1e-5.
    """
    rng = np.random.default_rng(8)
    x = start() + 0.02 * rng.standard_normal(TASK.dim)
    for bias in (slice(288, 320), slice(9536, 9568), slice(60768, 60832), slice(61472, None)):
        x[bias] = 0.1 * rng.standard_normal(len(x[bias]))
    return x.astype(np.float32)


every_model = pytest.mark.parametrize("model", [start, anywhere])


@cache
def pictures() -> Sample:
    """Noise, strokes on an empty ground, nothing, and all white: ties are part of the game."""
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (4, 28, 28)).astype(np.uint8)
    images[1] = 0
    images[1, 6:22, 12:15] = 255
    images[1, 9:11, 5:20] = 130
    images[2], images[3] = 0, 255
    return Sample(images.reshape(4, 784), np.array([7, 1, 0, 3], np.int32))


def slow_scores(x, pixels) -> np.ndarray:
    """Float64, place by place: convolution, bias, ReLU, then pooling, as the paper lists them."""
    p = layers(np.asarray(x, np.float64))
    maps = np.asarray(pixels, np.float64).reshape(28, 28, 1) / 255.0
    for kernel, bias in ((p.w1, p.b1), (p.w2, p.b2)):
        side = len(maps) - 2
        convolved = np.zeros((side, side, 32))
        for row in range(side):
            for column in range(side):
                patch = maps[row : row + 3, column : column + 3]
                convolved[row, column] = np.einsum("ijc,ijco->o", patch, kernel) + bias
        active = np.maximum(convolved, 0.0)
        half = side // 2
        maps = np.zeros((half, half, 32))
        for row in range(half):
            for column in range(half):
                square = active[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                maps[row, column] = square.max(axis=(0, 1))
    hidden = np.maximum(np.einsum("ijc,ijco->o", maps, p.w3) + p.b3, 0.0)
    return hidden @ p.w4 + p.b4


def cross_entropy(scores, target):
    return jax.nn.logsumexp(scores) - scores[target]


def compiler_loss(x, sample):
    """The compiler's own convolution and pooling."""
    p = layers(x)
    maps = sample.features.reshape(1, 28, 28, 1).astype(x.dtype) / 255.0
    for kernel, bias in ((p.w1, p.b1), (p.w2, p.b2)):
        maps = jax.lax.conv_general_dilated(maps, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        maps = jnp.where(maps + bias > 0.0, maps + bias, 0.0)
        window = (1, 2, 2, 1)
        maps = jax.lax.reduce_window(maps, -jnp.inf, jax.lax.max, window, window, "VALID")
    hidden = maps.reshape(-1) @ p.w3.reshape(800, 64) + p.b3
    hidden = jnp.where(hidden > 0.0, hidden, 0.0)
    return cross_entropy(hidden @ p.w4 + p.b4, sample.target)


@cache
def compiled(learners_share: bool = True):
    one = jax.value_and_grad(TASK.loss)
    return jax.jit(jax.vmap(one, in_axes=(None if learners_share else 0, 0)))


@cache
def compiled_reference():
    return jax.jit(jax.vmap(jax.value_and_grad(compiler_loss), in_axes=(None, 0)))


def assert_same(found, expected):
    """Loss by loss; gradients by their distance, relative to the length, layer by layer."""
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        largest = np.linalg.norm(theirs)
        assert largest > 0
        for a, b in zip(layers(np.asarray(ours)), layers(np.asarray(theirs)), strict=True):
            assert np.linalg.norm(a - b) <= 2e-5 * max(np.linalg.norm(b), 1e-2 * largest)


def test_size_is_that_of_valid_convolutions():
    side = (28 - 2) // 2
    side = (side - 2) // 2
    valid = (9 + 1) * 32 + (9 * 32 + 1) * 32 + (side * side * 32 + 1) * 64 + (64 + 1) * 10
    assert TASK.dim == valid == 61_482
    assert TASK.init().shape == (61_482,)


@every_model
def test_loss_of_every_digit_equals_the_slow_network_in_float64(model):
    x = model()
    scores = np.array([slow_scores(x, image) for image in pictures().features])
    largest = scores.max(axis=1, keepdims=True)
    logsumexp = largest + np.log(np.exp(scores - largest).sum(axis=1, keepdims=True))
    assert np.ptp(scores, axis=1)[[0, 1, 3]].min() > 0.1  # not the score of nothing
    np.testing.assert_allclose(losses(x, pictures().features), logsumexp - scores, rtol=2e-5)


@cache
def compiled_losses():
    digits = jax.vmap(lambda x, image, k: TASK.loss(x, Sample(image, k)), in_axes=(None, None, 0))
    return jax.jit(jax.vmap(digits, in_axes=(None, 0, None)))


def losses(x, images) -> np.ndarray:
    """Loss of each image with each digit as its target."""
    return np.asarray(compiled_losses()(x, images, DIGITS))


@every_model
def test_loss_and_gradient_equal_the_compilers_own_convolution_and_pooling(model):
    """In float64 there. At the start all biases are zero: ReLU's slope at zero is zero."""
    x = model()
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, compiled_reference()(x.astype(np.float64), pictures()))
    assert expected[1].dtype == np.float64
    assert_same(compiled()(x, pictures()), expected)


@every_model
def test_loss_and_gradient_equal_the_same_network_in_pytorch(model):
    torch = pytest.importorskip("torch")
    x, nn = model(), torch.nn
    module = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).double()
    parameters = list(module.parameters())
    assert sum(p.numel() for p in parameters) == TASK.dim

    # PyTorch has (out, in, i, j), and flattens (channel, row, column).
    def to_torch(p: Layers) -> list[np.ndarray]:
        w3 = p.w3.transpose(3, 2, 0, 1).reshape(64, 800)
        kernels = (p.w1.transpose(3, 2, 0, 1), p.w2.transpose(3, 2, 0, 1))
        return [kernels[0], p.b1, kernels[1], p.b2, w3, p.b3, p.w4.T, p.b4]

    def from_torch(parts: list[np.ndarray]) -> np.ndarray:
        k1, b1, k2, b2, w3, b3, w4, b4 = parts
        w3 = w3.reshape(64, 32, 5, 5).transpose(2, 3, 1, 0)
        parts = [k1.transpose(2, 3, 1, 0), b1, k2.transpose(2, 3, 1, 0), b2, w3, b3, w4.T, b4]
        return np.concatenate([part.ravel() for part in parts])

    with torch.no_grad():
        for parameter, value in zip(parameters, to_torch(layers(x)), strict=True):
            parameter.copy_(torch.tensor(value))
    found = []
    for pixels, target in zip(pictures().features, pictures().target, strict=True):
        image = torch.from_numpy(pixels.reshape(1, 1, 28, 28) / 255.0)
        loss = nn.functional.cross_entropy(module(image), torch.tensor([int(target)]))
        slopes = torch.autograd.grad(loss, parameters)
        found.append((loss.item(), from_torch([slope.numpy() for slope in slopes])))
    assert_same(compiled()(x, pictures()), tuple(zip(*found, strict=True)))


def test_last_two_rows_and_columns_of_pixels_are_never_seen():
    """Pooling takes 10 of 11 places: 10 + 2 of 13 below, 24 + 2 of 28 pixels."""
    x, images = anywhere(), np.repeat(pictures().features[:1], 4, axis=0).reshape(4, 28, 28)
    images[1, 26:], images[1, :, 26:] = 0, 255
    images[2, 25], images[3, :, 25] = 0, 0
    plain, unseen, row, column = losses(x, images.reshape(4, 784))
    np.testing.assert_allclose(unseen, plain, rtol=1e-6)
    assert np.abs(row - plain).max() > 1e-3
    assert np.abs(column - plain).max() > 1e-3


def test_pixels_of_both_types_give_the_same():
    x, images = anywhere(), pictures().features
    assert images.dtype == np.uint8
    real = losses(x, images.astype(np.float32))
    np.testing.assert_allclose(losses(x, images), real, rtol=1e-6)
    between = images[:1].astype(np.float32) + np.float32(0.7)  # fractions are not cut off
    scores = slow_scores(x, between[0])
    found = losses(x, np.repeat(between, 4, axis=0))[0]
    np.testing.assert_allclose(found - found[0], scores[0] - scores, atol=1e-5)


def test_prediction_is_the_digit_of_the_largest_score():
    images = np.random.default_rng(6).integers(0, 256, (12, 784)).astype(np.uint8)
    images = (images * np.linspace(0, 1, 12)[:, None]).astype(np.uint8)
    x = anywhere()
    x[61472:] -= np.mean([slow_scores(x, image) for image in images], axis=0)  # answers that vary
    answers = np.array([slow_scores(x, image).argmax() for image in images])
    assert len(set(answers)) >= 3
    predict = jax.jit(TASK.predict)
    np.testing.assert_array_equal(predict(x, images), answers)
    for digit in DIGITS:
        biased = x.copy()
        biased[61472 + digit] += 100
        np.testing.assert_array_equal(predict(biased, images), digit)


def test_learners_that_share_a_model_equal_learners_with_copies():
    """Two of the learners have one model, two another."""
    one, other = (compiled()(x, pictures()) for x in (anywhere(), start()))
    copies = np.array([anywhere(), start(), anywhere(), start()])
    expected = [np.concatenate([a[:1], b[1:2], a[2:3], b[3:]]) for a, b in zip(one, other, strict=True)]
    assert_same(compiled(learners_share=False)(copies, pictures()), expected)


def test_start_follows_from_the_seed_alone():
    again = Cnn()
    np.testing.assert_array_equal(TASK.init(11), again.init(11))
    np.testing.assert_array_equal(TASK.init(), again.init(0))
    for seed in (0, 12):
        moved = layers(np.asarray(TASK.init(seed)) != np.asarray(TASK.init(11)))
        for part in (moved.w1, moved.w2, moved.w3, moved.w4):
            assert part.mean() > 0.99


@pytest.mark.parametrize("seed", [0, 1])
def test_start_has_he_variances_and_zero_biases(seed):
    """Mean and variance within 5 standard errors: a false alarm in 2e5 runs, had they no seed."""
    p = layers(np.asarray(TASK.init(seed), np.float64))
    for bias in (p.b1, p.b2, p.b3, p.b4):
        assert not bias.any()
    variances = {"w1": 2 / 9, "w2": 2 / 288, "w3": 2 / 800, "w4": 1 / 64}
    for name, variance in variances.items():
        weights = getattr(p, name).ravel()
        scaled = weights / np.sqrt(variance)
        assert abs(scaled.mean()) < 5 / np.sqrt(scaled.size)
        assert abs(scaled.var(ddof=1) - 1) < 5 * np.sqrt(2 / (scaled.size - 1))
    scaled = [getattr(p, name).ravel()[:288] / np.sqrt(v) for name, v in variances.items()]
    apart = np.abs(np.corrcoef(scaled) - np.eye(4))
    assert apart.max() < 5 / np.sqrt(288)  # no layer repeats another's draws
