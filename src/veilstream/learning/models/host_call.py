"""A call from compiled JAX to Python code that knows nothing of JAX.

`jax.pure_callback` turns its arguments into JAX arrays first: for large ones a copy by JAX's own
threads, which may all be waiting for the call to return, for ever (seen with jax 0.10.2 on one core
with 4 MB; jax issues 24255 and 25861). Here the callback gets NumPy arrays.

Under `jax.vmap` an argument that is not mapped gets an axis of size one, whatever the nesting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jax import Array


def host_call(callback: Callable[..., NDArray[Any]], shape: tuple[int, ...], dtype: Any, *arrays: Any) -> Array:
    """``callback(*arrays)``: an array of this shape and type, from NumPy arrays.

    They are read only, and may be JAX's own memory. The callback must be pure, hashable (a function
    or a bound method, not a new lambda each time), safe to call from any thread, and free of JAX.
    """
    import jax.numpy as jnp

    given = [jnp.asarray(array) for array in arrays]
    result: Array = _primitive().bind(*given, callback=callback, shape=tuple(shape), dtype=np.dtype(dtype))
    return result


@cache
def _primitive() -> Any:
    import jax.numpy as jnp
    from jax.core import ShapedArray
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    primitive = Primitive("veilstream_host_call")

    def run(*arrays: Any, callback: Any, shape: Any, dtype: Any) -> Any:
        return jnp.asarray(_checked(callback(*map(np.asarray, arrays)), shape, dtype))

    def describe(*arrays: Any, callback: Any, shape: Any, dtype: Any) -> Any:
        return ShapedArray(shape, dtype)

    def lower(context: Any, *operands: Any, callback: Any, shape: Any, dtype: Any) -> Any:
        def called(*arrays: Any) -> tuple[NDArray[Any]]:
            return (_checked(callback(*arrays), shape, dtype),)

        results, _, _ = mlir.emit_python_callback(
            context, called, None, list(operands), context.avals_in, context.avals_out, has_side_effect=False
        )
        return results

    def batch(arrays: Any, axes: Any, *, callback: Any, shape: Any, dtype: Any) -> Any:
        (size,) = {a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None}
        mapped = [
            array[None] if axis is None else jnp.moveaxis(array, axis, 0)
            for array, axis in zip(arrays, axes, strict=True)
        ]
        result = primitive.bind(*mapped, callback=callback, shape=(size, *shape), dtype=dtype)
        return result, 0

    primitive.def_impl(run)
    primitive.def_abstract_eval(describe)
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _checked(result: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    if result.shape != shape or result.dtype != dtype:
        raise TypeError(f"the callback gave {result.dtype} {result.shape}, and promised {dtype} {shape}")
    return result
