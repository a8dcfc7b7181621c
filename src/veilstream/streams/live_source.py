"""People who call: their records wait in a bounded queue until a round takes them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from veilstream.learning.tasks import Sample
from veilstream.streams.intake import Offered
from veilstream.streams.waiting_source import WaitingRecord, WaitingSource

if TYPE_CHECKING:
    from veilstream.records.admission import Answer


class LiveSource(WaitingSource):
    """Open across rounds; a restart forgets whoever waits, and none of them was told "taken"."""

    def offer(self, tag: str | bytes, sample: Sample, timeout_s: float = 10.0) -> Answer | None:
        """Wait for the answer to one record.

        Returns:
            None where it was not taken: there was no room, or no round in that time.

        """
        done = threading.Event()
        found: list[Answer | None] = []

        def answered(answer: Answer | None) -> None:
            found.append(answer)
            done.set()

        record = WaitingRecord(Offered(tag, sample), answered)
        if not self.put([record]):
            return None
        if not done.wait(timeout_s):
            self.withdraw([record])
            done.wait()  # a round that has it just now answers soon
        return found[0]
