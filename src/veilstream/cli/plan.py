"""`veilstream plan`: how much noise a run would need, mechanism by mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veilstream.cli.tables import as_json, print_comparison, print_json
from veilstream.mechanisms import MECHANISMS
from veilstream.mechanisms.participation import Participation
from veilstream.privacy.guarantee import Accounting, Budget, Neighbours
from veilstream.progress import progress
from veilstream.reports.comparison import Comparison, Setting, compare
from veilstream.reports.error_figure import check_figure_path, draw_error_over_time

__all__ = ["command"]


def _compare_with_progress(
    setting: Setting, names: list[str] | None, options: dict[str, Any] | None = None
) -> Comparison:
    """`compare` with a bar on stderr."""
    with progress("comparing mechanisms", total=len(names or MECHANISMS)) as done:
        return compare(setting, names, options=options, tick=lambda _: done(1))


def command(
    epsilon: Annotated[float, typer.Option(help="Privacy budget ε; lower is more private.")],
    delta: Annotated[float, typer.Option(help="Privacy budget δ, well below 1/clients.")],
    rounds: Annotated[int, typer.Option(help="R: how many models are released.")],
    local_steps: Annotated[int, typer.Option(help="τ: clients a learner meets in a round.")] = 1,
    clip_norm: Annotated[
        float, typer.Option(help="B_g: norm that gradients are clipped to.")
    ] = 1.0,
    learners: Annotated[int, typer.Option(help="n: learners that are averaged.")] = 1,
    dim: Annotated[int, typer.Option(help="d: parameters of the model.")] = 100,
    mechanism: Annotated[
        str | None,
        typer.Option(help="Only this one: " + ", ".join(MECHANISMS) + ".", show_default=False),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help="With --mechanism optimal: mean, max or rounds.", show_default=False),
    ] = None,
    neighbours: Annotated[str, typer.Option(help="replace-one or zero-out.")] = "replace-one",
    participations: Annotated[int, typer.Option(help="How often a client may take part.")] = 1,
    separation: Annotated[int, typer.Option(help="Least steps between a client's visits.")] = 1,
    accounting: Annotated[str, typer.Option(help="exact, or zcdp as in the paper.")] = "exact",
    figure: Annotated[
        Path | None, typer.Option(help="Draw error over time: .png, .svg or .pdf.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare all mechanisms for a run: how much noise, how much error, at what cost.

    Example:
        veilstream plan --epsilon 2 --delta 1e-3 --rounds 1000 --local-steps 4 --learners 20

    """
    setting = Setting(
        budget=Budget(epsilon, delta),
        rounds=rounds,
        local_steps=local_steps,
        clip_norm=clip_norm,
        learners=learners,
        dim=dim,
        neighbours=Neighbours.of(neighbours),
        participation=Participation(participations, separation),
        accounting=Accounting.of(accounting),
    )
    options: dict[str, Any] = {}
    if objective is not None:
        if mechanism != "optimal":
            raise typer.BadParameter("goes with --mechanism optimal", param_hint="--objective")
        options = {"objective": objective, "local_steps": local_steps}
    names = None if mechanism is None else [mechanism]
    if figure is not None:
        check_figure_path(figure)
    comparison = _compare_with_progress(setting, names, options)
    drawn = None
    if figure is not None:
        drawn = draw_error_over_time(comparison, figure)
    if json:
        print_json(as_json(comparison) | ({"figure": str(drawn)} if drawn else {}))
        return
    print_comparison(comparison)
    if drawn:
        typer.echo(f"Figure: {drawn}")
