"""Values that must not be seen, as types: raw gradient, clipped gradient, noised vector.

A gradient goes through these types in one direction only:

    RawGradient --clip_onto_grid--> ClippedGradient --add_noise--> Noised --> a release
                                    (--extend_on_grid-->, where a client contributes telemetry)

The first two hold what would give a client away. They print as nothing, cannot be pickled, and a
type checker refuses them wherever a `Noised` is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Generic, NewType, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import PrivacyError
from veilstream.privacy.clipping import clip_one, normalised
from veilstream.privacy.grid import Grid, OnGrid
from veilstream.privacy.telemetry import Telemetry

T = TypeVar("T")


class Hidden(Generic[T]):
    """A value that no text, log or pickle may hold; `reveal` is where it is used."""

    __slots__ = ("_held",)

    def __init__(self, held: T) -> None:
        self._held = held

    def reveal(self) -> T:
        """The value itself."""
        return self._held

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<hidden>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} is not to be written anywhere")


class RawGradient(Hidden[NDArray[np.float32]]):
    """As the loss gave it: one client's, or one row for each client of a step."""

    __slots__ = ()


class MetricValues(Hidden[NDArray[np.float64]]):
    """One row of metrics for each client who is there, in [0, 1] if all is well."""

    __slots__ = ()


class ClippedGradient(Hidden[OnGrid]):
    """What a step's clients contribute, on the grid; the norm of each one's share was checked in integers.

    Made by `clip_onto_grid` and `extend_on_grid`.
    """

    __slots__ = ()


Noised = NewType("Noised", NDArray[np.int64])
"""Clipped gradients and their noise, in units of the grid: may be sent. Made by `add_noise`, and
sums of such."""


def clip_onto_grid(
    raw: RawGradient,
    grid: Grid,
    gamma: float | None = None,
    clients_per_step: int = 1,
    weights: NDArray[np.float32] | None = None,
) -> ClippedGradient:
    """Clip each client's gradient, round its share of the step towards zero, and add the shares up.

    Gradients are normalised first where there is a ``gamma``, then multiplied by their ``weights``, if any; one that is
    not finite becomes zero.
    """
    total = np.zeros(raw.reveal().shape[-1], np.int64)
    for place, gradient in enumerate(np.atleast_2d(raw.reveal())):  # one after the other, so that each stays in cache
        own = gradient if gamma is None else normalised(gradient, gamma)
        own = own if weights is None else weights[place] * own
        total += grid.gradient(clip_one(own, grid.clip_norm), clients_per_step)
    return ClippedGradient(OnGrid(total))


def add_up(parts: Sequence[ClippedGradient]) -> ClippedGradient:
    """What the clients of all parts contribute to one step."""
    first, *others = parts
    return ClippedGradient(OnGrid(sum((part.reveal() for part in others), first.reveal())))


def extend_on_grid(
    gradient: ClippedGradient, values: MetricValues | None, telemetry: Telemetry, grid: Grid, clients_per_step: int = 1
) -> ClippedGradient:
    """The step's whole vector: its gradient, and its clients' metrics, each share rounded towards zero.

    ``values`` None is nobody. A coordinate beyond half the width is a `PrivacyError`.
    """
    count = len(telemetry.metrics)
    if values is None:
        units = np.zeros(count, np.int64)
    else:
        exact = np.asarray(telemetry.coordinates(np.atleast_2d(values.reveal())), np.float64)
        bound = Fraction(telemetry.width) / 2
        within = np.isfinite(exact).all() and all(abs(Fraction(float(c))) <= bound for c in exact.ravel())
        if exact.shape[1:] != (count,) or not within:
            raise PrivacyError("a telemetry metric exceeds its bound: nothing was released")
        units = np.trunc(exact / (grid.step * clients_per_step)).astype(np.int64).sum(axis=0)
    return ClippedGradient(OnGrid(np.concatenate([gradient.reveal(), units])))


def add_noise(gradient: ClippedGradient, noise: NDArray[np.int64]) -> Noised:
    """The noisy step: whole numbers, so no low-order bit tells the two apart."""
    return Noised(gradient.reveal() + noise)
