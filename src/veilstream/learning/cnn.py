"""The paper's convolutional network for 28 x 28 images, on a flat parameter vector of 61,482.

    convolution 3x3, 32 filters, ReLU, max-pooling 2x2     28 -> 26 -> 13
    convolution 3x3, 32 filters, ReLU, max-pooling 2x2     13 -> 11 -> 5
    64 units, ReLU; 10 units; softmax and cross-entropy

Convolutions are valid (no padding): with padding d would be 110,634. What the paper leaves open:
pixels are divided by 255 (the training images' mean and deviation would use everybody's data
without protecting it); weights start at N(0, 2/fan-in), those of the last layer N(0, 1/fan-in),
biases at zero, drawn from the run's seed: public and independent of any data.

A convolution is one matrix product of image patches (im2col), faster here than the compiler's own:
learners that share x also share one product.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.learning.task_kind import Target, TaskKind
from veilstream.learning.tasks import FromLoss, Sample

if TYPE_CHECKING:
    from jax import Array

_SIDE = 28
_SHAPES = ((9, 32), (32,), (288, 32), (32,), (800, 64), (64,), (64, 10), (10,))
_ENDS = tuple(int(end) for end in np.cumsum([0, *(np.prod(shape) for shape in _SHAPES)]))


class Cnn(FromLoss):
    """Cross-entropy of the network above; features are 784 pixels from 0 to 255, targets 0 to 9."""

    classifies = True
    features_shape = (784,)
    labels = tuple(range(10))
    dim = _ENDS[-1]
    workspace = 200_000  # floats of activations and their gradients, one client

    def init(self, seed: int = 0) -> Array:
        """He-normal weights, zero biases."""
        import jax.numpy as jnp

        rng = np.random.default_rng([seed, 0xC44])
        parts = []
        for shape in _SHAPES:
            gain = 1.0 if shape == (64, 10) else 2.0
            std = np.sqrt(gain / shape[0]) if len(shape) == 2 else 0.0
            parts.append(std * rng.standard_normal(shape).ravel())
        return jnp.asarray(np.concatenate(parts), jnp.float32)

    def loss(self, params: Array, sample: Sample) -> Array:
        """Cross-entropy of one client's image."""
        import jax

        scores = _logits(params, sample.features)
        value: Array = jax.nn.logsumexp(scores) - scores[sample.target]
        return value

    def logits(self, params: Array, features: Array) -> Array:
        """A score for each digit."""
        import jax

        return jax.vmap(_logits, in_axes=(None, 0))(params, features)

    def predict(self, params: Array, features: Array) -> Array:
        """Digits of a batch of images."""
        return self.logits(params, features).argmax(axis=-1)


def _logits(params: Array, pixels: Array) -> Array:
    import jax.numpy as jnp
    from jax.nn import relu

    w1, b1, w2, b2, w3, b3, w4, b4 = (
        params[start:end].reshape(shape) for (start, end), shape in zip(pairwise(_ENDS), _SHAPES, strict=True)
    )
    image = pixels.reshape(_SIDE, _SIDE, 1).astype(jnp.float32) / 255.0
    # Pooling before bias and ReLU: the same numbers, a quarter of the work.
    first = relu(_pooled(_patches(image, 26) @ w1, 26) + b1)
    # Of the 11 x 11 places, pooling with stride 2 never looks at the last row and column.
    second = relu(_pooled(_patches(first, 10) @ w2, 10) + b2)
    hidden = relu(second.reshape(-1) @ w3 + b3)
    scores: Array = hidden @ w4 + b4
    return scores


def _patches(image: Array, side: int) -> Array:
    """3 x 3 patches at the first side x side places, as rows (side², 9·channels)."""
    import jax.numpy as jnp

    shifted = [image[i : i + side, j : j + side] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, axis=-1).reshape(side * side, -1)


def _pooled(rows: Array, side: int) -> Array:
    """Largest of each 2 x 2 square. Slices, since a reshaped maximum has a slow gradient."""
    import jax.numpy as jnp

    grid: Any = rows.reshape(side, side, -1)
    upper = jnp.maximum(grid[0::2, 0::2], grid[0::2, 1::2])
    lower = jnp.maximum(grid[1::2, 0::2], grid[1::2, 1::2])
    return jnp.maximum(upper, lower)


KINDS = (TaskKind(name="cnn", make=lambda _: Cnn(), data=("mnist",), target=Target.CLASS),)
