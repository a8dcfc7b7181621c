"""Whether a plan that simulates can be deployed, and if not, which key is in the way: from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.plans.plan_tables import MethodPlan
from veilstream.records.participation import MOST_TOGETHER


@dataclass(frozen=True, kw_only=True)
class Deployable:
    """What becomes of a plan where `veilstream server` and `veilstream learner` are given it.

    No noise is computed for this. So two refusals are left to a learner's start, before it spends anything: a δ
    that draws of finite length cannot keep (far below 1e-40, or beside an ε above 50), and more steps and
    parameters than float64 can keep the promise for.
    """

    method: str | None
    """The private method that learners run; None if the plan cannot be deployed."""
    why_not: str | None
    """The key that no learner or server accepts, the rule and the way out."""
    only_simulated: tuple[str, ...]
    """Keys that are set and that learners and server do not read."""

    @classmethod
    def of(cls, plan: Plan) -> Deployable:
        """Ask of this plan what learner and server ask of it."""
        ignored = tuple(_only_simulated(plan))
        try:
            method = deployed_method(plan)
            _check_commands(plan)
        except InputError as error:
            return cls(method=None, why_not=str(error), only_simulated=ignored)
        return cls(method=method.name, why_not=None, only_simulated=ignored)

    def text(self) -> str:
        """One line for people."""
        if self.why_not is not None:
            line = f"This plan cannot be deployed as it is: {self.why_not}."
        else:
            line = f"Deployed with this plan, learners run {self.method} and keep its promise."
        return " ".join([line, *(f"{each}." for each in self.only_simulated)])

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"method": self.method, "why_not": self.why_not, "only_simulated": list(self.only_simulated)}


def deployed_method(plan: Plan) -> MethodPlan:
    """The private method that learners run.

    Raises:
        InputError: for a plan that no learner accepts.

    """
    private = [m for m in plan.methods if m.method.private]
    wanted = plan.federation.method
    named = [m for m in private if wanted in (None, m.name)]
    if len(named) != 1:
        names = [m.name for m in private]
        raise InputError(
            "federation.method" if private else "methods",
            wanted if private else [m.name for m in plan.methods],
            f"one of {names}, the private methods of the plan: learners run one" if private else "a private method",
            f'[federation] method = "{names[-1]}"' if private else 'add one of kind = "ours"',
        )
    (method,) = named
    if plan.window is not None and plan.window % plan.learning.local_steps:
        raise InputError(
            "privacy.window",
            plan.window,
            f"whole rounds where learners are deployed: a multiple of local_steps = {plan.learning.local_steps}",
            f"window = {_whole_rounds(plan)}",
        )
    if plan.learning.unbounded and method.forgetting == 1.0:
        raise InputError(
            "learning.unbounded",
            True,
            "a method that forgets, where learners are deployed",
            "add forgetting = 0.999; or unbounded = false, with rounds that you will not reach",
        )
    if plan.learning.unbounded and method.mechanism_name == "independent":
        raise InputError(
            "learning.unbounded",
            True,
            "stationary noise, where learners are deployed: independent noise is for so many steps",
            'kind = "ours" without a mechanism; or unbounded = false, with rounds that you will not reach',
        )
    _, clients = plan.steps_and_clients(method)
    if clients > MOST_TOGETHER and plan.order == "known":
        raise InputError(
            "clients_per_step",
            clients,
            f"at most {MOST_TOGETHER} where learners are deployed: all clients of a step are stored in one write",
            f"clients_per_step = {MOST_TOGETHER}, with more rounds or local_steps",
        )
    return method


def _whole_rounds(plan: Plan) -> int:
    """The shortest window of whole rounds that is no shorter than the plan's and divides its epoch, if there is one."""
    rounds, tau = plan.learning.rounds, plan.learning.local_steps
    divisors = [n for n in range(1, rounds // 2 + 1) if rounds % n == 0]
    return tau * next((n for n in divisors if n * tau >= (plan.window or 0)), divisors[-1] if divisors else 1)


def _check_commands(plan: Plan) -> None:
    """Refuse what only Python can be given; a `Learner` made in Python takes such a plan with its task."""
    if plan.learning.task == "custom":
        raise InputError(
            "learning.task",
            "custom",
            "a task that `veilstream server` and `veilstream learner` can make from the plan",
            'task = "package.module:function", or deploy it from Python',
        )


def _only_simulated(plan: Plan) -> Iterator[str]:
    data = plan.data
    absences = {"missing": data.missing, "late": data.late, "leaving": data.leaving}
    if set_ := [f"data.{key} = {share:g}" for key, share in absences.items() if share > 0.0]:
        yield f"{', '.join(set_)}: only a simulation makes learners miss rounds; deployed ones miss those they miss"
    if data.kind == "custom":
        yield (
            'data.kind = "custom": a stream given in Python is for a simulation; learners get records with '
            "--data live or --data module:function"
        )
