"""The order of an epoch's records, if nobody outside the learner may know it (`privacy.order = "secret"`).

**Guarantees**: `learner.guarantee` counts on every client's step being drawn by itself, uniformly among the steps
of the epoch, unseen by everyone who reads what is sent. The draw is a keyed function of the client's tag
(`veilstream.records.secret_order`) under 32 bytes from the operating system, which the ledger holds from the epoch's
beginning and destroys at its end with the secrets of the noise; so it is the same after a crash, and for a client who
comes twice. Nobody can choose it, and no caller can hand over records in an order of their own.

Before an epoch's first round, in this order:

1. the records are read once, and written sorted by their steps (`veilstream.deployment.step_index`); nothing is spent;
2. when the server asks for the first round, every client's tag goes into the ledger as having taken part in this
   epoch, in the order of the keyed tags. From here on nobody of them may come again, used or not;
3. one record binds the epoch to the files as they were read.

Steps are then stored without tags. So nothing that the ledger or its witness keeps, and no length of what they write,
says at which step a client was used or how many a step had, also after the secret is gone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from veilstream.deployment.epochs import ORDER_FILES, ORDER_SECRET, EpochLedger
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.ledger.visits import tag_of
from veilstream.deployment.step_index import Contents, IndexWriter, Rows, StepIndex, remove_index
from veilstream.errors import InputError, LedgerError
from veilstream.plans.plan import Plan
from veilstream.progress import progress
from veilstream.records.admission import Admission
from veilstream.records.participation import MOST_AT_ONCE, Epochs, PastVisits, spent
from veilstream.records.sample import Sample
from veilstream.records.secret_order import chosen_steps
from veilstream.streams.intake import SomeRecords, SourceBookmark, WholeSource

_log = logging.getLogger(__name__)

MORE_THAN_THAT = 1e-9
"""Probability that an epoch has a round with more clients than its work is filled up to."""
_SALT_BYTES = 16
_CONTENT = "content"
"""Source of a bookmark that is a digest of records without bookmarks of their own."""
_WAY_OUT = (
    "put the old content back until this epoch has ended, and give new records to the next one; `veilstream ledger "
    "epoch --abandon` gives this one up, with everyone in it counted as having taken part"
)


class EpochRecords:
    """Which records the steps of the running epoch have. For one thread at a time."""

    def __init__(self, plan: Plan, epochs: EpochLedger, admission: Admission) -> None:
        self._plan, self._epochs, self._admission = plan, epochs, admission
        self._index: StepIndex | None = None
        self._source: WholeSource | None = None
        self._files = ""
        """The source's files as they were when they were last seen to hold what was indexed."""
        self._refused: tuple[str, InputError] | None = None  # files as they were, and why they were refused

    @property
    def index(self) -> StepIndex | None:
        """Of the running epoch; None before `use`. Secret."""
        found = self._index
        if found is not None and found.contents.epoch != self._epochs.epoch:
            self.close()
        return self._index

    @property
    def has_source(self) -> bool:
        """Whether `use` was called."""
        return self._source is not None

    def use(self, source: WholeSource) -> Contents:
        """Have the steps made of this source's records: read them, or check that they are those that were read.

        Raises:
            InputError: fewer clients than steps, or records that are not those of this epoch.

        """
        self.close()
        self._source, now = source, source.files_now()
        try:
            found = self._still_good(now) or self._made(source, now)
        except InputError as error:
            self._refused = (now, error)
            raise
        self._index, self._files, self._refused = found, now, None
        return found.contents

    def check(self) -> StepIndex:
        """The index, whose source has not changed since.

        Raises:
            InputError: it has, or there is none.

        """
        if self._source is None:
            raise InputError(
                "records",
                None,
                'all records of the epoch before its first round: privacy.order = "secret" chooses their steps',
                "learner.use_records(...)",
            )
        now = self._source.files_now()
        if self._refused is not None and now and self._refused[0] == now:
            raise self._refused[1]  # a server may ask again and again: the files are read again when they change
        if self.index is None or now != self._files:
            self.use(self._source)
        assert self._index is not None
        return self._index

    def enrol(self) -> Contents | None:
        """Count every client of the index as having taken part in this epoch, and bind the epoch to the files.

        None where that was done before.
        """
        index, ledger, epochs = self.check(), self._epochs.ledger, self._epochs
        if ledger.chain.standing.ordered:
            return None
        contents, known = index.contents, ledger.chain.visits.value().count
        with progress("clients written down", contents.records) as tick:
            waiting: list[bytes] = []
            for tags in itertools.chain(index.tags(), [[]]):
                past = ledger.past_visits(tags) if known and tags else {}
                waiting += [tag for tag in tags if not self._is_here(past.get(tag))]
                while len(waiting) >= MOST_AT_ONCE or (waiting and not tags):
                    some, waiting = waiting[:MOST_AT_ONCE], waiting[MOST_AT_ONCE:]
                    body = Body(epoch=epochs.epoch, step=0, places=MOST_AT_ONCE)
                    epochs.write("clients", body, tags=some, points="clients")
                tick(len(tags))
        for source, text in contents.until:
            epochs.note_read(SourceBookmark(source, text))
        read = {"since": contents.since, "until": contents.until}
        epochs.write_order({ORDER_FILES: secrets.token_bytes(_SALT_BYTES) + json.dumps(read).encode()})
        return contents

    def records(self, step: int) -> Iterator[list[Sample | None]]:
        """The records of one step, some at a time; None for one that cannot be used."""
        index = self.index
        if index is None:
            raise InputError("records", None, "the records of this epoch", "learner.use_records(...)")
        for rows in index.pieces(step):
            samples: Sequence[Sample] = self._admission.from_arrays(rows.features, rows.targets)
            yield [sample if good else None for sample, good in zip(samples, rows.usable, strict=True)]

    @property
    def most_a_round(self) -> int:
        """Clients that a round's work is filled up to."""
        index = self.index
        return most_of_a_round(0 if index is None else index.contents.records, self._epochs.terms.rounds)

    def close(self) -> None:
        """Let go of the index."""
        if self._index is not None:
            self._index.close()
        self._index = None

    # --- the index: found again, or made ------------------------------------------------------------

    def _bound(self) -> dict[str, Any] | None:
        """What the ledger says of the files of this epoch; None before its clients are written down."""
        if not self._epochs.ledger.chain.standing.ordered:
            return None
        told: dict[str, Any] = json.loads(self._epochs.ledger.blob(ORDER_FILES)[_SALT_BYTES:])
        return {name: tuple((source, text) for source, text in told[name]) for name in ("since", "until")}

    def _still_good(self, now: str) -> StepIndex | None:
        """The index of an earlier start, if the source is as it was."""
        epochs, bound = self._epochs, self._bound()
        try:
            found = StepIndex(epochs.ledger.path, epochs.ledger.blob(ORDER_SECRET))
        except (OSError, LedgerError):
            return None  # there is none, or it is of another epoch or damaged: it is made anew
        told = found.contents
        good = now != "" and told.files == now and told.epoch == epochs.epoch and told.steps == self._steps
        good = good and told.shape == self._admission.shape
        good = good and (told.until == bound["until"] if bound else told.since == self._since())
        if not good:
            found.close()
            return None
        return found

    @property
    def _steps(self) -> int:
        return self._epochs.terms.rounds * self._epochs.terms.local_steps

    def _since(self) -> tuple[tuple[str, str], ...]:
        marks = self._epochs.stored_bookmarks()
        return tuple((mark.source, mark.text) for mark in marks if mark.source != _CONTENT)

    def _made(self, source: WholeSource, now: str) -> StepIndex:
        epochs, bound = self._epochs, self._bound()
        secret, steps = epochs.ledger.blob(ORDER_SECRET), self._steps
        since = bound["since"] if bound else self._since()
        most = steps * epochs.terms.clients_per_step
        writer = IndexWriter(epochs.ledger.path, secret, steps, self._admission.shape)
        try:
            until, content, clients, returning = dict[str, str](), hashlib.blake2b(digest_size=16), 0, 0
            with progress(f"reading {source.name} by steps that only this learner knows", None) as tick:
                for some in source.read_whole([SourceBookmark(*told) for told in since]):
                    taken, looked_at = self._add(writer, some, secret, most - clients, content)
                    if some.behind is not None:
                        mark = some.behind(looked_at)
                        until[mark.source] = mark.text
                    clients, returning = clients + taken, returning + looked_at - taken
                    tick(looked_at)
                    if clients == most:
                        break
            if not until:
                until[_CONTENT] = content.hexdigest()
            told = tuple(sorted(until.items()))
            if bound is not None and told != bound["until"]:
                raise InputError(
                    "data",
                    source.name,
                    f"the records that epoch {epochs.epoch} was begun with; they changed since they were indexed",
                    _WAY_OUT,
                )
            contents = Contents(
                epoch=epochs.epoch, steps=steps, shape=self._admission.shape, since=since, until=told, files=now
            )
            if clients < steps:
                raise self._too_few(source, clients, returning)
            with progress("sorting records by step", clients) as tick:
                found = writer.finish(contents, tick)
            if found.contents.records < steps:
                found.close()
                remove_index(epochs.ledger.path)
                raise self._too_few(source, found.contents.records, returning)
        except BaseException:
            writer.give_up()
            raise
        self._say(source, found.contents, returning)
        return found

    def _add(
        self, writer: IndexWriter, some: SomeRecords, secret: bytes, most: int, content: hashlib.blake2b
    ) -> tuple[int, int]:
        """Write these clients' records, at most so many; how many they are, and of how many records.

        Whoever may not take part any more, or has no name, is passed.
        """
        ledger = self._epochs.ledger
        names = [tag_of(client) for client, _ in some.clients]
        keyed = [None if name is None else ledger.keyed(name) for name in names]
        past: dict[bytes, PastVisits] = {}
        if ledger.chain.visits.value().count:
            past = ledger.past_visits([tag for tag in keyed if tag is not None])
        here = [place for place, tag in enumerate(keyed) if tag is not None and self._may_take(past.get(tag))]
        looked_at = len(names)
        if len(here) >= most:
            here, looked_at = here[:most], here[most - 1] + 1
        tags = [tag for place in here if (tag := keyed[place]) is not None]
        plain = [name for place in here if (name := names[place]) is not None]
        if not here:
            return 0, looked_at
        rows = _as_arrays(
            self._admission.admitted_together([some.clients[place][1] for place in here]), self._admission.shape
        )
        if some.behind is None:
            for part in (*plain, rows.features.tobytes(), rows.targets.tobytes(), rows.usable.tobytes()):
                content.update(len(part).to_bytes(8, "little") + part)
        writer.add(tags, chosen_steps(secret, plain, self._steps), rows)
        return len(here), looked_at

    def _is_here(self, past: PastVisits | None) -> bool:
        return past is not None and past.epoch == self._epochs.epoch

    def _may_take(self, past: PastVisits | None) -> bool:
        """Whether a client is in this epoch; once it is bound to its files, exactly those who were written down."""
        standing = self._epochs.ledger.chain.standing
        if past is None or self._is_here(past) or standing.ordered:
            return (past is None and not standing.ordered) or self._is_here(past)
        since = standing.alike_since
        epochs = Epochs(
            self._epochs.epoch, self._plan.epochs_per_person, self._epochs.epoch if since is None else since
        )
        return spent([past], 0, self._plan.participation, epochs) is None

    def _too_few(self, source: WholeSource, clients: int, returning: int) -> InputError:
        others = f" ({returning} others took part before, or name nobody)" if returning else ""
        return InputError(
            "data",
            source.name,
            f'at least {self._steps} people who may take part, one for each step, under privacy.order = "secret"',
            f"it has {clients}{others}: give more records, or fewer learning.rounds",
        )

    def _say(self, source: WholeSource, told: Contents, returning: int) -> None:
        many, planned = told.records / told.steps, self._epochs.terms.clients_per_step
        if told.records + told.again == told.steps * planned:
            _log.info("%s: that is as many as the epoch takes; rows behind them are for the next one", source.name)
        _log.info(
            "%s: %d people have a step each that only this learner knows, %.3g a step on average; %d records cannot be "
            "used and keep their place, %d further rows of the same people and %d of people who took part before are "
            "left out",
            source.name,
            told.records,
            many,
            told.unusable,
            told.again,
            returning,
        )
        if many < 0.5 * planned:
            _log.warning(
                "a step has %.3g people on average, and its sum is divided by clients_per_step = %d, which everyone "
                "agreed on: the model moves %.2g times as far as it was tuned for. Set clients_per_step near the "
                "average before the run begins, or give more records",
                many,
                planned,
                many / planned,
            )


def most_of_a_round(clients: int, rounds: int, all_rounds: int | None = None) -> int:
    """More clients than that come in any round of an epoch with a probability below `MORE_THAN_THAT`.

    By Bernstein's inequality for a binomial count; how many clients there are is no secret between neighbours.
    ``rounds`` are those that a client chooses among, ``all_rounds`` those of the epoch.
    """
    share, rare = 1.0 / rounds, math.log((all_rounds or rounds) / MORE_THAN_THAT)
    beyond = rare / 3 + math.sqrt(rare * rare / 9 + 2 * rare * clients * share * (1 - share))
    return min(clients, math.ceil(clients * share + beyond))


def _as_arrays(samples: Sequence[Sample | None], shape: tuple[int, ...]) -> Rows:
    features = np.zeros((len(samples), *shape), np.float32)
    targets = np.zeros(len(samples))
    usable = np.array([sample is not None for sample in samples], bool)
    there = [sample for sample in samples if sample is not None]
    if there:
        features[usable] = np.stack([sample.features for sample in there])
        targets[usable] = [float(sample.target) for sample in there]
    return Rows(features, targets, usable)
