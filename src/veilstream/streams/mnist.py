"""MNIST: 60,000 training and 10,000 test images of handwritten digits, and who wrote each.

Four idx files, kept gzipped (11 MB; read in a fraction of a second) in `<data directory>/mnist/`.
Their content is compared with its known md5 every time it is read, so it does not matter where a
file came from. Nothing here touches the network: `veilstream data get mnist` does.

MNIST is by Yann LeCun and Corinna Cortes, CC BY-SA 3.0. The writers come from QMNIST (Yadav and
Bottou 2019), BSD licence beside the data.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.directories import user_directory
from veilstream.errors import InputError
from veilstream.streams.fetching import UnusableFile

Bytes = NDArray[np.uint8]

LICENCE = "CC BY-SA 3.0, Yann LeCun and Corinna Cortes"
CITATION = (
    "Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, Gradient-based learning applied to document "
    "recognition, Proceedings of the IEEE, 1998"
)
_SLACK = 1 << 16  # what gzip may add to content that it cannot compress


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: its usual name, the md5 of its content, the shape of its array."""

    name: str
    md5: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the content: a header of four, four more for each axis, then the values."""
        return 4 + 4 * len(self.shape) + prod(self.shape)

    @property
    def member_size(self) -> int:
        """Bytes that it has in a package, which holds it as it is."""
        return self.size

    @property
    def member_digest(self) -> str:
        """Its md5."""
        return self.md5

    @property
    def most(self) -> int:
        """Bytes that the gzipped file has at most."""
        return self.size + _SLACK

    @property
    def spellings(self) -> tuple[str, ...]:
        """Names under which it goes round, the one that we write first."""
        dotted = self.name.replace("-idx", ".idx")
        return f"{self.name}.gz", self.name, f"{dotted}.gz", dotted

    def check(self, content: bytes) -> None:
        """Raise unless this is the content, to the last bit."""
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != self.md5:
            raise UnusableFile(f"{self.name}: md5 of the content is {found}, not {self.md5}")

    def read(self, path: Path) -> bytes:
        """Content of a local file, gzipped or plain, checked."""
        with path.open("rb") as file:
            raw = file.read(self.most + 1)
        content = gunzip(raw, self.size) if path.suffix == ".gz" else raw
        self.check(content)
        return content

    def array(self, content: bytes) -> Bytes:
        """The values, one row each: (60000, 784) for images, (60000,) for labels."""
        values = np.frombuffer(content, np.uint8, offset=self.size - prod(self.shape))
        rows = self.shape[0]
        return values.reshape(rows, -1) if len(self.shape) > 1 else values


FILES = (
    IdxFile("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb", (60_000, 28, 28)),
    IdxFile("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624", (60_000,)),
    IdxFile("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea", (10_000, 28, 28)),
    IdxFile("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637", (10_000,)),
)


@dataclass(frozen=True, eq=False)
class Mnist:
    """Images as rows of 784 grey values from 0 to 255, labels from 0 to 9; all read-only."""

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


def data_directory() -> Path:
    """Where data sets are kept: `VEILSTREAM_DATA`, else the user's data directory."""
    return user_directory("data")


def mnist_directory() -> Path:
    """Where MNIST is kept unless another directory is named."""
    return data_directory() / "mnist"


def load_mnist(directory: Path | None = None) -> Mnist:
    """Read MNIST from a directory, or from the user's data directory when none is named.

    Args:
        directory: where the four files are, gzipped or not.

    Returns:
        Images and labels, for training and for testing.

    Raises:
        InputError: where files are missing or not intact.

    """
    place = mnist_directory() if directory is None else Path(directory)
    contents, problems = _survey(place)
    if problems:
        option = "" if directory is None else f" --dir {place}"
        raise InputError(
            "mnist",
            str(place),
            "a directory with the intact files " + ", ".join(f.spellings[0] for f in FILES),
            f"run `veilstream data get mnist{option}`, or put them there yourself, gzipped or not; "
            + "; ".join(problems.values()),
        )
    return Mnist(*(file.array(content) for file, content in contents.items()))


def mnist_problems(directory: Path) -> dict[str, str]:
    """What keeps each file of a directory from being used; empty when all is well."""
    return _survey(directory)[1]


def _survey(directory: Path) -> tuple[dict[IdxFile, bytes], dict[str, str]]:
    contents: dict[IdxFile, bytes] = {}
    problems: dict[str, str] = {}
    for file in FILES:
        try:
            contents[file] = find_file(directory, file)[1]
        except UnusableFile as error:
            problems[file.name] = str(error)
    return contents, problems


def find_file(directory: Path, file: IdxFile) -> tuple[Path, bytes]:
    """Where the file is under any of its names, and its checked content."""
    why = f"{file.name}: not there"
    for spelling in file.spellings:
        path = directory / spelling
        try:
            return path, file.read(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (UnusableFile, OSError) as error:
            why = f"{path.name} cannot be used ({error})"
    raise UnusableFile(why)


def gunzip(raw: bytes, limit: int) -> bytes:
    """What was compressed, never more than ``limit`` bytes of it."""
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


def mnist_writers(train: bool = True) -> NDArray[np.uint16]:
    """Who wrote each image: 539 people the training images, 297 others the test images."""
    import lzma
    from importlib.resources import files

    name = f"mnist_{'train' if train else 't10k'}_writer_u16le.xz"
    packed = (files("veilstream.streams") / "data" / name).read_bytes()
    return np.frombuffer(lzma.decompress(packed), "<u2").astype(np.uint16)
