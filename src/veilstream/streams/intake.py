"""Where a deployed learner's clients come from: a file beside it, or people who call.

A source offers clients one at a time and holds no more than one. After a restart it begins
again: who took part before is answered and not used, so a file is its own bookmark.
"""

from __future__ import annotations

import csv
import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from veilstream.errors import InputError
from veilstream.learning.admission import Answer
from veilstream.learning.tasks import Sample

__all__ = ["ClientSource", "FileSource", "LiveSource", "Observe"]


Observe = Callable[[str | bytes, Sample], Answer]


Wanted = Callable[[], int]


class ClientSource(Protocol):
    """What a daemon asks for clients."""

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Offer clients for this round until no more are wanted, or none comes."""


class FileSource:
    """Records of a file, top to bottom: CSV with a header, or one JSON object a line.

    ``tag`` says who (the same text whenever the same person comes, in any file: that is how nobody
    is used twice), ``target`` is the label or value; every other column is a feature, in the file's
    order. In JSON, ``features`` is a list. A record that cannot be read is refused like any other.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise InputError("data", str(path), "a file, `live`, or `plan:INDEX`", "check the path")
        self._csv = path.suffix == ".csv"
        self._records = self._read()
        if self._csv:
            with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
                header = next(csv.reader(file), [])
            if missing := {"tag", "target"} - set(header):
                raise InputError(
                    "data", str(path), "a header with columns `tag` and `target`",
                    f"add {' and '.join(sorted(missing))}",
                )  # fmt: skip

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """The next records; at the end of the file nobody comes any more."""
        while wanted():
            record = next(self._records, None)
            if record is None:
                return
            observe(*record)
            del record

    def close(self) -> None:
        """Let go of the file."""
        self._records.close()

    def _read(self) -> Generator[tuple[str, Any], None, None]:
        """No record can end this: what cannot be read is offered as None, and refused."""
        with self._path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows: Iterator[Any] = iter(csv.DictReader(file) if self._csv else file)
            for number in itertools.count():
                offer: tuple[str, Any]
                try:
                    offer = self._parsed(next(rows))
                except StopIteration:
                    return
                except Exception:  # whatever a client wrote
                    offer = f"{self._path.name}:{number}", None
                yield offer

    def _parsed(self, row: Any) -> tuple[str, Sample]:
        fields = row if isinstance(row, dict) else json.loads(row)
        tag, target = fields.pop("tag"), float(fields.pop("target"))
        if not isinstance(tag, str):
            raise ValueError("no tag")
        numbers = fields["features"] if "features" in fields else list(fields.values())
        return tag, Sample(np.asarray(numbers, np.float64), target)


class LiveSource:
    """People who call: each waits until a learner takes its data, and nothing is put by."""

    def __init__(self, patience_s: float) -> None:
        self.window_s = patience_s
        self._turn = threading.Lock()  # one caller at a time
        self._changed = threading.Condition()
        self._offer: tuple[str | bytes, Any] | None = None
        self._answer: Answer | None = None
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether a learner is waiting for someone now."""
        return self._open

    def offer(self, tag: str | bytes, sample: Any, timeout_s: float = 10.0) -> Answer | None:
        """Answer to a caller; None if no learner is waiting for anyone now."""
        with self._turn, self._changed:
            if not self._open:
                return None
            self._offer, self._answer = (tag, sample), None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answer or not self._open, timeout_s)
            answer, self._offer, self._answer = self._answer, None, None
            return answer

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Whoever calls within the plan's patience."""
        until = time.monotonic() + self.window_s
        with self._changed:
            self._open = True
            try:
                while wanted():
                    left = until - time.monotonic()
                    if not self._changed.wait_for(lambda: self._offer is not None, max(left, 0.0)):
                        return
                    assert self._offer is not None
                    (tag, sample), self._offer = self._offer, None
                    self._answer = observe(tag, sample)
                    del sample
                    self._changed.notify_all()
            finally:
                self._open = False
                self._changed.notify_all()
