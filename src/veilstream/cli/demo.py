"""`veilstream demo`: what `./run` shows a stranger in the first minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train privately online across 20 learners, with every kind of noise side by side.

    A smaller version of the paper's first figure: logistic regression, each learner meets 4 clients
    between two released models. An earlier demo in the same folder is replaced; anything else
    there is left alone, and refused.
    """
    from veilstream.cli.training import run_with_progress, show_run
    from veilstream.plans.experiments import experiment_path
    from veilstream.plans.plan import Plan
    from veilstream.research.learning_figure import draw_run
    from veilstream.runs.folder import clear_earlier

    plan = Plan.load(experiment_path("demo"), {"run.seeds": seeds})
    clear_earlier(out, plan)
    finished = run_with_progress(plan, out, resume=False, quiet=json)
    show_run(finished, draw_run(finished), json=json)
