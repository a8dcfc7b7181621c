"""`veilstream run`, `demo` and `reproduce`: simulations into run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.cli.options import Changes, PlanArgument, load_plan, overrides_of

Out = Annotated[
    Path | None,
    typer.Option(help="The run's folder, new or empty.", show_default="runs/NAME, or runs/NAME-2 and so on"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Processes = Annotated[int, typer.Option(min=1, help="Spread seeds over this many processes.")]
Resume = Annotated[bool, typer.Option(help="Continue an interrupted run to the same numbers.")]


def run_command(
    plan: PlanArgument,
    changes: Changes = None,
    out: Out = None,
    resume: Resume = False,
    processes: Processes = 1,
    live: Annotated[
        bool, typer.Option("--live", help="Show curves in a browser of this machine while they are computed.")
    ] = False,
    json: Json = False,
) -> None:
    """Simulate a plan, all methods and seeds at once, and leave a run folder with report.html.

    The guarantee of every method is printed before anything runs. Three ways to watch: a progress
    bar; with --live a page that shows the curves as they are computed; report.html afterwards.
    Ctrl-C leaves a usable partial run, which --resume continues.

    Example: `veilstream run plan.toml --set run.seeds=3 --out runs/first`
    """
    from veilstream.cli.training import run_with_progress, show_run
    from veilstream.runs.folder import latest_folder, new_folder

    folder = out or (latest_folder if resume else new_folder)(plan.stem)
    done = run_with_progress(
        load_plan(plan, changes), folder, resume=resume, quiet=json, processes=processes, live=live
    )
    show_run(done, [], json=json)


def demo_command(
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/demo"),
    changes: Changes = None,
    json: Json = False,
) -> None:
    """Train privately online across 20 learners, with every kind of noise side by side.

    A smaller version of the paper's first figure: logistic regression, each learner meets 4 clients
    between two released models. An earlier demo in the same folder is replaced; anything else
    there is left alone, and refused.
    """
    from veilstream.cli.training import run_with_progress, show_run
    from veilstream.runs.folder import clear_earlier

    plan = load_plan(Path("demo"), changes)
    clear_earlier(out, plan)
    show_run(run_with_progress(plan, out, resume=False, quiet=json), [], json=json)


def reproduce_command(
    figure: Annotated[str, typer.Argument(help="Which: logistic, fair, cnn, clip, beyond or streams.")],
    smoke: Annotated[bool, typer.Option(help="A few rounds and seeds: seconds.")] = False,
    changes: Changes = None,
    out: Out = None,
    resume: Resume = False,
    processes: Processes = 1,
    json: Json = False,
) -> None:
    """Reproduce a figure of the paper, or show what goes beyond it.

    * `logistic`: the paper's first figure, and what is better beside it; a minute on two cores

    * `fair`: the same task with every method at its own best, number of releases included

    * `cnn`: the paper's second figure, MNIST, tau = 1, 2, 4; minutes on a GPU, hours on a CPU

    * `clip`: what the clip norm does to it, and what not clipping hides

    * `beyond`: what reaches 0.9 and more with the promise kept

    * `streams`: prices, forests, flights and people who come back, every method at its own best, beside
    predictions from labels alone; tens of minutes on two cores

    Data that are not here are fetched.
    """
    from veilstream.cli.training import need_packages, run_with_progress, show_run, show_runs, show_streams
    from veilstream.plans.experiments import figure_of
    from veilstream.research.experiment_figures import draw_experiment
    from veilstream.runs.folder import latest_folder, new_folder
    from veilstream.simulation.baselines import write_baselines

    need_packages(jax="jax", matplotlib="figures")
    wanted = figure_of(figure)
    name = figure + ("-smoke" if smoke else "")
    folder = out or (latest_folder if resume else new_folder)(name)
    runs = {}
    for part, plan in wanted.plans(overrides_of(changes), smoke=smoke):
        runs[part] = run_with_progress(plan, folder / part, resume=resume, quiet=json, processes=processes)
        if figure in ("logistic", "fair", "streams"):
            write_baselines(runs[part])
    figures = draw_experiment(figure, runs, folder)
    if figure == "streams":
        show_streams(runs, figures, folder, json=json)
    elif list(runs) == [""]:
        show_run(runs[""], figures, json=json)
    else:
        show_runs(runs, figures, json=json)
