"""`veilstream report` and `veilstream compare`: pages, figures and exports from run folders alone."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veilstream.cli.options import Json

if TYPE_CHECKING:
    from veilstream.runs.folder import Run

Pdf = Annotated[Path | None, typer.Option(help="Also draw one panel for a paper.", show_default=False)]
Svg = Annotated[Path | None, typer.Option(help="The same panel as SVG.", show_default=False)]


class Viewer(StrEnum):
    """Where a run is exported to."""

    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"


def report_command(
    run: Annotated[Path, typer.Argument(help="A run folder; with --verify a statement.txt.", show_default=False)],
    pdf: Pdf = None,
    svg: Svg = None,
    statement: Annotated[
        bool, typer.Option("--statement", help="Also write and sign a privacy statement (federations only).")
    ] = False,
    keys: Annotated[Path, typer.Option(help="With --statement: the server's folder of keys.")] = (Path("keys/server")),
    verify: Annotated[
        Path | None, typer.Option(help="Check a statement against this public key (server.pub).", show_default=False)
    ] = None,
    export: Annotated[
        Viewer | None, typer.Option(help="Also copy curves, settings and promise to a viewer.", show_default=False)
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="With --export: a new folder (tensorboard), or a tracking store or server (mlflow).",
            show_default="RUN/tensorboard; MLFLOW_TRACKING_URI, or sqlite:///mlflow.db",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's report.html again, from the other files in its folder.

    The page opens from disk and fetches nothing. It shows the guarantee and what that rests on,
    curves with every seed, noise against signal, the last audit (audit.json), plan and versions.

    `--statement` writes statement.txt and statement.html: one page for data-protection officers,
    signed with the server's key. `veilstream report statement.txt --verify server.pub` checks it
    (exit code 7 if it was changed or another key signed it).

    `--export` makes one run for each method and seed of a simulation, or one run of a federation.
    It needs the extra of the same name: `pip install "veilstream[tensorboard]"`.

    Example: `veilstream report runs/demo --pdf figure.pdf`
    """
    from veilstream.cli.tables import print_json
    from veilstream.errors import InputError
    from veilstream.reports.report import write_report
    from veilstream.runs.folder import Run

    if verify is not None:
        _verify(run, verify, json)
        return
    _check_figures(pdf, svg)
    if to is not None and export is None:
        raise InputError("--to", to, "--export with it", "try --export tensorboard")
    folder = Run(run)
    made = [write_report(folder)]
    if pdf or svg:
        from veilstream.research.learning_figure import draw_panel

        made += [draw_panel(folder, path) for path in (pdf, svg) if path]
    if statement:
        from veilstream.federation.keys.identity import ServerKeys
        from veilstream.reports.statement import write_statement

        made += write_statement(folder, ServerKeys.load(keys))
    exported, hint = _export(folder, export, to) if export else ([], "")
    if json:
        print_json({"run": str(run), "files": [str(path) for path in made], "exported": exported})
        return
    for path in made:
        typer.echo(f"Saved: {path}")
    if export:
        typer.echo(f"Exported {len(exported)} runs: {hint}")


def _export(run: Run, viewer: Viewer, to: str | None) -> tuple[list[str], str]:
    from veilstream.reports.export import to_mlflow, to_tensorboard

    if viewer is Viewer.TENSORBOARD:
        folder = Path(to) if to else run.path / "tensorboard"
        return [str(path) for path in to_tensorboard(run, folder)], f"tensorboard --logdir {folder}"
    uri = to or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    return to_mlflow(run, uri), f"mlflow ui --backend-store-uri {uri}"


def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.", show_default=False)],
    method: Annotated[
        str | None, typer.Option(help="The method to compare.", show_default="each run's main method")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("compare.html"),
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

        lines = [(each.name, each.run, each.method.name) for each in compared]
        made += [draw_comparison(lines, path) for path in (pdf, svg) if path]
    table = state["results"]
    assert table is not None
    if json:
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        print_json({"runs": rows, "files": [str(path) for path in made]})
        return
    _table(
        table["columns"], [[cell if isinstance(cell, str) else cell["text"] for cell in row] for row in table["rows"]]
    )
    for path in made:
        typer.echo(f"Saved: {path}")


def _check_figures(pdf: Path | None, svg: Path | None) -> None:
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

    from veilstream.wording import shown

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(shown(name), overflow="fold")
    for row in rows:
        table.add_row(*(escape(shown(cell)) for cell in row))
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
