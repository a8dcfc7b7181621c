"""Tasks for records of a table beside `Logistic` and `LeastSquares`: classes, robust, counts.

All are linear in the features. With ‖a‖ <= 1 every gradient but Poisson's is at most √2 before
clipping, whatever the record, so a clip norm of about 1 loses little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from veilstream.errors import InputError
from veilstream.learning.tasks import Floats, FromLoss, Sample, jax_numpy

if TYPE_CHECKING:
    from jax import Array


_LARGEST_LOG_RATE = 20.0  # exp of more would be no count, and overflows float32 from 88 on


class Softmax(FromLoss):
    """-log softmax(W·a)_y + ridge/2·‖W‖², classes y = 0, 1, 2, ...; W is (classes, features).

    Args:
        features: numbers of one client's features.
        classes: how many.
        ridge: weight of the squared norm in the loss.

    """

    classifies = True

    def __init__(self, features: int, classes: int, ridge: float = 0.0) -> None:
        if classes < 2:
            raise InputError("classes", classes, "at least 2", "name every class of the label")
        self.features_shape, self.classes, self.ridge = (features,), classes, ridge
        self.dim = features * classes
        self.labels = tuple(float(label) for label in range(classes))

    def loss(self, params: Array, sample: Sample) -> Array:
        """Loss of one client."""
        jnp = jax_numpy()
        import jax

        scores = params.reshape(self.classes, -1) @ sample.features
        label = jnp.asarray(sample.target).astype(jnp.int32)
        value: Array = jax.nn.logsumexp(scores) - scores[label]
        return value + 0.5 * self.ridge * (params @ params) if self.ridge else value

    def host_gradient(self, params: Floats, sample: Sample) -> Floats:
        """Gradient without JAX, for a deployed learner."""
        scores = params.reshape(self.classes, -1) @ sample.features
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        weights[int(sample.target)] -= 1.0
        gradient: Floats = np.outer(weights, sample.features).ravel()
        return gradient + self.ridge * params if self.ridge else gradient

    def predict(self, params: Array, features: Array) -> Array:
        """The likeliest class."""
        scores = features @ params.reshape(self.classes, -1).T
        return scores.argmax(axis=-1).astype(np.float32)


class Huber(FromLoss):
    """Half the squared error up to ``width``, linear beyond it, + ridge/2·‖x‖².

    Args:
        dim: parameters, and numbers of one client's features.
        ridge: weight of the squared norm in the loss.
        width: from where on an error counts linearly; labels lie from -1 to 1.

    """

    classifies = False

    def __init__(self, dim: int, ridge: float = 0.0, width: float = 0.5) -> None:
        self.dim, self.ridge, self.width, self.features_shape = dim, ridge, width, (dim,)

    def loss(self, params: Array, sample: Sample) -> Array:
        """Loss of one client."""
        jnp = jax_numpy()
        error = jnp.abs(sample.features @ params - sample.target)
        inner = jnp.minimum(error, self.width)
        value: Array = 0.5 * inner**2 + self.width * (error - inner)
        return value + 0.5 * self.ridge * (params @ params) if self.ridge else value

    def host_gradient(self, params: Floats, sample: Sample) -> Floats:
        """Gradient without JAX, for a deployed learner."""
        error = sample.features @ params - sample.target
        gradient: Floats = np.clip(error, -self.width, self.width) * sample.features
        return gradient + self.ridge * params if self.ridge else gradient

    def predict(self, params: Array, features: Array) -> Array:
        """Fitted value."""
        return features @ params


class Poisson(FromLoss):
    """exp(a·x) - y·(a·x) + ridge/2·‖x‖² for counts y; log rates beyond 20 count as 20.

    Args:
        dim: parameters, and numbers of one client's features.
        ridge: weight of the squared norm in the loss.

    """

    classifies = False

    def __init__(self, dim: int, ridge: float = 0.0) -> None:
        self.dim, self.ridge, self.features_shape = dim, ridge, (dim,)

    def loss(self, params: Array, sample: Sample) -> Array:
        """Loss of one client."""
        jnp = jax_numpy()
        log_rate = sample.features @ params
        rate = jnp.exp(jnp.minimum(log_rate, _LARGEST_LOG_RATE))
        beyond = jnp.maximum(log_rate - _LARGEST_LOG_RATE, 0.0)  # linear from there on
        value: Array = rate * (1.0 + beyond) - sample.target * log_rate
        return value + 0.5 * self.ridge * (params @ params) if self.ridge else value

    def host_gradient(self, params: Floats, sample: Sample) -> Floats:
        """Gradient without JAX, for a deployed learner."""
        rate = np.exp(min(float(sample.features @ params), _LARGEST_LOG_RATE))
        gradient: Floats = (rate - sample.target) * sample.features
        return gradient + self.ridge * params if self.ridge else gradient

    def predict(self, params: Array, features: Array) -> Array:
        """The rate."""
        log_rate = (features @ params).clip(max=_LARGEST_LOG_RATE)
        xp = np if isinstance(log_rate, np.ndarray | np.generic) else jax_numpy()
        rate: Array = xp.exp(log_rate)
        return rate
