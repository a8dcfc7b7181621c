"""What is searched, as points of a grid without edges: one whole number for each dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

_AVERAGES = (0.0, 1.0, 3.0, 8.0, 20.0, 50.0)
_NO_AVERAGE = len(_AVERAGES)
_LOCAL, _DECAY = 4, 0.2


@dataclass(frozen=True)
class Limits:
    """What the data allow, and no search can change."""

    total: int
    """Clients that a learner meets."""
    clients_per_step: int = 10**9
    """Most that a step may average: people who return must not meet themselves in it."""
    least_clients: int = 1
    """Of a release: to solve for `optimal` noise at more releases takes too long. A limit of ours, so a choice that
    lies at it lies on an edge."""


@dataclass(frozen=True, order=True)
class Point:
    """A setting. Each number may go on for ever in at least one direction; `inside` has the other ends."""

    clients: int
    """2^this clients of a learner are in one release."""
    reach: int
    """2^this is the farthest that the whole run can move the model without noise: Σ steps times clip norm."""
    clip: int
    """2^this is the clip norm."""
    published: int
    """A power average (Σ r^p x_r, six of them), then the newest model, then ever slower exponential averages."""
    local: int = 0
    """4^this steps of a learner in a round."""
    decay: int = 0
    """Steps fall like (1 + round)^(-0.2·this)."""

    def inside(self, limits: Limits) -> bool:
        """Whether there is such a setting."""
        if min(self.clients, self.local, self.decay, self.published) < 0:
            return False
        clients, steps = self.shape
        return (
            max(steps, limits.least_clients) <= clients <= limits.total and clients // steps <= limits.clients_per_step
        )

    def neighbours(self, limits: Limits, fixed: frozenset[str] = frozenset()) -> Iterator[tuple[str, int, Point]]:
        """One step in each direction of each dimension that is not ``fixed``."""
        for field in fields(self):
            if field.name in fixed:
                continue
            for by in (-1, 1):
                other = replace(self, **{field.name: getattr(self, field.name) + by})
                if other.inside(limits):
                    yield field.name, by, other

    def releases(self, total: int) -> int:
        """How many rounds there are for this many clients."""
        return total // 2**self.clients

    @property
    def shape(self) -> tuple[int, int]:
        """Clients of a round, and its steps: settings of one shape run as one array."""
        return 2**self.clients, int(_LOCAL**self.local)

    @property
    def average(self) -> dict[str, float]:
        """The plan's keys for what is published."""
        if self.published < _NO_AVERAGE:
            return {"averaging": _AVERAGES[self.published]}
        if self.published > _NO_AVERAGE:
            return {"newest_weight": 2.0 ** (_NO_AVERAGE - self.published)}
        return {}

    def method(self, learners: int, total: int) -> dict[str, Any]:
        """A plan's keys; ``total`` is what a learner meets in the search, so a longer run takes the same steps."""
        clients, steps = self.shape
        decay, clip_norm, server = _DECAY * self.decay, 2.0**self.clip, math.sqrt(learners)
        rounds = np.arange(self.releases(total))
        effective = 2.0**self.reach / float(((1.0 + rounds) ** -decay).sum()) / clip_norm
        return {
            "clip_norm": clip_norm,
            "clients_per_step": clients // steps,
            "step_size": effective / (server * steps),
            "server_step_size": server,
            "step_decay": decay,
            **self.average,
        }


NEWEST = _NO_AVERAGE
"""`Point.published` of the newest model."""
POWER_3 = _AVERAGES.index(3.0)
"""`Point.published` of the average in which model r weighs r³."""
