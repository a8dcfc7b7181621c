"""How many of many records deployed learners would take: a few bytes a record, whatever people's names are."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from veilstream.mechanisms.participation import Participation
from veilstream.records.participation import VisitsInMemory
from veilstream.streams.table_stream import ClientRecord, TableReport


class VisitCounts:
    """Records in the order of their files, each learner's by itself.

    People are told apart by a hash of 64 bits: among ten million, two would be taken for one with a chance of 3e-6.
    """

    def __init__(self, participation: Participation, per_step: int) -> None:
        self._participation, self._per_step = participation, per_step
        self._people: dict[str, array[int]] = {}
        self._refused: dict[str, bytearray] = {}

    def add(self, records: list[ClientRecord]) -> None:
        """Count some more records."""
        for record in records:
            people = self._people.get(record.learner)
            if people is None:
                people = self._people[record.learner] = array("q")
                self._refused[record.learner] = bytearray()
            people.append(hash(record.client))
            self._refused[record.learner].append(record.encoded is None)

    def count_people(self, report: TableReport) -> None:
        """Count people and their visits into the report."""
        everyone = [np.frombuffer(people, np.int64) for people in self._people.values()]
        visits = np.unique(np.concatenate([*everyone, np.zeros(0, np.int64)]), return_counts=True)[1]
        report.people, report.most_visits = len(visits), int(visits.max(initial=0))
        report.returning = int((visits > 1).sum())

    def taken(self, report: TableReport) -> dict[str, int]:
        """Records that take a step at each learner, refused ones as well; counts the others into the report."""
        found = {}
        for learner in sorted(self._people):
            people = np.frombuffer(self._people[learner], np.int64)
            refused = np.frombuffer(self._refused[learner], np.bool_)
            kept = self._kept(people, report)
            found[learner] = int(kept.sum())
            report.refused_steps += int((kept & refused).sum())
        report.used = sum(found.values()) - report.refused_steps
        return found

    def _kept(self, people: NDArray[np.int64], report: TableReport) -> NDArray[np.bool_]:
        kept = np.zeros(len(people), np.bool_)
        if self._participation.times == 1:
            kept[np.unique(people, return_index=True)[1]] = True
            report.too_often += int((~kept).sum())
            return kept
        visits, taken = VisitsInMemory(self._participation), 0
        for place, person in enumerate(people.tolist()):
            why = visits.take(person, taken // self._per_step)
            kept[place] = why is None
            taken += why is None
            report.too_often += why == "too often"
            report.too_soon += why == "too soon"
        return kept
