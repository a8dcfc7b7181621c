"""Clipping, exact and total: what the paper assumes (asm-Bg), enforced for every gradient."""

from __future__ import annotations

from typing import NewType

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_number

_SMALLEST = 1e-150  # below, products of subnormal numbers could round up past the bound

_SUMS_ERR = 64 * np.finfo(np.float64).eps
"""Pairwise sums err by less, below 2^40 entries; a result's rounding by one ulp of its own type."""

Clipped = NewType("Clipped", NDArray[np.floating])
"""Gradients whose norm is at most the clip norm. Made by `clip` and `clip_one` alone."""


def checked_clip_norm(clip_norm: object) -> float:
    """``clip_norm`` as a float that clipping and calibration can keep."""
    bound = positive_number("clip_norm", clip_norm, "the norm gradients are clipped to; try 1")
    if bound < _SMALLEST:
        raise InputError("clip_norm", clip_norm, f">= {_SMALLEST:g}", "scale the loss; try 1")
    return bound


def clip(gradients: NDArray[np.floating], clip_norm: float, *, gamma: float | None = None) -> Clipped:
    """Scale each vector along the last axis to norm at most ``clip_norm``.

    Guarantees, for every input of float32 or float64, whatever its shape and values:

    - the exact norm of each result (in real arithmetic, not as some routine sums it) is at most
      ``clip_norm``; to that end a vector within rounding of the bound is scaled just below it;
    - a vector with an entry that is not finite becomes zero, so one client cannot poison a sum;
    - a finite vector keeps its direction, however large or small; one that is safely inside the
      bound is returned unchanged, bit for bit.

    Args:
        gradients: vectors along the last axis, float32 or float64.
        clip_norm: B_g, the largest norm of a result.
        gamma: take g / (|g| + gamma) instead of g first (`normalised`); None clips g as it is. The
            guarantees above are then those of the result, and a client's gradient counts by its
            direction, whatever its size.

    Returns:
        An array of the same shape and type.

    Raises:
        InputError: for another type, a scalar, or a clip norm or gamma that is not a positive
            number.

    """
    bound = checked_clip_norm(clip_norm)
    raw = np.asarray(gradients)
    if raw.dtype not in (np.float32, np.float64):
        raise InputError("gradients", f"dtype {raw.dtype}", "float32 or float64", "cast them")
    if raw.ndim == 0:
        raise InputError("gradients", "a scalar", "vectors along the last axis", "reshape it")
    if gamma is not None:
        raw = normalised(raw, gamma)
    finite = np.isfinite(raw).all(axis=-1, keepdims=True)
    # C order keeps the sums below pairwise along the last axis.
    x = np.where(finite, raw, 0.0).astype(np.float64, order="C")
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0.0)
    # Powers of two change no digits; the sum of squares can then neither overflow nor vanish.
    _, exponent = np.frexp(largest)
    unit = np.ldexp(x, -exponent)
    root = np.sqrt((unit * unit).sum(axis=-1, keepdims=True))
    slack = _SUMS_ERR + np.finfo(raw.dtype).eps
    with np.errstate(over="ignore"):
        inside = np.ldexp(root, exponent) * (1.0 + slack) <= bound
    # Both results are always computed: a shorter way inside the bound would tell whoever sees the
    # time of a step whether a client's gradient was clipped, and by that its label.
    factor = bound * (1.0 - 2.0 * slack) / np.where(root > 0.0, root, 1.0)
    with np.errstate(over="ignore", under="ignore"):  # of the result that is not taken
        scaled = _towards_zero(unit * factor, raw.dtype)
    return Clipped(np.where(inside, x.astype(raw.dtype), scaled))


def clip_one(gradient: NDArray[np.float32], clip_norm: float) -> Clipped:
    """`clip` of one float32 vector with its result in float64, which is not rounded to float32 again.

    Squares of float32 numbers neither overflow nor vanish in float64, so this takes a third of the passes
    over the numbers; each is made whatever the numbers are.
    """
    x = np.asarray(gradient, np.float32).astype(np.float64)
    squares = np.multiply(x, x)
    root = float(np.sqrt(squares.sum()))  # not finite exactly where an entry is not
    slack = _SUMS_ERR + np.finfo(np.float64).eps
    inside = root * (1.0 + slack) <= clip_norm
    factor = 1.0 if inside else clip_norm * (1.0 - 2.0 * slack) / root
    result = squares  # in its place: fresh memory costs as much as a pass
    np.copyto(result, x if np.isfinite(root) else 0.0)
    return Clipped(np.multiply(result, factor if np.isfinite(root) else 0.0, out=result))


def normalised(gradients: NDArray[np.floating], gamma: float) -> NDArray[np.floating]:
    """Return g / (|g| + gamma) of each vector along the last axis; not finite where g is not.

    Its norm is below one but for rounding: `clip` is what bounds it. A gradient much longer than
    ``gamma`` becomes a direction, one much shorter keeps its proportion to others like it.
    """
    offset = positive_number("gamma", gamma, "about a tenth of the longest gradient; try 0.1")
    x = np.asarray(gradients).astype(np.float64, order="C")
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        largest = np.abs(x).max(axis=-1, keepdims=True, initial=0.0)
        _, exponent = np.frexp(np.where(np.isfinite(largest), largest, 1.0))
        unit = np.ldexp(x, -exponent)  # as in `clip`: no square overflows or vanishes
        root = np.sqrt((unit * unit).sum(axis=-1, keepdims=True))
        scaled: NDArray[np.floating] = unit / (root + np.ldexp(offset, -exponent))
        return scaled.astype(gradients.dtype)


def _towards_zero(x: NDArray[np.float64], dtype: np.dtype[np.floating]) -> NDArray[np.floating]:
    """Round to ``dtype`` without growing, so that subnormal results stay inside as well."""
    rounded = x.astype(dtype)
    grown = np.abs(rounded.astype(np.float64)) > np.abs(x)
    return np.where(grown, np.nextafter(rounded, dtype.type(0)), rounded)
