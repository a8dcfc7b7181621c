"""Mechanisms by name, for command lines, plans and tests. Packages add others (`veilstream.mechanisms`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from veilstream.errors import InputError, VeilstreamError
from veilstream.mechanisms.banded import banded, banded_inverse
from veilstream.mechanisms.buffered import buffered
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.independent import independent
from veilstream.mechanisms.optimal import optimal
from veilstream.mechanisms.participation import Participation
from veilstream.mechanisms.toeplitz import toeplitz, toeplitz_normalised
from veilstream.mechanisms.tree import tree, tree_full, tree_online
from veilstream.mechanisms.workload import Workload
from veilstream.registry import Registry

_BUILT_IN = (
    *(independent, tree, tree_online, tree_full, optimal),
    *(toeplitz, toeplitz_normalised, buffered, banded, banded_inverse),
)

MECHANISMS: Registry[Callable[..., Factorization]] = Registry(
    "veilstream.mechanisms", "mechanism", {function.__name__: function for function in _BUILT_IN}, callable
)


def build(name: str, horizon: int, **options: Any) -> Factorization:
    """The mechanism of this name; an unknown one is refused with the nearest name."""
    function, rule = MECHANISMS[str(name)], f"a function that returns a Factorization of {horizon} steps"
    try:
        made = function(horizon, **options)
    except VeilstreamError:
        raise
    except Exception as error:
        if function in _BUILT_IN:
            raise
        raise InputError("mechanism", name, rule, f"it raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Factorization):
        raise InputError("mechanism", name, rule, f"it gave a {type(made).__name__}")
    if made.horizon != horizon:
        raise InputError("mechanism", name, rule, f"its factorization has {made.horizon} steps")
    return made


def built_in(name: str) -> bool:
    """Whether a mechanism comes with veilstream, not from another package."""
    return name in {function.__name__ for function in _BUILT_IN}


def takes(name: str, option: str) -> bool:
    """Whether the function of this name has such an argument."""
    return option in inspect.signature(MECHANISMS[name]).parameters


def made_for_published() -> tuple[str, ...]:
    """Mechanisms that can be made for what is published, or for people who return."""
    return tuple(name for name in MECHANISMS if takes(name, "workload") or takes(name, "participation"))


def build_for(name: str, workload: Workload, participation: Participation) -> Factorization:
    """The mechanism of this name, made for what is published; `InputError` where it cannot be.

    `optimal`, `buffered` and `banded` are made for people who return too, with the least mean error; `banded` and
    `banded_inverse` for nothing else.
    """
    options: dict[str, Any] = {}
    if name == "buffered" and workload.plain and participation.times > 1:
        options["objective"] = "mean"
    if takes(name, "workload"):
        options["workload"] = workload
    elif not workload.plain:
        raise InputError(
            "workload",
            "averages, forgetting or falling steps",
            f"running sums for {name}",
            "optimal and buffered take others",
        )
    if takes(name, "participation"):
        options["participation"] = participation
    return build(name, workload.horizon, **options)
