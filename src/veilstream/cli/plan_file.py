"""A plan on the command line: a file or a preset's name, and `--set KEY=VALUE`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.errors import InputError

if TYPE_CHECKING:
    from veilstream.plans.plan import Plan

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan's TOML file, or the name of a preset: demo, mnist_private, ...")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key: learning.rounds=200, privacy.epsilon=1, methods.NAME.step_size=0.5. Repeatable.",
        show_default=False,
    ),
]


def load_plan(path: Path, changes: list[str] | None = None) -> Plan:
    """The plan of this file or preset, with its changes."""
    from veilstream.plans.experiments import plan_path
    from veilstream.plans.plan import Plan

    return Plan.load(plan_path(path), overrides_of(changes))


def overrides_of(changes: list[str] | None) -> dict[str, Any]:
    """Key and value of each ``--set``; a value is TOML, or else plain text."""
    found = {}
    for text in changes or []:
        key, equals, given = text.partition("=")
        if not equals or not key:
            raise InputError("--set", text, "KEY=VALUE", "try --set learning.rounds=200")
        try:
            found[key.strip()] = tomllib.loads(f"value = {given}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = given.strip()
    return found
