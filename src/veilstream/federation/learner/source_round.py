"""The clients of a round, from a data source to the learner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from veilstream.deployment.learner import Learner, Outcome
from veilstream.errors import InputError
from veilstream.records.admission import Answer
from veilstream.streams.intake import ClientSource, Offered
from veilstream.streams.table_source import TableSource

_log = logging.getLogger(__name__)


def offer_clients(
    learner: Learner,
    source: ClientSource,
    round_: int,
    told: Callable[[Offered, Outcome], None] = lambda offered, outcome: None,
) -> None:
    """Offer the source's clients for the open round; if the source fails, the round ends without more.

    ``told`` is called with every record and what became of it, when it is stored; for this machine only.
    """
    failed: list[Exception] = []

    def observe(clients: Iterable[Offered]) -> list[Answer]:
        stream = _UntilItFails(clients)
        try:
            outcomes = learner.take_many(stream, told)
        except Exception as error:
            failed.append(error)
            raise
        if stream.failure is not None:
            raise stream.failure
        return [outcome.answer for outcome in outcomes]

    try:
        source.serve(round_, observe, lambda: learner.clients_wanted)
    except Exception as error:
        if failed:
            raise failed[0] from None
        _log.error("the data source failed (%s); the round goes on without it", source_failure(error))
    if isinstance(source, TableSource):
        learner.note_read(source.bookmark)


def source_failure(error: Exception) -> str:
    """What may be logged of an error: our own text, else its kind alone, since its text might quote data."""
    return str(error) if isinstance(error, InputError) else type(error).__name__


class _UntilItFails:
    """A source's records up to its failure, so that those before the failure count."""

    def __init__(self, clients: Iterable[Offered]) -> None:
        self._clients = clients
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[Offered]:
        try:
            yield from self._clients
        except Exception as error:
            self.failure = error
