"""Where a deployed learner's clients come from: what a source is.

**At most once.** A record is consumed before anything is computed from it, and for good: it is
deleted, its offset is committed, or the source's bookmark is stored in the same transaction as the
step that uses it. A crash between the two loses the record, which costs a little accuracy. The other
order would use it twice, which costs its client the promise.

**Content decides nothing.** A source hands over every record that names a client, also one that cannot be
used (``sample`` None): it takes its step with a zero gradient, so what the server sees is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from veilstream.records.admission import Answer
from veilstream.records.sample import Sample


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


class AlwaysReady:
    """For a source that cannot tell whether anybody comes: every round begins."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Always."""
        return True
