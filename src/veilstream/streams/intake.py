"""Where a deployed learner's clients come from: what a source is.

**At most once.** A record is consumed before anything is computed from it, and for good: it is
deleted, its offset is committed, or the source's bookmark is stored in the same transaction as the
step that uses it. A crash between the two loses the record, which costs a little accuracy. The other
order would use it twice, which costs its client the promise.

**Content decides nothing.** A source hands over every record that names a client, also one that cannot be
used (``sample`` None): it takes its step with a zero gradient, so what the server sees is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from veilstream.records.admission import Answer
from veilstream.records.sample import Sample

_AT_ONCE = 4096


@dataclass(frozen=True)
class SourceBookmark:
    """How far a source has been read; a learner stores it and gives it back."""

    source: str
    """Its name: a learner may read several, one after the other."""
    text: str
    """In the source's own form."""


class Offered(NamedTuple):
    """A record as a source hands it over; a plain tuple will do."""

    tag: str | bytes
    """The client: the same whenever the same person comes."""
    sample: Sample | None
    """None for a record that cannot be used: its client takes part with a zero gradient."""
    bookmark: SourceBookmark | None = None
    """Where the source stands behind it."""


Observe = Callable[[Iterable[Offered]], list[Answer]]
"""Takes records from a source, no more than the round can use; answers when all of them are stored."""
Wanted = Callable[[], int]  # how many more clients the round can take
MayTake = Callable[[str | bytes], bool]  # whether the participation rule lets a client take a step now


class ClientSource(Protocol):
    """What a daemon asks for clients."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whether enough clients wait who can be taken, whatever their records say; asked before a round begins."""

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Offer clients for this round until no more are wanted, or none comes."""


class SomeRecords(NamedTuple):
    """Records that follow each other in a source that is all there."""

    clients: Sequence[tuple[str | bytes, Sample | None]]
    """Tags, and records; None for one that cannot be used."""
    behind: Callable[[int], SourceBookmark] | None = None
    """Where the source stands behind so many of them; None if it has no bookmarks."""


@runtime_checkable
class WholeSource(Protocol):
    """Records that are all there before an epoch begins, as a secret order needs them."""

    @property
    def name(self) -> str:
        """For messages."""

    def read_whole(self, since: Sequence[SourceBookmark]) -> Iterator[SomeRecords]:
        """Every record behind these bookmarks, in the source's order; the same whenever it is asked."""

    def files_now(self) -> str:
        """Changes whenever somebody writes to the source; empty where that cannot be told without reading it."""


class GivenRecords:
    """Pairs of a tag and a record that are in memory."""

    name = "the records that were given"

    def __init__(self, clients: Sequence[tuple[str | bytes, Sample | None]]) -> None:
        self._clients = clients

    def read_whole(self, since: Sequence[SourceBookmark]) -> Iterator[SomeRecords]:
        """All of them: nothing says how far they were read before."""
        for first in range(0, len(self._clients), _AT_ONCE):
            yield SomeRecords(self._clients[first : first + _AT_ONCE])

    def files_now(self) -> str:
        """They have no file."""
        return ""


class AlwaysReady:
    """For a source that cannot tell whether anybody comes: every round begins."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Always."""
        return True
