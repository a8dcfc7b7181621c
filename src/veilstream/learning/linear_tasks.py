"""Tasks that are linear in a client's features: two classes, several, a number, a robust number, counts.

With ‖a‖ <= 1 every gradient but those of least squares and counts is at most √2 before clipping,
whatever the record, so a clip norm of about 1 loses little.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import InputError
from veilstream.learning.algorithm import without_tiny
from veilstream.learning.task_kind import Margins, Target, TaskKind, TaskSetting
from veilstream.learning.tasks import Floats, FromLoss, Sample, jax_numpy

if TYPE_CHECKING:
    from jax import Array


class _Scored(FromLoss):
    """A loss of a client's score a·x, + ridge/2·‖x‖²."""

    classifies = False

    def __init__(self, dim: int, ridge: float = 0.0) -> None:
        self.dim, self.ridge, self.features_shape = dim, ridge, (dim,)

    @abstractmethod
    def score_loss(self, score: Any, target: Any) -> Any:
        """Loss of one client's score; of JAX arrays."""

    @abstractmethod
    def slope(self, score: Any, target: Any) -> Any:
        """Derivative of `score_loss` by the score; of NumPy arrays."""

    def loss(self, params: Array, sample: Sample) -> Array:
        value: Array = self.score_loss(sample.features @ params, sample.target)
        return value + 0.5 * self.ridge * (params @ params) if self.ridge else value

    def host_gradient(self, params: Floats, sample: Sample) -> Floats:
        """Gradient without JAX, for a deployed learner."""
        slope = without_tiny(self.slope(sample.features @ params, sample.target))
        gradient: Floats = slope * sample.features
        return gradient + self.ridge * params if self.ridge else gradient

    def host_gradients(self, params: Floats, samples: Sample) -> Floats:
        """`host_gradient` of many clients, a row each."""
        slopes = without_tiny(self.slope(samples.features @ params, samples.target))
        gradients: Floats = slopes[:, None] * samples.features
        return gradients + self.ridge * params if self.ridge else gradients

    def predict(self, params: Array, features: Array) -> Array:
        return features @ params


class Logistic(_Scored):
    """log(1 + exp(-y·a·x)) + ridge/2·‖x‖², labels y in {-1, +1}.

    With ‖a‖ <= 1: smooth with L = 1/4 + ridge; without ridge the gradient is at most ‖a‖, and the
    infimum over separable data is 0 and is not attained. With ridge it is strongly convex.

    Args:
        dim: parameters, and numbers of one client's features.
        ridge: weight of the squared norm in the loss.

    """

    classifies = True
    labels = (-1.0, 1.0)

    def score_loss(self, score: Any, target: Any) -> Any:
        """log(1 + exp(-y·score))."""
        return jax_numpy().logaddexp(0.0, -(target * score))

    def slope(self, score: Any, target: Any) -> Any:
        """-y / (1 + exp(y·score))."""
        with np.errstate(over="ignore"):
            return -target / (1.0 + np.exp(target * score))

    def logits(self, params: Array, features: Array) -> Array:
        """Log odds of +1."""
        return features @ params

    def predict(self, params: Array, features: Array) -> Array:
        """Label, -1 or +1. For arrays of NumPy (a learner that predicts) as for those of JAX."""
        label: Array = 2.0 * (self.logits(params, features) >= 0) - 1.0
        return label


class LeastSquares(_Scored):
    """½(a·x - y)² + ridge/2·‖x‖². With ‖a‖ <= 1: smooth with L = 1 + ridge.

    Args:
        dim: parameters, and numbers of one client's features.
        ridge: weight of the squared norm in the loss.

    """

    def score_loss(self, score: Any, target: Any) -> Any:
        """½(score - y)²."""
        return 0.5 * (score - target) ** 2

    def slope(self, score: Any, target: Any) -> Any:
        """The error."""
        return score - target


class Huber(_Scored):
    """Half the squared error up to ``width``, linear beyond it, + ridge/2·‖x‖².

    Args:
        dim: as for `Logistic`.
        ridge: as for `Logistic`.
        width: from where on an error counts linearly; labels lie from -1 to 1.

    """

    def __init__(self, dim: int, ridge: float = 0.0, width: float = 0.5) -> None:
        super().__init__(dim, ridge)
        self.width = width

    def score_loss(self, score: Any, target: Any) -> Any:
        """Half the squared error, linear from ``width`` on."""
        jnp = jax_numpy()
        error = jnp.abs(score - target)
        inner = jnp.minimum(error, self.width)
        return 0.5 * inner**2 + self.width * (error - inner)

    def slope(self, score: Any, target: Any) -> Any:
        """The error, cut at ``width``."""
        return np.clip(score - target, -self.width, self.width)


