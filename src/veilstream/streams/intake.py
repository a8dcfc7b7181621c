"""Where a deployed learner's clients come from: what a source is.

    class Source:
        def ready(self, minimum, most, may_take): ...     are enough people there?
        def serve(self, round_, observe, wanted): ...     hand them over

A source is asked before a round whether enough people wait (`ready`), so that a learner does not
spend its noise on nobody, and then hands records over (`serve`), one at a time or many at once:
they are stored together, and a client who is told "taken" is stored.

**At most once.** A record is consumed before anything is computed from it, and for good: it is
deleted, its offset is committed, or the source's bookmark goes along with it and is stored in the
same transaction as the step that uses it. Between the two a crash loses the record, which costs a
little accuracy. The other order would use it twice, which costs its client the promise.

`table_source` reads files, `waiting_source` serves people who call, `iterator_source` reads any
Python iterator; `tests/conformance/test_sources.py` checks every source.
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
    sample: Sample
    bookmark: SourceBookmark | None = None
    """Where the source stands behind it."""


Observe = Callable[[Iterable[Offered]], list[Answer]]
"""Takes records from a source, no more than the round can use; answers when all of them are stored."""
Wanted = Callable[[], int]
"""How many more clients the round can take."""
MayTake = Callable[[str | bytes], bool]
"""Whether the participation rule lets a client take a step now."""


class ClientSource(Protocol):
    """What a daemon asks for clients."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whether enough clients wait who can be taken; asked before a round begins.

        Args:
            minimum: how many there must be; 0 begins every round.
            most: how many the round can take: a source that reads ahead needs no more.
            may_take: whether a client may take a step.

        """

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Offer clients for this round until no more are wanted, or none comes."""


class AlwaysReady:
    """For a source that cannot tell whether anybody comes: every round begins."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Always."""
        return True
