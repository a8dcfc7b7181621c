"""What a noise program is as matrices: column norms of C, row norms of B, and both as dense arrays.

The program realises N = C⁻¹ block by block; A is the lower-triangular matrix of ones.

- Columns of C = N⁻¹ come from the inverse recurrence, which maps increments back to draws. The
  squared norm of column j is what it puts out in its own block plus gᵀ·Q·g, where g is the state
  it leaves behind and Q the observability Gramian of all later blocks, gathered backwards.
- Rows of B = A·N are prefix sums of increments; their squared norms are the variances of the
  running sum, which one more state carries forward.

Both cost O(T·k²) and use float64 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.mechanisms.linear_system import LinearSystem
from veilstream.mechanisms.program import NoiseProgram
from veilstream.progress import progress

Floats = NDArray[np.float64]

DENSE_LIMIT = 8192
_BATCH = 512


def _batches(program: NoiseProgram, *, backwards: bool = False) -> Iterator[tuple[int, Floats]]:
    """Consecutive equal-length blocks as float64 stacks, with the number of the first one."""
    last_length = program.span(program.blocks - 1)[1]
    full = program.blocks - (last_length != program.block_length)
    cuts = [(first, min(first + _BATCH, full)) for first in range(0, full, _BATCH)]
    if full < program.blocks:
        cuts.append((full, program.blocks))
    with progress(f"calibrating {program.horizon:,} steps of noise", program.blocks) as tick:
        for first, end in reversed(cuts) if backwards else cuts:
            yield first, np.stack([program.matrix(b) for b in range(first, end)]).astype(np.float64)
            tick(end - first)


def inverse_block(M: Floats, state_size: int) -> tuple[Floats, Floats, Floats, Floats]:
    """From increments back to draws, of one block or a stack: z = H·w - E·S, S' = F·S + G·w."""
    k, length = state_size, M.shape[-2] - state_size
    H: Floats = np.linalg.inv(M[..., :length, k:]).astype(np.float64, copy=False)
    E = H @ M[..., :length, :k]
    G = M[..., length:, k:] @ H
    return H, E, G, M[..., length:, :k] - G @ M[..., :length, :k]


def column_norms_squared(program: NoiseProgram) -> Floats:
    """‖c_j‖² for every column of C = N⁻¹."""
    k = program.state_size
    norms = np.empty(program.horizon)
    later = np.zeros((k, k))
    for first, M in _batches(program, backwards=True):
        length = M.shape[1] - k
        H, E, G, F = inverse_block(M, k)
        own = np.einsum("btj,btj->bj", H, H)
        seen = E.transpose(0, 2, 1) @ E
        for i in range(len(M) - 1, -1, -1):
            start, _ = program.span(first + i)
            norms[start : start + length] = own[i] + np.einsum("kj,kj->j", G[i], later @ G[i])
            later = seen[i] + F[i].T @ later @ F[i]
    norms.setflags(write=False)
    return norms


def band_entries(program: NoiseProgram, width: int) -> tuple[Floats, float]:
    """Columns of C from their diagonal down, one a row, cut off after ``width`` entries, below which there is rounding.

    Beside them the largest norm of what was cut off, of any column.
    """
    found = np.empty((program.horizon, width))
    beyond = 0.0
    for start, entries, left in _bands_backwards(program, width):
        found[start : start + len(entries)] = entries
        beyond = max(beyond, left)
    return found, float(np.sqrt(max(beyond, 0.0)))


def band_products(program: NoiseProgram, width: int, distances: Sequence[int]) -> tuple[Floats, float]:
    """Inner products of columns of C, cut off after ``width`` entries, below which there is rounding.

    Row i holds ⟨c_j, c_{j-d}⟩, with d the i-th of ``distances`` (each below ``width``), for every j
    (zero where j < d); beside them the largest norm of what was cut off, of any column.
    """
    T, length = program.horizon, program.block_length
    products = np.zeros((len(distances), T))
    beyond = 0.0
    window = np.zeros((length + width, width))  # entries of this block's columns and the next ones
    for start, entries, left in _bands_backwards(program, width):
        own = len(entries)
        beyond = max(beyond, left)
        window = np.concatenate([entries, window[: length + width - own]])
        for row, d in zip(products, distances, strict=True):
            found = (window[:own, d:] * window[d : d + own, : width - d]).sum(axis=1)
            row[start + d : start + d + own] = found[: max(0, T - start - d)]
    return products, float(np.sqrt(max(beyond, 0.0)))