class Poisson(_Scored):
    """exp(a·x) - y·(a·x) + ridge/2·‖x‖² for counts y; log rates beyond 20 count as 20. Arguments as for `Logistic`."""

    largest_log_rate = 20.0  # exp of more would be no count, and overflows float32 from 88 on

    def score_loss(self, score: Any, target: Any) -> Any:
        """exp(score) - y·score, with a rate that is linear from the largest log rate on."""
        jnp = jax_numpy()
        rate = jnp.exp(jnp.minimum(score, self.largest_log_rate))
        beyond = jnp.maximum(score - self.largest_log_rate, 0.0)
        return rate * (1.0 + beyond) - target * score

    def slope(self, score: Any, target: Any) -> Any:
        """The rate's error."""
        return np.exp(np.minimum(score, self.largest_log_rate)) - target

    def predict(self, params: Array, features: Array) -> Array:
        """The rate."""
        log_rate = (features @ params).clip(max=self.largest_log_rate)
        xp = np if isinstance(log_rate, np.ndarray | np.generic) else jax_numpy()
        rate: Array = xp.exp(log_rate)
        return rate


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
        gradient: Floats = np.outer(without_tiny(weights), sample.features).ravel()
        return gradient + self.ridge * params if self.ridge else gradient

    def host_gradients(self, params: Floats, samples: Sample) -> Floats:
        """`host_gradient` of many clients, a row each."""
        scores = samples.features @ params.reshape(self.classes, -1).T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        weights[np.arange(len(weights)), samples.target.astype(np.int64)] -= 1.0
        gradients: Floats = (without_tiny(weights)[:, :, None] * samples.features[:, None, :]).reshape(len(weights), -1)
        return gradients + self.ridge * params if self.ridge else gradients

    def logits(self, params: Array, features: Array) -> Array:
        """A score for each class; their softmax is the probability."""
        return features @ params.reshape(self.classes, -1).T

    def predict(self, params: Array, features: Array) -> Array:
        """The likeliest class."""
        return self.logits(params, features).argmax(axis=-1).astype(np.float32)


def _of_classes(reach: float) -> Margins:
    return Margins(reach=reach, gradient_bound=reach)


def _of_numbers(setting: TaskSetting, slope: float) -> Margins:
    """Labels of a table lie from -1 to 1; without a public range no gradient is bounded."""
    bound = None if setting.label_range is None else slope * setting.feature_norm
    return Margins(reach=setting.feature_norm, gradient_bound=bound)


def _of_counts(setting: TaskSetting) -> Margins:
    """A margin is a log rate."""
    norm, counts = setting.feature_norm, setting.label_range
    if counts is None:
        return Margins(reach=norm, gradient_bound=None)
    return Margins(reach=norm, gradient_bound=counts[1] * norm, half_range=0.5 * math.log1p(counts[1]))


KINDS = (
    TaskKind(
        name="logistic",
        make=lambda setting: Logistic(setting.features, setting.ridge),
        data=("synthetic", "table"),
        target=Target.SIGN,
        takes_ridge=True,
        margins=lambda setting: _of_classes(setting.feature_norm),
        comparator="veilstream.research.comparators:logistic",
    ),
    TaskKind(
        name="least_squares",
        make=lambda setting: LeastSquares(setting.features, setting.ridge),
        data=("synthetic", "table"),
        target=Target.NUMBER,
        takes_ridge=True,
        margins=lambda setting: _of_numbers(setting, 2.0),
        comparator="veilstream.research.comparators:least_squares",
    ),
    TaskKind(
        name="softmax",
        make=lambda setting: Softmax(setting.features, setting.classes),
        data=("table",),
        target=Target.CLASS,
        margins=lambda setting: _of_classes(math.sqrt(2.0) * setting.feature_norm),
    ),
    TaskKind(
        name="huber",
        make=lambda setting: Huber(setting.features),
        data=("table",),
        target=Target.NUMBER,
        margins=lambda setting: _of_numbers(setting, 0.5),
    ),
    TaskKind(
        name="poisson",
        make=lambda setting: Poisson(setting.features),
        data=("table",),
        target=Target.COUNT,
        margins=_of_counts,
    ),
)
