"""Plans with another's noise that promise what is left without its secret order, or without honest other learners."""

from __future__ import annotations

import dataclasses
from typing import Any

from veilstream.deployment.terms import Terms
from veilstream.plans.plan import Plan


def known_order(plan: Plan, terms: Terms) -> Plan:
    """The plan with the same noise and a known order: what of the promise does not rest on the order."""
    return _promising(plan, terms.guarantee.epsilon_if_order_known, terms, order="known", window=None)


def floor_plan(plan: Plan, terms: Terms) -> Plan:
    """The plan with the same noise at each learner, for a server that sees each: what the floor rests on."""
    each = _promising(plan, terms.guarantee.floor_epsilon, terms, trust="each", honest=None, colluding=0)
    return dataclasses.replace(each, learning=dataclasses.replace(plan.learning, learners=1))


def _promising(plan: Plan, epsilon: float, terms: Terms, **privacy: Any) -> Plan:
    """With this ε and the terms' δ for all methods."""
    assert plan.privacy is not None
    return dataclasses.replace(
        plan,
        privacy=dataclasses.replace(plan.privacy, epsilon=epsilon, delta=terms.guarantee.delta, **privacy),
        methods=tuple(dataclasses.replace(method, epsilon=None, delta=None) for method in plan.methods),
    )
