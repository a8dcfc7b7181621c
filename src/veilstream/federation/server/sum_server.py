"""The server's side of the messages where only sums over learners are seen: what is asked, and what answers do.

Enrolment, refusals and the end are the `Server`'s. A round has stages: masked messages are asked for (mask), the set of
those that came is named and all of it seal shares for it (set), and enough learners agree on it (open). They tell pads
of the shares as they agree, or, where a graph says who holds shares, when enough have agreed (tell). If somebody of the
set does not seal, the attempt is given up (void), and the next one is without them. When to go from one stage to the
next is the driver's (`sum_coordinator`); what must be durable before it is written by the methods that go.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter
from dataclasses import replace
from typing import Literal

from veilstream.errors import ProtocolError, StorageError
from veilstream.federation.masking.links import hashed
from veilstream.federation.masking.requests import KeysRequest, MaskRequest, VoidRequest, run_on_terms
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.server_side import MaskingServer, Opened
from veilstream.federation.masking.statements import HASH_BYTES, KeyList, KeyOffer, OpenCertificate, unpack_parts
from veilstream.federation.protocol.fold import ClosedRound
from veilstream.federation.protocol.messages import MASKING_REPLIES, Buffer, Reply, Request, body_hash, digest
from veilstream.federation.protocol.sum_fold import SumFold
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.federation.server.server import Accepted, Server
from veilstream.mask_graph import LISTS, mask_graph

_log = logging.getLogger(__name__)

_LATE_ROUNDS = 8  # for which an answer that comes too late is known as one

Stage = Literal["mask", "set", "open", "tell", "void"]


class SumServer(Server):
    """One run's; made by `over`, then given its files (`resume`)."""

    round_answers = (*MASKING_REPLIES, "refusal")
    masks: MaskingServer | None
    """None before the learners have agreed on keys."""

    def resume(self, files: MaskingFiles) -> None:
        """Go on where the run's files stand, or begin."""
        trust = self.plan.trust
        assert trust is not None
        self.rules = Rules(trust.learners, trust.honest, trust.colluding)
        self.stage: Stage = "mask"
        self.masks = None
        self.elsewhere: Counter[str] = Counter()
        """Learners that have begun another epoch since the keys were agreed on."""
        self._files = files
        self._identities = {name: key.raw for name, key in self.keys.learners.items() if key is not None}
        self._offers: dict[str, tuple[KeyOffer, bytes]] = {}
        self._has_keys: set[str] = set()
        self._last_masked: dict[str, int] = {}
        """By learner: the round of which it may still wait to hear whether its message counted."""
        self._opened_already: set[str] = set()
        self._late: dict[str, dict[str, int]] = {}
        """By learner: what it was asked in one of the last rounds, and which; its answer changes nothing any more."""
        self._shared_body: tuple[tuple[object, ...], bytes, str, int | None] | None = None
        self._told: dict[str, bytes] = {}
        """By learner: its part of the draw of the list's graph."""
        self._listed: KeyList | None = None
        self._keys_request = files.keys()
        if self._keys_request is not None:
            self._resume(self._keys_request)

    def _resume(self, request: KeysRequest) -> None:
        keys, dim, kept = KeyList.unpack(request.keys), self.terms.release_dim, self._files.masks()
        for offer in keys.offers:  # those whose keys were removed are never asked
            self._identities.setdefault(offer.name, bytes(32))
        if mask_graph(len(keys.offers), self.rules.colluding) and not request.told:
            pairs = zip(keys.offers, request.certificates, strict=True)
            self._listed = keys
            self._offers = {offer.name: (offer, certificate) for offer, certificate in pairs}
            return
        if kept is None:
            self.masks = MaskingServer(self.rules, keys, self._identities, dim, request.told)
        else:
            self.masks = MaskingServer.unpack(kept, self.rules, self._identities, dim, request.told)
        self._files.drop_torn_opening()
        openings = self._files.openings()
        while self.masks.round < self.fold.round:
            if self.masks.round not in openings:
                raise ProtocolError(
                    f"the run's folder has no certificate of round {self.masks.round}",
                    "put the whole folder back from one copy",
                )
            self.masks.moved_on(openings[self.masks.round])
        self.masks.certificates |= {r: c for r, c in openings.items() if r < self.masks.round}
        if self.masks.named is not None:
            self._go_to("set")
        self._note_masked()

    @property
    def sums(self) -> SumFold:
        """The fold of sums."""
        assert isinstance(self.fold, SumFold)
        return self.fold

    @property
    def _run_on_terms(self) -> str:
        return run_on_terms(self.run, self._settings)

    @property
    def has_offered(self) -> frozenset[str]:
        """Who has given a key, before they are agreed on."""
        return frozenset(self._offers)

    def _go_to(self, stage: Stage) -> None:
        self.stage = stage
        self._opened_already = set()

    def _note_masked(self) -> None:
        assert self.masks is not None
        masks = self.masks
        here = masks.masked if masks.named is None else masks.named.members
        self.sums.masked(self.names(here))

    def names(self, places: frozenset[int]) -> list[str]:
        """Learners with these places in the list of keys."""
        assert self.masks is not None
        return [self.masks.keys.names[place] for place in sorted(places)]

    # --- what is asked

    def question(self, name: str) -> str | None:
        """What this learner is to be asked now; None for nothing."""
        masks, stage = self.masks, self.stage
        if masks is None and self.listed is not None:
            return "keys" if name in self.listed.names and name not in self._told else None
        if masks is None:
            return None if name in self._offers else "key"
        place = self._place_of(name)
        if place is None:
            return None
        if name not in self._has_keys:
            return "keys"
        if stage == "mask":
            return None if place in masks.masked else "mask"
        assert masks.named is not None
        unsealed = place in masks.named.members - masks.signed
        if stage == "set":
            return "set" if unsealed else None
        if unsealed and (stage != "void" or masks.openers or self._opened_already):
            return "set"  # others have agreed: what it sealed is needed, and its void of no use
        if stage in ("open", "tell") or name in self._opened_already:
            return None if place in masks.openers else "open"
        return None if place in masks.voided else "void"

    def _place_of(self, name: str) -> int | None:
        """Its place in the list of keys; None where it is not in it, or has begun another epoch since."""
        assert self.masks is not None
        keys, place = self.masks.keys, self.masks.places.get(name)
        if place is None:
            return None
        if keys.offers[place].epoch != self.fold.seats[name].epoch:
            self.elsewhere[name] += 1
            return None
        return place

    def ask(self, name: str, kind: str) -> tuple[bytes, bytes]:
        """A request's head and body."""
        body, hashed, published = self._body_for(name, kind)
        asked = Request(
            kind,
            self.run,
            name,
            secrets.token_hex(8),
            self.fold.round,
            time=int(self._clock()),
            epoch=self.fold.seats[name].epoch,
            published=published,
        )
        head = asked.sign_head(self.keys.identity, hashed)
        self._outstanding[name].add(digest(head))
        return head, body

    def _body_for(self, name: str, kind: str) -> tuple[bytes, str, int | None]:
        masks = self.masks
        if kind == "keys":
            assert self._keys_request is not None
            body = self._keys_request.pack()
            return body, body_hash(body), None
        if kind == "key" or masks is None:
            return b"", body_hash(b""), None
        opened = self._proofs(name)
        about = (kind, self.stage, masks.at.round, masks.at.attempt, *(c.opened.at.round for c in opened))
        if self._shared_body is None or self._shared_body[0] != about:  # most learners are sent the same bytes
            published = self._round()[3] if kind == "mask" else None
            packed = self._packed(kind, opened)
            self._shared_body = about, packed, body_hash(packed), published
        return self._shared_body[1:]

    def _packed(self, kind: str, opened: tuple[OpenCertificate, ...]) -> bytes:
        masks = self.masks
        assert masks is not None
        if kind == "mask":
            return MaskRequest(masks.at, opened, masks.proof, self._round()[1]).pack()
        if kind == "void":
            return VoidRequest(masks.at, opened, masks.proof).pack()
        return masks.name().pack() if kind == "set" else masks.share_request(opened).pack()

    def _proofs(self, name: str) -> tuple[OpenCertificate, ...]:
        """Certificates that this learner may lack: of the last round, and of one whose outcome it waits for.

        None where it has masked in this round, which takes them.
        """
        assert self.masks is not None
        if self._last_masked.get(name) == self.masks.round:
            return ()
        known = self.masks.certificates
        wanted = sorted({self._last_masked.get(name, self.masks.round - 1), self.masks.round - 1})
        return tuple(known[r] for r in wanted if r in known)

    # --- what comes back

    def take(self, reply: Reply, sender: str | None = None) -> Accepted:
        """Do what a reply says that `read` has checked."""
        if reply.answers in self._late.get(reply.learner, ()):  # enough had answered without it
            del self._late[reply.learner][reply.answers]
            self._outstanding[reply.learner].discard(reply.answers)
            return Accepted("repeated", reply.learner)
        told = super().take(reply, sender)
        if told.kind == "enrolled":
            self._last_masked[told.learner] = reply.facts["round"] - 1
            self._has_keys.discard(told.learner)
        return told

    def _release(self, reply: Reply) -> Accepted:
        """One of the masking protocol's answers."""
        name, masks = reply.learner, self.masks
        self._outstanding[name].discard(reply.answers)
        if reply.kind not in ("key", "keys"):
            self.refusals.pop(name, None)
        again = Accepted("repeated", name)
        if reply.kind == "key":
            self._take_offer(name, reply.body)
            return again
        if reply.kind == "keys" and masks is None:
            self._take_told(name, bytes(reply.body))
            return again
        place = None if masks is None else self._place_of(name)
        if masks is None or place is None:
            return again
        if reply.kind == "keys":
            self._has_keys.add(name)
        elif reply.kind == "masked":
            if masks.take_masked(place, reply.body):
                self._last_masked[name] = masks.round
                self._note_masked()
                return Accepted("release", name)
        elif masks.named is None:
            return again  # of an attempt that is over
        elif reply.kind == "signed":
            masks.take_signed(place, reply.body)
        elif reply.kind == "opened":
            masks.take_shares(place, reply.body)
        elif not reply.body:
            self._opened_already.add(name)
        else:
            masks.take_void(place, bytes(reply.body))
        return again

    def _absent(self, reply: Reply) -> Accepted:
        raise ProtocolError(f"learner {reply.learner!r} sits a round out, where its noise takes part anyhow", "")

    def _take_offer(self, name: str, body: Buffer) -> None:
        packed, certificate = unpack_parts(body, 2)
        offer = KeyOffer.unpack(packed)
        if (offer.name, offer.epoch) != (name, self.fold.seats[name].epoch):
            raise ProtocolError(f"a key of {offer.name!r}, epoch {offer.epoch}, from learner {name!r}", "")
        KeyList(self._run_on_terms, (offer,)).check(self._identities, 1)
        self._offers[name] = offer, bytes(certificate)

    def _take_told(self, name: str, part: bytes) -> None:
        listed = self.listed
        if listed is None or name not in listed.names:
            return
        anchor = listed.offers[listed.names.index(name)].anchor
        if len(part) != HASH_BYTES or hashed(part, listed.number) != anchor:
            raise ProtocolError(f"a part of the graph's draw that learner {name!r} did not commit to", "")
        self._told[name] = part

    # --- from one stage to the next

    @property
    def listed(self) -> KeyList | None:
        """The list whose graph is being drawn; None before there is one, and where it is done."""
        return None if self.masks is not None else self._listed

    @property
    def list_number(self) -> int:
        """Which list's graph is being drawn; 0 for none."""
        return 0 if self.listed is None else self.listed.number

    @property
    def has_told(self) -> frozenset[str]:
        """Who has told its part of the draw."""
        return frozenset(self._told)

    def agree_on_keys(self) -> bool:
        """Fix the list of keys, durably; False where too few have given theirs."""
        return self._list(sorted(self._offers), 1)

    def list_again(self) -> bool:
        """Another list, of those who have told their part of the draw of this one; False where they are too few."""
        assert self.listed is not None
        number = self.listed.number + 1
        return number <= LISTS and self._list(sorted(self._told), number)

    def _list(self, names: list[str], number: int) -> bool:
        if len(names) < self.rules.least or not self.rules.enough_core(len(names)):
            return False
        keys = KeyList(self._run_on_terms, tuple(self._offers[name][0] for name in names), number)
        self._keys_request = KeysRequest(keys.pack(), tuple(self._offers[name][1] for name in names))
        self._files.keep_keys(self._keys_request)
        self._told.clear()
        self._listed = keys
        if mask_graph(len(names), self.rules.colluding) is None:
            self._begin_masks(keys)
        return True

    def draw(self) -> bool:
        """Draw the list's graph, durably; False where some have not told their part."""
        keys = self.listed
        assert keys is not None
        assert self._keys_request is not None
        if self._told.keys() != set(keys.names):
            return False
        self._keys_request = replace(self._keys_request, told=tuple(self._told[name] for name in keys.names))
        self._files.keep_keys(self._keys_request)
        self._begin_masks(keys)
        return True

    def _begin_masks(self, keys: KeyList) -> None:
        assert self._keys_request is not None
        dim, told = self.terms.release_dim, self._keys_request.told
        self.masks = MaskingServer(self.rules, keys, self._identities, dim, told)
        near = self.masks.links.graph
        shared = "every other" if near is None else f"{near.degree} neighbours"
        _log.info(
            "%d learners agree on keys, each shares masks with %s; %d agree on a sum",
            len(keys.names),
            shared,
            self.rules.threshold,
        )

    def name_set(self) -> bool:
        """Name the set of all whose messages have come, durably; False where no honest learner would sign it."""
        masks = self.masks
        assert masks is not None
        if not masks.enough(masks.masked):
            return False
        masks.name()
        self._files.keep_masks(masks.pack())
        self._go_to("set")
        return True

    def go_on(self) -> Opened | None:
        """Go to the next stage if this one is done; the round's sum when it is opened.

        Raises:
            CannotUnmask: enough have shared, and some of it is wrong.

        """
        masks = self.masks
        if masks is None or masks.named is None:
            return None
        if self.stage == "set" and masks.all_signed:
            self._files.keep_masks(masks.pack())  # once somebody agrees, nobody may be asked to seal again in vain
            self._go_to("open")
        if self.stage in ("open", "void") and masks.rules.two_steps and masks.agreed:
            self._go_to("tell")
        if self.stage == "void" and masks.next_attempt():
            self._note_masked()
            self._go_to("mask")
            return None
        return masks.open() if self.stage != "set" and masks.can_open else None

    def give_up(self) -> None:
        """Not all of the set will seal for it: ask everybody to void the attempt."""
        self._go_to("void")

    def close_sum(self, result: Opened) -> ClosedRound:
        """Make the next model of an opened sum; its certificate is durable first.

        Raises:
            StorageError: it could not be written.

        """
        certificate = result.certificate
        try:
            self._files.keep_opening(certificate)
        except OSError as error:
            raise StorageError(
                f"the run's folder could not be written ({error})", "make room, and start the server again"
            ) from error
        proof = hashlib.sha256(certificate.opened.pack()).hexdigest()
        self.sums.take_sum(self.names(result.members), result.total, proof)
        closed = self.fold.close_round()
        self._shared_body = None
        for name, outstanding in self._outstanding.items():
            late = self._late.setdefault(name, {})
            late |= dict.fromkeys(outstanding - late.keys(), closed.round)
            for old in [each for each, round_ in late.items() if round_ <= closed.round - _LATE_ROUNDS]:
                del late[old]
                outstanding.discard(old)
        self._go_to("mask")
        return closed