def _bands_backwards(program: NoiseProgram, width: int) -> Iterator[tuple[int, Floats, float]]:
    """Each block from the last: its first step, its columns' first entries, and the largest energy after them."""
    k, length = program.state_size, program.block_length
    following = -(-(width + length - 1) // length)  # blocks that a column's entries reach into
    later: list[tuple[Floats, Floats, Floats]] = []  # E, F and the energy after it, next first
    energy = np.zeros((k, k))
    place = np.arange(width)
    for first, M in _batches(program, backwards=True):
        own = M.shape[1] - k
        H, E, G, F = inverse_block(M, k)
        for i in range(len(M) - 1, -1, -1):
            made, state, after = [H[i]], G[i], energy
            for E_next, F_next, after in later:  # noqa: B007 - the last one's is used
                made.append(-E_next @ state)
                state = F_next @ state
            left = np.einsum("kj,kj->j", state, after @ state)
            rows = np.concatenate([*made, np.zeros((width, own))])
            entries = np.stack([rows[j + place, j] for j in range(own)])
            for j in range(own):
                left[j] += (rows[j + width :, j] ** 2).sum()
            yield program.span(first + i)[0], entries, float(left.max())
            later = [(E[i], F[i], energy), *later][:following]
            energy = E[i].T @ E[i] + F[i].T @ energy @ F[i]


def toeplitz_column(program: NoiseProgram) -> tuple[Floats, float] | None:
    """First column of C where one block repeats, and how far the others are from it, shifted, by float32 rounding."""
    length = program.block_length
    if program.row_scale is not None or np.unique(program.matrix_of_block[:-1]).size > 1:
        return None
    H, E, G, F = inverse_block(program.matrix(0).astype(np.float64), program.state_size)
    blocks = program.blocks
    c = np.zeros((blocks + 1) * length)  # the first block is empty: nothing before a column
    apart = np.zeros(length)
    place = np.subtract.outer(np.arange(length), np.arange(length))
    made, state = H, G
    for block in range(blocks):
        at = (block + 1) * length
        c[at : at + length] = made[:, 0]
        apart += ((made - c[at + place]) ** 2).sum(axis=0)
        made, state = -E @ state, F @ state
    # The last block may be short, and is then a product of its own: rounding of the same size.
    rounding = 2.0 * float(np.sqrt(apart.max())) + 1e-7 * float(np.linalg.norm(c))
    return c[length : length + program.horizon], rounding


def row_norms_squared(program: NoiseProgram) -> Floats:
    """‖b_s‖² for every row of B = A·N."""
    k = program.state_size
    norms = np.empty(program.horizon)
    covariance = np.zeros((k + 1, k + 1))  # of [S; running sum]
    for first, M in _batches(program):
        count, length = len(M), M.shape[1] - k
        sums = np.cumsum(M[:, :length], axis=1)
        from_state = np.concatenate([sums[:, :, :k], np.ones((count, length, 1))], axis=2)
        fresh = np.einsum("btz,btz->bt", sums[:, :, k:], sums[:, :, k:])
        move = np.zeros((count, k + 1, k + 1))
        move[:, :k, :k] = M[:, length:, :k]
        move[:, k] = from_state[:, -1]
        entry = np.concatenate([M[:, length:, k:], sums[:, -1:, k:]], axis=1)
        added = entry @ entry.transpose(0, 2, 1)
        for i in range(count):
            start, _ = program.span(first + i)
            rows = from_state[i]
            norms[start : start + length] = fresh[i] + np.einsum("tk,tk->t", rows @ covariance, rows)
            covariance = move[i] @ covariance @ move[i].T + added[i]
    norms.setflags(write=False)
    return norms


def system_variances(program: NoiseProgram, system: LinearSystem) -> Floats:
    """Variance of every coordinate of a linear system that the increments drive, (T, n), in O(T·(k + n)²)."""
    k, n = program.state_size, system.order
    variances = np.empty((program.horizon, n))
    covariance = np.zeros((k + n, k + n))  # of [S; q]
    for first, M in _batches(program):
        count, length = len(M), M.shape[1] - k
        start = program.span(first)[0]
        steps = slice(start, start + count * length)
        F = system.transition[steps].reshape(count, length, n, n)
        b = system.entry[steps].reshape(count, length, n)
        # Rows of q after each step, as functions of [S; q] before the block and of its draws.
        q = np.zeros((count, n, k + n + length))
        q[:, :, k : k + n] = np.eye(n)
        after = np.empty((count, length, n, k + n + length))
        for t in range(length):
            q = F[:, t] @ q
            q[:, :, :k] += b[:, t, :, None] * M[:, t, None, :k]
            q[:, :, k + n :] += b[:, t, :, None] * M[:, t, None, k:]
            after[:, t] = q
        fresh = np.einsum("btnz,btnz->btn", after[..., k + n :], after[..., k + n :])
        move = np.zeros((count, k + n, k + n))
        move[:, :k, :k] = M[:, length:, :k]
        move[:, k:] = q[:, :, : k + n]
        entry = np.concatenate([M[:, length:, k:], q[:, :, k + n :]], axis=1)
        added = entry @ entry.transpose(0, 2, 1)
        for i in range(count):
            rows = after[i, :, :, : k + n].reshape(length * n, k + n)
            carried = np.einsum("tk,tk->t", rows @ covariance, rows).reshape(length, n)
            at = start + i * length
            variances[at : at + length] = fresh[i] + carried
            covariance = move[i] @ covariance @ move[i].T + added[i]
    return variances


@dataclass(frozen=True)
class RoundingGains:
    """How a step-by-step program magnifies rounding: the largest of each over all steps.

    With states in their standard deviations: Σ|output|·σ, |feed|, and per state vector Σ|F|·σ and
    |entry|; the norm of the columns of C; and √Q_kk, how far a change of one state moves all later
    draws when the increments stay as they are.
    """

    output: float
    feed: float
    transition: Floats
    entry: Floats
    column: float
    observed: Floats


def rounding_gains(program: NoiseProgram, column: float | None = None) -> RoundingGains:
    """For a program in blocks of one step; ``column``: the largest column norm of C, if it was computed from it."""
    if program.block_length != 1:
        raise InputError("program", program.block_length, "blocks of one step", "with_block_length(1)")
    if program.endless:
        return _endless_gains(program)
    k = program.state_size
    deviation = np.zeros((program.horizon, k))  # of each state before each step
    covariance = np.zeros((k, k))
    output = feed = 0.0
    transition, entry = np.zeros(k), np.zeros(k)
    for first, M in _batches(program):
        for i, step in enumerate(M, start=first):
            deviation[i] = np.sqrt(covariance.diagonal())
            F, g = step[1:, :k], step[1:, k]
            covariance = F @ covariance @ F.T + np.outer(g, g)
        sizes = deviation[first : first + len(M)]
        output = max(output, float((np.abs(M[:, 0, :k]) * sizes).sum(axis=1).max(initial=0.0)))
        feed = max(feed, float(np.abs(M[:, 0, k]).max()))
        moved = (np.abs(M[:, 1:, :k]) @ sizes[:, :, None])[:, :, 0]
        transition = np.maximum(transition, moved.max(axis=0, initial=0.0))
        entry = np.maximum(entry, np.abs(M[:, 1:, k]).max(axis=0, initial=0.0))
    observed = np.zeros(k)
    later = np.zeros((k, k))
    for _, M in _batches(program, backwards=True):
        for step in M[::-1]:
            observed = np.maximum(observed, later.diagonal())
            seen = step[0, :k] / step[0, k]
            F = step[1:, :k] - np.outer(step[1:, k], seen)
            later = np.outer(seen, seen) + F.T @ later @ F
    column = float(np.sqrt(column_norms_squared(program).max())) if column is None else column
    return RoundingGains(output, feed, transition, entry, column, np.sqrt(observed))


def _endless_gains(program: NoiseProgram) -> RoundingGains:
    """The same for one step that repeats: covariances grow with time, so their limits bound all."""
    from scipy.linalg import solve_discrete_lyapunov

    k = program.state_size
    step = program.matrix(0).astype(np.float64)
    F, g, output, feed = step[1:, :k], step[1:, k], step[0, :k], step[0, k]
    sizes = np.sqrt(solve_discrete_lyapunov(F, np.outer(g, g)).diagonal())
    seen = output / feed
    back = F - np.outer(g, seen)
    later = solve_discrete_lyapunov(back.T, np.outer(seen, seen))
    entered = g / feed
    return RoundingGains(
        float(np.abs(output) @ sizes),
        float(abs(feed)),
        np.abs(F) @ sizes,
        np.abs(g),
        float(np.sqrt(1.0 / feed**2 + entered @ later @ entered)),
        np.sqrt(later.diagonal()),
    )


def check_dense(horizon: int) -> None:
    """Refuse to form a matrix that would not fit."""
    if horizon > DENSE_LIMIT:
        raise InputError(
            "horizon",
            horizon,
            f"<= {DENSE_LIMIT} for a dense matrix",
            "sensitivity, row norms and errors need no matrix",
        )


def noising_matrix(program: NoiseProgram) -> Floats:
    """N = C⁻¹ as a dense lower-triangular matrix."""
    T, k = program.horizon, program.state_size
    check_dense(T)
    N = np.zeros((T, T))
    state = np.zeros((k, T))
    for block in range(program.blocks):
        start, length = program.span(block)
        M = program.matrix(block).astype(np.float64)
        new = M[:, :k] @ state
        new[:, start : start + length] += M[:, k:]
        N[start : start + length] = new[:length]
        state = new[length:]
    return N


def strategy_matrix(program: NoiseProgram) -> Floats:
    """C, the matrix whose columns decide the privacy."""
    from scipy.linalg import solve_triangular

    N = noising_matrix(program)
    C: Floats = solve_triangular(N, np.eye(len(N)), lower=True, check_finite=False)
    return C


def decoder_matrix(program: NoiseProgram) -> Floats:
    """B = A·N, the matrix whose rows decide the error."""
    return np.cumsum(noising_matrix(program), axis=0)
