"""Fixed features of 28 x 28 images, with a softmax layer on top: few parameters, no data used.

Noise grows with the number of parameters; features fixed before any client is met cost nothing.

* *edge*: histograms of edge directions (Dalal and Triggs 2005): the image's gradient, its length
  shared between the two nearest of 8 directions, summed in 7 x 7 overlapping cells, each divided by
  the root of the energy around it (and a little more). 392 numbers.
* *random*: 3x3 random convolutions with ReLU, summed in the same cells. As many numbers.

Each image's features are centred and scaled to norm one by themselves, with a constant beside them
for the bias: the gradient of the softmax layer is at most √2 before clipping, for every client.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import UnknownName
from veilstream.learning.task_kind import Margins, Target, TaskKind, TaskSetting
from veilstream.learning.tasks import FromLoss, Sample

if TYPE_CHECKING:
    from jax import Array

_SIDE, _CELL, _CHANNELS, _CLASSES = 28, 4, 8, 10
_CELLS = _SIDE // _CELL
_BIAS = 0.3
_ENERGY_FLOOR = 0.05


class FeatureSoftmax(FromLoss):
    """Softmax regression on fixed features of 784 pixels from 0 to 255, targets 0 to 9."""

    classifies = True
    features_shape = (784,)
    labels = tuple(range(10))
    dim = (_CELLS * _CELLS * _CHANNELS + 1) * _CLASSES
    workspace = 4 * _SIDE * _SIDE * _CHANNELS

    def __init__(self, features: str = "edge") -> None:
        if features not in FEATURES:
            raise UnknownName("features", features, FEATURES)
        self.features = FEATURES[features]

    def scores(self, params: Array, pixels: Array) -> Array:
        """One score a digit."""
        import jax.numpy as jnp

        raw = self.features(pixels.reshape(_SIDE, _SIDE).astype(jnp.float32) / 255.0).reshape(-1)
        centred = raw - raw.mean()
        length = jnp.sqrt((centred**2).sum())
        unit = centred / jnp.where(length > 0.0, length, 1.0)
        whole = jnp.append(unit, _BIAS) / np.sqrt(1.0 + _BIAS**2)
        scores: Array = whole @ params.reshape(-1, _CLASSES)
        return scores

    def loss(self, params: Array, sample: Sample) -> Array:
        """Cross-entropy of one client's image."""
        import jax

        scores = self.scores(params, sample.features)
        value: Array = jax.nn.logsumexp(scores) - scores[sample.target]
        return value

    def logits(self, params: Array, features: Array) -> Array:
        """`scores` of a batch of images."""
        import jax

        return jax.vmap(self.scores, in_axes=(None, 0))(params, features)

    def predict(self, params: Array, features: Array) -> Array:
        """Digits of a batch of images."""
        return self.logits(params, features).argmax(axis=-1)


def edge_features(image: Array) -> Array:
    """Edge directions, (7, 7, 8), from an image (28, 28) of numbers from 0 to 1."""
    import jax.numpy as jnp

    framed = jnp.pad(image, 1)
    across = framed[1:-1, 2:] - framed[1:-1, :-2]
    down = framed[2:, 1:-1] - framed[:-2, 1:-1]
    strength = jnp.sqrt(across**2 + down**2)
    # In units of the angle between two directions, 0 to 8; each counts for its two neighbours.
    angle = jnp.arctan2(down, across) * (_CHANNELS / (2 * np.pi))
    apart = jnp.abs(angle[..., None] - jnp.arange(_CHANNELS)) % _CHANNELS
    near = jnp.maximum(0.0, 1.0 - jnp.minimum(apart, _CHANNELS - apart))
    cells = _in_cells(strength[..., None] * near)
    energy = jnp.pad((cells**2).sum(axis=-1), 1)
    around = sum(energy[i : i + _CELLS, j : j + _CELLS] for i in range(3) for j in range(3))
    return cells / jnp.sqrt(around + _ENERGY_FLOOR)[..., None]


def random_features(image: Array) -> Array:
    """Random convolutions, (7, 7, 8), from an image (28, 28); the filters are fixed and public."""
    import jax.numpy as jnp

    filters = np.random.default_rng(0x5EED).standard_normal((9, _CHANNELS)) / 3.0
    framed = jnp.pad(image, 1)
    patches = [framed[i : i + _SIDE, j : j + _SIDE] for i in range(3) for j in range(3)]
    return _in_cells(jnp.maximum(0.0, jnp.stack(patches, axis=-1) @ filters.astype(np.float32)))


def _in_cells(channels: Array) -> Array:
    """Sums over 7 x 7 cells that overlap: weights fall to zero at the neighbours' centres."""
    import jax.numpy as jnp

    centres = (np.arange(_CELLS) + 0.5) * _CELL - 0.5
    away = np.abs(np.arange(_SIDE)[:, None] - centres) / _CELL
    weights: Any = np.maximum(0.0, 1.0 - away).astype(np.float32)
    return jnp.einsum("ijc,ia,jb->abc", channels, weights, weights)


FEATURES: dict[str, Callable[[Array], Array]] = {"edge": edge_features, "random": random_features}


def _make(features: str, _: TaskSetting) -> FeatureSoftmax:
    return FeatureSoftmax(features)


def _margins(_: TaskSetting) -> Margins:
    """An image's features have norm one, and a constant beside them."""
    reach = math.sqrt(2.0) * math.sqrt(2.0)
    return Margins(reach=reach, gradient_bound=reach)


KINDS = tuple(
    TaskKind(
        name=f"{features}_features",
        make=partial(_make, features),
        data=("mnist",),
        target=Target.CLASS,
        margins=_margins,
    )
    for features in FEATURES
)
