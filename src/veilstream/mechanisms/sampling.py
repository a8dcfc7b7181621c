"""Noise from a factorization: the only module that joins its analysis to the sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.keystream import NoiseKey, row_opener
from veilstream.mechanisms.stream import NoiseStream

Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]


def noise_of(factorization: Factorization, *, std: float = 1.0, dim: int, seed: int | None = None) -> NoiseStream:
    """`Factorization.noise`, which documents it."""
    key = NoiseKey.from_operating_system() if seed is None else NoiseKey.from_seed(seed)
    return NoiseStream(
        factorization.program,
        std=_noise_std(std),
        dim=positive_integer("dim", dim, "the number of model parameters"),
        open_row=row_opener(key),
    )


def _noise_std(value: object) -> float:
    std = positive_number("std", value, "take it from veilstream.calibrate")
    if not 1e-15 <= std <= 1e15:
        raise InputError("std", value, "in [1e-15, 1e15]", "float32 noise; scale the gradients")
    return std
