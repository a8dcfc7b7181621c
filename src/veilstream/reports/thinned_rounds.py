"""Figures of rounds for a chart, in bounded memory: of a long run every second, fourth, ... one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST = 4096
_NEWEST = 128


class ThinnedRounds:
    """Rows of numbers by round.

    Guarantees: at most ``most`` rows are held, evenly spread over the run, and beside them the
    newest 128; the last row that was added is always among them.

    Args:
        columns: what each row has.
        most: how many rows are held.

    """

    def __init__(self, columns: Sequence[str], most: int = _MOST) -> None:
        self._columns, self._most, self._every, self._seen = tuple(columns), most, 1, 0
        self._rows: list[tuple[int, tuple[float, ...]]] = []
        self._newest: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_NEWEST)

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, round_: int, values: Sequence[float]) -> None:
        """The next round's."""
        row = (round_, tuple(values))
        self._newest.append(row)
        if self._seen % self._every == 0:
            self._rows.append(row)
        self._seen += 1
        if len(self._rows) > self._most:
            self._rows, self._every = self._rows[::2], 2 * self._every

    def recent(self, column: str, count: int) -> list[float]:
        """The newest values of a column."""
        at = self._columns.index(column)
        return [values[at] for _, values in list(self._newest)[-count:]]

    def table(self) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        """Rounds, and the columns at them."""
        rows = dict([*self._rows, *list(self._newest)[-1:]])
        values = np.array(list(rows.values()), np.float64).reshape(-1, len(self._columns))
        by_column = {name: values[:, i] for i, name in enumerate(self._columns)}
        return np.array(list(rows), np.int64), by_column
