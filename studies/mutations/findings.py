"""What is said of each bug, and the small plans that they are planted in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan


@dataclass(frozen=True)
class Finding:
    """One bug, caught or not."""

    bug: str
    caught_by: str
    """Which check of the audit; or "guard", where nothing else can."""
    caught: bool
    figure: str
    guard: str = ""
    """What refuses in front of it, shown to do so; empty where nothing does."""


def each_by_name(bugs: Iterable[str], found: Callable[[str], Finding]) -> tuple[Callable[[], Finding], ...]:
    """A function for each bug, with the bug's name, that plants it and says whether it was found."""

    def of(bug: str) -> Callable[[], Finding]:
        def planted() -> Finding:
            return found(bug)

        planted.__name__ = bug
        return planted

    return tuple(of(bug) for bug in bugs)


def plan_of(mechanism: str = "toeplitz", *, rounds: int = 16, local_steps: int = 1, **privacy: float) -> Plan:
    return Plan(
        learning={"rounds": rounds, "local_steps": local_steps, "model_norm_cap": 1e30},
        data={"dim": 4},
        privacy={"epsilon": 2.0, "delta": 1e-3} | privacy,
        methods=[{"name": "ours", "mechanism": mechanism, "step_size": 0.1}],
    )


def both(dim: int = 4000, mechanism: str = "toeplitz", **options) -> tuple[Plan, Terms]:
    plan = plan_of(mechanism, **options)
    return plan, Terms.of(plan, dim)


def mu_of(found: float, claim: float) -> str:
    return f"mu >= {found:.3g} where {claim:.3g} is promised"
