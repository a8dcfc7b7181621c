"""Fixed features against slow ones written from their description, and pictures that one knows."""

from __future__ import annotations

import math
from functools import cache

import jax
import numpy as np
import pytest

from veilstream.errors import UnknownName
from veilstream.learning.image_features import FEATURES, FeatureSoftmax, edge_features, random_features
from veilstream.learning.tasks import Sample

every_kind = pytest.mark.parametrize("name", FEATURES)


@cache
def compiled(function):
    return jax.jit(function)


def features_of(function, image) -> np.ndarray:
    return np.array(compiled(function)(np.asarray(image, np.float32)))


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((28, 28))


def strokes() -> np.ndarray:
    """A seven, slanted, that stops before the frame."""
    image = np.zeros((28, 28))
    image[5:8, 7:21] = 1.0
    for row in range(8, 24):
        left = 18 - (row - 8) // 2
        image[row, left : left + 3] = 0.8
    return image


def blank() -> np.ndarray:
    return np.zeros((28, 28))


def white() -> np.ndarray:
    return np.ones((28, 28))


def right_half() -> np.ndarray:
    image = np.zeros((28, 28))
    image[:, 14:] = 1.0
    return image


PICTURES = [noise, strokes, blank, white, right_half]
every_picture = pytest.mark.parametrize("picture", PICTURES)


def at(image, row: int, column: int) -> float:
    """A pixel; nothing outside of the frame."""
    inside = 0 <= row < 28 and 0 <= column < 28
    return float(image[row, column]) if inside else 0.0


def spread(row: int, column: int) -> list[tuple[int, int, float]]:
    """The cells a pixel counts in, and how much: all at a centre, nothing at the next one."""
    found = []
    for a in range(7):
        for b in range(7):
            down, across = abs(row - (4 * a + 1.5)), abs(column - (4 * b + 1.5))
            if down < 4 and across < 4:
                found.append((a, b, (1 - down / 4) * (1 - across / 4)))
    return found


def slow_edges(image) -> np.ndarray:
    cells = np.zeros((7, 7, 8))
    for row in range(28):
        for column in range(28):
            across = at(image, row, column + 1) - at(image, row, column - 1)
            down = at(image, row + 1, column) - at(image, row - 1, column)
            degrees = math.degrees(math.atan2(down, across)) % 360
            lower = math.floor(degrees / 45)
            share = degrees / 45 - lower
            for a, b, weight in spread(row, column):
                cells[a, b, lower % 8] += weight * math.hypot(across, down) * (1 - share)
                cells[a, b, (lower + 1) % 8] += weight * math.hypot(across, down) * share
    found = np.zeros((7, 7, 8))
    for a in range(7):
        for b in range(7):
            energy = 0.05
            for i in range(max(0, a - 1), min(7, a + 2)):
                for j in range(max(0, b - 1), min(7, b + 2)):
                    energy += sum(cells[i, j, k] ** 2 for k in range(8))
            found[a, b] = cells[a, b] / math.sqrt(energy)
    return found


def slow_random(image) -> np.ndarray:
    """The filters are public: nine by eight normal numbers of a fixed seed, rows (i, j)."""
    filters = np.random.default_rng(0x5EED).standard_normal((9, 8)).reshape(3, 3, 8) / 3
    cells = np.zeros((7, 7, 8))
    for row in range(28):
        for column in range(28):
            response = np.zeros(8)
            for i in range(3):
                for j in range(3):
                    response += at(image, row + i - 1, column + j - 1) * filters[i, j]
            for a, b, weight in spread(row, column):
                cells[a, b] += weight * np.maximum(response, 0)
    return cells


SLOW = {"edge": slow_edges, "random": slow_random}


@every_kind
@every_picture
def test_features_equal_slow_ones_in_float64(name, picture):
    image = picture().astype(np.float32)
    found = features_of(FEATURES[name], image)
    assert found.shape == (7, 7, 8)
    np.testing.assert_allclose(found, SLOW[name](image), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("picture", [noise, strokes])
def test_a_turned_image_turns_its_edges(picture):
    """A quarter turn to the left: cells turn with it, directions move by two of eight."""
    image = picture()
    turned = features_of(edge_features, np.rot90(image))
    expected = np.roll(np.rot90(features_of(edge_features, image)), -2, axis=-1)
    np.testing.assert_allclose(turned, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(turned - features_of(edge_features, image)).max() > 0.1


def test_vertical_edges_point_right_where_it_brightens_and_left_where_it_darkens():
    """Away from the upper and lower frame: right at the middle, left where the image ends."""
    middle = features_of(edge_features, right_half())[1:6]
    assert middle[:, 3, 0].min() > 0.3
    assert middle[:, 6, 4].min() > 0.3
    middle[:, 2:5, 0] = 0
    middle[:, 5:, 4] = 0
    assert np.abs(middle).max() < 1e-5


@pytest.mark.parametrize(("degrees", "direction"), [(45 * k, k) for k in range(8)])
def test_a_slope_points_where_its_brightness_grows(degrees, direction):
    """Clockwise from the right, since rows count downwards."""
    rows, columns = np.mgrid[:28, :28] - 13.5
    angle = np.radians(degrees)
    image = 0.5 + 0.02 * (np.cos(angle) * columns + np.sin(angle) * rows)
    inner = features_of(edge_features, image)[2:5, 2:5]
    np.testing.assert_array_equal(inner.argmax(axis=-1), direction)
    inner[..., direction] = 0
    assert np.abs(inner).max() < 1e-3


@pytest.mark.parametrize("brightness", [0.5, 0.25])
def test_brightness_hardly_matters_to_edges(brightness):
    """The floor under the energy is all that remains of it."""
    full, dim = (features_of(edge_features, s * strokes()) for s in (1.0, brightness))
    assert full.max() > 0.4
    assert np.abs(dim - full).max() < 0.01
    assert not np.array_equal(dim, full)


def test_blank_images_have_no_features():
    for function in (edge_features, random_features):
        np.testing.assert_array_equal(features_of(function, blank()), np.zeros((7, 7, 8)))


def pixels(picture) -> np.ndarray:
    return np.round(255 * picture()).astype(np.uint8).reshape(784)


@cache
def batch() -> Sample:
    rng = np.random.default_rng(2)
    wild = [rng.integers(0, 256, 784), 255 * (rng.random(784) < 0.02), np.eye(784, dtype=int)[400]]
    images = [pixels(picture) for picture in PICTURES] + [w.astype(np.uint8) for w in wild]
    return Sample(np.array(images), np.arange(len(images), dtype=np.int32))


def models() -> np.ndarray:
    """Nothing known, unsure, sure, and sure of the wrong."""
    rng = np.random.default_rng(3)
    scales = np.array([0.0, 0.3, 5.0, 200.0])
    return (scales[:, None] * rng.standard_normal((4, 3930))).astype(np.float32)


@cache
def loss_and_gradient(name):
    """For every model and image."""
    one = jax.value_and_grad(FeatureSoftmax(name).loss)
    return jax.jit(jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None)))


