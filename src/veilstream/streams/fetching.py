"""Fetching files that are known by their checksum, from sources that are tried in turn.

What is damaged is asked for again, twice, then the next source has its turn; each file counts by
itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from veilstream.errors import InputError
from veilstream.files import write_file

ATTEMPTS = 3
PAUSE_S = 0.5


class UnusableFile(Exception):
    """A file is not there, or not what it should be; callers turn this into an `InputError`."""


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


def say_nothing(step: FetchStep) -> None:
    """As a `Report` that nobody reads."""


class SourceFailed(Exception):
    """A source did not give a file. ``then`` says what is worth trying next."""

    def __init__(self, why: str, then: Literal["again", "next file", "next source"]) -> None:
        self.why, self.then = why, then
        super().__init__(why)


class KnownFile(Protocol):
    """A file whose content is known beforehand."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def size(self) -> int:
        """Bytes of the content."""

    def check(self, content: bytes) -> None:
        """Raise `UnusableFile` unless this is the content, to the last bit."""


File = TypeVar("File", bound=KnownFile)
_Fetched = TypeVar("_Fetched", bound=KnownFile, contravariant=True)


class Source(Protocol[_Fetched]):
    """Somewhere that files come from."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def fetch(self, file: _Fetched, report: Report) -> bytes:
        """Content of the file, decompressed, not yet checked; or `SourceFailed`."""


def fetch_from(
    source: Source[File],
    wanted: Sequence[File],
    keep: Callable[[File, bytes], None],
    report: Report,
    pause_s: float = PAUSE_S,
) -> list[File]:
    """Keep what one source gives intact, and tell which files these were."""
    got: list[File] = []
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
                keep(file, content)
                report(FetchStep("got", source.name, file.name, file.size, file.size))
                got.append(file)
                break
    return got


def _check(file: KnownFile, content: bytes) -> None:
    try:
        file.check(content)
    except UnusableFile as error:
        raise SourceFailed(str(error), "again") from error


def check_writable(directory: Path, megabytes: int) -> None:
    """Better to hear now than after a download."""
    probe = directory / ".writable"
    store_file(probe, b"", megabytes)
    probe.unlink(missing_ok=True)


def store_file(path: Path, content: bytes, megabytes: int) -> None:
    """Write a file of public data, whole or not at all.

    Raises:
        InputError: where it cannot be written.

    """
    try:
        write_file(path, content)
        path.chmod(0o644)  # public data, and a data directory may be shared
    except OSError as error:
        raise InputError(
            "directory",
            str(path.parent),
            f"a directory that can be written, with {megabytes} MB to spare",
            f"{error.strerror or error}; name another with --dir or VEILSTREAM_DATA",
        ) from error
