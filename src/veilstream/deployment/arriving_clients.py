"""Clients who come one after the other: used as they come, or in the next window of a secret order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from veilstream.deployment.epochs import OPEN_ROUND, secret_name
from veilstream.deployment.learner_epochs import LearnerEpochs, one_at_a_time
from veilstream.deployment.ledger.chain import Body
from veilstream.deployment.ledger.visits import tag_of
from veilstream.deployment.local_rounds import pack_step
from veilstream.deployment.process_secrecy import without_values
from veilstream.deployment.window_records import Arrival
from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.records.admission import Answer
from veilstream.records.participation import Epochs, PastVisits, spent
from veilstream.streams.intake import Offered, SourceBookmark


class Outcome(NamedTuple):
    """What became of a record; for this machine only, since it says who took part before."""

    answer: Answer
    """All that its client may be told."""
    used: bool
    """Whether it took a place in a step; with the answer "refused", as a zero gradient."""


class ArrivingClients(LearnerEpochs):
    """A learner's clients, taken in the order in which they are handed over."""

    @without_values
    @one_at_a_time
    def observe(self, client: bytes | str, sample: Sample | None, bookmark: SourceBookmark | None = None) -> Answer:
        """Take one client as a step of its own: clip, add noise, step, store, forget the data, answer.

        A client who was taken before is answered and not used (or used again, as far as the plan's
        participation goes). With `privacy.window` the record waits, stored and encrypted, and is used in the next
        window, at a step that nobody is told. A record that is not admitted, or whose gradient fails, counts as a zero
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
        places: list[Arrival] = []
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
        while not ended and (most := self._most_of_a_group()):
            self._planned = {}
            group: list[Offered] = []
            places: list[Arrival] = []
            came: list[Outcome] = []
            # Those who take no place are made up for, so that only the last step is short.
            while not ended and (room := most - len(places)):
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

    def _most_of_a_group(self) -> int:
        """Clients of the open round that are stored together next; 0 when it has all of them."""
        if self._arrivals is not None:
            return min(self.clients_wanted, self._arrivals.most_together)
        return min(self.local.steps_wanted, self._steps_together) * self.terms.clients_per_step

    def _planned_places(self, group: Sequence[Offered], places: list[Arrival]) -> list[Outcome]:
        """What becomes of these records; adds a place for each client who takes one."""
        if not group:
            return []
        self.ledger.check()
        outcomes: list[Outcome] = []
        names = [tag_of(offered.tag) for offered in group]
        tags = [None if name is None else self.ledger.keyed(name) for name in names]
        stored = self.ledger.past_visits([tag for tag in tags if tag is not None])
        records = self._admission.admitted_together([offered.sample for offered in group])
        for offered, name, tag, admitted in zip(group, names, tags, records, strict=True):
            if offered.bookmark is not None:
                self.epochs.note_read(offered.bookmark)
            if tag is None or name is None:  # nobody: there is no place to take
                outcomes.append(Outcome(Answer.REFUSED, used=False))
                continue
            step = self.local.step + len(places) // self.terms.clients_per_step
            takes = not self._spent(tag, step, stored.get(tag))
            if takes:
                self._check_room(len(places))
                self._planned.setdefault(tag, []).append(PastVisits(self.epoch, step, 1))
                places.append(Arrival(tag, name, admitted))
            # Refused whether or not it takes its place: the answer says nothing of who took part.
            outcomes.append(Outcome(Answer.REFUSED if admitted is None else Answer.TAKEN, takes))
        return outcomes

    def _check_room(self, planned: int) -> None:
        if not self.pinned:
            raise InputError("round", None, "a round that has been begun", "call begin_round")
        if planned >= self.clients_wanted:
            most = f"at most {self.terms.local_steps * self.terms.clients_per_step} clients a round"
            if not self.takes_clients:
                most = "nobody in an epoch's last window: no other follows, in which they would be used"
            raise InputError("client", "<not shown>", most, "finish_round")

    def _store_places(self, places: Sequence[Arrival]) -> None:
        """Take these clients in steps of `clients_per_step`, the last with those that are left; or for later."""
        if places and self._arrivals is not None:
            with self.epochs.whole_or_broken():
                self._arrivals.take(places)
        elif places:
            self.steps.check()
            with self.epochs.whole_or_broken():
                many = self.terms.clients_per_step
                self._store_steps([places[first : first + many] for first in range(0, len(places), many)])

    def _store_steps(self, steps: Sequence[Sequence[Arrival]]) -> None:
        """Compute and store steps together; a step without places is nobody's.

        Memory is ahead of the store until it is written; an interruption before leaves it `broken`.
        """
        local, first, place = self.local, self.local.step, self.local.taken
        seeds = self._fresh_seeds(len(steps))
        local.prepare(seeds)
        for clients, seed in zip(steps, seeds, strict=True):
            noisy = self.steps.noisy(local, [client.sample for client in clients], seed)
            local.apply(noisy)
            self.ledger.reached("step-computed")
        keep = {secret_name(local.epoch, first): b"".join(seeds)}
        many = self.terms.clients_per_step
        tags = [
            tag for clients in steps for tag in [*(client.tag for client in clients), *[None] * (many - len(clients))]
        ]
        if len(tags) == 1:
            keep[f"noisy/{place}"] = pack_step(noisy)
            body = Body(epoch=local.epoch, step=first)
            self.epochs.write_steps("step", body, keep, tag=tags[0])
        else:
            keep[OPEN_ROUND] = local.pack_open()
            body = Body(epoch=local.epoch, step=first, steps=len(steps), places=many if many > 1 else None)
            self.epochs.write_steps("steps", body, keep, tags=tags)

    def _spent(self, tag: bytes, step: int, stored: PastVisits | None) -> bool:
        """Whether the client with this keyed tag may not take a place in this step."""
        past = [] if stored is None else [stored]
        past += self._planned.get(tag, [])
        if not past:
            return False
        since = self.ledger.chain.standing.alike_since
        epochs = Epochs(self.epoch, self.plan.epochs_per_person, self.epoch if since is None else since)
        return spent(past, step, self.plan.participation, epochs) is not None
