"""Rules between the keys of a plan, as data: which key, when it is wrong, the rule, the way out.

`Plan.check` goes through `PLAN_RULES`, then for each method through `METHOD_RULES`; the first broken one is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from veilstream.learning.task_kind import Target
from veilstream.learning.task_registry import task_kind
from veilstream.mechanisms.registry import made_for_published, takes
from veilstream.plans.schema import PlanError

if TYPE_CHECKING:
    from veilstream.plans.plan import Plan
    from veilstream.plans.plan_tables import MethodPlan


Text = str | Callable[..., str]  # words of an error, or a function that makes them of the plan (and the method)


@dataclass(frozen=True)
class Rule:
    """A rule between keys of different tables, or between a key of a method and the rest of the plan."""

    key: str  # dotted, or a method's; the one that is blamed
    broken: Callable[..., object]  # of the plan (and the method): true, in Python's sense, where it does not hold
    expected: Text
    way_out: Text
    shown: Callable[[Plan], Any] | None = None  # the value that an error shows, if not the key's own

    def check(self, plan: Plan, method: MethodPlan | None = None, where: str = "") -> None:
        """Raise `PlanError` where it is broken."""
        parts = (plan,) if method is None else (plan, method)
        if self.broken(*parts):
            value = self.shown(plan) if self.shown else reduce(getattr, self.key.split("."), parts[-1])
            raise PlanError(where + self.key, value, _said(self.expected, *parts), _said(self.way_out, *parts))


def _said(text: Text, *parts: Plan | MethodPlan) -> str:
    return text if isinstance(text, str) else text(*parts)


def _data_of_task(plan: Plan) -> tuple[str, ...]:
    kind = task_kind(plan.learning.task)
    return (plan.data.kind,) if kind is None else kind.data


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _takes_ridge(plan: Plan) -> bool:
    kind = task_kind(plan.learning.task)
    return kind is not None and kind.takes_ridge


def _predicts_a_number(plan: Plan) -> bool:
    kind = task_kind(plan.learning.task)
    return kind is not None and not kind.target.classifies


def _metrics(plan: Plan) -> list[str]:
    return [] if plan.telemetry is None else list(plan.telemetry.metrics)


def _secret(plan: Plan) -> bool:
    return plan.order == "secret"


def _sums(plan: Plan) -> bool:
    return plan.privacy is not None and plan.privacy.trust == "sum"


def _label_count(plan: Plan) -> int:
    """How many labels weights may be for; 0 where the task tells none apart, or the plan names none."""
    kind = task_kind(plan.learning.task)
    if kind is None or not kind.target.classifies:  # a task of one's own weighs its loss itself
        return 0
    if plan.data.kind == "table" and plan.data.labels is not None:
        return len(plan.data.labels)
    return 2 if kind.target is Target.SIGN else 0


def _each_label(plan: Plan) -> str:
    count = _label_count(plan)
    if not count:
        return "nothing: this task tells no labels apart that the plan names (data.labels)"
    return f"{count} numbers, one for each label in their order"


_ATTEND = "remove data.missing, data.late and data.leaving"

PLAN_RULES = (
    Rule(
        "methods.name",
        lambda plan: len({m.name for m in plan.methods}) < len(plan.methods),
        "a name of its own for each",
        "rename one",
        shown=lambda plan: [m.name for m in plan.methods],
    ),
    Rule(
        "data.kind",
        lambda plan: plan.data.kind not in (*_data_of_task(plan), "custom"),
        lambda plan: f'{_quoted(_data_of_task(plan))} or "custom" for task = "{plan.learning.task}"',
        lambda plan: f'kind = "{_data_of_task(plan)[0]}", or another task',
    ),
    Rule(
        "privacy.participations",
        lambda plan: _secret(plan) and plan.participation.times > 1,
        '1 beside order = "secret": several visits of one person have no price there',
        'participations = 1, or order = "known"',
    ),
    Rule(
        "privacy.epochs_per_person",
        lambda plan: _secret(plan) and plan.epochs_per_person > 1,
        '1 beside order = "secret": several epochs of one person have no price there',
        'epochs_per_person = 1, or order = "known"',
    ),
    Rule(
        "learning.unbounded",
        lambda plan: _secret(plan) and plan.learning.unbounded,
        'false beside order = "secret": a record chooses among all steps of an epoch',
        'rounds that you will not reach, or order = "known"',
    ),
    Rule(
        "data.missing",
        lambda plan: _secret(plan) and plan.data.partial_attendance,
        '0 beside order = "secret", and data.late and data.leaving too: a simulation deals records to steps, not '
        "to the rounds that a learner sits out",
        _ATTEND,
        shown=lambda plan: [plan.data.missing, plan.data.late, plan.data.leaving],
    ),
    Rule(
        "privacy.window",
        lambda plan: _secret(plan) and plan.window and plan.steps_of_epoch % plan.window,
        lambda plan: f"a divisor of {plan.steps_of_epoch}, the steps of an epoch (rounds x local_steps)",
        lambda plan: f"window = {math.gcd(plan.steps_of_epoch, plan.window or 1)}, or other rounds",
    ),
    Rule(
        "privacy.window",
        lambda plan: _secret(plan) and plan.window and plan.window >= plan.steps_of_epoch,
        lambda plan: f"less than {plan.steps_of_epoch}, the steps of an epoch: nobody is used in the first window",
        "a shorter window; or none, where all records are there before an epoch begins",
    ),
    Rule(
        "privacy.honest",
        lambda plan: _sums(plan) and plan.privacy.honest is None,
        'a number beside trust = "sum": how many learners\' noise the promise counts on',
        lambda plan: f"honest = {max(1, (plan.learning.learners + 1) // 2)}, if so many can be trusted",
    ),
    Rule(
        "privacy.honest",
        lambda plan: _sums(plan) and (plan.privacy.honest or 0) + plan.privacy.colluding > plan.learning.learners,
        lambda plan: f"at most {plan.learning.learners} together with privacy.colluding: the learners of the plan",
        "fewer honest or colluding ones, or more learners",
    ),
    Rule(
        "learning.local_steps",
        lambda plan: _sums(plan) and plan.learning.local_steps != 1,
        '1 beside trust = "sum": with more, one record moves later gradients of its round through a local model that '
        "only its own learner's noise hides",
        lambda plan: f"local_steps = 1 and clients_per_step = {_clients_of_round(plan)}",
    ),
    Rule(
        "learning.unbounded",
        lambda plan: _sums(plan) and plan.learning.unbounded,
        'false beside trust = "sum"',
        "rounds that you will not reach",
    ),
    Rule(
        "run.noise",
        lambda plan: plan.data.partial_attendance and plan.run.noise == "device",
        '"host" where learners miss rounds: each has noise at a pace of its own',
        f'noise = "host"; or {_ATTEND}',
    ),
    Rule(
        "privacy.min_separation",
        lambda plan: (
            plan.data.partial_attendance and plan.participation.times > 1 and plan.participation.min_separation > 1
        ),
        "1 where people return and learners miss rounds: a learner that sat some out has "
        "taken fewer steps between two visits than the run has",
        f"min_separation = 1 (more noise); or {_ATTEND}",
    ),
    Rule(
        "learning.class_weights",
        lambda plan: plan.learning.class_weights and len(plan.learning.class_weights) != _label_count(plan),
        _each_label,
        "one for each label, or remove it",
    ),
    Rule(
        "learning.class_weights",
        lambda plan: plan.learning.class_weights and max(plan.learning.class_weights) != 1.0,
        "1 as the largest: weights only shorten gradients, the step size makes them longer",
        "divide them all by the largest",
    ),
    Rule(
        "data.label_shares",
        lambda plan: plan.data.label_shares and len(plan.data.label_shares) != _label_count(plan),
        _each_label,
        "one for each label, or remove it",
    ),
    Rule(
        "data.label_shares",
        lambda plan: plan.data.label_shares and abs(sum(plan.data.label_shares) - 1.0) > 0.01,
        "shares that come to 1, to within 0.01",
        "label_shares = [0.73, 0.27]",
    ),
    Rule(
        "data.label_shares",
        lambda plan: plan.data.label_shares and min(plan.data.label_shares) < 0.001 * max(plan.data.label_shares),
        "shares of which none is below a thousandth of another",
        "give the rare label a larger share, or leave it out",
    ),
    Rule(
        "data.label_shares",
        lambda plan: plan.data.label_shares and plan.learning.class_weights,
        "nothing beside learning.class_weights, which it would choose",
        "remove one of the two",
    ),
    Rule(
        "learning.ridge",
        lambda plan: plan.learning.ridge and not _takes_ridge(plan),
        lambda plan: f"0 for {plan.learning.task}",
        "remove it",
    ),
    Rule(
        "learning.learners",
        lambda plan: (plan.data.kind, plan.data.split) == ("mnist", "paper") and plan.learning.learners != 10,
        "10 for the paper's split by digit",
        'learners = 10, or data.split = "even", "dirichlet" or "writers"',
    ),
    Rule(
        "federation.min_clients",
        lambda plan: (plan.federation.min_clients or 0) > _clients_of_round(plan),
        lambda plan: f"at most {_clients_of_round(plan)}, a round's clients (local_steps x clients_per_step)",
        lambda plan: f"min_clients = {_clients_of_round(plan)}",
    ),
    Rule(
        "telemetry.metrics",
        lambda plan: "accuracy" in _metrics(plan) and _predicts_a_number(plan),
        lambda plan: f"no accuracy where {plan.learning.task} predicts a number",
        'metrics = ["loss"], with a loss_cap',
        shown=_metrics,
    ),
    Rule(
        "telemetry.metrics",
        lambda plan: "clipped" in _metrics(plan) and any(m.method.normalises for m in plan.methods),
        "no clipped beside a method that normalises gradients: none is ever clipped",
        "remove it",
        shown=_metrics,
    ),
)


def _without_noise(key: str) -> Rule:
    return Rule(
        key,
        lambda plan, method: not method.method.adds_noise and getattr(method, key) is not None,
        lambda plan, method: f"nothing: {method.kind} adds no noise and protects no one",
        lambda plan, method: f"remove it, or take another kind than {method.kind}",
    )


def _chosen(key: str) -> Rule:
    """A number beside one that is chosen would be tuned on someone's data."""
    return Rule(
        key,
        lambda plan, method: method.method.chooses_steps and method.given(key),
        "nothing: auto takes it from public facts",
        'remove it, or kind = "ours"',
    )


