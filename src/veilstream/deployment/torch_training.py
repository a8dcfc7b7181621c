"""`vs.torch`: private training inside the PyTorch loop that one has, in the manner of Opacus."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from veilstream.deployment.fixed_batches import FixedBatches, SecretBatches
from veilstream.deployment.private_steps import PrivateSteps, StepTerms
from veilstream.deployment.process_secrecy import without_values
from veilstream.deployment.torch_gradients import PerSampleGradients, check_layers, torch_package, trained_parameters
from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms import Factorization
from veilstream.mechanisms.registry import build, takes
from veilstream.privacy.gradient_types import ClippedGradient
from veilstream.privacy.guarantee import Accounting, Budget, Guarantee, Neighbours, Order
from veilstream.privacy.tensor_clipping import TensorSum

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

__all__ = ["PrivateTraining", "make_private"]

_ORDER = "order"


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    budget: Budget,
    *,
    loss: Callable[[Any, Any], Any],
    clip_norm: float,
    store: Path | str,
    passes: int = 1,
    mechanism: str | Factorization | None = None,
    client: Sequence[Hashable] | Callable[[int], Hashable] | None = None,
    witness: Path | str | None = None,
    microbatch: int | None = None,
    state_steps: int | None = 16,
    order: Order | str = Order.KNOWN,
    neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
    accounting: Accounting | str = Accounting.EXACT,
) -> PrivateTraining:
    """Make every `optimizer.step()` private: it moves the model by a clipped, noised mean gradient and nothing else.

    The loop stays as it is, over ``private`` in the loader's place::

        private = vs.torch.make_private(model, optimizer, loader, vs.Budget(2.0, 1e-5), loss=F.cross_entropy,
                                        clip_norm=1.0, passes=10, store="north.db")
        for _ in range(private.passes_left):
            for images, labels in private:
                optimizer.step()
        print(private.guarantee)

    `optimizer.step()` computes each record's own gradient for the batch that ``private`` gave last, clips it, adds
    noise that is correlated over all steps, writes down what was spent, and puts the result where `loss.backward()`
    would have; a `loss.backward()` that the script still makes is dropped. One batch is one step.

    **Guarantees**: `private.guarantee`. *Unit*: one client's record (each index of the dataset is a client, unless
    ``client`` says who it is of). *Neighbours*: replace-one by default. *Participation*: once in each of ``passes``
    passes, one pass apart, since every pass has the same batches; the ledger holds the script to it. *Horizon*: all
    steps of all passes, over restarts. *Adversary*: whoever sees the model after every step and chooses what it is
    set to in between (a federation's server, other sites), since all that a site sends is computed from noised
    gradients.
    *Theorem*: one Gaussian mechanism under adaptive continual release (lem-priv-analy), with the law of
    `veilstream.privacy.grid_noise`. It presumes that nothing else that is computed from records leaves the site
    (losses and accuracies on them are for this machine), and that no record is used in another store besides.

    The optimizer may be any. Momentum, Adam's averages and weight decay are post-processing. But later steps take
    back noise of earlier ones, and an optimizer that divides each gradient by a running scale (Adam) undoes part of
    that; SGD with a constant step size, with or without momentum, keeps it.

    Args:
        model: in train mode, on its device. Refused: batch normalisation in train mode, and whatever else mixes or
            remembers records.
        optimizer: of parameters of this model.
        loader: over a dataset with a length; batches are tensors (inputs..., target). In order or `shuffle=True`;
            every record in one batch. Transforms belong into the dataset.
        budget: the promise for the whole run.
        loss: ``loss(outputs, target)`` for a batch, here of one record.
        clip_norm: bound on each record's gradient norm.
        store: the ledger's file; begun where there is none, and gone on with where there is one.
        passes: how often the script goes over the loader, in all.
        mechanism: which noise: a name, or a factorization of all steps. Left out: `buffered`, made for several passes;
            under a secret order `banded`.
        client: who each record is of, as a sequence or a function of the index. People with several records are
            priced for all of them.
        witness: the second file, best on another disk, by which an old copy of the store is recognised.
        microbatch: how many records' gradients are computed at once. Left out: all of a batch, but one by one on a CPU
            from a million parameters on. 1 is for layers that `torch.func.vmap` cannot map.
        state_steps: every so many steps, model and optimizer are kept in the store, for `PrivateTraining.resume`;
            None where a server has the model.
        order: "known": whoever knows which records are in which batch learns no more than the budget says. "secret",
            for one pass: every record's batch is drawn by itself, so that batches have ``batch_size`` records on
            average, and hiding that takes less noise. The promise then rests on nobody outside the site learning it.
            Batches are filled up to one size with records whose gradients are dropped.
        neighbours: "replace-one", or "zero-out" for the weaker promise that most libraries' ε is about.
        accounting: "exact", or "zcdp" as in the paper.

    Returns:
        The private loop, in the loader's place; open until its `close`.

    Raises:
        InputError: for a model, loader or store that the rules exclude.
        MissingExtra: without PyTorch.

    """
    names = trained_parameters(model, optimizer)
    check_layers(model)
    gradients = PerSampleGradients(model, names, loss, microbatch)
    records, size, shuffled = _read_loader(loader)
    clients = [client(i) for i in range(records)] if callable(client) else client
    secretly = Order.of(order) is Order.SECRET
    if secretly and (passes > 1 or (clients is not None and len(set(clients)) < len(clients))):
        raise InputError(
            "order", "secret", "one pass, and one record a client: several have no price", 'order="known", or passes=1'
        )
    batches = FixedBatches.made(records, size, passes, shuffled=shuffled, clients=clients)
    participation = batches.participation
    if mechanism is None:
        mechanism = "banded" if secretly else "buffered"
    if isinstance(mechanism, str):
        options = {"participation": participation} if takes(mechanism, "participation") else {}
        mechanism = build(mechanism, batches.horizon, **options)
    if mechanism.horizon != batches.horizon:
        raise InputError(
            "mechanism",
            f"{mechanism.horizon} steps",
            f"{batches.horizon}: {passes} passes of {batches.a_pass} batches",
            f'mechanism="{mechanism.name}" makes one that fits',
        )
    parameters = dict(model.named_parameters())
    terms = StepTerms.of(
        budget,
        mechanism,
        clip_norm,
        gradients.dim,
        clients_per_step=batches.batch_size,
        participation=participation,
        accounting=accounting,
        order=order,
        neighbours=neighbours,
        about={
            "parameters": {name: list(parameters[name].shape) for name in names},
            "records": records,
            "batch_size": batches.batch_size,
            "passes": passes,
            "shuffled": shuffled,
            "clients": "each record" if clients is None else "named",
        },
    )
    begun = {_ORDER: batches.order.astype("<i8").tobytes()}
    steps = PrivateSteps(terms, store, witness=witness, begun=begun, state_steps=state_steps)
    try:
        if secretly:
            secret = steps.order_secret
            if secret is not None:  # gone with the noise at the end of the horizon
                steps.enrol(batches.names(batches.order))
                hidden = SecretBatches.made(secret, records, batches.batch_size, clients)
                return PrivateTraining(steps, gradients, optimizer, loader, hidden)
        kept = np.frombuffer(steps.kept(_ORDER), "<i8").astype(np.int64)
        batches = FixedBatches(kept, batches.batch_size, passes, clients)
        return PrivateTraining(steps, gradients, optimizer, loader, batches)
    except BaseException:
        steps.close()
        raise


class PrivateTraining:
    """A private loop: iterate over it for batches, with one `optimizer.step()` for each. Made by `make_private`."""

    def __init__(
        self,
        steps: PrivateSteps,
        gradients: PerSampleGradients,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        batches: FixedBatches | SecretBatches,
    ) -> None:
        self._steps, self._gradients, self._optimizer = steps, gradients, optimizer
        self._loader, self._batches = loader, batches
        self._a_pass = batches.a_pass if isinstance(batches, FixedBatches) else batches.horizon
        self._given: tuple[int, Sequence[torch.Tensor]] | None = None
        self._replaying = self._checked = False
        self.clipped = 0
        """Gradients since this start that were longer than the clip norm: for this machine only."""
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    @property
    def guarantee(self) -> Guarantee:
        """The promise for all steps of all passes."""
        return self._steps.guarantee

    @property
    def step(self) -> int:
        """Steps taken so far, over restarts."""
        return self._steps.step

    @property
    def horizon(self) -> int:
        """Steps that there is noise for."""
        return self._steps.horizon

    @property
    def passes_left(self) -> int:
        """Passes that are not complete; the first of them may have been begun."""
        return -(-(self.horizon - self.step) // self._a_pass)

    @property
    def parameters(self) -> int:
        """d: numbers that are trained, and that have noise."""
        return self._steps.terms.dim

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise, before it is correlated, in a mean gradient."""
        return self._steps.terms.noise.std

    def __len__(self) -> int:
        """Batches that are left of this pass."""
        return 0 if self._steps.over else self._a_pass - self.step % self._a_pass

    def __iter__(self) -> Iterator[Any]:
        """What is left of the pass that has been begun, or else the next pass.

        Raises:
            HorizonExhausted: after the last pass.
            InputError: for a batch without `optimizer.step()`.

        """
        if self._steps.over:
            raise HorizonExhausted(self.horizon, self.step)
        self._given = None
        first = self.step
        steps = range(first, first + len(self))
        for step, batch in zip(steps, self._reader(steps), strict=True):
            self._given = step, _tensors(batch, len(self._batches.filled(step)))
            yield batch
            if self.step == step:
                raise InputError(
                    "optimizer.step()",
                    "not called for the last batch",
                    "one step for every batch: content decides nothing",
                    "remove what skips a batch",
                )

    def resume(self) -> int:
        """Set model and optimizer to where the last run of this script was interrupted; returns the steps taken.

        Not for a script whose server sends the model. Nothing is spent: steps that were stored are made again with
        the very gradients that were handed out. A scheduler's own state is the script's to keep.

        Raises:
            InputError: where nothing was kept (``state_steps``).

        """
        torch = torch_package()
        found = self._steps.resumed()
        if found is None:
            if self.step:
                raise InputError("state_steps", None, "a store that keeps model and optimizer", "state_steps=16")
            return 0
        kept = torch.load(io.BytesIO(found.state), weights_only=True)
        self._gradients.model.load_state_dict(kept["model"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self._replaying = True
        try:
            for note, gradient in zip(found.notes, found.gradients, strict=True):
                for group, options in zip(self._optimizer.param_groups, json.loads(note), strict=True):
                    group.update(options)
                self._put(gradient)
                self._optimizer.step()
        finally:
            self._replaying = False
        return self.step

    def close(self) -> None:
        """Let go of the store and of the optimizer, which refuses further steps."""
        self._given = None
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reader(self, steps: range) -> Any:
        torch, loader = torch_package(), self._loader
        return torch.utils.data.DataLoader(
            loader.dataset,
            batch_sampler=[self._batches.filled(step).tolist() for step in steps],
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )

    @without_values
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In place of raw gradients, the private one; whatever raises here stops the optimizer's step."""
        if self._replaying:
            return
        if len(args) > 1 or kwargs:
            raise InputError("closure", "given", "optimizer.step() alone", "an optimizer without a closure")
        if self._given is None or self._given[0] != self.step:
            if self._steps.over:
                raise HorizonExhausted(self.horizon, self.step)
            raise InputError(
                "optimizer.step()",
                "no batch, or a second step for one",
                "one step for each batch of the private loop",
                "for batch in private: ... optimizer.step()",
            )
        if trained_parameters(self._gradients.model, optimizer) != list(self._gradients.trained):
            raise PrivacyError("the optimizer moves other parameters now: nothing was released (make it private anew)")
        step, batch = self._given
        check_layers(self._gradients.model)
        if not self._checked:
            self._gradients.check(self._on_device(batch))
            self._checked = True
        own = self._batches.batch(step)
        names = self._batches.names(own) if isinstance(self._batches, FixedBatches) else None
        self._put(self._steps.take(names, lambda: self._clipped(batch, len(own)), self._state, self._note()))

    def _clipped(self, batch: Sequence[torch.Tensor], count: int) -> ClippedGradient:
        """What the batch's first ``count`` records contribute; the others are computed and dropped."""
        there = self._on_device(batch)
        terms = self._steps.terms
        total = TensorSum(self._steps.grid, terms.clients_per_step, terms.dim, there[0].device)
        for rows in self._gradients.rows(there):
            rows[max(0, count) :] = 0.0
            total.add(rows)
            count -= len(rows)
        self.clipped += int(total.longer)
        return total.gradient()

    def _on_device(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device = next(p.device for p in self._gradients.model.parameters())
        return [each.to(device, non_blocking=True) for each in batch]

    def _put(self, gradient: Any) -> None:
        """As `loss.backward()` would have."""
        torch = torch_package()
        named = dict(self._gradients.model.named_parameters())
        trained = [named[name] for name in self._gradients.trained]
        flat = torch.from_numpy(gradient).to(trained[0].device)
        for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            parameter.grad = part.reshape(parameter.shape)

    def _state(self) -> bytes:
        content = io.BytesIO()
        kept = {"model": self._gradients.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch_package().save(kept, content)
        return content.getvalue()

    def _note(self) -> bytes:
        """The optimizer's options of this step, as a scheduler has set them; those that are plain numbers."""
        plain = (int, float, bool, list, tuple, type(None))
        groups = [
            {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
            for group in self._optimizer.param_groups
        ]
        return json.dumps(groups).encode()

    def __repr__(self) -> str:
        return f"PrivateTraining(step {self.step} of {self.horizon}: {self.guarantee})"


def _read_loader(loader: Any) -> tuple[int, int, bool]:
    """Records, batch size and whether it shuffles, of a loader that gives every record once a pass."""
    data = torch_package().utils.data
    if not isinstance(loader, data.DataLoader):
        raise InputError("loader", type(loader).__name__, "a torch.utils.data.DataLoader", "wrap the dataset in one")
    if isinstance(loader.dataset, data.IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise InputError("loader", "a stream", "a dataset with a length", "vs.Learner takes records as they come")
    records = len(loader.dataset)
    if loader.batch_size is None:
        raise InputError("loader", "batches of its own", "batch_size, so that every record comes once", "batch_size=32")
    sampler = loader.sampler
    way_out = "shuffle=True or False, without a sampler"
    if type(sampler) is data.RandomSampler:
        if sampler.replacement or sampler.num_samples != records:
            raise InputError("loader", "draws records again, or some of them", "every record once a pass", way_out)
    elif type(sampler) is not data.SequentialSampler:
        raise InputError("loader", type(sampler).__name__, "every record once a pass, in an order of indices", way_out)
    if loader.drop_last and records % loader.batch_size:
        raise InputError(
            "loader",
            f"drops the last {records % loader.batch_size} records",
            "every record once a pass",
            "drop_last=False: a short batch is divided by the same number",
        )
    return records, loader.batch_size, type(sampler) is data.RandomSampler


def _tensors(batch: Any, records: int) -> Sequence[Any]:
    torch = torch_package()
    parts = list(batch) if isinstance(batch, list | tuple) else []
    if len(parts) < 2 or not all(isinstance(each, torch.Tensor) and len(each) == records for each in parts):
        raise InputError(
            "loader",
            type(batch).__name__,
            f"batches (inputs..., target) of tensors with {records} records",
            "a dataset of (input, target), or a collate_fn that makes such",
        )
    return parts
