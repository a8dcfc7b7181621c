"""What a simulation asks of whatever its clients come from."""

from __future__ import annotations

from typing import Protocol

from veilstream.learning.tasks import Sample


class Stream(Protocol):
    """Where a simulation's clients come from: a function of (seed, round), asked in any order.

    `PoolStream` is one whose clients are places in a pool, which a device holds once.
    """

    @property
    def provenance(self) -> str:
        """Where the data come from, for the run folder."""

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients.

        Args:
            seed: which of the run's seeds.
            round_: from 0.

        Returns:
            Features (n, clients, ...), targets (n, clients), for n learners that meet local_steps x
            clients_per_step clients each; ``present`` is 0 where a learner meets no one.

        """

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """Other clients, to measure on.

        Args:
            seed: which of the run's seeds.
            count: how many; fewer may come.
            round_: as of which round, where the world drifts.

        Returns:
            Features (count, ...), targets (count,).

        """
