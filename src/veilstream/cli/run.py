"""`veilstream run` and `veilstream reproduce`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from veilstream.errors import InputError

__all__ = ["reproduce_command", "run_command"]

Out = Annotated[Path | None, typer.Option(help="The run's folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Processes = Annotated[int, typer.Option(min=1, help="Spread seeds over this many processes.")]
Resume = Annotated[bool, typer.Option(help="Continue an interrupted run to the same numbers.")]


def run_command(
    plan: Annotated[Path, typer.Argument(help="A plan in TOML; see experiments/ for examples.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a key: learning.rounds=200, methods.NAME.step_size=1."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.", show_default=False)] = None,
    out: Out = None,
    resume: Resume = False,
    processes: Processes = 1,
    json: Json = False,
) -> None:
    """Train by a plan, all methods and seeds at once, and leave a run folder.

    The guarantee of every method is printed before anything runs. Ctrl-C leaves a usable partial
    run; --resume goes on from its checkpoint.
    """
    overrides = dict(_override(text) for text in set_ or [])
    if seeds is not None:
        overrides["run.seeds"] = seeds
    _train(
        plan,
        overrides,
        out or Path("runs") / plan.stem,
        resume=resume,
        processes=processes,
        json=json,
    )


def reproduce_command(
    figure: Annotated[str, typer.Argument(help="Which figure: logistic.")],
    smoke: Annotated[bool, typer.Option(help="60 rounds, 2 seeds: seconds.")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds.", show_default=False)] = None,
    out: Out = None,
    resume: Resume = False,
    processes: Processes = 1,
    json: Json = False,
) -> None:
    """Reproduce a figure of the paper, and draw what is better than the paper beside it."""
    from veilstream.engines.experiments import experiment_path

    overrides: dict[str, Any] = {}
    if smoke:
        overrides = {"learning.rounds": 60, "run.seeds": 2}
    if seeds is not None:
        overrides["run.seeds"] = seeds
    folder = out or Path("runs") / (figure + ("-smoke" if smoke else ""))
    _train(
        experiment_path(figure), overrides, folder, resume=resume, processes=processes, json=json
    )


def _train(
    path: Path, overrides: dict[str, Any], out: Path, *, resume: bool, processes: int, json: bool
) -> None:
    from veilstream.cli.training import run_with_progress, show_run
    from veilstream.engines.plan import Plan
    from veilstream.reports.learning_figure import draw_run

    plan = Plan.load(path, overrides)
    finished = run_with_progress(plan, out, resume=resume, quiet=json, processes=processes)
    show_run(finished, draw_run(finished), json=json)


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError("--set", text, "key=value", "try learning.rounds=200")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
