"""`veilstream report` and `veilstream compare`: pages and figures from run folders alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Pdf = Annotated[Path | None, typer.Option(help="Also draw one panel for a paper.", show_default=False)]
Svg = Annotated[Path | None, typer.Option(help="The same as a drawing that scales.", show_default=False)]


def report_command(
    run: Annotated[Path, typer.Argument(help="A run's folder; with --verify a statement.txt.", show_default=False)],
    pdf: Pdf = None,
    svg: Svg = None,
    statement: Annotated[
        bool, typer.Option("--statement", help="Also write and sign a privacy statement, of a federation's run.")
    ] = False,
    keys: Annotated[Path, typer.Option(help="With --statement: the server's folder of keys.")] = (Path("keys/server")),
    verify: Annotated[
        Path | None, typer.Option(help="Check a statement against this public key (server.pub).", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Make a run's report.html again, from the other files in its folder.

    The page opens from disk and fetches nothing: the guarantee and what it rests on, curves with
    every seed, noise against signal, the last audit (audit.json in the folder), plan and versions.

    `--statement` writes statement.txt and statement.html: one page for data-protection officers,
    signed with the server's key. `veilstream report statement.txt --verify server.pub` checks it
    (exit code 7 where it was changed or another key signed it).

    Example: `veilstream report runs/demo --pdf figure.pdf`
    """
    from veilstream.cli.tables import print_json
    from veilstream.reports.report import write_report
    from veilstream.runs.folder import Run

    if verify is not None:
        _verify(run, verify, json)
        return
    _check_figures(pdf, svg)
    folder = Run(run)
    made = [write_report(folder)]
    if pdf or svg:
        from veilstream.research.learning_figure import draw_panel

        made += [draw_panel(folder, path) for path in (pdf, svg) if path]
    if statement:
        from veilstream.federation.keys.identity import ServerKeys
        from veilstream.reports.statement import write_statement

        made += write_statement(folder, ServerKeys.load_signing(keys))
    if json:
        print_json({"run": str(run), "files": [str(path) for path in made]})
        return
    for path in made:
        typer.echo(f"Saved: {path}")


def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.", show_default=False)],
    method: Annotated[
        str | None, typer.Option(help="Which method of each.", show_default="the one that each recommends")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the page is written.")] = Path("compare.html"),
    pdf: Pdf = None,
    svg: Svg = None,
    json: Json = False,
) -> None:
    """Put several runs on one page: a table, and their curves together.

    Example: `veilstream compare runs/demo runs/demo-2 --out compare.html`
    """
    from veilstream.cli.tables import print_json
    from veilstream.reports.comparison import compared_runs, comparison_state
    from veilstream.reports.page_kit import write_page
    from veilstream.runs.folder import Run

    _check_figures(pdf, svg)
    compared = compared_runs([Run(path) for path in runs], method)
    state = comparison_state(compared)
    made = [write_page(out, state, shared=True)]
    if pdf or svg:
        from veilstream.research.learning_figure import draw_comparison

        lines = [(each.name, each.run, each.method) for each in compared]
        made += [draw_comparison(lines, path) for path in (pdf, svg) if path]
    table = state["results"]
    if json:
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        print_json({"runs": rows, "files": [str(path) for path in made]})
        return
    _table(table["columns"], table["rows"])
    for path in made:
        typer.echo(f"Saved: {path}")


def _check_figures(pdf: Path | None, svg: Path | None) -> None:
    """Refuse names that say another format, before any work."""
    from veilstream.errors import InputError
    from veilstream.research.error_figure import check_figure_path

    for option, path in (("pdf", pdf), ("svg", svg)):
        if path is None:
            continue
        if path.suffix.lower() != f".{option}":
            raise InputError(f"--{option}", str(path), f"a name ending in .{option}", f"try figure.{option}")
        check_figure_path(path)


def _table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console(highlight=False).print(table)


def _verify(path: Path, key: Path, json: bool) -> None:
    from veilstream.cli.tables import print_json
    from veilstream.errors import InputError
    from veilstream.reports.statement import public_key, verify_statement

    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("run", str(path), "a statement.txt", f"{error}; name the file itself") from None
    text = verify_statement(content, public_key(key))
    if json:
        print_json({"verified": True, "statement": text})
        return
    typer.echo(text)
    typer.echo("Verified: the holder of this key signed exactly this text.")
