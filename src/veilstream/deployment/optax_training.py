"""`vs.optax`: private training inside the JAX loop that one has, as an Optax transformation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from veilstream.deployment.private_steps import PrivateSteps, StepTerms
from veilstream.errors import InputError, MissingExtra
from veilstream.mechanisms import Factorization, Participation
from veilstream.mechanisms.participation import as_participation
from veilstream.mechanisms.registry import build, takes
from veilstream.privacy.gradient_types import ClippedGradient, RawGradient, clip_onto_grid
from veilstream.privacy.guarantee import Accounting, Budget, Guarantee

if TYPE_CHECKING:
    import optax

__all__ = ["PrivateGradients", "make_private"]


def make_private(
    params: Any,
    budget: Budget,
    *,
    steps: int,
    batch_size: int,
    clip_norm: float,
    store: Path | str,
    participation: Participation | tuple[int, int] | None = None,
    mechanism: str | Factorization = "buffered",
    witness: Path | str | None = None,
    accounting: Accounting | str = Accounting.EXACT,
) -> PrivateGradients:
    """An Optax transformation from per-example gradients to one private gradient, first in a chain.

    For a loop in JAX::

        private = vs.optax.make_private(params, vs.Budget(2.0, 1e-5), steps=100, batch_size=32, clip_norm=1.0,
                                        store="north.db")
        tx = optax.chain(private.transformation, optax.sgd(0.1))
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, images, labels)
        updates, state = tx.update(grads, state, params, clients=indices)

    **Guarantees**: `private.guarantee`. *Unit*: one client's record, where ``clients`` says who each row of the
    gradients is of. *Neighbours*: replace-one. *Participation*: ``participation``, (times, steps apart), once by
    default; the ledger holds the loop to it. *Horizon*: ``steps``, over restarts. *Adversary*: whoever sees every
    update and chooses the parameters in between. *Theorem*: as for `vs.torch.make_private`. It presumes that row i
    depends on record i alone, as with `jax.vmap`, that nothing else computed from records leaves the site, and that
    no record is used in another store.

    It writes to disk, so `update` is called outside `jax.jit`; what comes before and after it may be compiled.
    Gradients are clipped on the host.

    Args:
        params: what is trained; float32 arrays in any tree.
        budget: the promise for all steps.
        steps: how many there will be at most.
        batch_size: rows of a step at most; the sum is divided by it, however many came.
        clip_norm: bound on each row's norm.
        store: the ledger's file; begun where there is none, and gone on with where there is one.
        participation: how often one client may take part, and how far apart.
        mechanism: which noise: a name, or a factorization of ``steps`` steps.
        witness: the second file, best on another disk, by which an old copy of the store is recognised.
        accounting: "exact", or "zcdp" as in the paper.

    Returns:
        The transformation, the guarantee and the ledger; open until its `close`.

    Raises:
        InputError: for a value or a store that the rules exclude.
        MissingExtra: without Optax.

    """
    part = as_participation(participation)
    if isinstance(mechanism, str):
        mechanism = build(mechanism, steps, **({"participation": part} if takes(mechanism, "participation") else {}))
    if mechanism.horizon != steps:
        raise InputError("mechanism", f"{mechanism.horizon} steps", f"{steps}", f'mechanism="{mechanism.name}"')
    shapes = _shapes(params)
    terms = StepTerms.of(
        budget,
        mechanism,
        clip_norm,
        sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values()),
        clients_per_step=batch_size,
        participation=part,
        accounting=accounting,
        about={"parameters": {name: list(shape) for name, shape in shapes.items()}, "batch_size": batch_size},
    )
    return PrivateGradients(PrivateSteps(terms, store, witness=witness), params, shapes)


class PrivateGradients:
    """What `make_private` makes: `transformation` for Optax, and the ledger behind it. Open until `close`."""

    def __init__(self, steps: PrivateSteps, params: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        try:
            import jax
            import optax
        except ImportError as error:
            steps.close()
            raise MissingExtra("jax and optax", "optax", "training with Optax") from error
        self._jax, self._steps, self._shapes = jax, steps, shapes
        self._tree = jax.tree.structure(params)
        self.transformation: optax.GradientTransformationExtraArgs = optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(), self._update
        )
        """First in an `optax.chain`; its update takes ``clients``, who each row is of."""

    @property
    def guarantee(self) -> Guarantee:
        """The promise for all steps."""
        return self._steps.guarantee

    @property
    def step(self) -> int:
        """Steps taken so far, over restarts."""
        return self._steps.step

    @property
    def horizon(self) -> int:
        """Steps that there is noise for."""
        return self._steps.horizon

    def close(self) -> None:
        """Let go of the store."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _update(
        self, updates: Any, state: Any, params: Any = None, *, clients: Sequence[Hashable] | None = None, **more: Any
    ) -> tuple[Any, Any]:
        """A row of gradients for each client in, the private mean gradient out."""
        if clients is None:
            raise InputError(
                "clients", None, "who each row of the gradients is of", "tx.update(..., clients=indices of the records)"
            )
        jax, leaves = self._jax, self._jax.tree.leaves(updates)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise InputError(
                "update", "inside jax.jit", "a call outside it, since every step is written down", "jit the gradients"
            )
        names = [_name(client) for client in clients]
        found = [(leaf.dtype.name, leaf.shape) for leaf in leaves]
        wanted = [("float32", (len(names), *shape)) for shape in self._shapes.values()]
        if jax.tree.structure(updates) != self._tree or found != wanted:
            raise InputError(
                "updates",
                found,
                f"a float32 row for each of {len(names)} clients in every array of the parameters",
                "jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))",
            )
        flat = self._steps.take(names, lambda: self._clipped(leaves, len(names)))
        ends = np.cumsum([int(np.prod(shape, dtype=np.int64)) for shape in self._shapes.values()])[:-1]
        parts = zip(np.split(flat, ends), self._shapes.values(), strict=True)
        return jax.tree.unflatten(self._tree, [jax.numpy.asarray(part.reshape(shape)) for part, shape in parts]), state

    def _clipped(self, leaves: Sequence[Any], count: int) -> ClippedGradient:
        rows = np.concatenate([np.asarray(leaf).reshape(count, -1) for leaf in leaves], axis=1)
        return clip_onto_grid(RawGradient(rows), self._steps.grid, None, self._steps.terms.clients_per_step)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    try:
        import jax
    except ImportError as error:
        raise MissingExtra("jax and optax", "optax", "training with Optax") from error
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name, leaf in found.items():
        if getattr(leaf, "dtype", None) != np.float32:
            raise InputError(f"params{name}", getattr(leaf, "dtype", type(leaf).__name__), "float32 arrays", "cast it")
    if not found:
        raise InputError("params", "no arrays", "at least one float32 array", "pass the model's parameters")
    return {name: tuple(leaf.shape) for name, leaf in found.items()}


def _name(client: Hashable) -> bytes | str:
    if isinstance(client, bytes | str):
        return client
    if isinstance(client, int | np.integer) and not isinstance(client, bool):
        return b"record %d" % int(client)
    raise InputError("clients", type(client).__name__, "numbers, text or bytes", "the indices of the records")
