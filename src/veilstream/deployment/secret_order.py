"""Rounds made of records that wait here, used in an order that nobody outside knows."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np

from veilstream.deployment.epoch_records import EpochRecords
from veilstream.deployment.epochs import OPEN_ROUND, secret_name
from veilstream.deployment.learner_epochs import LearnerEpochs, one_at_a_time
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.process_secrecy import without_values
from veilstream.deployment.step_index import PAGE_RECORDS, Contents
from veilstream.deployment.window_records import Arrival, WindowRecords
from veilstream.errors import InputError, PrivacyError
from veilstream.learning.purity import example_records
from veilstream.learning.tasks import Sample
from veilstream.streams.intake import GivenRecords, WholeSource

_MEASURED_STEPS = 4
_MEASURED_WRITES = 3
_WRITES_A_ROUND = 5
"""Model, steps, message, a window that is over, the noise's state."""


class SecretOrder(LearnerEpochs):
    """A learner's records, each used at a step that a secret of the epoch and its client's tag decide."""

    @property
    def has_records(self) -> bool:
        """Whether `use_records` was called since this start."""
        return self._records is not None and self._records.has_source

    @property
    def clients_written_down(self) -> bool:
        """Whether the clients of this epoch's records, all together, have been counted as having taken part."""
        return self.ledger.chain.standing.ordered

    @without_values
    @one_at_a_time
    def use_records(self, records: WholeSource | Sequence[tuple[bytes | str, Sample | None]]) -> Contents:
        """Have this epoch's steps made of these records, where `privacy.order = "secret"`.

        Each client's step is drawn by itself, uniformly among the epoch's, as only this learner knows. The records are
        read now, and written in the order of their steps, encrypted, beside the store. From the first round on all
        of their clients count as having taken part. To be called after every start, and in every epoch.

        Args:
            records: all of the epoch's, as pairs of tag and record, or a source that is all there (a file, a folder
                or a table: `veilstream.streams.table_source.TableSource`).

        Returns:
            What was found; for this machine only.

        Raises:
            InputError: fewer clients than steps, records that changed since the epoch's first round, or another order.

        """
        if self._records is None:
            field, rule = ("privacy.order", '"secret"') if self.plan.window is None else ("privacy.window", "no window")
            raise InputError(
                field,
                self.plan.window or "known",
                f"{rule}, to give all records of an epoch at once",
                "observe_many(...)",
            )
        self.ledger.check()
        if self.over:
            raise PrivacyError(f"epoch {self.epoch} has ended: nothing was read (new_epoch() begins another)")
        source = records if isinstance(records, WholeSource) else GivenRecords(records)
        return self._records.use(source)

    @without_values
    @one_at_a_time
    def write_down_clients(self) -> Contents | None:
        """Count all clients of `use_records` as having taken part, as the epoch's first round does by itself.

        Returns:
            What was found of them; None where they had been written down before.

        Raises:
            InputError: what `use_records` raises, where the records changed since.

        """
        return None if self._records is None else self._records.enrol()

    @without_values
    @one_at_a_time
    def round_work_s(self) -> float:
        """About how long a round's work takes, whoever is in it: measured now, on made-up records and spare noise."""
        source = self._by_step
        if source is None or self.over:
            return 0.0
        local, most = self.epochs.new_rounds(self.epoch), source.most_a_round
        local.pin(np.zeros(self.terms.dim, np.float32), "")
        self.steps.check()
        seeds = self._fresh_seeds(min(_MEASURED_STEPS, self.terms.local_steps))
        work_s = self.steps.round_work_s(local, most, seeds)
        began = time.perf_counter()
        self._read_for_nobody(most)
        read_s = time.perf_counter() - began
        return work_s + read_s + self._arrivals_and_writes_s()

    def _read_for_nobody(self, count: int) -> None:
        """Make as many records of what is kept as that many people have, and drop them."""
        for at in range(0, count, PAGE_RECORDS):
            some = min(PAGE_RECORDS, count - at)
            self._admission.from_arrays(np.zeros((some, *self._admission.shape), np.float32), np.zeros(some))

    def _arrivals_and_writes_s(self) -> float:
        """About how long it takes to take in as many people as a round can, and to write all that a round writes.

        One group of made-up people is prepared and written to a file beside the store, as often as a file and its
        witness would be; the ledger itself is not touched.
        """
        group, groups, content = 0, 0, bytes(8 * self.terms.release_dim + 4 * self.terms.dim)
        began = time.perf_counter()
        if self._arrivals is not None:
            a_round = self.terms.local_steps * self.terms.clients_per_step
            group = min(a_round, self._arrivals.most_together)
            groups = -(-a_round // group)
            blank = example_records(self.task)[0]
            names = [b"made up %d" % place for place in range(group)]
            tags = [self.ledger.keyed(name) for name in names]
            self.ledger.past_visits(tags)
            samples = self._admission.admitted_together([blank] * group)
            places = [Arrival(*each) for each in zip(tags, names, samples, strict=True)]
            content = max(content, self._arrivals.packed(places), key=len)
        group_s = time.perf_counter() - began
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=self.ledger.path.parent) as file:
            for _ in range(_MEASURED_WRITES):
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        write_s = (time.perf_counter() - began) / _MEASURED_WRITES
        return groups * group_s + 2 * write_s * (groups + _WRITES_A_ROUND)

    @without_values
    @one_at_a_time
    def take_round(self) -> None:
        """Use the records whose secret steps are in the open round; `finish_round` does it if nobody has."""
        if self._by_step is None:
            raise InputError("privacy.order", "known", '"secret", where no caller says who comes', "observe_many(...)")
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        self._take_records(self._by_step)

    @property
    def _by_step(self) -> EpochRecords | WindowRecords | None:
        """What knows the records of a step; None in a known order."""
        return self._records if self._arrivals is None else self._arrivals

    def _take_records(self, order: EpochRecords | WindowRecords) -> None:
        """Compute all steps of the open round that are left, and store them in one write.

        Their clients' tags are stored already, all together. What is written, and when, must not depend on how many
        records a step has: the work is filled up to that of any round before anything of it is stored. Noise is
        prepared for some steps at a time, as large as they are.
        """
        local, first = self.local, self.local.step
        if not (count := local.steps_wanted):
            return
        with self.epochs.whole_or_broken():
            seeds, seen = self._fresh_seeds(count), 0

            def counted(pieces: Iterator[list[Sample | None]]) -> Iterator[list[Sample | None]]:
                nonlocal seen
                for some in pieces:
                    seen += len(some)
                    yield some

            for at in range(0, count, self._steps_together):
                some = seeds[at : at + self._steps_together]
                local.prepare(some)
                for step, seed in enumerate(some, first + at):
                    local.apply(self.steps.noisy_in_pieces(local, counted(order.records(step)), seed))
                    self.ledger.reached("step-computed")
            self._read_for_nobody(order.most_a_round - seen)
            self.steps.fill_up(local, order.most_a_round, self.terms.local_steps)
            keep = {secret_name(local.epoch, first): b"".join(seeds), OPEN_ROUND: local.pack_open()}
            self.epochs.write_steps("steps", Body(epoch=local.epoch, step=first, steps=count), keep)
