"""Any Python iterator of records as a deployed learner's clients (`--data module:function`).

A record is a mapping of the plan's columns, as a row of a table, or a pair (person, sample).

The function is called with how many records this learner has consumed so far, across restarts, by its ledger: a
stream that can be read again yields from there on. One that deletes what it hands out may ignore it. Whatever it
yields takes a step: a record that cannot be used ((person, None), a row as it is, or what is no record at all) with a
zero gradient, and one that names nobody as a client of its own. It must not raise, since an iterator that has raised is
at its end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from veilstream.errors import InputError
from veilstream.records.admission import Admission
from veilstream.records.client_names import LONGEST_NAME, client_name
from veilstream.records.schema import Encoded, RecordSchema, Refusal
from veilstream.streams.intake import Offered, SourceBookmark
from veilstream.streams.waiting_source import WaitingRecord, WaitingSource

_log = logging.getLogger(__name__)
_READ_AHEAD = 1024


class IteratorSource(WaitingSource):
    """Reads an iterator ahead in a thread of its own; the iterator may block.

    Args:
        make: called once, with how many records were consumed before; gives rows, or (tag, sample) pairs
            with None as sample for a record that cannot be used.
        name: under which the learner remembers how far it was read.
        patience_s: how long a round waits for records.

    """

    _nobody_hears = True

    def __init__(self, make: Callable[[int], Iterator[Any]], *, name: str, patience_s: float) -> None:
        super().__init__(patience_s, _READ_AHEAD)
        self.name = name
        self._make, self._consumed = make, 0
        self.admission: Admission | None = None  # other records are counted, and offered as None
        self.schema: RecordSchema | None = None  # what a row means
        self.not_admitted = 0
        self._thread: threading.Thread | None = None

    @property
    def _no_more_can_come(self) -> bool:
        return self._no_more or len(self._queue) >= self._capacity

    def hold(self, records: int) -> None:
        """Let at least so many wait."""
        self._capacity = max(self._capacity, records)

    @property
    def exhausted(self) -> bool:
        """Whether the iterator has ended, and nothing of it waits."""
        return self._no_more and not self._queue

    def resume(self, bookmarks: list[SourceBookmark]) -> None:
        """Continue after what was consumed under this name; call it before the first round."""
        for mark in bookmarks:
            if mark.source == self.name:
                if not mark.text.isdecimal():
                    raise InputError(
                        "data",
                        self.name,
                        "the name of an iterator; the ledger knows a table under it",
                        "give the iterator another name",
                    )
                self._consumed = int(mark.text)

    def ready(self, minimum: int, most: int, may_take: Callable[[str | bytes], bool]) -> bool:
        """Start reading, then as `WaitingSource`."""
        self._start()
        return super().ready(minimum, most, may_take)

    def serve(self, round_: int, observe: Any, wanted: Callable[[], int]) -> None:
        """Offer what the iterator gives while the window is open."""
        self._start()
        super().serve(round_, observe, wanted)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name=f"data {self.name}", daemon=True)
            self._thread.start()

    def _read(self) -> None:
        try:
            for given in self._make(self._consumed):
                self._consumed += 1
                tag, sample = self._encoded(given)
                if self.admission is not None and self.admission.admitted(sample) is None:
                    self._refuse(self.admission)
                    sample = None
                bookmark = SourceBookmark(self.name, str(self._consumed))
                if not self._put_when_there_is_room(WaitingRecord(Offered(tag, sample, bookmark))):
                    return
        except Exception as error:  # its text might quote data, unless it is ours
            why = str(error) if isinstance(error, InputError) else type(error).__name__
            _log.error("the data source %s failed (%s)", self.name, why)
        with self._changed:
            self._no_more = True
            self._changed.notify_all()

    def _encoded(self, given: object) -> tuple[str | bytes, Any]:
        """Whose record it is, and its sample if there is one."""
        nobody = f"{self.name}:{self._consumed}"
        if isinstance(given, Mapping):
            if self.schema is None and self._consumed == 1:
                rule = "(person, sample) pairs, since [data] has no columns"
                raise InputError("data", self.name, rule, 'kind = "table"')
            found = Refusal("not readable") if self.schema is None else self.schema.encode(given, row_name=nobody)
            return found.client or nobody, found.sample if isinstance(found, Encoded) else None
        if not isinstance(given, tuple | list) or len(given) != 2:
            return nobody, None
        who, sample = given
        named = who if isinstance(who, bytes) and 0 < len(who) <= LONGEST_NAME else client_name(who)
        return named or nobody, sample

    def _refuse(self, admission: Admission) -> None:
        """Warn at the first, the tenth, the hundredth ... record that cannot be used."""
        self.not_admitted += 1
        if self.not_admitted in (10**k for k in range(12)):
            _log.warning(
                "%s: %d of %d records so far cannot be used: the task takes %s; their clients take "
                "their steps all the same, with a zero gradient",
                self.name,
                self.not_admitted,
                self._consumed,
                admission.in_words,
            )

    def _put_when_there_is_room(self, record: WaitingRecord) -> bool:
        """False once the source is closed."""
        while not self.put([record]):
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.waiting < self._capacity)
                if self._closed:
                    return False
        return True
