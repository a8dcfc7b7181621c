"""Telemetry of a server's run: what each round added, and estimates with their error bars.

    telemetry_sums.csv   a line a round: the sum that the round's messages added, by metric, and of
                         each learner (JSON) its epoch and from which of its rounds to which
    telemetry.csv        round, metric, estimate, low, high, window, steps, sampling, average

Both are of plain sums over all learners, whatever rule combines their gradients. The first is what
a server goes on from after a restart; a round that a kill had done once more is there twice, and
the last line counts. Nothing in either is more than the messages said.
"""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.terms import Terms
from veilstream.federation.protocol.fold import ClosedRound
from veilstream.files import write_file
from veilstream.learning.telemetry_estimates import TELEMETRY_COLUMNS, Estimate, RoundNoise, TelemetrySums
from veilstream.plans.plan import Plan
from veilstream.privacy.telemetry import Telemetry

_SUMS, _ESTIMATES = TELEMETRY_FILES = ("telemetry_sums.csv", "telemetry.csv")

_LOOKS = 10  # estimates that a window sees


class TelemetryFiles:
    """One run's telemetry; `of` returns None where the plan has none."""

    def __init__(self, folder: Path, plan: Plan, terms: Terms, telemetry: Telemetry) -> None:
        self._folder, self._telemetry = folder, telemetry.on_grid(terms.grid.step * terms.clients_per_step)
        self._rounds = plan.learning.rounds
        self.window = plan.telemetry_window
        self._noise = RoundNoise(terms.mechanism, terms.noise_std, terms.local_steps)
        self._sums = TelemetrySums(self._telemetry, self._noise, terms.clients_per_step)
        self.latest: list[Estimate] = []
        """The newest estimates, one for each metric; for pages."""

    @classmethod
    def of(cls, folder: Path, plan: Plan, terms: Terms) -> TelemetryFiles | None:
        """As the plan says."""
        return None if terms.telemetry is None else cls(folder, plan, terms, terms.telemetry)

    def begin(self) -> None:
        """Write both files' first lines."""
        self._write([], [])

    def _write(self, sums: list[list[str]], estimates: list[list[str]]) -> None:
        """Each file whole: a kill leaves what was there, or all of this."""
        for name, first, rows in (
            (_SUMS, ["round", *self._telemetry.metrics, "spans"], sums),
            (_ESTIMATES, list(TELEMETRY_COLUMNS), estimates),
        ):
            write_file(self._folder / name, _as_csv([first, *rows]))

    def resume(self, rounds: int) -> None:
        """Go on after so many rounds; one whose line is missing counts as one without learners.

        What a kill cut short, and what belongs to a round that will be done again, is left out of
        both files, so that the next line begins where a line begins.
        """
        found: dict[int, ClosedRound] = {}
        for cells in self._lines(_SUMS):
            read = self._read(cells)
            if read is not None and read.round < rounds:
                found[read.round] = read
        told = [cells for cells in self._lines(_ESTIMATES) if _whole(cells, rounds)]
        self._write([self._row(closed) for _, closed in sorted(found.items())], told)
        for r in range(rounds):
            self._add(found.get(r, ClosedRound(r, {}, ())))
        if rounds:
            self.latest = self._sums.estimates(self.window)

    def _lines(self, name: str) -> list[list[str]]:
        """All but the first, and but one that does not end."""
        path = self._folder / name
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return [line for line in csv.reader(io.StringIO(whole)) if line][1:]

    def close_round(self, closed: ClosedRound) -> None:
        """Durable when it returns; before the checkpoint, so that no round is missing."""
        self._append(_SUMS, [self._row(closed)])
        self._add(closed)
        if self._look(closed.round + 1):
            self._append(_ESTIMATES, [estimate.cells() for estimate in self.latest])

    def as_dicts(self) -> list[dict[str, Any]]:
        """The newest estimates as plain values, for JSON."""
        return [asdict(estimate) for estimate in self.latest]

    def _look(self, rounds: int) -> bool:
        every = max(1, self.window // _LOOKS)
        if not rounds or (rounds % every and rounds != self._rounds):
            return False
        self.latest = self._sums.estimates(self.window)
        return True

    def _add(self, closed: ClosedRound) -> None:
        nothing = np.zeros(len(self._telemetry.metrics))
        self._sums.add(nothing if closed.telemetry is None else closed.telemetry)
        self._noise.add(closed.spans)

    @staticmethod
    def _row(closed: ClosedRound) -> list[str]:
        assert closed.telemetry is not None
        sums = [repr(float(number)) for number in closed.telemetry]
        return [str(closed.round), *sums, json.dumps(closed.spans, separators=(",", ":"))]

    def _read(self, cells: list[str]) -> ClosedRound | None:
        try:
            round_, *numbers, written = cells
            spans = {name: (e, lo, hi) for name, (e, lo, hi) in json.loads(written).items()}
            sums = np.array([float(number) for number in numbers])
            if len(sums) != len(self._telemetry.metrics):
                return None
            return ClosedRound(int(round_), {}, (), telemetry=sums, spans=spans)
        except (TypeError, ValueError, AttributeError):
            return None

    def _append(self, name: str, rows: list[list[str]]) -> None:
        with (self._folder / name).open("a", newline="") as file:
            file.write(_as_csv(rows))
            file.flush()
            os.fsync(file.fileno())


def _as_csv(rows: list[list[str]]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _whole(cells: list[str], rounds: int) -> bool:
    return len(cells) == len(TELEMETRY_COLUMNS) and cells[0].isdigit() and int(cells[0]) <= rounds
