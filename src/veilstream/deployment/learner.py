"""The deployed learner: Algorithm 1 beside one data source.

**Guarantees**, against the server and everyone who reads what is sent, whatever x the server
chooses: `learner.guarantee` for every client's record (replace-one neighbours: the record becomes any
other, also one that cannot be used; the plan's participation, the whole horizon; lem-priv-analy with
the plan's accounting), also through crashes, retries and restored backups. Once a named client has
come, its place in a step is taken, whatever its record says: one that cannot be used is a zero
gradient. A step adds up the clipped gradients of at most `clients_per_step` clients and divides by that
number, however many came. What is sent is the prefix sum of
clipped gradients and correlated noise on a common grid (`veilstream.privacy.grid`), of a size that
does not depend on the data; where the plan has telemetry, its bounded metrics are further
coordinates of that sum, and the guarantee is for all of it (`veilstream.privacy.telemetry`). Noise
comes from seeds that the operating system drew; nothing lets an operator choose them.

What a round computes is `veilstream.deployment.local_rounds`; here it is written down in this order
(`veilstream.deployment.ledger`): the pinned model; for every group of steps, in one transaction,
the clients' tags, the secrets their noise was drawn from, fresh from the operating system, what the
round has come to with them, and how far the data source has been read; the message. Each is
witnessed before anything that depends on it leaves. After a crash, a group that was not stored is
as if it had never been, secrets and all, so no row of noise ever meets two gradients; stored ones
are repeated to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.arriving_clients import ArrivingClients, Outcome
from veilstream.deployment.learner_epochs import checked_round, one_at_a_time
from veilstream.deployment.process_secrecy import without_values
from veilstream.deployment.release import Release
from veilstream.deployment.secret_order import SecretOrder
from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.privacy.gradient_types import Noised
from veilstream.runs.released_model import model_sha256

__all__ = ["Learner", "Outcome", "checked_model"]

Float32s = NDArray[np.float32]


class Learner(ArrivingClients, SecretOrder):
    """One data source's side of a run. Open until `close`; a store has one learner at a time.

    Calls from several threads are done one after the other.

    ``create=True`` begins a store where there is none, and opens one that is there: a restart with
    the same arguments goes on. Without it, a store that is missing is an `InputError`. From its
    first learner on, a process leaves no core dumps (`veilstream.deployment.process_secrecy`).

    Args:
        plan: the run; it must have one private method, or name one of several (`federation.method`).
        store: the ledger's file.
        task: what is learned; its gradient, predictions and losses must be pure functions of
            (model, record), and keep nothing for each other.
        witness: the second file, best on another disk, by which an old copy of the store is
            recognised; beside the store where it is left out.
        create: begin a store where there is none.
        parts: for audits and studies; a deployed learner leaves it out.

    Raises:
        InputError: for a plan that cannot be deployed, a task that is not pure or does not say
            what its records look like, a store that is missing.
        LedgerError: for a store that is damaged, or older than its witness remembers.
        StoreBusy: while another process has it.

    """

    @without_values
    @without_values
    @one_at_a_time
    def begin_round(self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None = None) -> None:
        """Pin the model of round r; refused before any client's data are read if anything is wrong.

        Args:
            r: the round, in order from 0.
            x: the server's model, ``task.dim`` numbers.
            acknowledged: the last (round, hash) that the server has accepted from this learner: if
                the store does not know it, the store is an old copy.

        Raises:
            InputError: for another round than the next, or a model of another shape or size.
            PrivacyError: past the horizon, or for another model than a round was begun with.
            LedgerError: where the server remembers more than the store.

        """
        model = self._model_of_round(r, x, acknowledged)
        if model is None:
            return  # open already, or sealed: finish_round repeats it
        self.steps.check()
        if self._records is not None:
            self._records.enrol()
        if self._arrivals is not None:
            with self.epochs.whole_or_broken():
                self._arrivals.begin()
        with self.epochs.whole_or_broken():
            self.epochs.pin(checked_round("round", r), model, model_sha256(model), acknowledged)

    @without_values
    @one_at_a_time
    def would_begin(self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None = None) -> bool:
        """Whether `begin_round` would begin a round now; pins and spends nothing.

        False where the round is open or sealed already. Takes and raises what `begin_round` does.
        """
        return self._model_of_round(r, x, acknowledged) is not None

    def _model_of_round(self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None) -> Float32s | None:
        """The model that the round is to be pinned to; None where it is open or sealed."""
        r = checked_round("round", r)
        self.check_acknowledged(acknowledged)
        model = checked_model(x, self.task.dim, self.terms.model_norm_cap)
        return model if self.local.wants(r, model_sha256(model)) else None

    @without_values
    @one_at_a_time
    def learn_round(
        self,
        r: int,
        x: NDArray[Any],
        clients: Iterable[tuple[bytes | str, Sample | None]] | None = None,
        acknowledged: tuple[int, str] | None = None,
    ) -> Release:
        """A whole round from a stream of (tag, sample): takes no more of it than it uses.

        Args:
            r: the round, as the server counts.
            x: the model to start from.
            clients: tags and samples, in the order in which they came; None for nobody, or where `use_records` was
                given all of them.
            acknowledged: the last round that the server accepted, and the hash of its message.

        Returns:
            What is sent, as `finish_round` has it; errors are those of `begin_round` and `finish_round`.

        """
        if clients is not None:
            self._refuse_own_order()
        self.begin_round(r, x, acknowledged)
        if self.pinned and clients is not None:
            self.take_many(clients)
        return self.finish_round()

    @without_values
    @one_at_a_time
    def finish_round(self) -> Release:
        """Seal the round and return its message: the same bytes however often it is asked.

        Steps without a client have a zero gradient and keep their noise.

        Returns:
            What may be sent, `Release.payload`, with its hash.

        Raises:
            InputError: where no round has been begun or finished.

        """
        self._refuse_alone()
        self.seal_round()
        return self.epochs.last_release()

    @without_values
    @one_at_a_time
    def seal_round(self) -> None:
        """Seal the open round, if there is one, and hand nothing out."""
        if self.pinned:
            if self._by_step is not None:
                self._take_records(self._by_step)
            with self.epochs.whole_or_broken():
                self._seal()
            if self.over and self._arrivals is not None:
                self._arrivals.close()

    @one_at_a_time
    def sealed_release(self) -> Release:
        """The last finished round's message, again; seals nothing."""
        self._refuse_alone()
        return self.epochs.last_release()

    def _refuse_alone(self) -> None:
        if self.epochs.sums:
            raise InputError(
                "privacy.trust",
                "sum",
                "no message of one learner alone",
                '`veilstream learner` sends masked increments; or trust = "each"',
            )

    @without_values
    @one_at_a_time
    def catch_up(self, r: int) -> None:
        """Come to round r of a clock that all learners share: rounds without this learner have noise and no client.

        An open round before it is sealed as it is. Only where sums alone are seen.
        """
        r = checked_round("round", r)
        if not self.epochs.sums or r > self.terms.rounds:
            raise InputError("round", r, "one of a run in which only sums are seen", "begin_round")
        if self.local.round < r:
            self.seal_round()
        while (some := min(r - self.local.round, self._steps_together)) > 0:
            with self.epochs.whole_or_broken():
                seeds = self._fresh_seeds(some)
                self.local.prepare(seeds)
                self.epochs.miss([self.steps.noisy(self.local, (), seed) for seed in seeds], seeds)

    @one_at_a_time
    def increment(self, r: int) -> Noised:
        """All noisy steps up to round r that no opened sum holds; for masks alone, and never to be sent as it is."""
        if not self.epochs.sums or self.pinned or self.local.round != r + 1:
            raise InputError("round", r, f"round {self.local.round - 1}, sealed", "seal_round")
        return self.local.prefix

    def _seal(self) -> None:
        while empty := min(self.local.steps_wanted, self._steps_together):
            self._store_steps([()] * empty)
        self.epochs.seal()


def checked_model(x: Any, dim: int, norm_cap: float) -> Float32s:
    """A finite model of the right shape, within the public norm cap, as float32 of its own."""
    # As a plain array: what a subclass does besides holding numbers is not wanted here.
    given = np.asarray(x) if isinstance(x, np.ndarray) else None
    if given is None or given.dtype.kind not in "fiu" or given.shape != (dim,):
        what = type(x).__name__ if given is None else f"{given.dtype} of shape {given.shape}"
        raise InputError("x", what, f"an array of numbers of shape ({dim},)", "check the server")
    with np.errstate(all="ignore"):
        model = given.astype(np.float32)
        length = float(np.sqrt((model.astype(np.float64) ** 2).sum()))
    if not length <= norm_cap:
        raise InputError(
            "x", f"norm {length:g}", f"a norm of at most {norm_cap:g} (learning.model_norm_cap)", "check the server"
        )
    return model
