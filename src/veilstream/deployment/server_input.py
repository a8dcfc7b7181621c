"""What a server says to a learner, looked at before it is used and before any client is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, LedgerError


def checked_round(field: str, r: Any) -> int:
    """A round's number; anything else is shown by its type alone, since it may be anything."""
    if isinstance(r, bool) or not isinstance(r, int | np.integer) or not 0 <= r < 2**63:
        raise InputError(field, type(r).__name__, "a whole number below 2^63", "check the server")
    return int(r)


def checked_acknowledgement(acknowledged: Any) -> tuple[int, str]:
    """(round, hash)."""
    if type(acknowledged) is not tuple or len(acknowledged) != 2:
        raise InputError("acknowledged", type(acknowledged).__name__, "(round, hash)", "or None")
    r, digest = acknowledged
    if type(digest) is not str:
        raise InputError("acknowledged", type(digest).__name__, "a hash as text", "or None")
    return checked_round("acknowledged", r), digest


def check_known(acknowledged: tuple[int, str], known: Callable[[int, str], bool]) -> None:
    """Refuse to go on if the server has accepted what this store (``known``) does not know."""
    r, digest = acknowledged
    if not known(r, digest):
        raise LedgerError(
            f"the server has accepted round {r} with hash {digest[:16]!r}, which this store does not know",
            "this store and its witness are old copies: put the newest ones back; if they are "
            "lost, begin another store, with other clients only",
        )


def checked_model(x: Any, dim: int, norm_cap: float) -> NDArray[np.float32]:
    """A finite model of the right shape, within the public norm cap, as float32 of its own."""
    # As a plain array: what a subclass does besides holding numbers is not wanted here.
    given = np.asarray(x) if isinstance(x, np.ndarray) else None
    if given is None or given.dtype.kind not in "fiu" or given.shape != (dim,):
        what = type(x).__name__ if given is None else f"{given.dtype} of shape {given.shape}"
        raise InputError("x", what, f"an array of numbers of shape ({dim},)", "check the server")
    with np.errstate(all="ignore"):
        model = given.astype(np.float32)
        length = float(np.sqrt((model.astype(np.float64) ** 2).sum()))
    if not length <= norm_cap:
        raise InputError(
            "x", f"norm {length:g}", f"a norm of at most {norm_cap:g} (learning.model_norm_cap)", "check the server"
        )
    return model