@cache
def unit_features(name) -> np.ndarray:
    """Centred, of norm one unless there is nothing; beside them 0.3; together at most one."""
    found = []
    for image in batch().features:
        raw = SLOW[name](image.reshape(28, 28) / 255.0).ravel()
        raw -= raw.mean()
        length = np.linalg.norm(raw)
        found.append(np.append(raw / length if length > 0 else raw, 0.3) / math.sqrt(1 + 0.3**2))
    return np.array(found)


@every_kind
def test_loss_and_gradient_equal_the_closed_form(name):
    """log Σ exp(s) - s_y and features ⊗ (p - e_y), in float64 from the slow features."""
    losses, gradients = loss_and_gradient(name)(models(), batch())
    for i, target in enumerate(batch().target):
        features = unit_features(name)[i]
        assert np.linalg.norm(features) <= 1 + 1e-12
        for m, x in enumerate(models().astype(np.float64)[:3]):
            scores = features @ x.reshape(393, 10)
            exponentials = np.exp(scores - scores.max())
            probabilities = exponentials / exponentials.sum()
            loss = np.log(exponentials.sum()) + scores.max() - scores[target]
            slope = np.outer(features, probabilities - np.eye(10)[target]).ravel()
            assert float(losses[m, i]) == pytest.approx(loss, rel=1e-4, abs=1e-4)
            assert np.linalg.norm(gradients[m, i] - slope) < 1e-4


@every_kind
def test_gradient_is_never_longer_than_the_square_root_of_two(name):
    """Float64 sums of what float32 computed: its rounding is all that is granted."""
    gradients = np.asarray(loss_and_gradient(name)(models(), batch())[1], np.float64)
    lengths = np.linalg.norm(gradients, axis=-1)
    assert lengths.max() <= math.sqrt(2) * (1 + 1e-6)
    assert lengths.max() > 1.4  # a bound that is nearly reached


@every_kind
def test_blank_images_have_finite_losses_and_gradients_of_the_bias_alone(name):
    at_blank = PICTURES.index(blank)
    losses, gradients = (part[:, at_blank] for part in loss_and_gradient(name)(models(), batch()))
    assert np.isfinite(losses).all()
    assert np.isfinite(gradients).all()
    by_feature = np.asarray(gradients).reshape(4, 393, 10)
    assert not by_feature[:, :392].any()
    assert by_feature[:2, 392].any()


@every_kind
def test_loss_is_convex_along_lines(name):
    """Second differences in float64; somewhere they are not zero."""
    rng, steps = np.random.default_rng(4), np.linspace(-3, 3, 25)
    task, sizes = FeatureSoftmax(name), (1.0, 10.0, 50.0)
    points = [rng.standard_normal(3930) for _ in sizes]
    lines = [size * rng.standard_normal(3930) / math.sqrt(3930) for size in sizes]
    x = np.array([p + s * line for p, line in zip(points, lines, strict=True) for s in steps])
    with jax.enable_x64(True):
        along = jax.jit(jax.vmap(jax.vmap(task.loss, in_axes=(None, 0)), in_axes=(0, None)))
        losses = np.asarray(along(x, batch())).reshape(len(sizes), len(steps), -1)
    assert losses.dtype == np.float64
    bends = losses[:, 2:] - 2 * losses[:, 1:-1] + losses[:, :-2]
    assert bends.min() > -1e-12
    assert bends.max() > 1e-3


@every_kind
def test_size_and_predictions(name):
    task = FeatureSoftmax(name)
    assert task.dim == 3930
    assert task.init().shape == (3930,)
    x, images = models()[2].reshape(393, 10), batch().features
    whole = unit_features(name)
    x[392] -= (whole @ x).mean(axis=0) / whole[0, 392]  # answers that vary
    expected = (whole @ x).argmax(axis=1)
    assert len(set(expected)) >= 3
    # Whole pixels above, real ones here: both types give the same.
    found = jax.jit(task.predict)(x.ravel(), images.astype(np.float32))
    np.testing.assert_array_equal(found, expected)


def test_unknown_features_are_refused_by_name():
    with pytest.raises(UnknownName, match="edge") as refusal:
        FeatureSoftmax("egde")
    assert refusal.value.field == "features"
    assert set(refusal.value.known) == {"edge", "random"}
    assert FeatureSoftmax().features is edge_features
