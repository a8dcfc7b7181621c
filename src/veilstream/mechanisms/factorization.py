"""A factorization A = B·C of the prefix sums: what it costs in noise and what it costs in error.

Errors are stated at sensitivity one: the variance of a prefix sum's noise when the noise is scaled
to the privacy of a unit sensitivity. All are squared, per coordinate.

To add a mechanism, wrap its steps, or its matrix C with `from_strategy_matrix`: sensitivity, errors,
noise, calibration and the conformance suite follow (docs/new-mechanism.md).
"""

from __future__ import annotations

import copy
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms import analysis
from veilstream.mechanisms.checks import checked_horizon, positive_integer
from veilstream.mechanisms.participation import (
    GRAM_LIMIT,
    Participation,
    Sensitivity,
    as_participation,
    banded_sensitivity,
    gram_sensitivity,
    long_toeplitz_sensitivity,
)
from veilstream.mechanisms.program import NoiseProgram, compile_program
from veilstream.mechanisms.steps import Steps, VaryingSteps

if TYPE_CHECKING:
    from veilstream.mechanisms.stream import NoiseStream

Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]


class Factorization:
    """A = B·C for one horizon, with the noise program that realises it.

    Guarantees: `sensitivity` is computed in float64 from the float32 blocks of `program`, never
    taken from a formula that the program might miss; so are the errors. (`tree_online` states the
    larger, published sensitivity instead.) Calibrate on the object whose noise you use: another
    block length has its own rounding.
    """

    bandwidth: int | None = None  # If set, columns of C at least this far apart are orthogonal up to float32 rounding

    def __init__(self, name: str, horizon: int, steps: Steps, *, row_scale: Float32s | None = None) -> None:
        self.name = name
        self.horizon = checked_horizon(horizon)
        self.steps = steps
        self._row_scale = row_scale
        self._block_length: int | None = None

    def __repr__(self) -> str:
        return f"<{self.name} factorization, horizon {self.horizon}>"

    @cached_property
    def program(self) -> NoiseProgram:
        """How the noise is made: float32 blocks."""
        return compile_program(self.steps, self.horizon, self._block_length, self._row_scale)

    def with_block_length(self, block_length: int) -> Self:
        """The same mechanism in blocks of another length: other memory and speed."""
        other = copy.copy(self)
        for cached in ("program", "_column_norms_squared", "_row_norms_squared"):
            other.__dict__.pop(cached, None)
        other._block_length = positive_integer("block_length", block_length, "try 16")
        return other

    @cached_property
    def _column_norms_squared(self) -> Floats:
        return analysis.column_norms_squared(self.program)

    def column_norms_squared(self) -> Floats:
        """‖c_j‖² of every column of C."""
        return self._column_norms_squared

    def sensitivity(self, participation: Participation | tuple[int, int] | None = None) -> float:
        """Largest ‖C·ΔG‖_F when the gradients of one client move by at most one each.

        Multiply by 2·clip_norm for replace-one neighbours, by clip_norm for zero-out.
        """
        return self.sensitivity_report(participation).value

    def sensitivity_report(self, participation: Participation | tuple[int, int] | None = None) -> Sensitivity:
        """`sensitivity` together with whether it is exact or a safe upper bound."""
        part = as_participation(participation)
        part.check_horizon(self.horizon)
        norms = self.column_norms_squared()
        if not np.isfinite(norms).all():
            raise InputError("mechanism", self.name, "columns of C with finite norms", "its C grows too fast")
        if part.times == 1:
            return Sensitivity(float(np.sqrt(norms.max())), True, "largest column norm")
        if self.horizon <= GRAM_LIMIT:
            return gram_sensitivity(self.strategy_matrix(), part)
        if self.bandwidth is not None and 2 * part.min_separation >= self.bandwidth:
            return self._banded_sensitivity(self.bandwidth, part)
        shifted = self._shifted_sensitivity(part)
        if shifted is not None:
            return Sensitivity(shifted, True, "left-most pattern of a decreasing Toeplitz matrix")
        bound = part.times * float(np.sqrt(norms.max()))
        return Sensitivity(bound, False, "times x largest column norm (horizon too long for CᵀC)")

    def _banded_sensitivity(self, width: int, part: Participation) -> Sensitivity:
        near = range(part.min_separation, width)
        found, beyond = analysis.band_products(self.program, width, (0, *near))
        products = dict(zip(near, found[1:], strict=True))
        return banded_sensitivity(found[0], products, beyond, width, part)

    def _shifted_sensitivity(self, part: Participation) -> float | None:
        """Exact, but for rounding that is added, where C is Toeplitz and falls."""
        found = analysis.toeplitz_column(self.program)
        return None if found is None else long_toeplitz_sensitivity(*found, part)

    @cached_property
    def _row_norms_squared(self) -> Floats:
        return analysis.row_norms_squared(self.program)

    def row_norms_squared(self) -> Floats:
        """‖b_s‖² of every row of B: variance of prefix sum s at noise std one."""
        return self._row_norms_squared

    def error_over_time(self, participation: Participation | tuple[int, int] | None = None) -> Floats:
        """Variance of every prefix sum at sensitivity one."""
        return self.row_norms_squared() * self.sensitivity(participation) ** 2

    def max_error(self, participation: Participation | tuple[int, int] | None = None) -> float:
        """Largest variance (not standard deviation) of a prefix sum at sensitivity one.

        `veilstream plan` prints standard deviations, at the noise that a budget needs: the root of
        this, times V / `sensitivity()`, with V as `calibrate` returns it.

        Args:
            participation: how often one client may take part, and how far apart; None for once.

        """
        return float(self.error_over_time(participation).max())

    def mean_error(self, participation: Participation | tuple[int, int] | None = None) -> float:
        """Variance (not standard deviation) of a prefix sum at sensitivity one, mean over steps.

        Args:
            participation: as for `max_error`.

        """
        return float(self.error_over_time(participation).mean())

    def round_error(self, local_steps: int, participation: Participation | tuple[int, int] | None = None) -> float:
        """Variance at sensitivity one, averaged over round ends: what the released models carry.

        Args:
            local_steps: τ, steps of a round.
            participation: as for `max_error`.

        Raises:
            InputError: where τ is more than the horizon.

        """
        tau = positive_integer("local_steps", local_steps, "τ, try 4")
        if tau > self.horizon:
            raise InputError("local_steps", tau, f"<= the horizon {self.horizon}", "T is R·τ")
        return float(self.error_over_time(participation)[tau - 1 :: tau].mean())

    def strategy_matrix(self) -> Floats:
        """C, dense; for horizons up to 8192."""
        return analysis.strategy_matrix(self.program)

    def decoder_matrix(self) -> Floats:
        """B = A·C⁻¹, dense; for horizons up to 8192."""
        return analysis.decoder_matrix(self.program)

    def noising_matrix(self) -> Floats:
        """N = C⁻¹, dense: maps fresh draws to increments; for horizons up to 8192."""
        return analysis.noising_matrix(self.program)

    def noise(self, *, std: float = 1.0, dim: int, seed: int | None = None) -> NoiseStream:
        """Iterator over the T increments, each a float32 vector of length ``dim``: for simulation.

        **Private to no one**, seeded or not: sums of these floats and data give the data away in
        their low-order bits. To release something, use `veilstream.PrivateSum` or a `Learner`.

        ``std`` is V, the standard deviation of the underlying iid noise, as `calibrate` returns
        it. With a ``seed`` the noise is reproducible; without one it is different every time.
        """
        # Loaded when called: a server calibrates and must not load code that draws noise.
        stream = import_module("veilstream.mechanisms.stream")
        drawn: NoiseStream = stream.noise_of(self, std=std, dim=dim, seed=seed)
        return drawn


