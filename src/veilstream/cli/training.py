"""Running a plan from the command line: guarantee first, a live bar, a table at the end."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from veilstream.cli.run_table import run_table, show_quality
from veilstream.cli.tables import escape, print_json, table_console
from veilstream.deployment.deployable import Deployable
from veilstream.errors import MissingExtra
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared
from veilstream.reports.page_kit import REPORT
from veilstream.reports.report import write_report
from veilstream.reports.reported_run import run
from veilstream.research.comparators import has_comparators
from veilstream.runs.folder import Run

if TYPE_CHECKING:
    from veilstream.reports.live_simulation import LiveSimulation


def _fetch_data(plan: Plan, console: Console) -> None:
    from veilstream.streams.datasets import SOURCE_PREFIX, dataset_directory, dataset_of, dataset_problems, get_dataset

    data = plan.data
    if data.kind == "mnist":
        name = "mnist"
    elif data.kind == "table" and (data.source or "").startswith(SOURCE_PREFIX):
        name = str(data.source).removeprefix(SOURCE_PREFIX).partition("/")[0]
    else:
        return
    licence, place = dataset_of(name).licence, dataset_directory(name)
    if dataset_problems(name, place):
        console.print(f"{name} ({licence}) is not here; fetching it into {escape(str(place))}")
        get_dataset(name)


def need_packages(**extras: str) -> None:
    """Say at once which packages are missing: figures are drawn after minutes of training."""
    missing = {name: extra for name, extra in extras.items() if find_spec(name) is None}
    if missing:
        raise MissingExtra(" and ".join(missing), ",".join(missing.values()), "a simulation")


def run_with_progress(
    plan: Plan, out: Path, *, resume: bool, quiet: bool, processes: int = 1, live: bool = False
) -> Run:
    """Run the plan with a bar, and with a live page where that is wanted; all of it goes to stderr."""
    need_packages(jax="jax")
    console = Console(stderr=True, highlight=False)
    _fetch_data(plan, console)
    with _live_page(plan) if live else nullcontext() as page:
        return _run(plan, out, console, page, resume=resume, quiet=quiet, processes=processes)


@contextmanager
def _live_page(plan: Plan) -> Iterator[LiveSimulation]:
    from veilstream.federation.http.live_routes import local_live_server
    from veilstream.reports.live_simulation import LiveSimulation

    def tell(url: str) -> None:
        sys.stderr.write(f"Live page: {url}\n")  # not through the console, which would wrap the address

    with local_live_server(partial(LiveSimulation, plan), 0, tell) as page:
        try:
            yield page
        finally:
            page.feed.end()


def _run(
    plan: Plan, out: Path, console: Console, page: LiveSimulation | None, *, resume: bool, quiet: bool, processes: int
) -> Run:
    def promise(prepared: list[Prepared]) -> None:
        if page is not None:
            page.prepared(prepared)
        if quiet:
            return
        console.print(
            f"Simulation: its noise comes from seeds and protects no one. {escape(Deployable.of(plan).text())} "
            "Where learners run it, each method promises:",
            soft_wrap=True,
        )
        for p in prepared:
            text = str(p.guarantee) if p.guarantee else f"{p.plan.method.protects} ({p.plan.kind})"
            console.print(f"[bold]{escape(p.plan.name)}[/bold]: {escape(text)}", soft_wrap=True)
            if p.auto:
                console.print(f"  auto: {escape(str(p.auto))}", soft_wrap=True)
        remarks = [r for p in prepared if p.guarantee for r in p.guarantee.remarks]
        for remark in dict.fromkeys(remarks):
            console.print(f"note: {escape(remark)}", soft_wrap=True)

    def records(notices: list[str]) -> None:
        for notice in notices:
            console.print(f"[bold]records[/bold]: {escape(notice)}", soft_wrap=True)

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    solves = plan.run.regret and has_comparators(plan)
    with bar:
        training = bar.add_task("rounds", total=plan.learning.rounds)
        solving = bar.add_task("regret", total=plan.run.seeds if solves else 0)

        def advanced(progress: Any) -> None:
            shown = "" if progress.accuracy is None else f", accuracy {progress.accuracy:.3f}"
            bar.update(training, completed=progress.done, total=progress.total, description=f"rounds{shown}")
            if page is not None:
                page.progressed(progress)

        def solved(seeds: int) -> None:
            bar.advance(solving, seeds)
            if page is not None:
                page.solved(seeds)

        def written(folder: Run) -> None:
            write_report(folder)
            if page is not None:
                page.written(folder)

        try:
            return run(
                plan,
                out,
                resume=resume,
                processes=processes,
                on_notices=records,
                on_prepared=promise,
                on_baselines=None if page is None else page.compared,
                on_progress=advanced,
                on_solving=solved,
                on_written=written,
            )
        except KeyboardInterrupt:
            if any(out.glob("checkpoint*.npz")):
                console.print(f"The rounds so far are in {escape(str(out))}; --resume continues them.", soft_wrap=True)
            raise


def show_runs(runs: dict[str, Run], figures: list[Path], *, json: bool) -> None:
    """Print several runs of one figure."""
    if json:
        parts = {
            name: run.summary | {"deployed": Deployable.of(run.plan).as_dict(), "folder": str(run.path)}
            for name, run in runs.items()
        }
        print_json({"runs": parts, "figures": [str(f) for f in figures]})
        return
    for name, finished in runs.items():
        sys.stdout.write(f"\n{name}: {finished.plan.description}\n")
        show_run(finished, [], json=False)
    for path in figures:
        sys.stdout.write(f"Figure: {path}\n")


def show_streams(runs: dict[str, Run], figures: list[Path], folder: Path, *, json: bool) -> None:
    """Print accuracy and loss of every method on every stream, beside predictions without learning."""
    from veilstream.research.streams_report import by_stream, stream_rows, write_stream_tables

    finished, streams = list(runs.values()), by_stream(runs)
    rows = stream_rows(streams)
    tables = write_stream_tables(rows, folder)
    if json:
        print_json(
            {
                "rows": [dataclasses.asdict(row) for row in rows],
                "data": {name: parts[0].summary["data"] for name, parts in streams.items()},
                "seconds": {n: each.summary["training_seconds"] for n, each in runs.items()},
                "figures": [str(path) for path in figures],
                "tables": [str(path) for path in tables],
            }
        )
        return
    console, table = table_console(), Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stream", "method", "protects (simulated)"):
        table.add_column(name, overflow="fold")
    for name in ("releases", "prequential accuracy", "prequential loss"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.stream,
            row.method,
            "[red]nothing[/red]" if row.epsilon is None else f"ε = {row.epsilon:g}",
            f"{row.releases:,}",
            f"{row.accuracy:.4f} ± {row.accuracy_std:.4f}",
            f"{row.loss:.4f} ± {row.loss_std:.4f}",
        )
    console.print(table)
    for name, parts in streams.items():
        took = sum(each.summary["training_seconds"] for each in parts)
        console.print(f"[dim]{name}: {took:.0f} s; {escape(parts[0].summary['data'])}[/dim]")
    console.print(
        f"[dim]mean ± std over {len(finished[0].summary['seeds'])} seeds; majority, learner's share "
        "and last label read the labels themselves and protect no one, a noisy count keeps the promise beside it and "
        "is released as often as buffered; a simulation's noise comes from seeds "
        "and protects no one either[/dim]"
    )
    for path in (*tables, *figures):
        console.print(f"{'Figure' if path in figures else 'Table'}: {escape(str(path))}")


def show_run(finished: Run, figures: list[Path], *, json: bool) -> None:
    """Print the comparison on stdout."""
    summary, deployable = finished.summary, Deployable.of(finished.plan)
    if json:
        print_json(
            summary
            | {
                "deployed": deployable.as_dict(),
                "folder": str(finished.path),
                "report": str(finished.path / REPORT),
                "figures": [str(f) for f in figures],
            }
        )
        return
    console, simulation = table_console(), finished.simulation
    methods = simulation.methods.values()
    regret = any("regret" in key for method in methods for key in method.final)
    console.print(run_table(simulation))
    show_quality(console, simulation)
    seeds = f"{len(summary['seeds'])} seed{'' if len(summary['seeds']) == 1 else 's'}"
    regret_note = "; regret per step" if regret else ""
    console.print(f"[dim]mean ± std over {seeds}{regret_note}; {escape(summary['data'])}[/dim]")
    _show_records(console, summary.get("records"))
    console.print(
        "[dim]This is a simulation: its noise comes from seeds and protects no one. The column 'protects' is for "
        f"learners that run the method. {escape(deployable.text())}[/dim]"
    )
    for remark in (summary["comparators"] or {}).get("remarks", []):
        console.print(f"[dim]note: {escape(remark)}[/dim]")
    for method in methods:
        if method.remark:
            console.print(f"note: {escape(method.name)} {escape(method.remark)}")
    if not summary["complete"]:
        console.print(f"Not complete: {summary['rounds']} rounds; --resume continues it.")
    console.print(f"Run: {escape(str(finished.path))}")
    console.print(f"Report: {escape(str(finished.path / REPORT))}")
    for path in figures:
        console.print(f"Figure: {escape(str(path))}")


def _show_records(console: Console, records: dict[str, Any] | None) -> None:
    if records is None:
        return
    console.print(
        f"records: {records['rows']} rows; {records['used']} to train on, {records['held_out']} held out to test on"
    )
    for why, count in records["refused"].items():
        console.print(f"! {count} rows refused: {escape(why)}")
    for column, count in records["clamped"].items():
        console.print(f"note: {count} cells of {escape(column)} outside the plan's range or vocabulary")
    left_out = {"too_often": "over the visit limit", "too_soon": "too soon after the last visit"}
    for key, why in left_out.items():
        if records[key]:
            console.print(f"note: {records[key]} rows left out: {why}")
