"""Fetch the JavaScript packages in requirements/npm.json with npm, and check their hashes.

    python scripts/fetch_npm.py uplot          draws the charts of pages; part of the wheel
    python scripts/fetch_npm.py axe-core       accessibility rules for tests/browser

npm decides where packages come from; each must have the SHA-512 that npm.json names. Files that
are there, with the SHA-256 that npm.json names for each, are not fetched again. Exit code 3: npm is
missing, or found nothing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 120


class NotFetched(Exception):
    """A package could not be fetched; the message says why."""


def fetch(name: str, root: Path = ROOT) -> Path:
    """Fetch a pinned package's files if they are missing; returns their folder."""
    pins = json.loads((root / "requirements/npm.json").read_text(encoding="utf-8"))
    if name not in pins:
        raise NotFetched(f"{name}: not one of {', '.join(pins)}")
    pin = pins[name]
    into = root / pin["into"]
    if not _as_pinned(pin, into):
        unpack(packed(name, pin["version"]), pin, into)
        if not _as_pinned(pin, into):
            raise NotFetched(f"{name}: its files are not those of npm.json's sha256")
    return into


def _as_pinned(pin: dict[str, Any], into: Path) -> bool:
    """Whether each file is there, with the hash that npm.json names: looked at on every use."""
    return all(
        (into / kept).is_file() and hashlib.sha256((into / kept).read_bytes()).hexdigest() == pin["sha256"][kept]
        for kept in pin["files"].values()
    )


def packed(name: str, version: str) -> bytes:
    """The package's archive, from `npm pack`."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotFetched(f"{name} {version}: npm is not installed (Debian: apt-get install npm)")
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [
                    npm,
                    "pack",
                    f"{name}@{version}",
                    "--silent",
                    "--ignore-scripts",
                    "--fetch-retries=1",
                    f"--pack-destination={folder}",
                ],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise NotFetched(f"{name} {version}: npm took more than {_TIMEOUT_S} s") from None
        found = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(found) != 1:
            said = (done.stderr.strip().splitlines() or ["no archive"])[-1]
            raise NotFetched(f"{name} {version}: npm pack failed: {said}")
        return found[0].read_bytes()


def unpack(archive: bytes, pin: dict[str, Any], into: Path) -> None:
    """Write the pinned files of an archive, after checking its hash."""
    kind, _, wanted = pin["integrity"].partition("-")
    found = base64.b64encode(hashlib.new(kind, archive).digest()).decode()
    if found != wanted:
        raise NotFetched(f"version {pin['version']}: its {kind} is {found}, expected {wanted}")
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for inside, name in pin["files"].items():
            member = members.extractfile(f"package/{inside}")
            if member is None:
                raise NotFetched(f"version {pin['version']}: {inside} is not a file in it")
            (into / name).write_bytes(member.read())


def main() -> int:
    """Fetch the packages named on the command line."""
    for name in sys.argv[1:]:
        try:
            fetch(name)
        except (NotFetched, OSError) as error:
            sys.stderr.write(f"fetch_npm: {error}\n")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
