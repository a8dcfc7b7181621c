"""`veilstream plan`: how much noise a run would need, mechanism by mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.cli.tables import as_json, print_comparison, print_json
from veilstream.errors import InputError
from veilstream.mechanisms import MECHANISMS, Workload
from veilstream.mechanisms.checks import positive_integer
from veilstream.mechanisms.participation import Participation
from veilstream.mechanisms.registry import MADE_FOR_PUBLISHED, options_for
from veilstream.plans.comparison import Comparison, Setting, compare
from veilstream.privacy.guarantee import Accounting, Budget, Neighbours
from veilstream.privacy.telemetry import Telemetry
from veilstream.progress import progress
from veilstream.research.error_figure import check_figure_path, draw_error_over_time

if TYPE_CHECKING:
    from veilstream.plans.plan_tables import TelemetryPlan


def _compare_with_progress(
    setting: Setting, names: list[str] | None, options: dict[str, Any] | None = None
) -> Comparison:
    """`compare` with a bar on stderr."""
    with progress("comparing mechanisms", total=len(names or MECHANISMS)) as done:
        return compare(setting, names, options=options, tick=lambda _: done(1))


def command(
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PLAN]",
            show_default=False,
            help="A plan's file: its first private method; options below change it.",
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget ε; lower is more private.")] = None,
    delta: Annotated[float | None, typer.Option(help="Privacy budget δ, well below 1/clients.")] = None,
    rounds: Annotated[int | None, typer.Option(help="R: how many models are released.")] = None,
    local_steps: Annotated[int | None, typer.Option(help="τ: steps of a learner in a round.", show_default="1")] = None,
    clients_per_step: Annotated[
        int | None, typer.Option(help="Clients that a step averages.", show_default="1")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="B_g: norm that gradients are clipped to.", show_default="1.0")
    ] = None,
    learners: Annotated[int | None, typer.Option(help="n: learners that are averaged.", show_default="1")] = None,
    dim: Annotated[int | None, typer.Option(help="d: parameters of the model.", show_default="100")] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="Only this one: " + ", ".join(MECHANISMS) + ".", show_default=False)
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="With --mechanism optimal: mean, max or rounds; or published, for what is published.",
            show_default=False,
        ),
    ] = None,
    neighbours: Annotated[str | None, typer.Option(help="replace-one or zero-out.", show_default="replace-one")] = None,
    participations: Annotated[
        int | None, typer.Option(help="How often a client may take part.", show_default="1")
    ] = None,
    separation: Annotated[
        int | None, typer.Option(help="Least steps between a client's visits.", show_default="1")
    ] = None,
    accounting: Annotated[
        str | None, typer.Option(help="exact, or zcdp as in the paper.", show_default="exact")
    ] = None,
    step_size: Annotated[float | None, typer.Option(help="η·η_g, to show the noise in the model itself.")] = None,
    step_decay: Annotated[
        float | None, typer.Option(help="Steps fall like (1 + round)^-decay.", show_default="0")
    ] = None,
    averaging: Annotated[
        float | None, typer.Option(help="Publish an average: model r weighs about r^averaging.")
    ] = None,
    newest_weight: Annotated[
        float | None, typer.Option(help="Publish an exponential average with this newest weight.")
    ] = None,
    forgetting: Annotated[float | None, typer.Option(help="ρ: x⁰ + ρ·(x - x⁰) every round.", show_default="1")] = None,
    people: Annotated[int | None, typer.Option(help="How many people a learner has; says if they are too few.")] = None,
    unbounded: Annotated[
        bool | None, typer.Option("--unbounded", help="Nobody knows when it ends: what that costs.", show_default=False)
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw error over time: .png, .svg or .pdf.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare all mechanisms for a run: how much noise, how much error, at what cost.

    Examples: `veilstream plan plan.toml`, or without a file
    `veilstream plan --epsilon 2 --delta 1e-3 --rounds 1000 --local-steps 4 --learners 20`
    """
    known = _DEFAULTS if plan is None else _of_plan(plan, dim)
    options_given = {
        "epsilon": epsilon,
        "delta": delta,
        "rounds": rounds,
        "local_steps": local_steps,
        "clients_per_step": clients_per_step,
        "clip_norm": clip_norm,
        "learners": learners,
        "dim": dim,
        "neighbours": neighbours,
        "participations": participations,
        "separation": separation,
        "accounting": accounting,
        "step_size": step_size,
        "step_decay": step_decay,
        "averaging": averaging,
        "newest_weight": newest_weight,
        "forgetting": forgetting,
        "people": people,
        "unbounded": unbounded,
    }
    chosen: dict[str, Any] = {key: known.get(key) if given is None else given for key, given in options_given.items()}
    for key in ("epsilon", "delta", "rounds"):
        if chosen[key] is None:
            raise InputError(
                f"--{key}",
                None,
                "a number, or a plan's file that says it",
                "`veilstream plan plan.toml`, or see --help",
            )
    local_steps = int(chosen["local_steps"])
    positive_integer("rounds", chosen["rounds"], "R, try 1000")
    positive_integer("local_steps", local_steps, "τ, try 4")
    workload = Workload(
        horizon=int(chosen["rounds"]) * local_steps,
        local_steps=local_steps,
        **{key: chosen[key] for key in _PUBLISHING},
    )
    setting = Setting(
        budget=Budget(chosen["epsilon"], chosen["delta"]),
        rounds=chosen["rounds"],
        local_steps=local_steps,
        clip_norm=chosen["clip_norm"],
        clients_per_step=chosen["clients_per_step"],
        learners=chosen["learners"],
        dim=chosen["dim"],
        neighbours=Neighbours.of(chosen["neighbours"]),
        participation=Participation(chosen["participations"], chosen["separation"]),
        accounting=Accounting.of(chosen["accounting"]),
        telemetry=_telemetry(known.get("telemetry"), chosen["clip_norm"]),
        workload=workload,
        step_size=chosen["step_size"],
        people=chosen["people"],
        unbounded=bool(chosen["unbounded"]),
    )
    options = {} if objective is None else _made_for(objective, mechanism, setting)
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


