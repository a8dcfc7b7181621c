"""The deployed learner: Algorithm 1 beside one data source, one client at a time.

    learner = Learner(plan, "store.db", task, create=True)     the first time
    learner.begin_round(r, x)
    learner.observe(tag, sample)        up to τ times, or observe_many((tag, sample), ...)
    release = learner.finish_round()    send release.payload

**Guarantees**, against the server and everyone who reads what is sent, whatever x the server
chooses: `learner.guarantee` for every client's record (replace-one neighbours among records that
are admitted, the plan's participation, the whole horizon; lem-priv-analy with the plan's
accounting), also through crashes, retries and restored backups. What is sent is the prefix sum of
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

import itertools
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.client_gradients import ClientGradients
from veilstream.deployment.client_telemetry import ClientTelemetry
from veilstream.deployment.epochs import Epochs, one_at_a_time
from veilstream.deployment.ledger.chain import BOOKMARKS
from veilstream.deployment.ledger.tags import tag_forms
from veilstream.deployment.ledger.witness import MOST_TOGETHER
from veilstream.deployment.local_rounds import model_hash, pack_step
from veilstream.deployment.process_secrecy import no_core_dumps, without_values
from veilstream.deployment.recovery import OPEN_ROUND, secret_name
from veilstream.deployment.release import Release
from veilstream.deployment.server_input import checked_acknowledgement, checked_model, checked_round
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.learning.tasks import LeastSquares, Logistic, Ripple, Sample, Task, TaskDetails, admission_of
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised, RawGradient
from veilstream.privacy.seeds import check_generator_once, checked_seed
from veilstream.records.admission import Answer
from veilstream.records.participation import PastVisits, spent
from veilstream.streams.intake import Offered, SourceBookmark

Float32s = NDArray[np.float32]

_SNAPSHOT_STEPS = 64
_SALT_BYTES = 16
_GROUP_BYTES = 16 << 20
"""Of noise rows, eight bytes a number, that a group of steps has at most."""


class Outcome(NamedTuple):
    """What became of a record; for this machine only, since it says who took part before."""

    answer: Answer
    """All that its client may be told."""
    used: bool
    """Whether a step was made of it."""


def _check_dim(plan: Plan, task: Task) -> None:
    """The server makes its model from the plan alone: the task that the plan names has its size.

    A task of another class (an audit's, a study's, one that the plan names by its module) has a
    size of its own, which server and learner compare when they meet.
    """
    own = ":" in plan.learning.task
    known = isinstance(task, Logistic | LeastSquares | Ripple) and not own
    if known and plan.feature_count != task.dim:
        field = "data.features" if plan.data.kind == "table" else "data.dim"
        raise InputError(
            field,
            plan.feature_count,
            f"the {task.dim} parameters of the task that was given",
            f"[data] dim = {task.dim} in the plan, the same on every side",
        )


def _is_longer(raw: RawGradient, clip_norm: float) -> bool:
    with np.errstate(all="ignore"):
        numbers = raw.reveal().astype(np.float64)
        # Not by a dot product: a BLAS would wake its threads for it, and have them spin.
        return not float(np.sqrt((numbers * numbers).sum())) <= clip_norm


class Learner(Epochs):
    """One data source's side of a run. Open until `close`; a store has one learner at a time.

    Calls from several threads are done one after the other.

    ``create=True`` begins a store where there is none, and opens one that is there: a restart with
    the same arguments goes on. Without it, a store that is missing is an `InputError`. From its
    first learner on, a process leaves no core dumps (`veilstream.deployment.process_secrecy`).

    Args:
        plan: the run; it must have one private method with one client a step.
        store: the ledger's file.
        task: what is learned; its gradient, predictions and losses must be pure functions of
            (model, record), and keep nothing for each other.
        witness: the second file, best on another disk, by which an old copy of the store is
            recognised; beside the store where it is left out.
        create: begin a store where there is none.

    Raises:
        InputError: for a plan that cannot be deployed, a task that is not pure or does not say
            what its records look like, a store that is missing.
        LedgerError: for a store that is damaged, or older than its witness remembers.
        StoreBusy: while another process has it.

    """

    @without_values
    def __init__(
        self, plan: Plan, store: Path | str, task: Task, *, witness: Path | str | None = None, create: bool = False
    ) -> None:
        no_core_dumps()
        _check_dim(plan, task)
        self.task = task
        self._admission = admission_of(task)
        terms = Terms.of(plan, task.dim, task)
        self.noise_std, self.guarantee, self.grid = terms.noise_std, terms.guarantee, terms.grid
        self._gradients = ClientGradients(task)
        self._telemetry = None
        if terms.telemetry is not None:
            self._telemetry = ClientTelemetry(task, terms.telemetry, terms.grid.clip_norm)
        if TaskDetails.of(task).host_gradient is not None:
            self._gradients.check_pure()
        check_generator_once(fresh_secret)
        self._read: SourceBookmark | None = None  # how far, and not written down yet
        self.clipped = 0
        """Gradients since this start that were longer than the clip norm: for this machine only."""
        self._planned: list[tuple[bytes, PastVisits]] = []  # of the group that is being put together
        self._most_together = max(1, min(MOST_TOGETHER, _GROUP_BYTES // (8 * terms.release_dim)))
        super().__init__(plan, terms, store, witness, create=create)

    # --- a round ---------------------------------------------------------------------------------

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
        self._check_task()
        with self._whole_or_broken():
            self._pin(checked_round("round", r), model, model_hash(model), acknowledged)

    @without_values
    @one_at_a_time
    def would_begin(self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None = None) -> bool:
        """Whether `begin_round` would begin a round now; pins and spends nothing.

        Args:
            r: as for `begin_round`.
            x: as for `begin_round`.
            acknowledged: as for `begin_round`.

        Returns:
            False where the round is open or sealed already.

        Raises:
            InputError: as `begin_round`.
            PrivacyError: as `begin_round`.

        """
        return self._model_of_round(r, x, acknowledged) is not None

    def _model_of_round(self, r: int, x: NDArray[Any], acknowledged: tuple[int, str] | None) -> Float32s | None:
        """The model that the round is to be pinned to; None where it is open or sealed."""
        r = checked_round("round", r)
        self.check_acknowledged(acknowledged)
        model = checked_model(x, self.task.dim, self._plan.learning.model_norm_cap)
        return model if self._local.wants(r, model_hash(model)) else None

    @without_values
    @one_at_a_time
    def observe(self, client: bytes | str, sample: Sample, bookmark: SourceBookmark | None = None) -> Answer:
        """Take one client: clip, add noise, step, store, forget the data, answer.

        A client who was taken before is answered and not used (or used again, as far as the plan's
        participation goes). Data that cannot be used at all are refused before the step; data whose
        gradient turns out unusable count as a zero gradient. Spellings of a text tag are one client
        (`veilstream.deployment.ledger.tags`); one that has nothing but white space is refused.

        Args:
            client: the client's tag, the same whenever the same person comes.
            sample: its record.
            bookmark: how far its source has been read with it. It is stored with the step that uses
                the record, or with the next one where none does: after a restart the source goes on
                behind it, so no record is used a second time.

        Returns:
            Taken or refused: the same whatever became of the data.

        Raises:
            InputError: where no round has been begun, or it has all its clients.
            LedgerError: where the store can no longer be trusted.

        """
        (outcome,) = self._take_group([Offered(client, sample, bookmark)])
        return outcome.answer

    @without_values
    @one_at_a_time
    def observe_many(self, clients: Iterable[Offered | tuple[Any, ...]]) -> list[Answer]:
        """Take clients in groups that are stored together: `observe` for each, at less cost.

        A group is one durable commit: after a crash all of its steps are stored, or none is and it
        is as if it had never been. It has at most 256 steps, fewer where a step is large, and ends
        where ``clients`` does. What a client may do is decided as if all before it were stored.

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
        """`observe_many`, for whoever counts beside the learner what became of each record.

        ``told`` is called with every record and its outcome, when its group is stored.
        """
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        stream, outcomes, failure = iter(clients), list[Outcome](), None
        while failure is None and (most := min(self.clients_wanted, self._most_together)):
            group: list[Offered] = []
            try:
                for given in itertools.islice(stream, most):
                    group.append(Offered(*given))  # noqa: PERF401 - kept where the next one fails
            except Exception as error:
                failure = error
            came = self._take_group(group)
            for offered, outcome in zip(group, came, strict=True):
                told(offered, outcome)
            outcomes += came
            if len(group) < most:
                break
        if failure is not None:
            raise failure
        return outcomes

    @without_values
    @one_at_a_time
    def may_take(self, client: bytes | str) -> bool:
        """Whether this client could take the next step, as far as the promise goes.

        Says who took part, so its answer must not leave this machine.
        """
        names = tag_forms(client)
        return bool(names) and not self._spent([self._ledger.keyed(name) for name in names])

    @one_at_a_time
    def note_read(self, bookmark: SourceBookmark) -> None:
        """A source has been read so far, without a record to use; stored with the next write."""
        self._read = bookmark

    @one_at_a_time
    def bookmarks(self) -> list[SourceBookmark]:
        """How far each source had been read, as stored."""
        kept = (self._ledger.blob(name) for name in self._ledger.names(BOOKMARKS))
        return [SourceBookmark(*json.loads(content[_SALT_BYTES:])) for content in kept]

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
        if self.pinned:
            with self._whole_or_broken():
                self._seal()
        return self._last_release()

    @one_at_a_time
    def sealed_release(self) -> Release:
        """The last finished round's message, again; seals nothing."""
        return self._last_release()

    @without_values
    @one_at_a_time
    def learn_round(
        self,
        r: int,
        x: NDArray[Any],
        clients: Iterable[tuple[bytes | str, Sample]],
        acknowledged: tuple[int, str] | None = None,
    ) -> Release:
        """A whole round from a stream of (tag, sample): takes no more of it than it uses.

        Args:
            r: as for `begin_round`.
            x: as for `begin_round`.
            clients: pairs of a tag and a record.
            acknowledged: as for `begin_round`.

        Returns:
            As `finish_round`.

        Raises:
            InputError: as `begin_round`.

        """
        self.begin_round(r, x, acknowledged)
        if self.pinned:
            self.take_many(clients)
        return self.finish_round()

    @without_values
    @one_at_a_time
    def acknowledge(self, r: int, digest: str) -> None:
        """Remember that the server has accepted round r's message.

        (`begin_round` takes the same along, without a write of its own.)

        Args:
            r: the round.
            digest: the hash of its message.

        Raises:
            InputError: where that is not the last message.

        """
        r, digest = checked_acknowledgement((r, digest))
        release = self._last_release()
        if (r, digest) != (release.round, release.hash):
            raise InputError(
                "acknowledged",
                (r, digest[:64]),
                f"round {release.round} and its hash",
                "the server acknowledges what it was sent",
            )
        body = {"epoch": self.epoch, "round": r, "hash": digest}
        if self._ledger.chain.standing.answered != body:
            self._write("ack", body)
        self._ledger.reached("acknowledged")

    @without_values
    def predict(self, features: NDArray[Any]) -> Any:
        """What the server's newest model says of a client; None before the first model.

        Answered here, with a model that is public anyway.
        """
        if self._model is None or features.shape != self._admission.shape:
            return None
        said = np.asarray(self.task.predict(self._model, features[None]))  # a batch of one
        return (said[0] if said.shape[:1] == (1,) else said).tolist()

    # --- what a round consists of ----------------------------------------------------------------

    def _pin(self, r: int, model: Float32s, digest: str, acknowledged: tuple[int, str] | None) -> None:
        body: dict[str, Any] = {"epoch": self.epoch, "round": r, "x": digest}
        if acknowledged is not None:
            body["acknowledged"] = list(acknowledged)
        self._write("pin", body, keep={"x": model.tobytes()})
        self._ledger.reached("pinned")
        self._local.pin(model, digest)
        self._model = model

    def _take_group(self, group: Sequence[Offered]) -> list[Outcome]:
        """At most as many as are stored together."""
        outcomes: list[Outcome] = []
        used: list[tuple[bytes, Sample]] = []
        self._planned = []
        for client, sample, bookmark in group:
            self._read = bookmark or self._read
            names, admitted = tag_forms(client), self._admission.admitted(sample)
            if not names or admitted is None:  # looked at first: it says nothing of who took part
                outcomes.append(Outcome(Answer.REFUSED, used=False))
                continue
            self._ledger.check()
            tags = [self._ledger.keyed(name) for name in names]
            takes = not self._spent(tags)
            if takes:
                self._check_room(len(used))
                self._planned.append((tags[0], PastVisits(self.epoch, self._next_step, 1)))
                used.append((tags[0], admitted))
            outcomes.append(Outcome(Answer.TAKEN, takes))
        if used:
            self._check_task()
            with self._whole_or_broken():
                self._store_steps(used)
        return outcomes

    @property
    def metrics_failed(self) -> int:
        """Clients since this start whose telemetry the task failed on: for this machine only."""
        return 0 if self._telemetry is None else self._telemetry.failed

    def _check_task(self) -> None:
        told = self._telemetry
        if told is not None:
            told.check()
        self._gradients.check_pure_with(*(() if told is None else told.asked))

    def _check_room(self, planned: int) -> None:
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        if planned >= self.clients_wanted:
            most = f"at most {self.terms.local_steps} clients a round"
            raise InputError("client", "<not shown>", most, "finish_round")

    def _store_steps(self, group: Sequence[tuple[bytes | None, Sample | None]]) -> None:
        """Compute and store steps together; with nobody in them where there is no tag.

        Memory is ahead of the store until it is written: who is interrupted before is `broken`.
        """
        local, first, place = self._local, self._local.step, self._local.taken
        seeds = self._fresh_seeds(len(group))
        local.prepare(seeds)
        for (tag, sample), seed in zip(group, seeds, strict=True):
            noisy = self._step(sample, tag, seed)
            local.apply(noisy)
            self._ledger.reached("step-computed")
        keep = {secret_name(local.epoch, first): b"".join(seeds)} | self._bookmark_blob()
        body = {"epoch": local.epoch, "step": first}
        tags = [tag for tag, _ in group]
        if len(group) == 1:
            keep[f"noisy/{place}"] = pack_step(noisy)
            self._write("step", body, tag=tags[0], keep=keep, points="step")
        else:
            body["steps"] = len(group)
            keep[OPEN_ROUND] = local.pack_open()
            self._write("steps", body, tags=tags, keep=keep, points="step")
        self._read, self._planned = None, []

    def _fresh_seeds(self, count: int) -> list[bytes]:
        return [checked_seed(fresh_secret()) for _ in range(count)]

    def _step(self, sample: Sample | None, tag: bytes | None, seed: bytes) -> Noised:
        """The noisy step of a client, or of nobody; nothing of it is stored yet."""
        local = self._local
        if sample is None:
            return local.noisy(local.nothing(), seed)
        raw = self._gradients.raw(local.model, sample)
        if local.terms.gamma is None:  # normalised gradients are short, whatever a client has
            self.clipped += _is_longer(raw, self.grid.clip_norm)
        told = self._telemetry
        values = None if told is None else told.values(local.begun, sample, raw)
        return local.noisy(local.whole(local.clip(raw), values), seed)

    def _bookmark_blob(self) -> dict[str, bytes]:
        """With salt: a hash of records stays in the chain for ever, and must not tell of them."""
        if self._read is None:
            return {}
        name = BOOKMARKS + self._ledger.keyed(self._read.source.encode()).hex()[:32]
        content = json.dumps([self._read.source, self._read.text]).encode()
        return {name: secrets.token_bytes(_SALT_BYTES) + content}

    def _seal(self) -> None:
        local = self._local
        while empty := min(local.clients_wanted, self._most_together):
            self._store_steps([(None, None)] * empty)
        release = local.message()
        body = {"epoch": release.epoch, "round": release.round, "hash": release.hash}
        self._ledger.reached("message-computed")
        self._write(
            "message",
            body | {"x": local.pinned},
            keep={"message": release.payload} | self._bookmark_blob(),
            points="message",
        )
        self._read = None
        local.seal(release)
        if self.horizon_reached:
            self._destroy_secrets()
        elif local.step - self._snapshot_at >= _SNAPSHOT_STEPS:
            self._keep_snapshot()

    def _keep_snapshot(self) -> None:
        """Noise state, so that a restart is quick and old secrets can go."""
        noise = self._local.noise
        self._write(
            "snapshot",
            {"epoch": self.epoch, "step": noise.position},
            keep={"snapshot": noise.snapshot()},
            destroy=self._ledger.names("seed/"),
        )
        self._snapshot_at = noise.position
        self._ledger.reached("snapshot-stored")

    @property
    def _next_step(self) -> int:
        """The step that the next client would take, behind those of the group so far."""
        return self._local.step + len(self._planned)

    def _spent(self, tags: list[bytes]) -> bool:
        """Whether this client, under all its tags together, may not take the next step."""
        past = [visits for tag in tags if (visits := self._ledger.past_visits(tag)) is not None]
        past += [visits for tag, visits in self._planned if tag in tags]
        return spent(past, self._next_step, self._plan.participation, self.epoch) is not None
