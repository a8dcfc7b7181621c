"""`veilstream data check`: what a file of records holds, for the person beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veilstream.cli.options import Json
from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.wording import counted, shown, shown_lines

if TYPE_CHECKING:
    from veilstream.plans.column_profile import Column, Profile
    from veilstream.plans.data_check import DataCheck
    from veilstream.streams.table import Table


_NUMBERS = ("rows", "rounds", "missing", "rows in run")
_PRIVATE = (
    "This was read off people's records: keep it on this screen. A plan is shared; put only public ranges and "
    "words into it."
)


def check_command(
    files: Annotated[
        list[Path], typer.Argument(help="CSV, JSON lines (also .gz), Parquet, Arrow, SQLite; or folders.")
    ],
    plan: Annotated[
        Path | None, typer.Option(help="The plan to check them against, or a new one to propose.", show_default=False)
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column that is predicted.", show_default="a guess")] = None,
    client: Annotated[
        str | None, typer.Option(help='Column that says who; "#row" if nobody returns.', show_default="a guess")
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="Which records of SQLite files, in order; otherwise data.query.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Put names and kinds of columns into the plan (no values).")
    ] = False,
    json: Json = False,
) -> None:
    """Check records before any budget is spent: columns, ranges, labels, people, refusals.

    With a plan that is not there yet, it proposes one: names and kinds of columns, task, rounds, and "?" where a
    person must say what anybody knows. With a plan that is there it says which rows would be used or
    refused and why, how often people return, how many rounds the records are enough for, what
    `veilstream run` would refuse (exit code 2 then), and whether the plan can be deployed. Nothing is sent or kept.

    Example: `veilstream data check visits.csv --label came_back --client patient --plan plan.toml`, fill in each
    "?", and the same again without `--label` and `--client`.
    """
    from veilstream.cli.tables import print_json
    from veilstream.deployment.deployable import Deployable
    from veilstream.plans.column_profile import profile
    from veilstream.plans.data_check import check_data
    from veilstream.plans.plan import Plan

    if write and plan is None:
        raise InputError("--write", None, "--plan, the file to write to", "--plan plan.toml")
    known = {role: column for role, column in (("label", label), ("client", client)) if column is not None}
    new = plan is not None and not plan.exists()
    if plan is None or write or new:
        found = profile([_opened(file, query) for file in files], known)
        proposed = _proposed(found, _source(files), plan if write or new else None)
        if json:
            print_json(_as_dict(found, proposed))
        else:
            _show_profile(found)
            _show_label(found)
            typer.echo(f"\nin {shown(plan)}:\n" if plan is not None else "\nA proposal; --plan FILE writes a plan:\n")
            _say(proposed)
            typer.echo(_PRIVATE)
            if plan is not None:
                typer.echo(f'Next: in {shown(plan)}, write in the place of each "?"; then run this command again.')
        return
    if known:
        raise InputError(
            "--" + next(iter(known)),
            next(iter(known.values())),
            "what the plan says",
            f"{plan} is there: change it there",
        )
    loaded = Plan.load(plan)
    checked, deployable = check_data(files, loaded, query), Deployable.of(loaded)
    if json:
        print_json(checked.as_dict() | {"deployed": deployable.as_dict()})
    else:
        _show_check(checked, deployable.text())
    if checked.run_refuses is not None:
        raise typer.Exit(InputError.exit_code)


def _opened(path: Path, query: str | None) -> Table:
    from veilstream.streams.folder_table import FolderTable, names_many
    from veilstream.streams.tables import open_table

    return FolderTable(path, open_table) if names_many(path) else open_table(path, query=query)


def _source(files: list[Path]) -> str:
    """A path or pattern that names these files and no others; `InputError` if there is none."""
    if len(files) == 1:
        return str(files[0])
    folder, suffix = files[0].parent, files[0].suffix
    found = {path.resolve() for path in folder.glob(f"*{suffix}")}
    if found != {path.resolve() for path in files}:
        raise InputError(
            "FILES",
            [str(file) for file in files],
            "files that one pattern names, as data.source does",
            f"put them, and no other *{suffix} file, into one folder",
        )
    return str(folder / f"*{suffix}")


def _proposed(found: Profile, source: str, plan: Path | None) -> str:
    """What is proposed; written, if a plan is named, where it lacks [data] or has that of a new project."""
    from veilstream.plans.new_project import without_sample_data
    from veilstream.plans.proposal import data_table, whole_plan

    if plan is None:
        return data_table(found, source)
    found.check_header()
    if not plan.exists():
        text = proposed = whole_plan(found, source, plan.resolve().parent.name or "run")
    else:
        proposed = data_table(found, source)
        before = without_sample_data(plan.read_text(encoding="utf-8"))
        if re.search(r"^\s*\[+\s*data\b", before, re.MULTILINE):
            raise InputError(
                "--write",
                str(plan),
                "a plan without [data]",
                "it has one: remove it first, or name a plan that is not there yet",
            )
        text = (before.rstrip() + "\n\n" if before.strip() else "") + proposed
    write_file(plan, text)
    return proposed


def _show_label(found: Profile) -> None:
    """The label's texts, which a person may know from elsewhere: on this screen, never in the plan."""
    from veilstream.plans.proposal import label_is_class

    if found.roles.label is None or not label_is_class(column := found.columns[found.roles.label]):
        return
    spellings: dict[str, str] = {}
    for text, _ in column.texts.most_common():
        spellings.setdefault(text.casefold(), text)
    each = ", ".join(f'"{text}"' for text in spellings.values())
    _say(f"\nIf everyone knows these to be the label's texts: labels = [{each}]")


