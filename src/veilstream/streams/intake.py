"""Where a deployed learner's clients come from: what a source is.

    class Source:
        def ready(self, minimum, most, may_take): ...     are enough people there?
        def serve(self, round_, observe, wanted): ...     hand them over

A source is asked before a round whether enough people wait (`ready`), so that a learner does not
spend its noise on nobody, and then hands records over (`serve`), one at a time or many at once:
they are stored together, and whoever is told "taken" is stored.

**At most once.** A record is consumed before anything is computed from it, and for good: it is
deleted, its offset is committed, or the source's bookmark goes along with it and is stored in the
same transaction as the step that uses it. Between the two a crash loses the record, which costs a
little accuracy. The other order would use it twice, which costs its client the promise.

`veilstream.streams.table_source` reads files, `live_source` people who call, `iterator_source`
whatever Python can iterate over; `tests/conformance/test_sources.py` is for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from veilstream.learning.tasks import Sample
from veilstream.records.admission import Answer


@dataclass(frozen=True)
class SourceBookmark:
    """How far a source has been read, in its own words; a learner stores it and gives it back."""

    source: str
    """Which source: a learner may read several, one after the other."""
    text: str


class Offered(NamedTuple):
    """A record as a source hands it over; a plain tuple of the same will do."""

    tag: str | bytes
    """Whose it is: the same whenever the same person comes."""
    sample: Sample
    bookmark: SourceBookmark | None = None
    """Where the source stands behind it."""


Observe = Callable[[Iterable[Offered]], list[Answer]]
"""How a source hands records over; no more are consumed than the round can use.

The answers, to those that were consumed, come when all of them are stored."""
Wanted = Callable[[], int]
"""How many more clients the round can take."""
MayTake = Callable[[str | bytes], bool]
"""Whether a client could take a step now, as far as the promise goes."""


class ClientSource(Protocol):
    """What a daemon asks for clients."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whether at least so many clients wait who can be taken; asked before a round begins.

        Args:
            minimum: how many there must be; 0 begins every round.
            most: how many the round can take: a source that reads ahead needs no more.
            may_take: leaves people out who took part as often as they may.

        """

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Offer clients for this round until no more are wanted, or none comes."""


class AlwaysReady:
    """Of a source that cannot tell beforehand whether anybody comes: every round is begun."""

    def ready(self, minimum: int, most: int, may_take: MayTake) -> bool:
        """Whatever is asked."""
        return True
