"""`veilstream audit`: measure the privacy that the running code really gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veilstream.cli.options import Changes, Json, load_plan, overrides_of

if TYPE_CHECKING:
    from veilstream.audit import AuditReport


def command(
    plan: Annotated[
        Path | None,
        typer.Option(
            help="A plan in TOML with one private method.", show_default="64 steps at (2, 1e-3), buffered noise"
        ),
    ] = None,
    changes: Changes = None,
    runs: Annotated[int, typer.Option(min=400, help="How many runs with a canary stand behind the verdict.")] = 100_000,
    draws: Annotated[
        float, typer.Option(min=1e4, max=1e12, help="How many numbers of a message its cells are judged by.")
    ] = 1e8,
    federation: Annotated[
        bool, typer.Option("--federation", help="Also run a server and learners, and audit their wire.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Save the picture and audit.json here.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Measure, from the messages alone, how much privacy a deployed learner really gives.

    Runs the learner of a plan with its real ledger, seeds and messages, in temporary folders: one
    run with many coordinates, many runs with a canary client, two runs with the same draws whose
    clients differ, small learners through two epochs, and some that only make noise, whose numbers
    are counted cell by cell (most of the time: some 2 minutes; `--draws 1e6` for a quick look). All
    are compared with the promise.

    Exit code 0: no check found more than was promised. 4: one did.
    """
    from veilstream.audit import audit
    from veilstream.audit.report import DEFAULT_PLAN, ticks
    from veilstream.cli.tables import print_json
    from veilstream.errors import PrivacyError
    from veilstream.plans.plan import Plan
    from veilstream.progress import progress

    loaded = Plan.parse(DEFAULT_PLAN, overrides_of(changes)) if plan is None else load_plan(plan, changes)
    count = int(draws)
    with progress("auditing", ticks(loaded, runs, count, federation=federation)) as tick:
        report = audit(loaded, runs=runs, draws=count, federation=federation, tick=tick)
    paths = _save(report, out) if out is not None else []
    if json:
        print_json(report.as_dict() | {"files": [str(path) for path in paths]})
    else:
        _show(report, paths)
    if report.alarms:
        raise PrivacyError("the audit found a broken promise: " + "; ".join(report.alarms))


def _save(report: AuditReport, folder: Path) -> list[Path]:
    import json as text

    from veilstream.files import write_file
    from veilstream.reports.audit_figure import draw_audit

    paths = draw_audit(report, folder)
    write_file(folder / "audit.json", text.dumps(report.as_dict(), indent=2) + "\n")
    return [*paths, folder / "audit.json"]


def _show(report: AuditReport, paths: list[Path]) -> None:
    from veilstream.audit.report import SHARES, UNSEEN
    from veilstream.audit.statistics.many_run import epsilon_of

    promise, many, delta = report.guarantee, report.many, report.guarantee.delta
    typer.echo(f"Guarantee    {promise}")
    typer.echo(f"Verdict      {report.verdict}\n")
    typer.echo(f"{'':44}{'mu':>9}{'epsilon':>10}  at delta = {delta:g}")
    rows = [("promised", report.fixed.claim)]
    rows += [
        (f"one run, {name} server, d = {run.coordinates:,}: >=", run.mu_lower)
        for name, run in (("fixed", report.fixed), ("adaptive", report.adaptive))
    ]
    rows += [(f"{many.runs:,} runs with a canary: >=", many.mu_lower)]
    for label, mu in rows:
        typer.echo(f"{label:44}{mu:9.4f}{epsilon_of(mu, delta):10.4f}")
    typer.echo(f"{'  the same, without assumptions: >=':44}{'':9}{many.epsilon_lower:10.4f}")
    if report.local_steps > 1 and report.fixed.expected is not None:
        sent = float(report.fixed.expected.max())
        typer.echo(f"{'  (what messages alone can tell)':44}{sent:9.4f}")
    twins = report.twins
    typer.echo(
        f"\nSame draws, one client replaced: the transcripts differ by the predicted image of its "
        f"gradient, to within {twins.unexplained_units} of {twins.moved_units:,} units"
    )
    typer.echo("")
    for check in report.checks:
        typer.echo(f"{check.name}: {check.figure}; p = {check.p:.2g}")
    typer.echo(
        f"\nBounds hold with probability {many.confidence:.0%} each; an alarm on correct code has "
        f"probability below {SHARES * many.false_alarms:.0e}."
    )
    typer.echo("\nAn audit of messages cannot see:")
    for line in UNSEEN:
        typer.echo(f"  - {line}")
    for path in paths:
        typer.echo(f"Saved: {path}")
