"""Mechanisms by name, for command lines, plans and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veilstream.errors import InputError, UnknownName
from veilstream.mechanisms.banded import banded
from veilstream.mechanisms.buffered import buffered
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.independent import independent
from veilstream.mechanisms.optimal import optimal
from veilstream.mechanisms.participation import Participation
from veilstream.mechanisms.toeplitz import toeplitz, toeplitz_normalised
from veilstream.mechanisms.tree import tree, tree_full, tree_online
from veilstream.mechanisms.workload import Workload

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


def build(name: str, horizon: int, **options: Any) -> Factorization:
    """The mechanism of this name; an unknown one is refused with the nearest name."""
    if not isinstance(name, str) or name not in MECHANISMS:
        raise UnknownName("mechanism", str(name), MECHANISMS)
    return MECHANISMS[name](horizon, **options)


MADE_FOR_PUBLISHED = ("optimal", "buffered", "toeplitz", "toeplitz_normalised", "banded")
"""Mechanisms that can be made for what is published, or for people who return."""


def build_for(name: str, workload: Workload, participation: Participation) -> Factorization:
    """The mechanism of this name, made for what is published.

    `buffered` and `banded` are tuned for people who return too; `banded` for nothing else.

    Raises:
        InputError: for a mechanism that cannot be made for it.

    """
    return build(name, workload.horizon, **options_for(name, workload, participation))


def options_for(name: str, workload: Workload, participation: Participation) -> dict[str, Any]:
    """What the function of this name is given to be made for what is published."""
    if name == "banded":
        if not workload.plain:
            raise InputError(
                "workload",
                "averages, momentum, forgetting or falling steps",
                "running sums for banded",
                "optimal and buffered take others",
            )
        return {"participation": participation}
    return {"workload": workload} | ({"participation": participation} if name == "buffered" else {})
