"""Each record's own gradient of a PyTorch model, by `torch.func`, and what a model must not do for that.

`vmap` computes rows that cannot depend on each other; a model's buffers are handed over as copies, so nothing that a
forward pass writes there lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from veilstream.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import torch

_GROUP_NORM = "torch.nn.GroupNorm in its place keeps records apart (16 channels a group is usual)"
_SINGLY = 1_000_000  # parameters from which a CPU is faster with one record at a time
_SAME = 1e-3  # of a gradient, between two times: a GPU adds in any order


class PerSampleGradients:
    """Gradients of ``loss(model(*inputs), target)`` for each record of a batch, flat, in float32.

    Args:
        model: in the mode that it is to be trained in; parameters in ``trained`` get gradients.
        trained: names of parameters, in the order of a row.
        loss: as torch.nn.functional has them, asked for one record at a time.
        microbatch: how many records are computed at once; None for all of a batch, but one by one on a CPU for large
            models. 1 does without `vmap`, for layers that have no rule for it.

    """

    def __init__(
        self, model: torch.nn.Module, trained: Sequence[str], loss: Callable[[Any, Any], Any], microbatch: int | None
    ) -> None:
        self._torch = torch_package()
        self.model, self.trained, self._loss, self._microbatch = model, tuple(trained), loss, microbatch
        self.dim = sum(parameter.numel() for parameter in self._parameters().values())

    def _parameters(self) -> dict[str, Any]:
        named = dict(self.model.named_parameters())
        return {name: named[name] for name in self.trained}

    def rows(self, batch: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """A matrix with a row for each record, for one microbatch after the other."""
        torch = self._torch
        parameters = {name: p.detach() for name, p in self._parameters().items()}
        rest = {name: p.detach() for name, p in self.model.named_parameters() if name not in parameters}
        rest |= {name: b.detach().clone() for name, b in self.model.named_buffers()}
        one = torch.func.grad(self._loss_of_one)
        singly = batch[0].device.type == "cpu" and self.dim >= _SINGLY
        at_once = self._microbatch or (1 if singly else len(batch[0]))
        for first in range(0, len(batch[0]), at_once):
            some = [each[first : first + at_once] for each in batch]
            if at_once == 1:  # several times as fast as torch.func's gradient of one record
                followed = {name: p.requires_grad_() for name, p in parameters.items()}
                loss = self._loss_of_one(followed, rest, *(each[0] for each in some))
                found = torch.autograd.grad(loss, list(followed.values()), materialize_grads=True)
                yield torch.cat([each.reshape(1, -1) for each in found], 1)
                continue
            many = torch.func.vmap(one, in_dims=(None, None, *[0] * len(some)), randomness="different")
            try:
                found = many(parameters, rest, *some)
            except RuntimeError as error:
                if "vmap" not in str(error) and "batching rule" not in str(error):
                    raise
                raise InputError(
                    "model",
                    str(error).strip().splitlines()[0][:200],
                    "layers that torch.func.vmap can map over records",
                    f"microbatch=1 computes one record at a time; for a layer that writes to a buffer, {_GROUP_NORM}",
                ) from error
            yield torch.cat([found[name].reshape(len(some[0]), -1) for name in self.trained], 1)

    def _loss_of_one(self, parameters: Any, rest: Any, *record: torch.Tensor) -> Any:
        *inputs, target = (each[None] for each in record)
        outputs = self._torch.func.functional_call(self.model, {**parameters, **rest}, tuple(inputs))
        return self._loss(outputs, target).reshape(())

    def check(self, batch: Sequence[torch.Tensor]) -> None:
        """Refuse a model that mixes records or remembers them, on made-up records shaped like these.

        Raises:
            InputError: for what it does wrong.

        """
        torch = self._torch
        check_layers(self.model)
        inputs = [_made_up(torch, each, seed) for seed, each in enumerate(batch[:-1])]
        target = torch.cat([batch[-1][:1]] * 2)
        alike = [torch.cat([each[:1], each[:1]]) for each in inputs]
        unlike = [torch.cat([each[:1], each[1:]]) for each in inputs]
        self._check_buffers(alike)
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            found = []
            for records in (alike, unlike, alike):
                torch.manual_seed(0)
                found.append(torch.cat(list(self.rows([*records, target]))))
        first, beside_another, again = found
        if not _alike(torch, first, again):
            raise InputError(
                "model",
                "another gradient for the same record",
                "a model that remembers nothing of records it has seen",
                "keep no state between calls",
            )
        if not _alike(torch, first[:1], beside_another[:1]):
            raise InputError(
                "model", "a gradient that depends on other records", "layers that keep records apart", _GROUP_NORM
            )

    def _check_buffers(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse a model whose own forward pass, which the script may make, writes down what it saw."""
        before = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        with self._torch.no_grad():
            self.model(*inputs)
            changed = [n for n, b in self.model.named_buffers() if not self._torch.equal(b, before[n])]
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])
        if changed:
            raise InputError(
                f"model.{changed[0]}",
                "a buffer that a forward pass changes",
                "buffers that stay as they are",
                f"they would be sent with the model; {_GROUP_NORM}",
            )


def check_layers(model: torch.nn.Module) -> None:
    """Refuse layers that mix records, in the mode that they are in now."""
    nn = torch_package().nn
    for name, layer in model.named_modules():
        tracks = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if (isinstance(layer, nn.modules.batchnorm._BatchNorm) or tracks) and layer.training:
            raise InputError(
                f"model.{name}" if name else "model",
                f"{type(layer).__name__} in train mode",
                "layers that look at one record at a time",
                f"{_GROUP_NORM}; one with statistics from public data may stay in eval mode",
            )


def trained_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of what the optimizer moves, in the model's order.

    Raises:
        InputError: where the optimizer moves something else than float32 parameters of this model on one device.

    """
    torch = torch_package()
    moved = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = {name: p for name, p in model.named_parameters() if id(p) in moved}
    if len(named) != len(moved) or not named:
        raise InputError(
            "optimizer",
            f"{len(moved)} parameters, {len(named)} of them the model's",
            "parameters of the model, at least one",
            "make it of model.parameters(), after the model is on its device",
        )
    for name, parameter in named.items():
        if parameter.dtype != torch.float32 or not bool(torch.isfinite(parameter).all()):
            what = str(parameter.dtype) if parameter.dtype != torch.float32 else "not finite"
            raise InputError(f"model.{name}", what, "finite float32 numbers", "model.float()")
    if len(devices := {str(p.device) for p in named.values()}) != 1:
        raise InputError("model", sorted(devices), "parameters on one device", "model.to(device)")
    return list(named)


def torch_package() -> Any:
    """PyTorch; `MissingExtra` without it."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("torch", "torch", "training a PyTorch model") from error
    return torch


def _made_up(torch: Any, like: Any, seed: int) -> Any:
    """Two records of this shape and type; made of numbers that nobody has, where they are real numbers."""
    if not like.is_floating_point():
        return torch.cat([like[:1], like[-1:]])
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn((2, *like.shape[1:]), generator=numbers, dtype=like.dtype).to(like.device)


def _alike(torch: Any, ours: Any, theirs: Any) -> bool:
    scale = float(ours.abs().max())
    return bool(torch.allclose(ours, theirs, rtol=_SAME, atol=_SAME * scale, equal_nan=True))
