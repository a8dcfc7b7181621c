"""`veilstream run` and `veilstream reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Out = Annotated[
    Path | None,
    typer.Option(help="The run's folder, new or empty.", show_default="runs/NAME, or runs/NAME-2 and so on"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Memory = Annotated[
    int | None, typer.Option(help="Budget in MiB; more runs more seeds at once.", show_default="the plan's")
]
Processes = Annotated[int, typer.Option(min=1, help="Spread seeds over this many processes.")]
Resume = Annotated[bool, typer.Option(help="Continue an interrupted run to the same numbers.")]
Seeds = Annotated[int | None, typer.Option(help="How many seeds.", show_default="the plan's")]


def run_command(
    plan: Annotated[Path, typer.Argument(help="A plan in TOML, or the name of a shipped one: mnist_private.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: learning.rounds=200, methods.NAME.step_size=1.")
    ] = None,
    seeds: Seeds = None,
    out: Out = None,
    resume: Resume = False,
    processes: Processes = 1,
    memory: Memory = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show curves in a browser of this machine while they are computed.")
    ] = False,
    live_port: Annotated[int, typer.Option(help="With --live: where it listens.", show_default="one that is free")] = 0,
    json: Json = False,
) -> None:
    """Train by a plan, all methods and seeds at once, and leave a run folder.

    PLAN is a TOML file, or the name of a plan that ships with the package (`mnist_private`: MNIST
    digits at 0.96 with the promise kept).

    The guarantee of every method is printed before anything runs. Ctrl-C leaves a usable partial
    run; --resume goes on from its checkpoint. report.html in the folder shows all of it, and with
    --live the page whose address is printed shows it as it comes.
    """
    from veilstream.cli.training import run_with_progress, show_run
    from veilstream.plans.experiments import plan_path
    from veilstream.plans.plan import Plan, parse_override
    from veilstream.research.learning_figure import draw_run
    from veilstream.runs.folder import latest_folder, new_folder

    overrides = dict(map(parse_override, set_ or [])) | _changes(seeds, memory)
    loaded = Plan.load(plan_path(plan), overrides)
    folder = out or (latest_folder if resume else new_folder)(plan.stem)
    done = run_with_progress(
        loaded, folder, resume=resume, quiet=json, processes=processes, live_port=live_port if live else None
    )
    show_run(done, draw_run(done), json=json)


def reproduce_command(
    figure: Annotated[str, typer.Argument(help="Which: logistic, cnn, clip, beyond or streams.")],
    smoke: Annotated[bool, typer.Option(help="A few rounds and seeds: seconds.")] = False,
    seeds: Seeds = None,
    out: Out = None,
    resume: Resume = False,
    processes: Processes = 1,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Reproduce a figure of the paper, or show what goes beyond it.

    * `logistic`: the paper's first figure, and what is better beside it; a minute on two cores

    * `cnn`: the paper's second figure, MNIST, tau = 1, 2, 4; minutes on a GPU, hours on a CPU

    * `clip`: what the clip norm does to it, and what not clipping hides

    * `beyond`: what reaches 0.9 and more with the promise kept

    * `streams`: prices, forests, flights and people who come back, beside predictions that need no
    learning; a minute or two on two cores

    Data that are not here are fetched.
    """
    from veilstream.cli.training import run_with_progress, show_run, show_runs, show_streams
    from veilstream.plans.experiments import figure_of
    from veilstream.research.experiment_figures import draw_experiment
    from veilstream.runs.folder import latest_folder, new_folder
    from veilstream.simulation.baselines import write_baselines

    wanted = figure_of(figure)
    name = figure + ("-smoke" if smoke else "")
    folder = out or (latest_folder if resume else new_folder)(name)
    runs = {}
    for part, plan in wanted.plans(_changes(seeds, memory), smoke=smoke):
        runs[part] = run_with_progress(plan, folder / part, resume=resume, quiet=json, processes=processes)
        if figure == "streams":
            write_baselines(runs[part])
    figures = draw_experiment(figure, list(runs.values()), folder)
    if figure == "streams":
        show_streams(runs, figures, folder, json=json)
    elif list(runs) == [""]:
        show_run(runs[""], figures, json=json)
    else:
        show_runs(runs, figures, json=json)


def _changes(seeds: int | None, memory: int | None) -> dict[str, Any]:
    given = {"run.seeds": seeds, "run.memory_mib": memory}
    return {key: value for key, value in given.items() if value is not None}
