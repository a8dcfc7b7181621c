"""What of a federation's plan a page for strangers shows: numbers, and words from our own lists."""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w

from veilstream.plans.plan import Plan

_TABLES = ("learning", "privacy", "telemetry", "federation", "methods")
_WORDS = ("mechanism", "accounting", "neighbours", "objective", "metrics", "combine")
"""Keys whose texts are names of ours: an operator cannot write anything else there."""


def public_plan(plan: Plan) -> str:
    """The plan as TOML without anything that an operator wrote in words of their own.

    Guarantees: no path, address, column, label, task or method name of the plan is in it; nothing
    at all about data. A key that is added to plans later stays out unless it is a number.
    """
    tables = tomllib.loads(plan.to_toml())
    return tomli_w.dumps({name: _public(tables[name]) for name in _TABLES if name in tables})


def _public(table: Any) -> Any:
    if isinstance(table, list):
        return [_public(entry) for entry in table]
    return {key: content for key, content in table.items() if isinstance(content, int | float) or key in _WORDS}
