"""Noise programs inside JAX: the same float32 blocks, in a compiled scan, on CPU or GPU.

**Simulation only.** Draws come from `jax.random`, a counter-based generator that is reproducible
from its key and not made to keep secrets. A deployed learner uses `NoiseStream`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import HorizonExhausted, MissingExtra
from veilstream.mechanisms.program import NoiseProgram, advance

if TYPE_CHECKING:
    from jax import Array


class JaxNoise:
    """A program as device arrays; `block` is pure and may be called under jit, scan and vmap.

    The state is an array (k, dim), zero at the start. Draws are addressed by step, so the block
    length does not change them. Blocks all have the full length; rows of the last one that lie
    past the horizon are zero, and asking for a further block is an error where the number is
    concrete, and gives NaN under tracing: never a repeat.
    """

    simulation_only = True

    def __init__(self, program: NoiseProgram) -> None:
        try:
            import jax.numpy as jnp
        except ImportError as error:
            raise MissingExtra("jax", "jax", "noise on a GPU or in a compiled scan") from error
        self.program = program
        k, length = program.state_size, program.block_length
        size = k + length
        matrices = np.zeros((len(program.matrices), size, size), np.float32)
        for i, matrix in enumerate(program.matrices):
            short = len(matrix) - k
            matrices[i, :short, : k + short] = matrix[:short]
            matrices[i, length:, : k + short] = matrix[short:]
        blocks = 1 if program.endless else program.blocks  # that are told apart
        scale = np.ones((blocks * length,), np.float32)
        if program.row_scale is not None:
            scale[: program.horizon] = program.row_scale
        row_scale = np.ones((blocks, size), np.float32)
        row_scale[:, :length] = scale.reshape(blocks, length)
        self._matrices = jnp.asarray(matrices)
        self._matrix_of_block = jnp.asarray(program.matrix_of_block)
        self._row_scale = jnp.asarray(row_scale)

    def initial_state(self, dim: int) -> Array:
        """State before the first block."""
        import jax.numpy as jnp

        return jnp.zeros((self.program.state_size, dim), jnp.float32)

    def draws(self, key: Any, block: Any, dim: int) -> Array:
        """The block's fresh standard normals, (L, dim)."""
        import jax
        import jax.numpy as jnp

        length = self.program.block_length
        steps = block * length + jnp.arange(length)
        row = jax.vmap(lambda s: jax.random.normal(jax.random.fold_in(key, s), (dim,), jnp.float32))
        return row(steps)

    def apply(self, state: Array, draws: Array, block: Any) -> tuple[Array, Array]:
        """Next state and the block's increments (L, dim), at std one."""
        import jax.numpy as jnp

        length, blocks = self.program.block_length, self.program.blocks
        if isinstance(block, int | np.integer) and not 0 <= block < blocks:
            raise HorizonExhausted(self.program.horizon, int(block) * length)
        place = 0 if self.program.endless else block
        base = self._matrices[self._matrix_of_block[place]]
        matrix = base * self._row_scale[place][:, None]
        # By default a GPU multiplies in TF32, with ten bits: another mechanism than the program.
        out = advance(matrix, jnp.concatenate([state, draws]), jnp.matmul, precision="highest")
        within = jnp.asarray(block) >= 0
        if not self.program.endless:
            within &= jnp.asarray(block) < blocks
        out = jnp.where(within, out, jnp.nan)
        return out[length:], out[:length]

    def block(self, key: Any, state: Array, block: Any, std: float) -> tuple[Array, Array]:
        """Next state and increments of block number ``block``, scaled by ``std``."""
        draws = self.draws(key, block, state.shape[1])
        state, increments = self.apply(state, draws, block)
        return state, increments * std

    def all_increments(self, key: Any, dim: int, std: float = 1.0) -> Array:
        """The whole horizon at once, (T, dim): for short horizons and tests."""
        import jax
        import jax.numpy as jnp

        def body(state: Array, block: Array) -> tuple[Array, Array]:
            return self.block(key, state, block, std)

        blocks = jnp.arange(self.program.blocks)
        _, out = jax.lax.scan(body, self.initial_state(dim), blocks)
        return out.reshape(-1, dim)[: self.program.horizon]
