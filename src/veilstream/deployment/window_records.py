"""Records that arrive while an epoch runs, in an order that nobody outside knows (`privacy.window`).

The steps of an epoch are cut into windows of one length. A record that arrives in one window is used in the next, at
a step that is drawn uniformly among that window's, by the same keyed function of its client's tag and the epoch's
secret as in `veilstream.deployment.epoch_records`. So nobody is used in the first window, and the last one takes
nobody: no window follows it.

**Guarantees**: `learner.guarantee` counts on the window in which a record arrives being known, and on its step within
the next being unseen. What is written down is the first alone:

1. when records arrive, one transaction holds their clients' keyed tags in their own order, under no step, and the
   records with the steps they drew, encrypted. Only then is anybody answered. From here on a client has taken part in
   this epoch, used or not;
2. steps are stored without tags, and a round's work is filled up to what a full window can need;
3. when a window begins, the records of the one before the last are destroyed.

A round takes at most ``local_steps * clients_per_step`` people, as in a known order; others wait with their source.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.epoch_records import most_of_a_round
from veilstream.deployment.epochs import ARRIVED, ORDER_SECRET, EpochLedger
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.step_index import PAGE_RECORDS, keyed_cipher
from veilstream.errors import LedgerError
from veilstream.plans.plan import Plan
from veilstream.records.admission import Admission
from veilstream.records.participation import MOST_AT_ONCE
from veilstream.records.sample import Sample
from veilstream.records.secret_order import chosen_steps

_log = logging.getLogger(__name__)

_SALT_BYTES = 16
_GROUP_BYTES = 16 << 20
"""Of records that are stored, or handed on, together: a large record is one of few."""
_TAG_BYTES = 32
_PURPOSE = b"veilstream records that wait for their window\0"


class Arrival(NamedTuple):
    """A client who takes part."""

    tag: bytes
    """Keyed, as the ledger has it."""
    name: bytes
    """Plain, in its one form: what the step is drawn from."""
    sample: Sample | None
    """None for a record that keeps its place with a zero gradient."""


class WindowRecords:
    """Who has arrived, and which records the steps of the running window have. For one thread at a time."""

    def __init__(self, plan: Plan, window: int, epochs: EpochLedger, admission: Admission) -> None:
        self._window, self._epochs, self._admission = window, epochs, admission
        terms = epochs.terms
        self._rounds_of_window = window // terms.local_steps
        self._most_a_round = terms.local_steps * terms.clients_per_step
        self._layout = np.dtype(
            [
                ("tag", f"S{_TAG_BYTES}"),
                ("step", "<u4"),
                ("usable", "u1"),
                ("target", "<f8"),
                ("features", "<f4", (int(np.prod(admission.shape, dtype=np.int64)),)),
            ]
        )
        self.most_together = max(1, min(MOST_AT_ONCE, _GROUP_BYTES // self._layout.itemsize))
        """Clients whose records are stored in one write."""
        self._page = max(1, min(PAGE_RECORDS, _GROUP_BYTES // self._layout.itemsize))
        self._due: tuple[tuple[int, int], NDArray[Any], NDArray[np.int64]] | None = None
        """Epoch and window, its records, and their order by step and tag; secret."""
        self._said = -1
        self.most_a_round = most_of_a_round(
            self._rounds_of_window * self._most_a_round, self._rounds_of_window, all_rounds=terms.rounds
        )
        """Clients that a round's work is filled up to."""

    @property
    def room(self) -> int:
        """How many more people the current round can take."""
        if not self.taking:
            return 0
        names = self._epochs.ledger.names(f"{ARRIVED}{self._epochs.local.round:010d}/")
        return self._most_a_round - sum(self._count(name) for name in names)

    @property
    def taking(self) -> bool:
        """Whether a window follows, in which those who arrive now are used."""
        local = self._epochs.local
        return not local.over and (self._now + 1) * self._rounds_of_window < self._epochs.terms.rounds

    @property
    def due(self) -> int:
        """How many people the running window has, at whatever steps."""
        return sum(self._count(name) for name in self._names_of(self._now - 1))

    @property
    def waiting(self) -> int:
        """How many have arrived in the running window, and wait for the next."""
        return sum(self._count(name) for name in self._names_of(self._now))

    def take(self, clients: Sequence[Arrival]) -> None:
        """Store these clients, at most `MOST_AT_ONCE`, as having taken part, and their records for the next window."""
        epochs, round_ = self._epochs, self._epochs.local.round
        place = f"{ARRIVED}{round_:010d}/"
        name = f"{place}{len(epochs.ledger.names(place)):06d}/{len(clients)}"
        body = Body(epoch=epochs.epoch, round=round_, step=0, places=MOST_AT_ONCE)
        epochs.write_arrived(body, {name: self.packed(clients)}, sorted(each.tag for each in clients))

    def packed(self, clients: Sequence[Arrival]) -> bytes:
        """These clients' records with the steps they draw, encrypted."""
        secret = self._epochs.ledger.blob(ORDER_SECRET)
        rows = np.zeros(len(clients), self._layout)
        rows["step"] = chosen_steps(secret, [each.name for each in clients], self._window)
        for row, each in zip(rows, clients, strict=True):
            row["tag"] = each.tag
            if each.sample is not None:
                row["usable"], row["target"] = 1, float(each.sample.target)
                row["features"] = np.asarray(each.sample.features, np.float32).reshape(-1)
        return _sealed(secret, rows.tobytes())

    def begin(self) -> None:
        """Destroy the records of windows that are over; to be called before a round begins."""
        names = self._epochs.ledger.names(ARRIVED)
        over = [name for name in names if self._window_of(name) < self._now - 1]
        if over:
            self._epochs.forget_used(over)
        if self._said != self._now:
            self._said = self._now
            self._say()

    def records(self, step: int) -> Iterator[list[Sample | None]]:
        """The records of one step, some at a time; None for one that cannot be used."""
        window, place = divmod(step, self._window)
        rows, order = self._rows(window)
        first, last = np.searchsorted(rows["step"][order], [place, place + 1]).tolist()
        shape = self._admission.shape
        for at in range(first, last, self._page):
            some = rows[order[at : min(last, at + self._page)]]
            samples = self._admission.from_arrays(some["features"].reshape(len(some), *shape), some["target"])
            yield [sample if good else None for sample, good in zip(samples, some["usable"], strict=True)]

    def close(self) -> None:
        """Let go of what was read."""
        self._due = None

    def _say(self) -> None:
        """Log how full the window is: everybody beside the learner may know who arrived in the one before."""
        windows = self._epochs.terms.rounds // self._rounds_of_window
        full, due = self._rounds_of_window * self._most_a_round, self.due
        _log.info(
            "window %d of %d: %d people, of %d at most, who arrived in the one before have a step each that only this "
            "learner knows%s",
            self._now + 1,
            windows,
            due,
            full,
            "" if self.taking else "; nobody is taken any more, since no window follows",
        )
        if 0 < due < 0.5 * full:
            _log.warning(
                "a step has %.3g people on average, and its sum is divided by clients_per_step, which everyone agreed "
                "on: the model moves %.2g times as far as it was tuned for",
                due / self._window,
                due / full,
            )

    # --- what is stored -----------------------------------------------------------------------------

    @property
    def _now(self) -> int:
        return self._epochs.local.round // self._rounds_of_window

    def _window_of(self, name: str) -> int:
        return int(name.split("/")[1]) // self._rounds_of_window

    def _names_of(self, window: int) -> list[str]:
        return [name for name in self._epochs.ledger.names(ARRIVED) if self._window_of(name) == window]

    @staticmethod
    def _count(name: str) -> int:
        return int(name.split("/")[3])

    def _rows(self, window: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All records of a window, once, and their order by step and then by tag, in which no arrival has a part."""
        of = (self._epochs.epoch, window)
        if self._due is None or self._due[0] != of:
            self._due = None
            ledger = self._epochs.ledger
            secret, names = ledger.blob(ORDER_SECRET), self._names_of(window - 1)
            rows, filled = np.zeros(sum(map(self._count, names)), self._layout), 0
            for name in names:
                content, many = _opened(secret, ledger.blob(name)), self._count(name)
                if len(content) != many * self._layout.itemsize:
                    raise self._unreadable()
                rows[filled : filled + many] = np.frombuffer(content, self._layout)
                filled += many
            if (rows["step"] >= self._window).any():
                raise self._unreadable()
            self._due = (of, rows, np.lexsort((rows["tag"], rows["step"])))
        return self._due[1:]

    def _unreadable(self) -> LedgerError:
        return LedgerError(
            f"{self._epochs.ledger.path}: records that wait for their window cannot be read",
            "put the newest store back",
        )


def _sealed(secret: bytes, content: bytes) -> bytes:
    """Encrypted under a key of its own; the ledger's chain says whether it was changed."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return salt + keyed_cipher(secret, _PURPOSE + salt).update(content)


def _opened(secret: bytes, stored: bytes) -> bytes:
    return keyed_cipher(secret, _PURPOSE + stored[:_SALT_BYTES]).update(stored[_SALT_BYTES:])
