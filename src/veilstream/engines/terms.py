"""The terms of a deployment: what the promise and the numbers rest on, from the plan alone.

Server and learner each work them out for themselves; what they get must be the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from veilstream.engines.build import prepare
from veilstream.engines.plan import MethodPlan, Plan
from veilstream.errors import InputError
from veilstream.mechanisms import Factorization
from veilstream.privacy import Guarantee
from veilstream.privacy.grid import Grid
from veilstream.privacy.noise_law import calibrate_release

__all__ = ["Terms", "both_sides", "differences"]


@dataclass(frozen=True)
class Terms:
    """One private method, one client a step."""

    method: MethodPlan
    dim: int
    rounds: int
    local_steps: int
    mechanism: Factorization
    """In blocks of one step: the mechanism whose sensitivity counts for a learner that releases
    step by step."""
    noise_std: float
    guarantee: Guarantee
    grid: Grid
    projection_radius: float | None
    model_norm_cap: float

    @classmethod
    def of(cls, plan: Plan, dim: int) -> Terms:
        """What this plan means for a model with so many parameters."""
        method = _deployable(plan)
        prepared = prepare(plan, method)
        assert prepared.factorization is not None
        noise = calibrate_release(
            plan.budget_of(method), prepared.factorization, plan.clip_norm_of(method), dim,
            neighbours=plan.neighbours, accounting=plan.accounting_of(method),
            participation=plan.participation,
        )  # fmt: skip
        return cls(
            method, dim, plan.learning.rounds, prepared.steps, noise.mechanism, noise.std,
            noise.guarantee, noise.grid, plan.learning.projection_radius,
            plan.learning.model_norm_cap,
        )  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """As JSON holds them: kept in the ledger, compared at enrolment."""
        settings = {
            "d": self.dim,
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "mechanism": self.mechanism.name,
            "clip_norm": self.grid.clip_norm,
            "noise_std": self.noise_std,
            "grid": self.grid.step,
            "guarantee": self.guarantee.as_dict(),
            "objective": self.method.objective,
            "step_size": self.method.step_size,
            "server_step_size": self.method.server_step_size,
            "step_decay": self.method.step_decay,
            "projection_radius": self.projection_radius,
            "model_norm_cap": self.model_norm_cap,
        }
        as_stored: dict[str, Any] = json.loads(json.dumps(settings))
        return as_stored


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same on both sides."""
    keys = dict.fromkeys([*ours, *theirs])
    return {k: (ours.get(k), theirs.get(k)) for k in keys if ours.get(k) != theirs.get(k)}


def both_sides(unlike: dict[str, tuple[Any, Any]]) -> str:
    """`differences` between a server's settings and a learner's, in words."""
    return ", ".join(f"{k}: server {s!r}, learner {o!r}" for k, (s, o) in unlike.items())


def _deployable(plan: Plan) -> MethodPlan:
    """The plan's one private method."""
    private = [m for m in plan.methods if m.method.private]
    if len(private) != 1:
        raise InputError(
            "methods", [m.name for m in plan.methods], "exactly one private method",
            "a learner runs one; keep comparisons for simulation",
        )  # fmt: skip
    if plan.learning.clients_per_step != 1 or not private[0].method.local_updates:
        raise InputError(
            "learning.clients_per_step", plan.learning.clients_per_step, "1",
            "a deployed learner takes one client a step",
        )  # fmt: skip
    return private[0]