def _as_dict(found: Profile, proposed: str) -> dict[str, object]:
    return {
        "files": found.names,
        "rows": found.rows,
        "unreadable": found.unreadable,
        "notices": found.notices,
        "roles": found.roles.as_dict(),
        "remarks": [*found.doubts_of_header, *found.roles.remarks],
        "proposal": proposed,
        "columns": [
            {"name": c.name, "kind": c.kind, "missing": c.missing, "distinct": c.distinct, "low": c.low, "high": c.high}
            for c in found.columns.values()
        ],
    }


def _show_table(headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in _NUMBERS else "left")
    for row in rows:
        table.add_row(*(escape(shown(cell)) for cell in row))
    Console(highlight=False).print(table, markup=False)


def _say(text: str) -> None:
    """Column names, cells and notices are a file's text: nothing of it moves the cursor."""
    typer.echo(shown_lines(text))


def _show_profile(found: Profile) -> None:
    _say(f"{found.title}: {counted(found.rows, 'row')}, {counted(len(found.columns), 'column')}")
    for notice in found.notices:
        _say(f"  {notice}")
    if found.unreadable:
        _say(f"  {counted(found.unreadable, 'row')} cannot be read (too few or too many cells, no text)")
    roles = found.roles.by_column()

    def kind(column: Column) -> str:
        role = roles.get(column.name)
        return column.kind if role is None else role if role == "left out" else f"{role}?"

    rows = ((c.name, kind(c), str(c.missing), c.shown) for c in found.columns.values())
    _show_table(("column", "looks like", "missing", "holds"), rows)
    for remark in (*found.doubts_of_header, *found.roles.remarks):
        _say(f"! {remark}")


def _show_check(checked: DataCheck, deployed: str) -> None:
    report = checked.report
    _say(
        f"{counted(report.rows, 'row')}: {report.used} can be used, {sum(report.refused.values())} are refused, "
        f"{report.too_often} over the visit limit, {report.too_soon} too soon"
    )
    for notice in report.notices:
        _say(f"  {notice}")
    most = counted(report.most_visits, "time")
    if checked.each_row:
        _say(f"{counted(report.people, 'row')}, each taken for another person")
    else:
        _say(f"{report.people} people, {report.returning} of them return, one up to {most}")
    if checked.labels:
        each = ", ".join(f"{label}: {count}" for label, count in checked.labels.most_common(12))
        _say(f"labels: {each}")
    rows = (
        (name, str(count), str(checked.rounds[name]), str(checked.learned.get(name, "-")))
        for name, count in sorted(checked.per_learner.items())
    )
    _show_table(("learner", "rows", "rounds", "rows in run"), rows)
    if checked.unused_columns:
        _say(f"columns not used by the plan: {', '.join(checked.unused_columns)}")
    problems = checked.problems()
    for problem in problems:
        _say(f"! {problem}")
    if not problems:
        _say("All rows are usable, and there are enough for every round.")
    _say(deployed)
    _say(_PRIVATE)