def _made_for(objective: str, mechanism: str | None, setting: Setting) -> dict[str, Any]:
    """Options of the mechanism, as `prepare` gives them for a plan's objective."""
    fitting = MADE_FOR_PUBLISHED if objective == "published" else ("optimal",)
    if mechanism is None or mechanism not in fitting:
        raise InputError(
            "--objective",
            objective,
            f"beside --mechanism {', '.join(fitting)}",
            "name one of these, or leave it out: without both, all mechanisms are compared",
        )
    if setting.unbounded:
        raise InputError("--objective", objective, "nothing beside --unbounded: that noise is as it is", "leave it out")
    if objective != "published":
        return {"objective": objective, "local_steps": setting.local_steps}
    if mechanism == "banded" and setting.participation.times == 1:
        raise InputError(
            "--objective",
            objective,
            "beside --mechanism banded only with --participations > 1",
            "leave it out: banded is tuned for people who return, and for nothing else",
        )
    return options_for(mechanism, setting.published, setting.participation)


_DEFAULTS: dict[str, Any] = {
    "local_steps": 1,
    "clients_per_step": 1,
    "clip_norm": 1.0,
    "learners": 1,
    "dim": 100,
    "neighbours": "replace-one",
    "participations": 1,
    "separation": 1,
    "accounting": "exact",
    "step_decay": 0.0,
    "forgetting": 1.0,
}
_PUBLISHING = ("step_decay", "averaging", "newest_weight", "forgetting")
"""Options that say what is published, as `Workload` names them."""


def _telemetry(told: TelemetryPlan | None, clip_norm: float) -> Telemetry | None:
    """Of a plan; its width goes with the clip norm, also with one that an option gives."""
    if told is None:
        return None
    return Telemetry(told.metrics, told.scale * clip_norm, told.loss_cap)


def _of_plan(path: Path, dim: int | None) -> dict[str, Any]:
    """What a plan's first private method says; the model's size from its task unless given."""
    from veilstream.plans.plan import Plan
    from veilstream.plans.prepare import prepare, warn_of_kept_noise
    from veilstream.plans.tasks import task_of

    plan = Plan.load(path)
    method = next((m for m in plan.methods if m.method.private), None)
    if method is None:
        raise InputError(
            "methods", [m.name for m in plan.methods], "a method that protects someone", "add one with a mechanism"
        )
    if method.method.chooses_steps:
        method = prepare(plan, method).plan
    else:
        runs = method.mechanism_name or "no"
        if plan.learning.unbounded and runs != "independent":
            runs = "stationary" if method.forgetting < 1.0 else "doubling"
        warn_of_kept_noise(plan, runs)
    budget, learning, often = plan.budget_of(method), plan.learning, plan.participation
    steps, clients = plan.steps_and_clients(method)
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "rounds": learning.rounds,
        "local_steps": steps,
        "clients_per_step": clients,
        "clip_norm": plan.clip_norm_of(method),
        "learners": learning.learners,
        "dim": task_of(plan).dim if dim is None else dim,
        "neighbours": plan.neighbours,
        "participations": often.times,
        "separation": often.min_separation,
        "accounting": plan.accounting_of(method),
        "step_size": method.local_step_size * method.server_step_size,
        "people": plan.data.clients,
        "telemetry": plan.telemetry,
        **{key: getattr(method, key) for key in _PUBLISHING},
        "unbounded": learning.unbounded,
    }
