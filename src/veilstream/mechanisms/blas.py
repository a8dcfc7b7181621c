"""One BLAS thread: for products that threads slow down, and for solutions equal to the last bit."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING

from veilstream.errors import MissingExtra

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which NumPy's and SciPy's BLAS use one thread; `MissingExtra` without threadpoolctl."""
    limit: AbstractContextManager[object] = blas_controller().limit(limits=1, user_api="blas")
    return limit


@cache
def blas_controller() -> ThreadpoolController:
    """What sets BLAS threads; `MissingExtra` if it is not installed."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError as error:
        raise MissingExtra("threadpoolctl", None, "correlating noise on the CPU") from error
    import scipy.linalg  # noqa: F401 - the controller sees only libraries that are loaded

    return ThreadpoolController()
