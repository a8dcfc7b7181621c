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
    "intake": ("ClientSource", "Offered", "SourceBookmark"),
    "iterator_source": ("IteratorSource",),
    "mnist": ("MNIST_SPLITS", "load_mnist", "mnist_stream"),
    "pool": ("ClientsMet", "PoolStream", "Stream"),
    "splits": ("DirichletSplit", "EvenSplit", "PaperSplit", "Split", "WriterSplit"),
    "synthetic": ("DRIFTS", "RippleStream", "SyntheticStream"),
    "table_source": ("TableSource",),
    "waiting_source": ("LiveSource",),
}
__getattr__ = names_from(__name__, {name: f"{__name__}.{room}" for room, names in _LATER.items() for name in names})


def __dir__() -> list[str]:
    return sorted(__all__)
