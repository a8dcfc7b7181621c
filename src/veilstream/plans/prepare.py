"""From a plan to the things that run: task, stream, calibrated methods."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.algorithm import StepRule
from veilstream.mechanisms import Factorization, StationaryFactorization, Workload, build
from veilstream.mechanisms.registry import build_for
from veilstream.mechanisms.unbounded import without_end
from veilstream.plans.auto import AutoChoice, choose_steps, gamma_of, with_defaults
from veilstream.plans.plan import Plan
from veilstream.plans.plan_tables import MethodPlan
from veilstream.plans.records import class_weights_of
from veilstream.privacy import Guarantee, Neighbours, Order, calibrate
from veilstream.privacy.secret_bands import banded_for_secret_order

_NOT_CLIPPED = 1e15  # the largest bound that a clipper takes


class PlanNotice(UserWarning):
    """A plan that runs, but not well."""


@dataclass(frozen=True)
class Prepared:
    """A method with its calibrated noise."""

    plan: MethodPlan
    steps: int  # noisy steps of a learner in a round
    clients: int  # clients averaged in a step
    rule: StepRule
    factorization: Factorization | None
    noise_std: float
    guarantee: Guarantee | None
    workload: Workload  # what it publishes
    auto: AutoChoice | None = None  # what a method of kind "auto" chose, and from which facts

    @property
    def rounds(self) -> int:
        """R, how many models are released."""
        return self.workload.rounds

    @property
    def shape(self) -> tuple[int, int, bool, float | None, bool]:
        """Methods of one shape run as one array."""
        rule = self.rule
        return self.steps, self.clients, rule.unit_steps, rule.gamma, self.plan.forgets

    @property
    def recipe(self) -> tuple[object, ...]:
        """Methods of one recipe share their noise, but for its size."""
        plan = self.plan
        made_for: tuple[object, ...] = (plan.mechanism_name, plan.objective)
        if plan.objective == "published":
            averages = plan.averaging, plan.newest_weight
            made_for += (*averages, plan.step_decay, plan.forgetting)
        if isinstance(self.factorization, StationaryFactorization):
            made_for += (plan.forgetting,)
        if self.factorization is not None and self.factorization.bandwidth is not None:
            made_for += (self.factorization.bandwidth,)
        return made_for

    @property
    def effective_step_size(self) -> float:
        """η̃ = η·η_g·τ before any decay."""
        return self.plan.local_step_size * self.plan.server_step_size * self.steps

    @cached_property
    def round_end_noise(self) -> NDArray[np.float64] | None:
        """Standard deviation, a coordinate, of the noise in one learner's sum after each round; None without noise."""
        f = self.factorization
        if f is None:
            return None
        if isinstance(f, StationaryFactorization):
            f = f.until(self.steps * self.rounds)
        ends: NDArray[np.float64] = f.row_norms_squared()[self.steps - 1 :: self.steps]
        return self.noise_std * np.sqrt(ends[: self.rounds])

    @cached_property
    def noise_published(self) -> float:
        """`published_noise` of one learner; 0 without noise."""
        return 0.0 if self.factorization is None else published_noise(self.factorization, self.noise_std, self.workload)

    @property
    def effort(self) -> tuple[bool, int]:
        """What its noise takes; see `recommended`."""
        state = 0 if self.factorization is None else self.factorization.program.state_size
        return effort(self.plan.mechanism_name or "", self.plan.objective, state)


def published_noise(factorization: Factorization, noise_std: float, workload: Workload) -> float:
    """Noise of one learner in what is published, at step size one: root of the mean variance, per coordinate.

    This is what `recommended` compares, for every command.
    """
    seen = factorization
    if isinstance(factorization, StationaryFactorization):  # calibrated without an end, looked at up to the horizon
        seen = factorization.until(workload.horizon)
    if workload.plain:
        ends = seen.row_norms_squared()[workload.local_steps - 1 :: workload.local_steps]
        return noise_std * math.sqrt(float(ends.mean()))
    return noise_std * math.sqrt(workload.error(seen).mean) / seen.sensitivity()


def main_method(prepared: Sequence[Prepared]) -> int:
    """Index of the method that a run recommends; the first where none protects anyone.

    Of the methods with the first private one's budget and accounting, the paper's own before baselines, the
    `recommended` one by the noise in what is published.
    """
    private = [i for i, each in enumerate(prepared) if each.guarantee]
    if not private:
        return 0
    first = _budget(prepared[private[0]])
    alike = [i for i in private if _budget(prepared[i]) == first]
    own = [i for i in alike if prepared[i].plan.kind in _OWN] or alike
    promise = prepared[own[0]].guarantee
    order = Order.KNOWN if promise is None else promise.order
    return recommended(own, lambda i: prepared[i].noise_published, lambda i: prepared[i].effort, order)