def _clients_of_round(plan: Plan) -> int:
    return plan.learning.local_steps * plan.learning.clients_per_step


def _made_for(method: MethodPlan) -> tuple[str, ...]:
    if method.objective == "published":
        return made_for_published()
    return ("optimal",) if method.objective == "rounds" else ("optimal", "buffered")


def _endless(method: MethodPlan) -> str:
    return "toeplitz" if method.forgetting < 1.0 else "buffered"


_NAME_AN_END = "remove it; or learning.unbounded = false, with the rounds that there will be"

METHOD_RULES = (
    Rule(
        "kind",
        lambda plan, method: (
            _secret(plan)
            and plan.steps_and_clients(method) != (plan.learning.local_steps, plan.learning.clients_per_step)
        ),
        lambda plan, method: (
            f'the plan\'s own steps beside order = "secret": a round of {method.name} has '
            f"{' x '.join(map(str, plan.steps_and_clients(method)))} clients, and records choose among steps"
        ),
        "remove it or its clients_per_step, or set those of learning",
    ),
    *(_without_noise(key) for key in ("epsilon", "delta", "accounting", "mechanism")),
    Rule(
        "mechanism",
        lambda plan, method: (
            method.method.fixed_mechanism and method.mechanism not in (None, method.method.default_mechanism)
        ),
        lambda plan, method: f"{method.method.default_mechanism} for {method.kind}",
        'kind = "ours" takes any',
    ),
    *(_chosen(key) for key in ("step_size", "server_step_size", "clip_norm")),
    Rule(
        "kind",
        lambda plan, method: method.method.chooses_steps and plan.learning.unbounded,
        "a run with an end: auto's step depends on it",
        'rounds that you will not reach, or kind = "ours" with a step_size',
    ),
    Rule(
        "objective",
        lambda plan, method: method.objective is not None and method.mechanism_name not in _made_for(method),
        lambda plan, method: f"only with mechanism = {', '.join(_made_for(method))}",
        "remove it",
    ),
    Rule(
        "clients_per_step",
        lambda plan, method: method.clients_per_step and _clients_of_round(plan) % method.clients_per_step,
        lambda plan, method: f"a divisor of {_clients_of_round(plan)}, the clients that a learner meets in a round",
        lambda plan, method: f"clients_per_step = {math.gcd(_clients_of_round(plan), method.clients_per_step or 1)}",
    ),
    Rule(
        "clients_per_step",
        lambda plan, method: _sums(plan) and method.method.private and plan.steps_and_clients(method)[0] != 1,
        lambda plan, method: f'one step a round beside trust = "sum": {_clients_of_round(plan)}, or nothing',
        "remove it",
    ),
    Rule(
        "objective",
        lambda plan, method: (
            method.objective == "published"
            and not takes(method.mechanism_name or "", "workload")
            and (plan.participation.times == 1 or not plan.workload_of(method).plain)
        ),
        lambda plan, method: (
            "people who return ([privacy] participations > 1) and models as they are: "
            f"{method.mechanism_name} is tuned for nothing else"
        ),
        "remove it, or take optimal or buffered",
    ),
    Rule(
        "mechanism",
        lambda plan, method: (
            plan.learning.unbounded and method.mechanism not in (None, _endless(method), "independent")
        ),
        lambda plan, method: f"nothing, or {_endless(method)}, for unbounded rounds: this one needs an end",
        _NAME_AN_END,
    ),
    Rule(
        "objective",
        lambda plan, method: plan.learning.unbounded and method.objective is not None,
        "nothing beside unbounded rounds: their noise is made for forgetting, or for epochs of doubling length",
        _NAME_AN_END,
    ),
    Rule(
        "kind",
        lambda plan, method: (
            method.method.one_machine and (plan.learning.learners, plan.learning.local_steps) != (1, 1)
        ),
        "learners = 1 and local_steps = 1 (one machine)",
        lambda plan, method: (
            f"this plan has learners = {plan.learning.learners}, local_steps = {plan.learning.local_steps}"
        ),
    ),
)
