"""`veilstream audit`: measure the privacy that the running code really gives."""

from __future__ import annotations

import sys
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
    full: Annotated[bool, typer.Option("--full", help="More runs and draws: minutes instead of seconds.")] = False,
    runs: Annotated[
        int | None,
        typer.Option(
            min=400, help="How many runs with a canary.", show_default="20000, or fewer for long plans; --full: 100000"
        ),
    ] = None,
    draws: Annotated[
        float | None,
        typer.Option(
            min=1e4,
            max=1e12,
            help="How many numbers of a message its cells are judged by.",
            show_default="2e6 over the steps of a round; --full: 1e8",
        ),
    ] = None,
    federation: Annotated[
        bool, typer.Option("--federation/--no-federation", help="Also run a server and learners, and audit their wire.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Save the picture and audit.json here.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Measure, from the messages alone, how much privacy a deployed learner really gives.

    Runs learners of a plan with their real ledgers, seeds and messages, in temporary folders: with
    many coordinates, with a canary client, with the same draws and other clients, through three
    epochs, from a copied store, and in a federation. Clients come one by one, in groups, twice, and not
    at all; learners are killed and started again. All that they send is compared with the promise; with
    privacy.trust = "sum" so are the sums that a server opens, and all of that with the floor.

    It says first what it will do and how long that takes (a quick audit of a small plan: under a
    minute). Plans of more than 256 rounds (--full: 2,048) are audited with that many.

    Exit code 0: no check found more than was promised. 4: one did. 2: it did not end in the time that it
    announced.
    """
    from veilstream.audit.programme import Programme, limit_of
    from veilstream.audit.report import DEFAULT_PLAN, run_programme
    from veilstream.cli.tables import print_json
    from veilstream.errors import PrivacyError
    from veilstream.plans.plan import Plan
    from veilstream.progress import progress

    loaded = Plan.parse(DEFAULT_PLAN, overrides_of(changes)) if plan is None else load_plan(plan, changes)
    count = None if draws is None else int(draws)
    programme = Programme.of(loaded, full=full, runs=runs, draws=count, federation=federation)
    seconds = programme.seconds()
    limit_s = limit_of(seconds)
    typer.echo(f"{programme.in_words()}. About {_time(seconds)}, at most {_time(limit_s)}.", err=True)
    with progress("auditing", int(sum(programme.costs().values()))) as tick:
        report = run_programme(programme, tick=tick, say=_say, limit_s=limit_s)
    paths = _save(report, out) if out is not None else []
    if json:
        print_json(report.as_dict() | {"files": [str(path) for path in paths]})
    else:
        _show(report, paths)
    if report.alarms:
        raise PrivacyError("the audit found a broken promise: " + "; ".join(report.alarms))


def _say(stage: str) -> None:
    """Where no progress bar is shown, a line for each stage."""
    if not sys.stderr.isatty():
        typer.echo(f"  {stage}", err=True)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


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
    for remark in promise.remarks:
        typer.echo(f"  note: {remark}")
    typer.echo(f"Verdict      {report.verdict}\n")
    typer.echo(f"{'':44}{'mu':>9}{'epsilon':>10}  at delta = {delta:g}")
    sums = report.sums
    promised = "promised" if promise.secret is None else "the noise alone, were the order known"
    rows = []
    if sums is not None:
        rows = [(f"{promised}, for sums", sums.together.claim)]
        rows += [(f"sums, noise of {sums.honest} unknown, d = {sums.noise.coordinates:,}: >=", sums.noise.mu_lower)]
        rows += [(f"{sums.together.runs:,} runs with a canary: >=", sums.together.mu_lower)]
    rows += [(promised if promise.trust is None else "the floor", report.fixed.claim)]
    rows += [
        (f"one run, {name} server, d = {run.coordinates:,}: >=", run.mu_lower)
        for name, run in (("fixed", report.fixed), ("adaptive", report.adaptive))
    ]
    rows += [(f"{many.runs:,} runs with a canary: >=", many.mu_lower)]
    if sums is not None:
        rows += [(f"sums, noise of one unknown, d = {sums.noise.coordinates:,}: >=", sums.mu_of_floor)]
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
    typer.echo(f"\n{len(report.checks)} checks in {report.seconds:.0f} s")
    typer.echo(
        f"\nBounds hold with probability {many.confidence:.0%} each; an alarm on correct code has "
        f"probability below {SHARES * many.false_alarms:.0e}."
    )
    typer.echo("\nAn audit of messages cannot see:")
    for line in UNSEEN:
        typer.echo(f"  - {line}")
    for path in paths:
        typer.echo(f"Saved: {path}")
