"""MNIST, by Yann LeCun and Corinna Cortes (CC BY-SA 3.0), and who wrote each digit.

The writers come from QMNIST (Yadav and Bottou 2019), BSD licence beside the data. The four idx files are kept
gzipped and compared with their SHA-256 whenever they are read; `veilstream data get mnist` fetches them.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.streams.datasets import dataset_directory, dataset_of, read_kept
from veilstream.streams.pool import PoolStream
from veilstream.streams.splits import DirichletSplit, EvenSplit, PaperSplit, Split, WriterSplit

Bytes = NDArray[np.uint8]

MNIST_SPLITS = ("paper", "dirichlet", "writers", "even")


@dataclass(frozen=True, eq=False)
class Mnist:
    """Images as rows of 784 grey values from 0 to 255, labels from 0 to 9; all read-only."""

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


def load_mnist(directory: Path | None = None) -> Mnist:
    """Read MNIST from a directory, or from the user's data directory when none is named.

    Args:
        directory: where the four files are, gzipped or not.

    Returns:
        Images and labels, for training and for testing.

    """
    place = dataset_directory("mnist") if directory is None else Path(directory)
    contents, problems = read_kept("mnist", place)
    if problems:
        option = "" if directory is None else f" --dir {place}"
        raise InputError(
            "mnist",
            str(place),
            "a directory with the intact files " + ", ".join(f.spellings[0] for f in dataset_of("mnist").kept),
            f"run `veilstream data get mnist{option}`, or put them there yourself, gzipped or not; "
            + "; ".join(problems.values()),
        )
    return Mnist(*(_idx_array(content) for content in contents))


def _idx_array(content: bytes) -> Bytes:
    axes, rows = content[3], int.from_bytes(content[4:8], "big")
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    return values.reshape(rows, -1) if axes > 1 else values


def mnist_writers(train: bool = True) -> NDArray[np.uint16]:
    """Who wrote each image: 539 people the training images, 297 others the test images."""
    name = f"mnist_{'train' if train else 't10k'}_writer_u16le.xz"
    packed = (resources.files("veilstream.streams") / "data" / name).read_bytes()
    return np.frombuffer(lzma.decompress(packed), "<u2").astype(np.uint16)


def mnist_stream(
    mnist: Mnist, *, learners: int, rounds: int, per_round: int, split: str = "paper", alpha: float = 0.5
) -> PoolStream:
    """MNIST as clients with one image each: grey values from 0 to 255, labels as int32.

    Args:
        mnist: the images, from `load_mnist`.
        learners: among how many they are split.
        rounds: for how many rounds.
        per_round: clients that a learner meets in a round.
        split: how: "paper", "dirichlet", "writers" or "even".
        alpha: concentration, for "dirichlet".

    Returns:
        A stream of clients, each with one image, and of those held out.

    """
    way: Split
    detail = ""
    if split == "paper":
        way = PaperSplit()
    elif split == "even":
        way = EvenSplit()
    elif split == "dirichlet":
        way, detail = DirichletSplit(alpha), f" (alpha {alpha:g})"
    elif split == "writers":
        way = WriterSplit(mnist_writers())
        detail = " (writers from QMNIST, Yadav and Bottou 2019; one image is protected, not its writer)"
    else:
        raise UnknownName("split", split, MNIST_SPLITS)
    licence = dataset_of("mnist").licence
    return PoolStream(
        learners=learners,
        rounds=rounds,
        per_round=per_round,
        features=mnist.train_images,
        targets=mnist.train_labels.astype(np.int32),
        held_features=mnist.test_images,
        held_targets=mnist.test_labels.astype(np.int32),
        split=way,
        provenance=f"MNIST ({licence}), each image a client met at most once, split among learners: {split}{detail}",
    )
