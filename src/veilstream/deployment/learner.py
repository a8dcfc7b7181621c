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

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.client_steps import ClientSteps, check_dim
from veilstream.deployment.epoch_records import EpochRecords
from veilstream.deployment.epochs import DEPLOYED, OPEN_ROUND, EpochLedger, LearnerParts, secret_name
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.visits import tag_of
from veilstream.deployment.local_rounds import LocalRounds, pack_step
from veilstream.deployment.process_secrecy import no_core_dumps, without_values
from veilstream.deployment.release import Release
from veilstream.deployment.step_index import Contents
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, LedgerError, PrivacyError
from veilstream.learning.tasks import Sample, Task, admission_of
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised
from veilstream.privacy.seeds import check_generator_once, checked_seed
from veilstream.records.admission import Answer
from veilstream.records.participation import MOST_TOGETHER, Epochs, PastVisits, spent
from veilstream.runs.released_model import model_sha256
from veilstream.streams.intake import GivenRecords, Offered, SourceBookmark, WholeSource

Float32s = NDArray[np.float32]
P = ParamSpec("P")
R = TypeVar("R")

_MEASURED_STEPS = 4
_GROUP_BYTES = 16 << 20
"""Of noise rows, eight bytes a number, that a group of steps has at most."""


_Place = tuple[bytes, Sample | None]
"""A client's keyed tag, and its record if that can be used."""