def normalised(factorization: Factorization, name: str) -> Factorization:
    """The same factorization with unit columns: C·diag(1/‖c_j‖) has N = diag(‖c_j‖)·C⁻¹, a factor per increment."""
    scale = np.sqrt(factorization.column_norms_squared()).astype(np.float32)
    scale.setflags(write=False)
    result = Factorization(name, factorization.horizon, factorization.steps, row_scale=scale)
    result.bandwidth = factorization.bandwidth
    return result


def from_strategy_matrix(name: str, C: Floats, *, tolerance: float = 1e-8) -> Factorization:
    """Factorization from any square, lower-triangular, invertible C (a researcher's own).

    The increments C⁻¹·ξ become a recurrence whose order is the numerical rank of the blocks of
    C⁻¹ below the diagonal: few states for structured matrices, many for arbitrary ones.
    """
    from scipy.linalg import solve_triangular

    C = np.asarray(C, dtype=np.float64)
    if C.ndim != 2 or C.shape[0] != C.shape[1] or not C.size:
        raise InputError("C", f"array of shape {C.shape}", "a square matrix", "one row a step")
    T = len(C)
    analysis.check_dense(T)
    if not np.isfinite(C).all() or np.triu(C, 1).any() or not C.diagonal().all():
        raise InputError(
            "C",
            f"array of shape {C.shape}",
            "finite, lower triangular, nonzero on the diagonal",
            "any C can be made so: take the lower-triangular root of CᵀC",
        )
    N = solve_triangular(C, np.eye(T), lower=True)
    # S holds uncorrelated combinations of past draws; what later increments do with them is O.
    later = np.zeros((T, 0))
    outputs: list[Floats] = []
    moves: list[Floats] = []
    for t in range(T):
        outputs.append(later[0])
        candidates = np.column_stack([later[1:], N[t + 1 :, t]])
        left, size, V = np.linalg.svd(candidates, full_matrices=False)
        keep = size > tolerance * abs(N[t, t])
        later = left[:, keep] * size[keep]
        moves.append(V[keep])
    return Factorization(name, T, VaryingSteps.from_ragged(outputs, moves, N.diagonal().copy()))
