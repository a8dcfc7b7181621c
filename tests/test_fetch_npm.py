"""What npm brings: nothing but the bytes that are pinned."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("fetch_npm", ROOT / "scripts/fetch_npm.py")
fetch_npm = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fetch_npm)


def archive(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    """A root whose lock pins one small package, and an npm that hands it out."""
    packed = archive(main=b"draw()", LICENSE=b"MIT")
    digest = base64.b64encode(hashlib.sha512(packed).digest()).decode()
    pin = {
        "version": "1.0.0",
        "licence": "MIT",
        "integrity": f"sha512-{digest}",
        "into": "vendor",
        "files": {"main": "main.js", "LICENSE": "LICENSE"},
        "sha256": {"main.js": hashlib.sha256(b"draw()").hexdigest(), "LICENSE": hashlib.sha256(b"MIT").hexdigest()},
    }
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/npm.json").write_text(json.dumps({"small": pin}))
    handed = {"archive": packed, "asked": 0}

    def npm(name, version):
        handed["asked"] += 1
        return handed["archive"]

    monkeypatch.setattr(fetch_npm, "packed", npm)
    return tmp_path, handed


def test_pinned_files_are_written_once(pinned):
    root, handed = pinned
    into = fetch_npm.fetch("small", root)
    assert (into / "main.js").read_bytes() == b"draw()"
    assert (into / "LICENSE").read_bytes() == b"MIT"
    fetch_npm.fetch("small", root)
    assert handed["asked"] == 1
    (into / "main.js").unlink()
    fetch_npm.fetch("small", root)
    assert handed["asked"] == 2


def test_a_file_that_was_changed_since_is_not_used(pinned):
    root, _ = pinned
    into = fetch_npm.fetch("small", root)
    (into / "main.js").write_bytes(b"steal()")
    fetch_npm.fetch("small", root)
    assert (into / "main.js").read_bytes() == b"draw()"


def test_other_bytes_are_refused_and_leave_nothing(pinned):
    root, handed = pinned
    handed["archive"] = archive(main=b"steal()", LICENSE=b"MIT")
    with pytest.raises(fetch_npm.NotFetched, match="expected"):
        fetch_npm.fetch("small", root)
    assert not (root / "vendor").exists()


def test_a_package_that_is_not_pinned_is_refused(pinned):
    root, _ = pinned
    with pytest.raises(fetch_npm.NotFetched, match="not one of small"):
        fetch_npm.fetch("large", root)


def test_without_npm_it_says_how_to_get_it(tmp_path):
    """In a root of its own: what is in this one may be fetched already."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "requirements").mkdir()
    for name in ("scripts/fetch_npm.py", "requirements/npm.json"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, str(tmp_path / "scripts/fetch_npm.py"), "uplot"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 3
    assert "npm is not installed" in done.stderr


def test_the_lock_names_versions_and_hashes_and_no_host():
    text = (ROOT / "requirements/npm.json").read_text()
    assert "://" not in text
    for pin in json.loads(text).values():
        kind, _, digest = pin["integrity"].partition("-")
        assert kind == "sha512"
        assert len(base64.b64decode(digest)) == 64
        assert any("LICENSE" in name for name in pin["files"])
        assert set(pin["sha256"]) == set(pin["files"].values())


def test_actions_of_the_public_checks_are_pinned_by_digest():
    """A tag can be moved to other code; a commit cannot."""
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        used = re.findall(r"uses:\s*(\S+)", workflow.read_text(encoding="utf-8"))
        assert used
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each) for each in used), used
