"""`TaskKind`: what a task says of itself, so that plans, regret and step sizes need no list of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from veilstream.learning.tasks import Task


class Target(StrEnum):
    """What a task predicts."""

    SIGN = "one of two labels, -1 or +1"
    CLASS = "one of several labels, 0, 1, 2, ..."
    NUMBER = "a number in a public range"
    COUNT = "a count"
    NOTHING = "nothing: parameters are estimated"

    @property
    def classifies(self) -> bool:
        """Whether predictions are right or wrong."""
        return self in (Target.SIGN, Target.CLASS)


@dataclass(frozen=True, kw_only=True)
class TaskSetting:
    """What a plan says that a task may depend on."""

    features: int  # Numbers of one client's features
    feature_norm: float = 1.0  # The largest norm that they have
    ridge: float = 0.0
    classes: int = 0  # How many labels the plan names
    label_range: tuple[float, ...] | None = None
    """The public range of a label that is a number; only records of a table have one."""


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Public bounds on what a model says of one client, its margin."""

    reach: float  # Norm of the gradient of a margin: that of the features, or √2 times it between two classes
    gradient_bound: float | None
    """Longest gradient of a client whose prediction is in the label's range; None if unknown."""
    half_range: float = 1.0  # Half the range of what is predicted; 1 for a class's margin


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """A task that plans can name: `learning.task = "..."`. An entry point of `veilstream.tasks` is one."""

    name: str
    make: Callable[[TaskSetting], Task]
    data: tuple[str, ...]  # Kinds of `[data]` that it learns from, the usual one first
    target: Target
    takes_ridge: bool = False  # Whether `learning.ridge` may be set
    margins: Callable[[TaskSetting], Margins] | None = None
    """What `kind = "auto"` chooses a step from; None where nothing is known."""
    comparator: str | None = None
    """Function of (plan, seed) that finds the least losses for regret, as "package.module:function"."""