class Outcome(NamedTuple):
    """What became of a record; for this machine only, since it says who took part before."""

    answer: Answer
    """All that its client may be told."""
    used: bool
    """Whether it took a place in a step; with the answer "refused", as a zero gradient."""


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """A learner's method that waits until no other thread is in one."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        learner: Any = args[0]
        with learner.one_call:
            return method(*args, **kwargs)

    return call


class Learner:
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
    def __init__(
        self,
        plan: Plan,
        store: Path | str,
        task: Task,
        *,
        witness: Path | str | None = None,
        create: bool = False,
        parts: LearnerParts = DEPLOYED,
    ) -> None:
        no_core_dumps()
        check_dim(plan, task)
        self.plan, self.task = plan, task
        self.one_call = threading.RLock()
        self._admission = admission_of(task)
        self.terms = terms = Terms.of(plan, task.dim, task)
        self.noise_std, self.guarantee, self.grid = terms.noise_std, terms.guarantee, terms.grid
        self.steps = ClientSteps(task, terms, parts.telemetry)
        check_generator_once(fresh_secret)
        self._participation = plan.participation
        self._planned: dict[bytes, list[PastVisits]] = {}  # of the group that is being put together
        self._steps_together = max(
            1, min(MOST_TOGETHER // terms.clients_per_step, _GROUP_BYTES // (8 * terms.release_dim))
        )
        self.epochs = EpochLedger(plan, terms, store, witness, create=create, parts=parts)
        self._records = EpochRecords(plan, self.epochs, self._admission) if plan.order == "secret" else None
        if self._records is not None:
            self._steps_together = max(1, min(MOST_TOGETHER, _GROUP_BYTES // (8 * terms.release_dim)))

    @property
    def model(self) -> Float32s | None:
        """The newest model that the server has sent, read-only; None before the first."""
        if self.epochs.model is None:
            return None
        shown = self.epochs.model.view()
        shown.flags.writeable = False
        return shown

    @property
    def ledger(self) -> Ledger:
        """The store, to look at; the learner alone writes to it."""
        return self.epochs.ledger

    @property
    def local(self) -> LocalRounds:
        """The epoch's rounds in memory, to look at; the learner alone moves them."""
        return self.epochs.local

    @property
    def settings(self) -> dict[str, Any]:
        """All that the guarantee rests on; a store keeps to it, and so must the server."""
        return self.terms.settings

    @property
    def epoch(self) -> int:
        """Which mechanism is running, from 0."""
        return self.epochs.epoch

    @property
    def run(self) -> str | None:
        """The server's run that this epoch belongs to; None before it has joined one."""
        return self.epochs.run

    @property
    def epochs_left(self) -> int:
        """How many more epochs a server may lead this learner into (`federation.epochs`)."""
        return self.epochs.epochs_left

    @property
    def round(self) -> int:
        """The round that is open, or is to be begun next."""
        return self.local.round

    @property
    def pinned(self) -> bool:
        """Whether a round has been begun and not sealed."""
        return self.local.pinned is not None

    @property
    def clients_wanted(self) -> int:
        """How many clients the open round can still take."""
        return self.local.steps_wanted * self.terms.clients_per_step

    @property
    def order_is_secret(self) -> bool:
        """Whether nobody outside may know at which step a record is used: all come by `use_records`."""
        return self._records is not None

    @property
    def has_records(self) -> bool:
        """Whether `use_records` was called since this start."""
        return self._records is not None and self._records.has_source

    @property
    def clients_written_down(self) -> bool:
        """Whether the clients of this epoch's records, all together, have been counted as having taken part."""
        return self.ledger.chain.standing.ordered

    @property
    def horizon_reached(self) -> bool:
        """Whether every round of this epoch has been sealed."""
        return self.local.horizon_reached

    @property
    def over(self) -> bool:
        """Whether this epoch takes nobody any more: at its horizon, or ended before it."""
        return self.local.over

    @without_values
    @one_at_a_time
    def join(self, run: str, parts: LearnerParts = DEPLOYED) -> None:
        """Give this epoch to one run of the server; another run is refused until the next epoch.

        A study's learner joins only with the very ``parts`` that it was made of.
        """
        self.epochs.join(run, parts)

    @without_values
    @one_at_a_time
    def end_epoch(self) -> None:
        """End this epoch now, whatever rounds are left; done before, nothing happens.

        An open round is dropped: nothing of it is ever released, and its clients count as having
        taken part. Seeds and the state of the noise are destroyed. What was sealed can still be
        sent. Ending early loses the rounds that are left, and nothing of the promise.
        """
        self.epochs.end()

    @without_values
    @one_at_a_time
    def follow(self, run: str, ended: Collection[str]) -> bool:
        """Go along into the server's next run, if the plan allows; whether an epoch was begun.

        A new epoch has a fresh mechanism and takes only clients who were in none before, so every
        client has the promise in exactly one epoch, whatever the server says and however often.
        The plan bounds how many epochs there may be (`federation.epochs`, since the operator last
        began one); the server cannot.

        Args:
            run: the run that begins.
            ended: the runs before it, which the server says are over. If this epoch belongs to one
                of them, it is ended; else nothing happens.

        Raises:
            InputError: the plan allows no further epoch.
            LedgerError: secrets of the last one cannot be destroyed yet.

        """
        return self.epochs.follow(run, ended)

    @without_values
    @one_at_a_time
    def new_epoch(self) -> None:
        """Start a fresh mechanism, for those who may take part in a further epoch: by default new clients only."""
        self.epochs.begin_next()

    def close(self) -> None:
        """Let go of the store."""
        if self._records is not None:
            self._records.close()
        self.ledger.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Learner cannot be copied: two would answer for one store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        with self.epochs.whole_or_broken():
            self.epochs.pin(_checked_round("round", r), model, model_sha256(model), acknowledged)

    @without_values
    @one_at_a_time
    def would_begin(self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None = None) -> bool:
        """Whether `begin_round` would begin a round now; pins and spends nothing.

        False where the round is open or sealed already. Takes and raises what `begin_round` does.
        """
        return self._model_of_round(r, x, acknowledged) is not None

    def _model_of_round(self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None) -> Float32s | None:
        """The model that the round is to be pinned to; None where it is open or sealed."""
        r = _checked_round("round", r)
        self.check_acknowledged(acknowledged)
        model = checked_model(x, self.task.dim, self.terms.model_norm_cap)
        return model if self.local.wants(r, model_sha256(model)) else None

    @one_at_a_time
    def check_acknowledged(self, acknowledged: tuple[int, str] | None) -> None:
        """Refuse to go on if the server has accepted what this store does not know."""
        if acknowledged is None:
            return
        r, digest = _checked_acknowledgement(acknowledged)
        if not self.ledger.knows_message(r, digest):
            raise LedgerError(
                f"the server has accepted round {r} with hash {digest[:16]!r}, which this store does not know",
                "this store and its witness are old copies: put the newest ones back; if they are "
                "lost, begin another store, with other clients only",
            )

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
            raise InputError(
                "privacy.order", "known", '"secret", to give all records of an epoch at once', "observe_many(...)"
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
        if self._records is None or self.over:
            return 0.0
        local, most = self.epochs.new_rounds(self.epoch), self._records.most_a_round
        local.pin(np.zeros(self.terms.dim, np.float32), "")
        self.steps.check()
        return self.steps.round_work_s(local, most, self._fresh_seeds(min(_MEASURED_STEPS, self.terms.local_steps)))

    @without_values
    @one_at_a_time
    def take_round(self) -> None:
        """Use the records whose secret steps are in the open round; `finish_round` does it if nobody has."""
        if self._records is None:
            raise InputError("privacy.order", "known", '"secret", where no caller says who comes', "observe_many(...)")
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        self._take_records(self._records)

    def _take_records(self, order: EpochRecords) -> None:
        while count := min(self.local.steps_wanted, self._steps_together):
            with self.epochs.whole_or_broken():
                self._store_records(order, count)

    def _refuse_own_order(self) -> None:
        if self._records is not None:
            raise InputError(
                "privacy.order",
                "secret",
                '"known", to hand over clients one after the other: their order would be the caller\'s',
                "give all records of the epoch to use_records(...) before its first round",
            )

    @without_values
    @one_at_a_time
    def observe(self, client: bytes | str, sample: Sample | None, bookmark: SourceBookmark | None = None) -> Answer:
        """Take one client as a step of its own: clip, add noise, step, store, forget the data, answer.

        A client who was taken before is answered and not used (or used again, as far as the plan's
        participation goes). A record that is not admitted, or whose gradient fails, counts as a zero
        gradient. Spellings of a text tag are one client (`veilstream.records.client_names`). Where a
        step has several clients, give them together to `observe_many`.

        Args:
            client: the client's tag, the same whenever the same person comes.
            sample: its record; None for one that cannot be read.
            bookmark: how far its source has been read with it. It is stored with the step that uses
                the record, or with the next one where none does: after a restart the source goes on
                behind it, so no record is used a second time.

        Returns:
            Refused for a record that cannot be used or has no client, else taken: neither says who took
            part before.

        Raises:
            InputError: where no round has been begun, or it has all its clients.
            LedgerError: where the store can no longer be trusted.

        """
        self._refuse_own_order()
        self._planned = {}
        places: list[_Place] = []
        (outcome,) = self._planned_places([Offered(client, sample, bookmark)], places)
        self._store_places(places)
        return outcome.answer

    @without_values
    @one_at_a_time
    def observe_many(self, clients: Iterable[Offered | tuple[Any, ...]]) -> list[Answer]:
        """Take clients in groups that are stored together: `observe` for each, at less cost.

        Steps are filled in order, `clients_per_step` clients each; the last one has fewer where
        ``clients`` ends. A group is one durable commit: after a crash all of its steps are stored, or
        none is and it is as if it had never been. It has at most 256 clients, fewer where a step is
        large. What a client may do is decided as if all before it were stored.

        Args:
            clients: pairs of a tag and a record, or triples with the bookmark behind it, as for
                `observe`. No more of them are consumed than the open round can use; where the
                iterator raises, what it gave before is taken first.

        Returns:
            For every record that was consumed, in order, taken or refused; nobody is answered
            before all of them are stored and witnessed.

        Raises:
            InputError: where no round has been begun.
            LedgerError: where the store can no longer be trusted.

        """
        return [outcome.answer for outcome in self.take_many(clients)]

    @without_values
    @one_at_a_time
    def take_many(
        self,
        clients: Iterable[Offered | tuple[Any, ...]],
        told: Callable[[Offered, Outcome], None] = lambda offered, outcome: None,
    ) -> list[Outcome]:
        """`observe_many`, with what became of each record: for this machine only.

        ``told`` is called with every record and its outcome, when its group is stored.
        """
        self._refuse_own_order()
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        stream, outcomes, failure, ended = iter(clients), list[Outcome](), None, False
        while not ended and (steps := min(self.local.steps_wanted, self._steps_together)):
            self._planned = {}
            group: list[Offered] = []
            places: list[_Place] = []
            came: list[Outcome] = []
            # Those who take no place are made up for, so that only the last step is short.
            while not ended and (room := steps * self.terms.clients_per_step - len(places)):
                looked_at = len(group)
                try:
                    for given in itertools.islice(stream, room):
                        group.append(Offered(*given))  # noqa: PERF401 - kept where the next one fails
                except Exception as error:
                    failure = error
                ended = len(group) - looked_at < room
                came += self._planned_places(group[looked_at:], places)
            self._store_places(places)
            for offered, outcome in zip(group, came, strict=True):
                told(offered, outcome)
            outcomes += came
        if failure is not None:
            raise failure
        return outcomes

    @without_values
    @one_at_a_time
    def may_take(self, client: bytes | str) -> bool:
        """Whether this client could take the next step, as far as the promise goes.

        Says who took part, so its answer must not leave this machine.
        """
        name = tag_of(client)
        if name is None:
            return False
        tag = self.ledger.keyed(name)
        return not self._spent(tag, self.local.step, self.ledger.past_visits([tag]).get(tag))

    @one_at_a_time
    def note_read(self, bookmark: SourceBookmark) -> None:
        """A source has been read so far, without a record to use; stored with the next write."""
        self.epochs.note_read(bookmark)

    @one_at_a_time
    def bookmarks(self) -> list[SourceBookmark]:
        """How far each source had been read, as stored."""
        return self.epochs.stored_bookmarks()

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
            if self._records is not None:
                self._take_records(self._records)
            with self.epochs.whole_or_broken():
                self._seal()

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
        r = _checked_round("round", r)
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

    @without_values
    @one_at_a_time
    def learn_round(
        self,
        r: int,
        x: NDArray[Any],
        clients: Iterable[tuple[bytes | str, Sample]] | None = None,
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
    def acknowledge(self, r: int, digest: str) -> None:
        """Remember that the server has accepted the last round's message, by its hash.

        `begin_round` takes the same along, without a write of its own.

        Args:
            r: the round that the server accepted.
            digest: the hash of its message.

        """
        r, digest = _checked_acknowledgement((r, digest))
        release = self.epochs.last_release()
        if (r, digest) != (release.round, release.hash):
            raise InputError(
                "acknowledged",
                (r, digest[:64]),
                f"round {release.round} and its hash",
                "the server acknowledges what it was sent",
            )
        if self.ledger.chain.standing.answered != digest:
            self.epochs.write("ack", Body(epoch=self.epoch, round=r, hash=digest))
        self.ledger.reached("acknowledged")

    def _planned_places(self, group: Sequence[Offered], places: list[_Place]) -> list[Outcome]:
        """What becomes of these records; adds a place for each client who takes one."""
        if not group:
            return []
        self.ledger.check()
        outcomes: list[Outcome] = []
        names = [tag_of(offered.tag) for offered in group]
        tags = [None if name is None else self.ledger.keyed(name) for name in names]
        stored = self.ledger.past_visits([tag for tag in tags if tag is not None])
        records = self._admission.admitted_together([offered.sample for offered in group])
        for offered, tag, admitted in zip(group, tags, records, strict=True):
            if offered.bookmark is not None:
                self.epochs.note_read(offered.bookmark)
            if tag is None:  # nobody: there is no place to take
                outcomes.append(Outcome(Answer.REFUSED, used=False))
                continue
            step = self.local.step + len(places) // self.terms.clients_per_step
            takes = not self._spent(tag, step, stored.get(tag))
            if takes:
                self._check_room(len(places))
                self._planned.setdefault(tag, []).append(PastVisits(self.epoch, step, 1))
                places.append((tag, admitted))
            # Refused whether or not it takes its place: the answer says nothing of who took part.
            outcomes.append(Outcome(Answer.REFUSED if admitted is None else Answer.TAKEN, takes))
        return outcomes

    def _check_room(self, planned: int) -> None:
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        if planned >= self.clients_wanted:
            most = f"at most {self.terms.local_steps * self.terms.clients_per_step} clients a round"
            raise InputError("client", "<not shown>", most, "finish_round")

    def _store_places(self, places: Sequence[_Place]) -> None:
        """Take these clients in steps of `clients_per_step`, the last with those that are left."""
        if places:
            self.steps.check()
            with self.epochs.whole_or_broken():
                many = self.terms.clients_per_step
                self._store_steps([places[first : first + many] for first in range(0, len(places), many)])

    def _store_steps(self, steps: Sequence[Sequence[_Place]]) -> None:
        """Compute and store steps together; a step without places is nobody's.

        Memory is ahead of the store until it is written; an interruption before leaves it `broken`.
        """
        local, first, place = self.local, self.local.step, self.local.taken
        seeds = self._fresh_seeds(len(steps))
        local.prepare(seeds)
        for clients, seed in zip(steps, seeds, strict=True):
            noisy = self.steps.noisy(local, [sample for _, sample in clients], seed)
            local.apply(noisy)
            self.ledger.reached("step-computed")
        keep = {secret_name(local.epoch, first): b"".join(seeds)}
        many = self.terms.clients_per_step
        tags = [tag for clients in steps for tag in [*(tag for tag, _ in clients), *[None] * (many - len(clients))]]
        if len(tags) == 1:
            keep[f"noisy/{place}"] = pack_step(noisy)
            body = Body(epoch=local.epoch, step=first)
            self.epochs.write_steps("step", body, keep, tag=tags[0])
        else:
            keep[OPEN_ROUND] = local.pack_open()
            body = Body(epoch=local.epoch, step=first, steps=len(steps), places=many if many > 1 else None)
            self.epochs.write_steps("steps", body, keep, tags=tags)

    def _store_records(self, order: EpochRecords, count: int) -> None:
        """Compute and store the next steps of a secret order; their clients' tags are stored already, all together."""
        local, first = self.local, self.local.step
        seeds = self._fresh_seeds(count)
        local.prepare(seeds)
        for step, seed in enumerate(seeds, first):
            local.apply(self.steps.noisy_in_pieces(local, order.records(step), seed))
            self.ledger.reached("step-computed")
        if not local.steps_wanted:  # before they are stored: the time of a write tells no more than that of a reply
            self.steps.fill_up(local, order.most_a_round, self.terms.local_steps)
        keep = {secret_name(local.epoch, first): b"".join(seeds), OPEN_ROUND: local.pack_open()}
        self.epochs.write_steps("steps", Body(epoch=local.epoch, step=first, steps=count), keep)

    def _fresh_seeds(self, count: int) -> list[bytes]:
        return [checked_seed(fresh_secret()) for _ in range(count)]

    def _seal(self) -> None:
        while empty := min(self.local.steps_wanted, self._steps_together):
            self._store_steps([()] * empty)
        self.epochs.seal()

    def _spent(self, tag: bytes, step: int, stored: PastVisits | None) -> bool:
        """Whether the client with this keyed tag may not take a place in this step."""
        past = [] if stored is None else [stored]
        past += self._planned.get(tag, [])
        if not past:
            return False
        since = self.ledger.chain.standing.alike_since
        epochs = Epochs(self.epoch, self.plan.epochs_per_person, self.epoch if since is None else since)
        return spent(past, step, self._participation, epochs) is not None


def _checked_round(field: str, r: Any) -> int:
    """A round's number. The server may send anything, so what is no number is shown by its type alone."""
    if isinstance(r, bool) or not isinstance(r, int | np.integer) or not 0 <= r < 2**63:
        raise InputError(field, type(r).__name__, "a whole number below 2^63", "check the server")
    return int(r)


def _checked_acknowledgement(acknowledged: Any) -> tuple[int, str]:
    if type(acknowledged) is not tuple or len(acknowledged) != 2:
        raise InputError("acknowledged", type(acknowledged).__name__, "(round, hash)", "or None")
    r, digest = acknowledged
    if type(digest) is not str:
        raise InputError("acknowledged", type(digest).__name__, "a hash as text", "or None")
    return _checked_round("acknowledged", r), digest


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
