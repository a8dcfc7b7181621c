"""Mechanisms by name, for command lines, plans and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veilstream.errors import UnknownName
from veilstream.mechanisms.banded import banded
from veilstream.mechanisms.buffered import buffered
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.independent import independent
from veilstream.mechanisms.optimal import optimal
from veilstream.mechanisms.toeplitz import toeplitz, toeplitz_normalised
from veilstream.mechanisms.tree import tree, tree_full, tree_online

__all__ = ["FOR_PUBLISHED", "MECHANISMS", "build"]

MECHANISMS: dict[str, Callable[..., Factorization]] = {
    function.__name__: function
    for function in (
        independent,
        tree,
        tree_online,
        tree_full,
        optimal,
        toeplitz,
        toeplitz_normalised,
        buffered,
        banded,
    )
}

FOR_PUBLISHED = ("optimal", "buffered", "toeplitz", "toeplitz_normalised")
"""Those that can be made for what a method publishes: they take a ``workload``."""


def build(name: str, horizon: int, **options: Any) -> Factorization:
    """The mechanism of this name; an unknown one is refused with the nearest name."""
    if not isinstance(name, str) or name not in MECHANISMS:
        raise UnknownName("mechanism", str(name), MECHANISMS)
    return MECHANISMS[name](horizon, **options)
