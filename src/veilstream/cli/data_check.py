"""`veilstream data check`: what a file of records holds, for the person beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veilstream.errors import InputError

if TYPE_CHECKING:
    from veilstream.plans.data_check import DataCheck, Profile

__all__ = ["check_command"]

_PRIVATE = (
    "What this shows was read off people's records: keep it on this screen. A plan is shared; put "
    "only ranges and words into it that anybody knows."
)


def check_command(
    files: Annotated[list[Path], typer.Argument(help="CSV, JSON lines, Parquet, Arrow or SQLite.")],
    plan: Annotated[
        Path | None, typer.Option(help="A plan to check them against.", show_default=False)
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="Which records of a SQLite file, in order.")
    ] = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Put names and kinds of columns into the plan (no values)."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Look at records before any budget is spent: columns, ranges, labels, people, refusals.

    Without a plan it proposes one's `[data]` table. With a plan it says which rows would be used
    and which refused and why, who returns how often, and how many rounds that feeds. It runs here,
    for you alone: nothing is sent or kept.

    Example: `veilstream data check stations.csv`, then `--write --plan plan.toml`, fill in the
    ranges, and `veilstream data check stations.csv --plan plan.toml`.
    """
    from veilstream.cli.tables import print_json
    from veilstream.plans.data_check import check_data, profile, proposal
    from veilstream.plans.plan import Plan
    from veilstream.streams.tables import open_table

    if plan is None or write:
        found = profile(open_table(files[0], query=query))
        source = str(files[0])
        if write:
            _write(plan, proposal(found, source))
        if json:
            print_json(_as_dict(found, proposal(found, source)))
        else:
            _show_profile(found)
            typer.echo("\nA proposal, names and kinds only:\n" if not write else f"\nin {plan}:\n")
            typer.echo(proposal(found, source))
            typer.echo(_PRIVATE)
        return
    checked = check_data(files, Plan.load(plan))
    if json:
        print_json(checked.as_dict())
    else:
        _show_check(checked)


def _write(plan: Path | None, text: str) -> None:
    """Put a proposal where the plan has no [data] yet."""
    import re

    from veilstream.files import write_file

    if plan is None:
        raise InputError("--write", None, "--plan, the file to write to", "--plan plan.toml")
    before = plan.read_text(encoding="utf-8") if plan.exists() else ""
    if re.search(r"^\s*\[+\s*data\b", before, re.MULTILINE):
        raise InputError(
            "--write", str(plan), "a plan without [data]",
            "it has one: remove it first, or copy from the proposal without --write",
        )  # fmt: skip
    write_file(plan, (before.rstrip() + "\n\n" if before.strip() else "") + text)


def _as_dict(found: Profile, proposed: str) -> dict[str, object]:
    return {
        "file": found.name, "rows": found.rows, "unreadable": found.unreadable,
        "notices": found.notices, "roles": found.roles(), "proposal": proposed,
        "columns": [
            {"name": c.name, "kind": c.kind, "missing": c.missing, "distinct": len(c.texts),
             "low": c.low, "high": c.high}
            for c in found.columns.values()
        ],
    }  # fmt: skip


def _table(*headers: str):  # type: ignore[no-untyped-def]
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in ("rows", "missing") else "left")
    return table


def _print(table: object) -> None:
    from rich.console import Console

    Console(highlight=False).print(table, markup=False)


def _show_profile(found: Profile) -> None:
    from rich.markup import escape

    typer.echo(f"{found.name}: {found.rows} rows, {len(found.columns)} columns")
    for notice in found.notices:
        typer.echo(f"  {notice}")
    if found.unreadable:
        typer.echo(f"  {found.unreadable} rows cannot be read (too few or too many cells, no text)")
    roles = {column: role for role, column in found.roles().items()}
    table = _table("column", "looks like", "missing", "holds")
    for column in found.columns.values():
        kind = roles.get(column.name) or column.kind
        table.add_row(escape(column.name), kind, str(column.missing), escape(column.shown))
    _print(table)


def _show_check(checked: DataCheck) -> None:
    report = checked.report
    typer.echo(f"{report.rows} rows: {report.used} can be used, "
               f"{sum(report.refused.values())} are refused, {report.too_often} are of people who "
               "came as often as the promise allows")  # fmt: skip
    for notice in report.notices:
        typer.echo(f"  {notice}")
    typer.echo(f"{report.people} people, {report.returning} of them return, one up to "
               f"{report.most_visits} times")  # fmt: skip
    if checked.labels:
        counted = ", ".join(f"{label}: {count}" for label, count in checked.labels.most_common(12))
        typer.echo(f"labels: {counted}")
    table = _table("learner", "rows", "rounds they feed")
    for name, count in sorted(checked.per_learner.items()):
        table.add_row(name, str(count), str(checked.rounds[name]))
    _print(table)
    if checked.unused_columns:
        typer.echo(f"columns that the plan does not use: {', '.join(checked.unused_columns)}")
    problems = checked.problems()
    for problem in problems:
        typer.echo(f"! {problem}")
    if not problems:
        typer.echo("Every row can be used, and the horizon is fed.")
    typer.echo(_PRIVATE)
