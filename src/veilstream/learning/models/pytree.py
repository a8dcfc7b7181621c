"""Your JAX model as a task: any loss on a pytree of parameters.

The loss is written for one sample, so no client's gradient can depend on another's. Predictions are
made for a batch; `check_per_sample` refuses those that mix the samples of a batch, as batch
normalisation does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.tasks import FromLoss, Sample

if TYPE_CHECKING:
    from jax import Array

MIXING = (
    "if one client's gradient depended on other clients' samples, the clip norm would not bound "
    "what one client can move; use group or layer normalisation instead of batch normalisation"
)

_TOLERANCE = 1e-3  # relative; float32 sums in another order differ by far less, mixing by far more


class PytreeTask(FromLoss):
    """A loss on a pytree of float32 arrays, as a task on the flat vector of all its entries.

    With an ``example``, loss, gradient and predictions are checked here and now. Features then take
    its shape on their way to the loss (a stream may hold them flat), and where it has integers, so
    will the loss (a stream may hold floats).

    Args:
        loss: ``loss(params, features, target)`` of one sample, a scalar.
        init: ``init(seed)`` makes the parameters of x⁰ from the seed alone, or is the pytree itself;
            public either way.
        predict: ``predict(params, features)`` for a batch (first axis).
        classifies: whether predictions are labels, right or wrong.
        labels: targets that the loss is written for; records with others are refused.
        example: a made-up sample, never a client's.

    Raises:
        InputError: for a loss, start or prediction that cannot work, or that mixes samples.
        MissingExtra: without JAX.

    """

    def __init__(
        self,
        loss: Callable[[Any, Any, Any], Any],
        init: Callable[[int], Any] | Any,
        predict: Callable[[Any, Any], Any] | None = None,
        *,
        classifies: bool = False,
        labels: Sequence[float] | None = None,
        example: Sample | None = None,
    ) -> None:
        _jax()
        if not callable(loss):
            raise InputError("loss", loss, "a function of (params, features, target)", "pass one")
        if classifies and predict is None:
            raise InputError(
                "predict",
                None,
                "a function, since the task classifies",
                "pass predict(params, features) -> labels, or classifies=False",
            )
        self.classifies = classifies
        self.labels = None if labels is None else tuple(labels)
        self._loss, self._init, self._predict = loss, init, predict
        self.example = None if example is None else example_arrays(example)
        self._structure, start, self._unravel = _flatten(self._start(0))
        self.dim = start.size
        if not np.array_equal(start, _flatten(self._start(0))[1]):
            raise InputError(
                "init",
                "two results for seed 0",
                "parameters that follow from the seed",
                "draw them from jax.random.key(seed) or numpy.random.default_rng(seed)",
            )
        if self.example is not None:
            self._check(start, self.example)

    def _start(self, seed: int) -> Any:
        import jax

        # Some pytrees of parameters can be called too: they are the model, not a way to make one.
        drawn = callable(self._init) and jax.tree_util.all_leaves([self._init])
        return self._init(seed) if drawn else self._init

    def init(self, seed: int = 0) -> Array:
        """x⁰: your parameters, flat."""
        import jax.numpy as jnp

        structure, start, _ = _flatten(self._start(seed))
        if structure != self._structure:
            raise InputError(
                "init",
                f"another structure for seed {seed}",
                "the same names and shapes",
                "let the seed change numbers only",
            )
        return jnp.asarray(start)

    def unflatten(self, flat: Array | NDArray[np.float32]) -> Any:
        """Your pytree, from a flat vector."""
        import jax.numpy as jnp

        flat = jnp.asarray(flat)
        if flat.shape != (self.dim,):
            raise InputError("params", f"shape {flat.shape}", f"({self.dim},)", "one model at a time")
        return self._unravel(flat)

    def loss(self, params: Array, sample: Sample) -> Array:
        """Your loss of one client."""
        import jax.numpy as jnp

        features, target = sample.features, sample.target
        if self.example is not None:
            features = like_example("features", features, self.example.features)
            target = like_example("target", target, self.example.target)
        value = self._loss(self.unflatten(params), features, target)
        try:
            number = jnp.asarray(value)
        except (TypeError, ValueError):
            found = type(value).__name__
        else:
            if number.shape == () and jnp.issubdtype(number.dtype, jnp.floating):
                return number.astype(params.dtype)
            found = f"{number.dtype}, shape {number.shape}"
        raise InputError(
            "loss",
            found,
            "one floating-point number for one sample",
            "return the sum or mean over the sample's own outputs",
        )

    def predict(self, params: Array, features: Array) -> Array:
        """Your predictions for a batch."""
        if self._predict is None:
            raise InputError("predict", None, "a function", "pass predict(params, features) to PytreeTask")
        if self.example is not None:
            batch = features.shape[:1]
            features = like_example("features", features, self.example.features, batch)
        answers: Array = self._predict(self.unflatten(params), features)
        return answers

    def _check(self, start: NDArray[np.float32], example: Sample) -> None:
        import jax
        import jax.numpy as jnp

        # Away from x⁰, where a layer that starts at zero would hide what the others do.
        moved = start + 0.1 * np.random.default_rng(0).standard_normal(self.dim)
        params = jnp.asarray(moved, jnp.float32)
        loss, gradient = jax.jit(jax.value_and_grad(self.loss))(params, example)
        if not (jnp.isfinite(loss) and jnp.isfinite(gradient).all()):
            raise InputError(
                "loss",
                f"{float(loss)} at the example, near x⁰",
                "finite, with a finite gradient",
                "look for a logarithm, division or root at zero",
            )
        if self._predict is None:
            return
        features, predict = made_up(example.features), jax.jit(self.predict)
        check_per_sample(lambda batch: predict(params, batch), features)
        shape = predict(params, features).shape
        if self.classifies and shape[1:] != example.target.shape:
            raise InputError(
                "predict",
                f"shape {shape} for {len(features)} samples",
                "one label a sample",
                f"return shape (samples, *{example.target.shape}), for instance by argmax",
            )


def check_per_sample(predict: Callable[[Any], Any], features: NDArray[Any], *, field: str = "predict") -> None:
    """Refuse a batched function whose answer for one made-up sample differs in the batch and alone."""
    count = len(features)
    together = np.asarray(predict(features))
    alone = [np.asarray(predict(features[i : i + 1])) for i in range(count)]
    if together.shape[:1] != (count,) or any(a.shape != (1, *together.shape[1:]) for a in alone):
        raise InputError(
            field,
            f"shape {together.shape} for {count} samples, {alone[0].shape} for one",
            "one answer a sample",
            "keep the first axis: one entry for each sample",
        )
    each = np.concatenate(alone).astype(np.float64)
    scale = np.abs(each[np.isfinite(each)]).max(initial=1e-30)
    if not np.allclose(together, each, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True):
        raise InputError(
            field,
            "an answer that changes with the other samples of the batch",
            "each sample's answer to depend on that sample alone",
            MIXING,
        )


def made_up(features: Any, count: int = 8) -> NDArray[Any]:
    """A batch of samples like this one: normal numbers, or its own integers in other orders."""
    rng, like = np.random.default_rng(0), np.asarray(features)
    if np.issubdtype(like.dtype, np.floating):
        return rng.standard_normal((count, *like.shape)).astype(np.float32)
    return np.stack([rng.permutation(like.ravel()).reshape(like.shape) for _ in range(count)])


def example_arrays(example: Sample) -> Sample:
    """The example, as NumPy arrays."""
    if not isinstance(example, Sample):
        raise InputError(
            "example", type(example).__name__, "a Sample of made-up data", "Sample(numpy.zeros(shape, 'float32'), 0)"
        )
    return Sample(np.asarray(example.features), np.asarray(example.target))


def like_example(field: str, array: Any, example: NDArray[Any], batch: tuple[int, ...] = ()) -> Array:
    """Samples in the example's shape, after the axes of a batch; integers where it has them."""
    import jax
    import jax.numpy as jnp

    array = jnp.asarray(array)
    if array.size != example.size * math.prod(batch):
        raise InputError(
            field,
            f"shape {array.shape}",
            f"{example.size} numbers a sample, as {example.shape}",
            "make the example look like the stream's samples",
        )
    array = array.reshape((*batch, *example.shape))
    if jnp.issubdtype(array.dtype, np.floating) and jnp.issubdtype(example.dtype, np.floating):
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(example.dtype))


def _flatten(tree: Any) -> tuple[Any, NDArray[np.float32], Callable[[Any], Any]]:
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for path, leaf in leaves:
        # A plain Python float has no type of its own in JAX; anything else says what it is.
        kind = str(getattr(leaf, "dtype", type(leaf).__name__))
        if kind not in ("float32", "float"):
            raise InputError(
                f"init{jax.tree_util.keystr(path)}",
                kind,
                "float32",
                "convert it with .astype('float32'), or keep what is not learned out of init",
            )
    if not sum(np.size(leaf) for _, leaf in leaves):
        raise InputError("init", tree, "at least one parameter", "return a pytree of arrays")
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)
    flat, unravel = ravel_pytree(tree)
    start = np.asarray(flat)
    if not np.isfinite(start).all():
        raise InputError("init", "numbers that are not finite", "finite numbers", "repair init")
    arrays, structure = jax.tree.flatten(tree)
    return (structure, [a.shape for a in arrays]), start, unravel


def _jax() -> None:
    try:
        import jax  # noqa: F401
    except ImportError as error:
        raise MissingExtra("jax", "jax", "training a JAX model") from error
