"""The server's conversation with learners where it sees only sums over them.

Enrolment, attendance, refusals and the end are the `Coordinator`'s. A round has stages: masked messages are asked for
(mask), the set of those that came is named and signed by all of it (set), and enough learners share (open). If
somebody of the set does not sign, the attempt is given up (void), and the next one is without them.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from typing import Any, Literal

from veilstream.errors import ProtocolError, StorageError
from veilstream.federation.masking.requests import KeysRequest, MaskRequest, VoidRequest
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.server_side import CannotUnmask, MaskingServer, Opened
from veilstream.federation.masking.statements import KeyList, KeyOffer, OpenCertificate, unpack_parts
from veilstream.federation.protocol.messages import MASKING_REPLIES, Buffer, Reply, Request, body_hash, digest
from veilstream.federation.protocol.sum_fold import SumFold
from veilstream.federation.protocol.transport import Transport
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.federation.server.open_round import Asked, OpenRound

_log = logging.getLogger(__name__)

_AGAIN_S = 5.0  # before a short question is asked once more
_SIGN_S = 15.0  # that a learner which is connected has to sign a set

Stage = Literal["mask", "set", "open", "void"]


class SumCoordinator(Coordinator):
    """One run of the server, in one folder."""

    for_sums = True

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        trust = self._plan.trust
        assert trust is not None
        self._rules = Rules(trust.learners, trust.honest, trust.colluding)
        self._identities = {name: key.raw for name, key in self._keys.learners.items()}
        self._kept = MaskingFiles(self._files.folder)
        self._offers: dict[str, tuple[KeyOffer, bytes]] = {}
        self._has_keys: set[str] = set()
        self._last_masked: dict[str, int] = {}
        """By learner: the round of which it may still wait to hear whether its message counted."""
        self._opened_already: set[str] = set()
        self._stage: Stage = "mask"
        self._stage_since = time.monotonic()
        self._result: Opened | None = None
        self._body: tuple[tuple[int, ...], bytes, str, int | None] | None = None
        self._keys_request = self._kept.keys()
        self.masks: MaskingServer | None = None
        if self._keys_request is not None:
            self._resume(self._keys_request)

    @property
    def sums(self) -> SumFold:
        """The fold of sums."""
        assert isinstance(self.fold, SumFold)
        return self.fold

    def _resume(self, request: KeysRequest) -> None:
        keys, dim, kept = KeyList.unpack(request.keys), self.terms.release_dim, self._kept.masks()
        removed = [name for name in keys.names if name not in self._identities]
        for offer in keys.offers:  # those whose keys were removed are never asked; what they signed is not looked at
            self._identities.setdefault(offer.name, bytes(32))
        if removed:
            _log.warning("%s: of this run's list of keys, and removed since", ", ".join(removed))
        if kept is None:
            self.masks = MaskingServer(self._rules, keys, self._identities, dim)
        else:
            self.masks = MaskingServer.unpack(kept, self._rules, self._identities, dim)
        openings = self._kept.openings()
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

    def _go_to(self, stage: Stage) -> None:
        self._stage, self._stage_since = stage, time.monotonic()
        self._opened_already = set()

    def _note_masked(self) -> None:
        masks = self.masks
        if masks is not None:
            here = masks.masked if masks.named is None else masks.named.members
            self.sums.masked([masks.keys.names[place] for place in here])

    # What is asked.

    def _ask_for_rounds(self, transport: Transport, here: OpenRound) -> None:
        now = time.monotonic()
        for name, place in self._places.items():
            if place.node not in self._present or name in self._refused or not self._askable(self.fold.seats[name]):
                continue
            kind = self._question(name)
            if kind is None:
                continue
            asked = here.asked.get(f"{kind} {name}")
            patience_s = self._patience_s if kind == "mask" else _AGAIN_S
            if asked and asked.node == place.node and now - asked.at < patience_s:
                continue
            head, body = self._request(name, kind)
            here.asked[f"{kind} {name}"] = Asked(head, now, place.node)
            self._outstanding[name].add(digest(head))
            transport.send(place.node, head, body)

    def _question(self, name: str) -> str | None:
        """What this learner is to be asked now."""
        masks, stage = self.masks, self._stage
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
        if stage == "set":
            return "set" if place in masks.named.members - masks.signed else None
        if stage == "open" or name in self._opened_already:
            return None if place in masks.openers else "open"
        return None if place in masks.voided else "void"

    def _place_of(self, name: str) -> int | None:
        """Its place in the list of keys; None where it is not in it, or has begun another epoch since."""
        assert self.masks is not None
        keys = self.masks.keys
        if name not in keys.names:
            return None
        place = keys.names.index(name)
        if keys.offers[place].epoch != self.fold.seats[name].epoch:
            text = f"learner {name} has begun another epoch; it takes part from the next run on"
            self._say(name, "other epoch", text, learner=name)
            return None
        return place

    def _request(self, name: str, kind: str) -> tuple[bytes, bytes]:
        body, hashed, published = self._body_for(name, kind)
        request = Request(
            kind,
            self.run,
            name,
            secrets.token_hex(8),
            self.fold.round,
            epoch=self.fold.seats[name].epoch,
            published=published,
        )
        return request.sign_head(self._keys.identity, hashed), body

    def _body_for(self, name: str, kind: str) -> tuple[bytes, str, int | None]:
        masks = self.masks
        if kind == "key" or masks is None:
            return b"", body_hash(b""), None
        opened = self._proofs(name)
        published = None
        if kind == "keys":
            assert self._keys_request is not None
            body = self._keys_request.pack()
        elif kind == "mask":
            about = (*(c.opened.at.round for c in opened), masks.at.round, masks.at.attempt)
            if self._body is None or self._body[0] != about:  # most learners are sent the same bytes
                model, published = self._round_body()
                packed = MaskRequest(masks.at, opened, masks.proof, model).pack()
                self._body = about, packed, body_hash(packed), published
            return self._body[1:]
        elif kind == "void":
            body = VoidRequest(masks.at, opened, masks.proof).pack()
        elif kind == "set":
            body = masks.name().pack()
        else:
            place = self._place_of(name)
            assert place is not None
            body = masks.share_request(place, opened).pack()
        return body, body_hash(body), published

    def _proofs(self, name: str) -> tuple[OpenCertificate, ...]:
        """Certificates that this learner may lack: of the last round, and of one whose outcome it waits for."""
        assert self.masks is not None
        known = self.masks.certificates
        wanted = sorted({self._last_masked.get(name, self.masks.round - 1), self.masks.round - 1})
        return tuple(known[r] for r in wanted if r in known)

    # What comes back.

    def _seat(self, node: str, reply: Reply, data: Buffer, here: OpenRound) -> None:
        super()._seat(node, reply, data, here)
        name = reply.learner
        self._last_masked[name] = reply.facts["round"] - 1
        self._has_keys.discard(name)
        for kind in ("key", "keys", "mask", "set", "open", "void"):
            here.asked.pop(f"{kind} {name}", None)

    def _accept(self, node: str, reply: Reply, here: OpenRound) -> None:
        name = reply.learner
        if reply.kind not in MASKING_REPLIES:
            raise ProtocolError(f"a {reply.kind} from {name!r}, where only sums are seen", "its plan is another")
        self._outstanding[name].discard(reply.answers)
        self._refusals.pop(name, None)
        if reply.kind == "key":
            self._take_offer(name, reply.body)
            return
        masks = self.masks
        place = None if masks is None else self._place_of(name)
        if masks is None or place is None:
            return
        if reply.kind == "keys":
            self._has_keys.add(name)
        elif reply.kind == "masked":
            if masks.take_masked(place, reply.body):
                self._last_masked[name] = masks.round
                self._note_masked()
                self._attendance.took_part(name)
        elif masks.named is None:
            return  # of an attempt that is over
        elif reply.kind == "signed":
            masks.take_signed(place, reply.body)
        elif reply.kind == "opened":
            masks.take_shares(place, reply.body)
        elif not reply.body:
            self._opened_already.add(name)
        else:
            masks.take_void(place, bytes(reply.body))
        here.scan_at = 0.0

    def _take_offer(self, name: str, body: Buffer) -> None:
        packed, certificate = unpack_parts(body, 2)
        offer = KeyOffer.unpack(packed)
        if (offer.name, offer.epoch) != (name, self.fold.seats[name].epoch):
            raise ProtocolError(f"a key of {offer.name!r}, epoch {offer.epoch}, from learner {name!r}", "")
        KeyList(self.run, (offer,)).check(self._identities, 1)
        self._offers[name] = offer, bytes(certificate)

    def _absent(self, reply: Reply, here: OpenRound) -> None:
        raise ProtocolError(f"learner {reply.learner!r} sits a round out, where its noise takes part anyhow", "")

    # When a stage is over.

    def _complete(self, here: OpenRound) -> bool:
        if self.masks is None:
            self._agree_on_keys()
            return False
        stage, named = self._stage, self.masks.named
        if stage == "mask":
            if super()._complete(here) and self._may_name():
                self.masks.name()
                self._kept.keep_masks(self.masks.pack())
                self._go_to("set")
                here.scan_at = 0.0
            return False
        assert named is not None
        if stage == "set":
            if self.masks.all_signed:
                self._go_to("open")
                here.scan_at = 0.0
            elif self._lost(named.members - self.masks.signed):
                self._go_to("void")
                here.scan_at = 0.0
            return False
        if self.masks.can_open and self._opened():
            return True
        if stage == "void" and self.masks.next_attempt():
            self._note_masked()
            self._go_to("mask")
            here.scan_at = 0.0
        elif time.monotonic() - self._stage_since > _SIGN_S:
            need = self._rules.threshold if stage == "open" else self._rules.voids
            self._say_waiting(f"too few learners are here to {stage} round {self.masks.round}: it takes {need}")
        return False

    def _agree_on_keys(self) -> None:
        """Fix the list of keys, when all who can be expected have given theirs."""
        out = set(self._refused) | self._attendance.away
        out |= {seat.name for seat in self.fold.seats.values() if not self._askable(seat)}
        if self.fold.seats.keys() - out - self._offers.keys():
            return
        names = sorted(self._offers)
        if len(names) < self._rules.least or not self._rules.enough_core(len(names)):
            self._say_waiting(
                f"{len(names)} learners have given keys, and only with {self._rules.least} are sums opened "
                "(privacy.honest and privacy.colluding)"
            )
            return
        keys = KeyList(self.run, tuple(self._offers[name][0] for name in names))
        self._keys_request = KeysRequest(keys.pack(), tuple(self._offers[name][1] for name in names))
        self._kept.keep_keys(self._keys_request)
        self.masks = MaskingServer(self._rules, keys, self._identities, self.terms.release_dim)
        _log.info("%d learners agree on keys; %d of them open a sum", len(names), self._rules.threshold)

    def _may_name(self) -> bool:
        masks = self.masks
        assert masks is not None
        if masks.enough(masks.masked):
            return True
        core = len(masks.core & masks.masked)
        if not self._rules.enough_core(len(masks.core)):
            self._say_waiting(
                f"{len(masks.core)} learners were part of every round, and the promise counts on "
                f"{self._rules.honest + self._rules.colluding}: this run is over at round {masks.round}. Stop the "
                "server; --next-run begins another with all learners",
                logging.ERROR,
            )
        else:
            self._say_waiting(
                f"{len(masks.masked)} learners have answered, {core} of them part of every round; a sum needs "
                f"{self._rules.least}, and {self._rules.honest + self._rules.colluding} of those"
            )
        return False

    def _lost(self, unsigned: frozenset[int]) -> bool:
        """Whether one of these will not sign soon."""
        assert self.masks is not None
        late = time.monotonic() - self._stage_since > max(_SIGN_S, self._plan.federation.grace_s)
        names = {self.masks.keys.names[place] for place in unsigned}
        return late or bool(names & (self._attendance.away | set(self._refused)))

    def _opened(self) -> bool:
        assert self.masks is not None
        try:
            self._result = self.masks.open()
        except CannotUnmask as error:
            self._say("shares", "wrong shares", str(error), logging.ERROR)
            return False
        return True

    def _close(self, here: OpenRound) -> None:
        result, masks = self._result, self.masks
        assert result is not None
        assert masks is not None
        certificate = result.certificate
        try:
            self._kept.keep_opening(certificate)
        except OSError as error:
            raise StorageError(
                f"the run's folder could not be written ({error})", "make room, and start the server again"
            ) from error
        proof = hashlib.sha256(certificate.opened.pack()).hexdigest()
        self.sums.take_sum([masks.keys.names[place] for place in result.members], result.total, proof)
        super()._close(here)
        if self.sums.refused_sum:
            text = f"the sum of round {masks.round - 1} was refused, and the model stays: {self.sums.refused_sum}"
            self._say("sum", "sum refused", text, logging.ERROR)
        self._result, self._body = None, None
        for outstanding in self._outstanding.values():
            outstanding.clear()
        self._go_to("mask")