_OWN = ("ours", "auto")
CLOSE = 1.15
"""Noise this close to the least counts as equal: over 24 seeds, kinds of noise up to 12% apart gave models of the same
accuracy (docs/planning.md has the figures), and the least noise must be solved for, step by step."""
SOLVED = ("optimal", "tree_full")  # mechanisms with a solution of their own for every horizon
T = TypeVar("T")


def recommended(
    choices: Sequence[T],
    noise: Callable[[T], float],
    effort: Callable[[T], tuple[bool, int]],
    order: Order = Order.KNOWN,
) -> T:
    """Which noise to use: the least in what is published, or within 15% of it what takes the least `effort`.

    Under a secret order, always the least: no noise that is compared there is solved for step by step.
    `veilstream plan`, a run's main method, a new project's plan and the demonstrations keep to it.
    """
    least = min(map(noise, choices))
    if order is Order.SECRET:
        return min(choices, key=noise)
    return min(
        (each for each in choices if noise(each) <= CLOSE * least), key=lambda each: (*effort(each), noise(each))
    )


def effort(mechanism: str, objective: str | None, state: int) -> tuple[bool, int]:
    """Whether a mechanism is solved for before it runs, and how many vectors it then keeps."""
    return mechanism in SOLVED or objective is not None, state


def _budget(prepared: Prepared) -> tuple[float, float, str]:
    promise = prepared.guarantee
    assert promise is not None
    return promise.epsilon, promise.delta, promise.accounting.value


def warn_of_kept_noise(plan: Plan, method: MethodPlan) -> None:
    """Notice for a plan under which correlated noise does not cancel as it could."""
    radius = plan.learning.projection_radius
    if radius is not None and method.mechanism_name not in (None, "independent"):
        warnings.warn(
            f"learning.projection_radius = {radius:g} beside correlated noise ({method.name}): a model that is put "
            "back into the ball keeps noise that later steps would have cancelled (remove it; forgetting keeps a "
            'model near its start too, or take mechanism = "independent")',
            PlanNotice,
            stacklevel=3,
        )


def prepare(plan: Plan, method: MethodPlan) -> Prepared:
    """Build the mechanism and calibrate it; a method of kind "auto" then chooses its steps."""
    learning, chooses = plan.learning, method.step_size is None
    if chooses:
        method = with_defaults(plan, method)
    plan.check_visits(method)
    steps, clients = plan.steps_and_clients(method)
    clip_norm = plan.clip_norm_of(method)
    enforced = clip_norm if method.method.clips else _NOT_CLIPPED
    rule = StepRule(
        enforced,
        learning.projection_radius,
        method.method.unit_steps,
        gamma_of(plan, method),
        weights=class_weights_of(plan),
    )
    published, name = plan.workload_of(method), method.mechanism_name
    if not method.method.adds_noise or name is None:
        return Prepared(method, steps, clients, rule, None, 0.0, None, published)
    options: dict[str, Any] = {}
    if method.objective not in (None, "published"):
        options = {"objective": method.objective}
        if name == "optimal":
            options["local_steps"] = steps
        elif plan.participation.times > 1:
            options["participation"] = plan.participation
    horizon = learning.rounds * steps
    if learning.unbounded and name != "independent":
        factorization = without_end(published.forgetting_per_step, horizon)
    elif method.objective == "published":
        factorization = build_for(name, published, plan.participation)
    elif plan.order == "secret" and name == "banded":
        near = Neighbours.of(plan.neighbours)
        factorization = banded_for_secret_order(plan.budget_of(method), published, near, plan.window)
    else:
        factorization = build(name, horizon, **options)
    warn_of_kept_noise(plan, method)
    std, guarantee = calibrate(
        plan.budget_of(method),
        factorization,
        clip_norm,
        neighbours=plan.neighbours,
        accounting=plan.accounting_of(method),
        clients_per_step=clients,
        participation=plan.participation,
        telemetry=plan.telemetry_of(method),
        trust=plan.trust,
        order=plan.order,
        window=plan.window,
    )
    guarantee = replace(guarantee, epochs=plan.epochs_per_person)
    kept = guarantee if method.method.private else None
    if not chooses:
        return Prepared(method, steps, clients, rule, factorization, std, kept, published)
    method, choice = choose_steps(plan, method, factorization, std)
    if choice.outlook is not None and not choice.outlook.worth_it:
        warnings.warn(f"{method.name}: {choice.outlook}", PlanNotice, stacklevel=2)
    return Prepared(method, steps, clients, rule, factorization, std, kept, published, choice)
