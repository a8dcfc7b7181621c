"""`kind = "auto"`: a private method that needs neither a step size nor a clip norm.

Tuning these on clients' records spends privacy that no guarantee counts. Here they follow from
public facts of the plan: task, feature norm, label range, learners, rounds and budget.

* Every client's gradient g becomes g / (|g| + gamma), then goes through the clipper at norm one:
  the sensitivity is that of clip norm one, whatever rounding does. gamma is `GAMMA_SHARE` of the
  longest gradient that the task allows.
* The step makes the noise in a *margin* (what a model says of one client: w·a, or the difference
  of two classes' scores) as large as learning can bear. A model is h·(sum of unit gradients and
  noise), so that noise has standard deviation h · reach · V·e / sqrt(n): V is the calibrated
  noise, e its error in what is published (`Workload.error`, the root of its mean), and reach the
  norm of a margin's gradient. It does not depend on d. h is where this is `KAPPA`, or
  `KAPPA_NUMBER` times the half range of a number that is predicted; but a round moves no margin by
  more than `ROUND_CAP` (half ranges).
* What is published is an exponential average over the last hundredth of the run: long averages are stale wherever
  the world changes, and a short one already takes out most of what noise an average can take out.
* Before anything is spent, an `Outlook` compares the loss that so much noise leaves with that of the commonest label.

`docs/planning.md` says how the constants were chosen and how far the result is from the best tuned.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from veilstream.learning.task_registry import task_kind
from veilstream.mechanisms import Factorization
from veilstream.plans.plan import Plan
from veilstream.plans.plan_tables import MethodPlan
from veilstream.plans.records import class_weights_of
from veilstream.plans.tasks import task_setting

KAPPA = 0.7  # standard deviation of the noise in a class's margin that is aimed at
KAPPA_NUMBER = 0.5  # the same for a predicted number, in half ranges: losses of numbers punish noise more
ROUND_CAP = 4.0  # most that one round of unit gradients, all alike, may move a margin
GAMMA_SHARE = 0.3  # gamma, as a share of the longest gradient that public facts allow
WINDOWS = 100.0  # averages of what is published, one after the other, in a run
TRAVEL = 270.0  # margin that the gradients must be able to move for half of what can be learned to be learned
TRAVEL_POWER = 0.7
LEARNABLE = (
    0.3  # of the entropy of labels, what a linear model took away on the four streams that come with the package
)
_GAMMA_UNKNOWN = 0.01  # of a task whose gradients have no bound that anybody states
_DIGITS = 3  # of a chosen number: people read it, and the last bits of a sum do not matter


@dataclass(frozen=True, kw_only=True)
class PublicFacts:
    """What a plan says of a task before any record is read."""

    margin_reach: float  # `Margins.reach` of the task
    gradient_bound: float | None
    half_range: float
    aim: float  # standard deviation that noise in a margin may have, in half ranges
    known: bool  # whether the task states its margins; otherwise features of norm one are assumed

    @classmethod
    def of(cls, plan: Plan) -> PublicFacts:
        """From the task, the feature norm and the label's range."""
        kind = task_kind(plan.learning.task)
        if kind is None or kind.margins is None:
            return cls(margin_reach=1.0, gradient_bound=None, half_range=1.0, aim=KAPPA, known=False)
        margins = kind.margins(task_setting(plan))
        return cls(
            margin_reach=margins.reach,
            gradient_bound=margins.gradient_bound,
            half_range=margins.half_range,
            aim=KAPPA if kind.target.classifies else KAPPA_NUMBER,
            known=True,
        )


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a private model of labels may be worth, from the plan alone.

    `travel` is how far all gradients together could move a margin, if they agreed: steps · reach · step size. With
    noise of `KAPPA` in the margin it says how much there is to learn from: on synthetic records a share
    1/(1 + (travel/`TRAVEL`)^`TRAVEL_POWER`) of what can be learned was left in the mean over the run. First the labels'
    shares are learned, then what records tell, usually `LEARNABLE` of the shares' entropy; noise of standard deviation
    s in a margin adds s²/8. This is an expectation for a table that nobody has seen, not a bound: whether labels can be
    told from records at all is no public fact.
    """

    travel: float
    expected_loss: float
    majority_loss: float | None  # entropy of data.label_shares; None where the plan does not state them
    records: int  # that the run asks for

    @property
    def worth_it(self) -> bool:
        """Whether more is expected of it than of naming the commonest label, as far as the plan tells."""
        return self.majority_loss is None or self.expected_loss < self.majority_loss

    def __str__(self) -> str:
        expected = f"expected average loss about {self.expected_loss:.2f} from {self.records:,} records"
        if self.majority_loss is None:
            return f"{expected} (state data.label_shares to compare it with the commonest label)"
        if self.worth_it:
            return f"{expected}, always naming the labels' shares {self.majority_loss:.2f}"
        return (
            f"{expected}, no better than the {self.majority_loss:.2f} of always naming the labels' shares: "
            "more records, a larger epsilon, or publish a noisy count instead"
        )


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """The chosen step sizes and the public facts behind them."""

    step_size: float  # η, of a local step
    server_step_size: float  # η_g
    gamma: float
    averaging: float | None
    newest_weight: float | None
    mechanism: str
    margin_noise: float  # standard deviation of the noise in a margin: root mean square over what is published
    capped: bool  # whether the most that a round may move decided, not the noise
    task: str
    facts: PublicFacts
    learners: int
    rounds: int
    local_steps: int
    noise_std: float
    published_std: float  # noise in what is published, at step size one: per coordinate, of one learner
    outlook: Outlook | None  # of labels; None for numbers and for tasks that nobody knows

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        facts = self.facts
        assumed = "" if facts.known else " (assumed: nothing is known of this task)"
        bound = "unknown" if facts.gradient_bound is None else f"{facts.gradient_bound:.3g}"
        average = (
            f"averaging {self.averaging}" if self.newest_weight is None else f"newest_weight {self.newest_weight:g}"
        )
        looks = "" if self.outlook is None else f". Outlook: {self.outlook}"
        reason = (
            f"a round may move a margin by {ROUND_CAP:g} x {facts.half_range:.3g}"
            if self.capped
            else f"aimed at {facts.aim:g} x {facts.half_range:.3g}"
        )
        return (
            f"step_size {self.step_size:g}, server_step_size {self.server_step_size:g}, gradients "
            f"g / (|g| + {self.gamma:g}) clipped to 1, {self.mechanism} noise, "
            f"{average}: noise in a margin {self.margin_noise:.3g} ({reason}). "
            f"From the plan alone: task {self.task}, margin reach {facts.margin_reach:.3g}"
            f"{assumed}, longest gradient {bound}, {self.learners} learners, {self.rounds} rounds "
            f"of {self.local_steps} steps, noise std {self.noise_std:.4g} "
            f"({self.published_std:.4g} in what is published){looks}"
        )


def with_defaults(plan: Plan, method: MethodPlan) -> MethodPlan:
    """The method with an exponential average over a hundredth of the run, unless it says what it publishes."""
    if method.averaging is not None or method.newest_weight is not None:
        return method
    return dataclasses.replace(method, newest_weight=_rounded(min(1.0, WINDOWS / plan.learning.rounds)))


def expected_loss(labels: int, entropy: float | None, travel: float, noise: float) -> float:
    """The mean loss over a run that `Outlook` describes.

    Args:
        labels: how many there are.
        entropy: of their shares; None for equal ones.
        travel: of the run.
        noise: standard deviation of the noise in a margin.

    Returns:
        In nats.

    """
    left = 1.0 / (1.0 + math.pow(travel / TRAVEL, TRAVEL_POWER))
    first = math.log(labels)
    known = first if entropy is None else entropy
    return known + (first - known) * left - LEARNABLE * known * (1.0 - left) + noise**2 / 8.0


def outlook_of(plan: Plan, facts: PublicFacts, moved: float, noise: float, steps: int, clients: int) -> Outlook | None:
    """What to expect of gradients that move a margin by so much a step.

    Args:
        plan: of it the number of records, the labels and their public shares.
        facts: of the task.
        moved: how far a step of unit gradients, all alike, moves a margin.
        noise: standard deviation of the noise in a margin.
        steps: noisy steps of a learner in a round.
        clients: averaged in a step.

    Returns:
        The outlook, for labels alone.

    """
    kind, learning = task_kind(plan.learning.task), plan.learning
    if not facts.known or kind is None or not kind.target.classifies:
        return None
    shares, weights = plan.data.label_shares, class_weights_of(plan)
    labels = len(shares) if shares else len(plan.data.labels or ()) or 2
    counted = 1.0
    if shares and weights is not None:  # rarer labels count alike, so the others' gradients are shortened
        counted = sum(share * weight for share, weight in zip(shares, weights.weights, strict=True))
    travel = moved * learning.rounds * steps * counted
    entropy = -sum(share * math.log(share) for share in shares) if shares else None
    return Outlook(
        travel=travel,
        expected_loss=expected_loss(labels, entropy, travel, noise),
        majority_loss=entropy,
        records=learning.learners * learning.rounds * steps * clients,
    )


def gamma_of(plan: Plan, method: MethodPlan) -> float | None:
    """Gamma of a method that normalises gradients; None for the others."""
    if not method.method.normalises:
        return None
    bound = PublicFacts.of(plan).gradient_bound
    return _GAMMA_UNKNOWN if bound is None else _rounded(GAMMA_SHARE * bound)


def choose_steps(
    plan: Plan, method: MethodPlan, mechanism: Factorization, noise_std: float
) -> tuple[MethodPlan, AutoChoice]:
    """The method with its step sizes, and why.

    Guarantees: a function of its arguments alone, so that server, learners and simulation of one
    plan find the same numbers; nothing of it depends on a record.
    """
    facts, learning = PublicFacts.of(plan), plan.learning
    steps, clients = plan.steps_and_clients(method)
    error = math.sqrt(plan.workload_of(method).error(mechanism).mean)
    published = noise_std * error / mechanism.sensitivity()
    noise_per_step = facts.margin_reach * published / math.sqrt(learning.learners)
    by_noise = facts.aim * facts.half_range / noise_per_step
    by_round = ROUND_CAP * facts.half_range / (steps * facts.margin_reach)
    both = min(by_noise, by_round)
    # Local models carry one learner's noise, the server's only its average (the paper's η_g).
    server = _rounded(math.sqrt(learning.learners)) if steps > 1 else 1.0
    local = _rounded(both / server)
    chosen = dataclasses.replace(method, step_size=local, server_step_size=server)
    gamma = gamma_of(plan, method)
    assert gamma is not None
    assert method.mechanism_name is not None
    return chosen, AutoChoice(
        step_size=local,
        server_step_size=server,
        gamma=gamma,
        averaging=method.averaging,
        newest_weight=method.newest_weight,
        mechanism=method.mechanism_name,
        margin_noise=local * server * noise_per_step,
        capped=by_round < by_noise,
        task=learning.task,
        facts=facts,
        learners=learning.learners,
        rounds=learning.rounds,
        local_steps=steps,
        noise_std=noise_std,
        published_std=published,
        outlook=outlook_of(
            plan, facts, local * server * facts.margin_reach, local * server * noise_per_step, steps, clients
        ),
    )


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
