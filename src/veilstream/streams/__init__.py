"""Where clients come from."""

from typing import TYPE_CHECKING

from veilstream.lazy import names_from

if TYPE_CHECKING:
    from veilstream.streams.intake import ClientSource, Offered, SourceBookmark
    from veilstream.streams.iterator_source import IteratorSource
    from veilstream.streams.mnist import MNIST_SPLITS, load_mnist, mnist_stream
    from veilstream.streams.pool import ClientsMet, PoolStream, Stream
    from veilstream.streams.splits import DirichletSplit, EvenSplit, PaperSplit, Split, WriterSplit
    from veilstream.streams.synthetic import DRIFTS, RippleStream, SyntheticStream
    from veilstream.streams.table_source import TableSource
    from veilstream.streams.waiting_source import LiveSource

__all__ = [
    "DRIFTS",
    "MNIST_SPLITS",
    "ClientSource",
    "ClientsMet",
    "DirichletSplit",
    "EvenSplit",
    "IteratorSource",
    "LiveSource",
    "Offered",
    "PaperSplit",
    "PoolStream",
    "RippleStream",
    "SourceBookmark",
    "Split",
    "Stream",
    "SyntheticStream",
    "TableSource",
    "WriterSplit",
    "load_mnist",
    "mnist_stream",
]

_LATER = {
    "ClientsMet": "veilstream.streams.pool",
    "DRIFTS": "veilstream.streams.synthetic",
    "DirichletSplit": "veilstream.streams.splits",
    "EvenSplit": "veilstream.streams.splits",
    "ClientSource": "veilstream.streams.intake",
    "IteratorSource": "veilstream.streams.iterator_source",
    "LiveSource": "veilstream.streams.waiting_source",
    "Offered": "veilstream.streams.intake",
    "SourceBookmark": "veilstream.streams.intake",
    "MNIST_SPLITS": "veilstream.streams.mnist",
    "PaperSplit": "veilstream.streams.splits",
    "PoolStream": "veilstream.streams.pool",
    "RippleStream": "veilstream.streams.synthetic",
    "Split": "veilstream.streams.splits",
    "Stream": "veilstream.streams.pool",
    "SyntheticStream": "veilstream.streams.synthetic",
    "TableSource": "veilstream.streams.table_source",
    "WriterSplit": "veilstream.streams.splits",
    "load_mnist": "veilstream.streams.mnist",
    "mnist_stream": "veilstream.streams.mnist",
}

__getattr__ = names_from(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted(__all__)
