"""Your PyTorch model as a task: per-sample gradients by `torch.func`, called from JAX.

JAX cannot trace PyTorch, so loss, gradient and predictions are each a `host_call` for all learners,
seeds and methods of a step at once, answered by one (nested) `torch.func.vmap`.

Two traps. `functional_call` swaps the module's parameters while it runs, and XLA may run two calls
at once: a lock lets one in at a time. And the arrays that arrive may be JAX's own memory: features
are copied, since a first layer may write in place; parameters, which are large, are not.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.models.host_call import host_call
from veilstream.learning.models.pytree import MIXING, check_per_sample, example_arrays, like_example, made_up
from veilstream.learning.tasks import Sample

if TYPE_CHECKING:
    import torch
    from jax import Array

_one_at_a_time = threading.Lock()


class TorchTask:
    """A module and a loss on its outputs, as a task on the flat vector of its parameters.

    Features take the shape and type of ``example`` on their way to the module, targets its type
    (integers become int64). The module is copied, and starts from the weights that it has, whatever the
    seed: they are public and must not come from clients' data. Parameters with ``requires_grad=False``
    stay as they are and need no noise. It runs on the CPU, in the mode (train or eval) that it is in.

    Refused, since they would break what per-client clipping promises or what a loss is:

    - layers that mix samples or keep running statistics: batch normalisation in either mode,
      instance normalisation that tracks statistics, whatever changes a buffer or parameter when
      called;
    - randomness: dropout in train mode (in eval mode it does nothing, and is welcome);
    - trainable parameters that are not float32, or not on the CPU.

    Args:
        module: the model; it is copied.
        loss: ``loss(outputs, targets)`` for a batch of one, as torch.nn.functional has them.
        example: a made-up sample, never a client's.
        classifies: whether predictions are labels, right or wrong.
        labels: targets that the loss is written for; records with others are refused.
        predict: ``predict(outputs)``; the largest of the outputs where the task classifies.

    Raises:
        InputError: for what is refused above, or an example that the module does not take.
        MissingExtra: without PyTorch.

    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        example: Sample,
        classifies: bool = False,
        labels: Sequence[float] | None = None,
        predict: Callable[[Any], Any] | None = None,
    ) -> None:
        torch = _torch()
        if not isinstance(module, torch.nn.Module):
            raise InputError("module", type(module).__name__, "a torch.nn.Module", "pass one")
        self.example = made = example_arrays(example)
        _check_layers(module)
        self.classifies = classifies
        self.labels = None if labels is None else tuple(labels)
        self._loss = loss
        self._predict = predict
        self._module = copy.deepcopy(module)
        self._parameters = _trainable(self._module)
        self._shapes = [p.shape for p in self._parameters.values()]
        self._sizes = [p.numel() for p in self._parameters.values()]
        self.dim = sum(self._sizes)
        self._features = _plain(made.features)
        self._target = _plain(made.target)
        self._check()

    def init(self, seed: int = 0) -> Array:
        """x⁰: the weights that the module came with, whatever the seed."""
        import jax.numpy as jnp

        return jnp.asarray(self._start())

    def to_module(self, params: Array | NDArray[np.float32]) -> torch.nn.Module:
        """A copy of your module with these parameters."""
        torch = _torch()
        flat = torch.from_numpy(np.array(params, np.float32))
        if flat.shape != (self.dim,):
            shape = tuple(flat.shape)
            raise InputError("params", f"shape {shape}", f"({self.dim},)", "one model at a time")
        module = copy.deepcopy(self._module)
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, values in self._pieces(flat).items():
                named[name].copy_(values)
        return module

    def loss(self, params: Array, sample: Sample) -> Array:
        """Your loss of one client."""
        return host_call(self._losses, (), np.float32, *self._given(params, sample))

    def gradient(self, params: Array, sample: Sample) -> Array:
        """Gradient of `loss`, by PyTorch."""
        shape = (self.dim,)
        return host_call(self._gradients, shape, np.float32, *self._given(params, sample))

    def predict(self, params: Array, features: Array) -> Array:
        """Your module's predictions for a batch."""
        import jax.numpy as jnp

        batch = features.shape[:1]
        shaped = like_example("features", features, self._features, batch)
        shape = (*batch, *self._answer_shape)
        flat = jnp.asarray(params, jnp.float32)
        return host_call(self._predictions, shape, self._answer_type, flat, shaped)

    def _given(self, params: Array, sample: Sample) -> tuple[Array, Array, Array]:
        import jax.numpy as jnp

        features = like_example("features", sample.features, self._features)
        target = like_example("target", sample.target, self._target)
        return jnp.asarray(params, jnp.float32), features, target

    def _losses(self, params: Any, features: Any, target: Any) -> NDArray[Any]:
        arrays = self._arrays(params, features, target)
        with _one_at_a_time, _torch().no_grad():
            return _mapped(self._loss_of_one, arrays, params.ndim - 1).astype(np.float32)

    def _gradients(self, params: Any, features: Any, target: Any) -> NDArray[Any]:
        arrays = self._arrays(params, features, target)
        gradient = _torch().func.grad(self._loss_of_one)
        with _one_at_a_time:
            return _mapped(gradient, arrays, params.ndim - 1)

    def _predictions(self, params: Any, features: Any) -> NDArray[Any]:
        return self._predictions_of(params, features).astype(self._answer_type)

    def _predictions_of(self, params: Any, features: Any) -> NDArray[Any]:
        arrays = self._arrays(params, features)
        with _one_at_a_time, _torch().no_grad():
            return _mapped(self._answers, arrays, params.ndim - 1)

    def _arrays(self, params: Any, *others: Any) -> list[torch.Tensor]:
        """What JAX hands over, as tensors: parameters in place, the rest copied."""
        torch = _torch()
        rest = zip(others, (self._features, self._target), strict=False)
        copies = [torch.from_numpy(np.array(array, like.dtype)) for array, like in rest]
        try:
            return [torch.from_dlpack(np.asarray(params)), *copies]
        except (BufferError, TypeError):  # older NumPy does not lend read-only memory
            return [torch.from_numpy(np.array(params)), *copies]

    def _pieces(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(self._parameters, flat.split(self._sizes), self._shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in parts}

    def _outputs(self, flat: torch.Tensor, batch: torch.Tensor) -> Any:
        return _torch().func.functional_call(self._module, self._pieces(flat), (batch,))

    def _loss_of_one(self, flat: torch.Tensor, features: torch.Tensor, target: torch.Tensor) -> Any:
        return self._loss(self._outputs(flat, features[None]), target[None]).reshape(())

    def _answers(self, flat: torch.Tensor, batch: torch.Tensor) -> Any:
        outputs = self._outputs(flat, batch)
        if self._predict is not None:
            return self._predict(outputs)
        return outputs.argmax(-1) if self.classifies else outputs

    def _start(self) -> NDArray[np.float32]:
        flat: NDArray[np.float32] = np.concatenate([p.detach().numpy().ravel() for p in self._parameters.values()])
        return flat

    def _check(self) -> None:
        start, batch = self._start(), made_up(self._features)
        if not np.isfinite(start).all():
            raise InputError("module", "weights that are not finite", "finite", "repair them")
        # Away from x⁰, where a layer that starts at zero would hide what the others do.
        away = 0.1 * np.random.default_rng(0).standard_normal(self.dim)
        params = (start + away).astype(np.float32)

        def outputs(features: NDArray[Any]) -> NDArray[Any]:
            return self._trial(params, features)

        first = outputs(batch)
        self._check_state(params, batch)
        if not np.allclose(first, outputs(batch), rtol=1e-3, equal_nan=True):
            raise InputError(
                "module",
                "another output for the same input",
                "a loss without randomness",
                "call module.eval() first, or remove what is random",
            )
        check_per_sample(outputs, batch, field="module")
        self._check_loss(params, batch)
        scores = first.shape[-1] if first.ndim > 1 else 1
        if self.classifies and self._predict is None and scores < 2:
            raise InputError(
                "predict",
                None,
                "a rule, for outputs without one score a class",
                "for instance predict=lambda outputs: outputs[:, 0] > 0",
            )
        answers = self._predictions_of(params, batch)
        self._answer_shape, self._answer_type = answers.shape[1:], _narrow(answers.dtype)
        wanted = (len(batch), *self._target.shape)
        if self.classifies and answers.shape != wanted:
            raise InputError(
                "predict",
                f"shape {answers.shape} for {len(batch)} samples",
                f"labels, {wanted}",
                "pass predict(outputs) -> labels",
            )

    def _trial(self, params: NDArray[np.float32], features: NDArray[Any]) -> NDArray[Any]:
        torch = _torch()
        try:
            with torch.no_grad():
                copied = torch.from_numpy(features.copy())  # a layer may write in place
                outputs = self._outputs(torch.from_numpy(params), copied)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise InputError(
                "example",
                f"features of shape {self._features.shape}, {self._features.dtype}",
                "features that the module takes, after an axis for a batch",
                _first_line(error),
            ) from error
        if not isinstance(outputs, torch.Tensor):
            raise InputError(
                "module",
                f"an output of type {type(outputs).__name__}",
                "one tensor",
                "wrap the module in one that returns what the loss needs",
            )
        array: NDArray[Any] = outputs.numpy()
        return array

    def _check_state(self, params: NDArray[np.float32], batch: NDArray[Any]) -> None:
        """Nothing that the module keeps may change when it is called."""
        torch = _torch()
        called = self.to_module(params)
        before = {name: value.clone() for name, value in _state(called)}
        with torch.no_grad():
            called(torch.from_numpy(batch.copy()))
        for name, value in _state(called):
            if not torch.equal(value, before[name]):
                raise InputError(
                    f"module.{name}",
                    "changed by a call",
                    "a state that calls leave alone",
                    f"what it keeps of one client would reach others: {MIXING}",
                )

    def _check_loss(self, params: NDArray[np.float32], batch: NDArray[Any]) -> None:
        targets = np.stack([self._target] * len(batch))
        try:
            gradients = self._gradients(params[None], batch, targets)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise InputError(
                "loss",
                "no gradient for each sample",
                "one number a sample, without randomness",
                f"torch.func says: {_first_line(error)}",
            ) from error
        if not np.isfinite(gradients).all():
            raise InputError(
                "loss",
                "not finite near the module's weights",
                "a finite gradient",
                "look for a logarithm, division or root at zero",
            )


def _mapped(function: Callable[..., Any], arrays: list[torch.Tensor], axes: int) -> NDArray[Any]:
    """``function`` over the first ``axes`` axes (size one where shared), with as few vmaps as there can be."""
    vmap = _torch().func.vmap
    lead = np.broadcast_shapes(*(tuple(array.shape[:axes]) for array in arrays))
    groups: list[tuple[tuple[bool, ...], int]] = []
    for axis, size in enumerate(lead):
        mapped = tuple(array.shape[axis] > 1 for array in arrays)
        if groups and groups[-1][0] == mapped:
            groups[-1] = (mapped, groups[-1][1] * size)
        elif any(mapped):
            groups.append((mapped, size))
    shaped = [
        array.reshape([size for mapped, size in groups if mapped[i]] + list(array.shape[axes:]))
        for i, array in enumerate(arrays)
    ]
    for mapped, _ in reversed(groups):
        function = vmap(function, in_dims=tuple(0 if m else None for m in mapped))
    result: NDArray[Any] = function(*shaped).detach().numpy()
    return result.reshape((*lead, *result.shape[len(groups) :]))


def _check_layers(module: torch.nn.Module) -> None:
    nn = _torch().nn
    for name, layer in module.named_modules():
        kind, field = type(layer).__name__, f"module.{name}" if name else "module"
        running = isinstance(layer, nn.modules.instancenorm._InstanceNorm)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or (running and layer.track_running_stats):
            raise InputError(
                field,
                kind,
                "layers that look at one sample at a time",
                f"{kind} normalises with statistics of other samples; {MIXING}",
            )
        random = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        if random and layer.training:
            raise InputError(
                field,
                f"{kind} in train mode",
                "a loss without randomness",
                "the noise already regularises: call module.eval() first, or remove the layer",
            )


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    torch = _torch()
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, parameter in found.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(
                f"module.{name}",
                "not yet shaped",
                "parameters with a shape",
                "call the module once on made-up features",
            )
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise InputError(
                f"module.{name}",
                f"{parameter.dtype} on {parameter.device}",
                "float32 on the cpu",
                "convert with module.float().cpu(); complex numbers as pairs of real ones",
            )
    if not found:
        raise InputError(
            "module", "no trainable parameter", "at least one", "set requires_grad on those that should learn"
        )
    return found


def _state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32)
    return array if array.dtype == np.bool_ else array.astype(np.int64)


def _narrow(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype({"i": np.int32, "b": np.bool_}.get(dtype.kind, np.float32))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("torch", "torch", "training a PyTorch model") from error
    return torch
