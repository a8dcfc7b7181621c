"""`veilstream server`'s way of driving a `SumServer`: when learners are asked, and how long each stage waits."""

from __future__ import annotations

import logging
import time
from typing import Any

from veilstream.errors import ProtocolError
from veilstream.federation.masking.server_side import CannotUnmask, Opened
from veilstream.federation.protocol.fold import ClosedRound
from veilstream.federation.protocol.messages import Buffer, Reply
from veilstream.federation.protocol.transport import Transport
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.federation.server.open_round import Asked, OpenRound
from veilstream.federation.server.server import Accepted, Server
from veilstream.federation.server.sum_server import SumServer

_AGAIN_S = 5.0  # before a short question is asked once more
_SIGN_S = 15.0  # that a learner which is connected has to sign a set


class SumCoordinator(Coordinator):
    """One run of the server, in one folder."""

    for_sums = True
    server: SumServer

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._stage_since = time.monotonic()
        self._result: Opened | None = None

    def _served(self) -> Server:
        server = SumServer.over(self._plan, self.terms, self.fold, self._keys, self.run, self._files.follows)
        server.resume(MaskingFiles(self._files.folder))
        return server

    @property
    def core(self) -> tuple[int, int] | None:
        """Learners that were part of every sum so far, and how many must be; None before keys are agreed on."""
        masks, rules = self.server.masks, self.server.rules
        return None if masks is None else (len(masks.core), rules.honest + rules.colluding)

    def _ask_for_rounds(self, transport: Transport, here: OpenRound) -> None:
        now, server = time.monotonic(), self.server
        for name, place in self._places.items():
            if place.node not in self._present or name in server.refused or not server.askable(self.fold.seats[name]):
                continue
            kind = server.question(name)
            if kind is None:
                continue
            asked = here.asked.get(f"{kind} {name}")
            patience_s = self._patience_s if kind == "mask" else _AGAIN_S
            if asked and asked.node == place.node and now - asked.at < patience_s:
                continue
            head, body = server.ask(name, kind)
            here.asked[f"{kind} {name}"] = Asked(now, place.node)
            transport.send(place.node, head, body)
        for name in server.elsewhere:
            text = f"learner {name} has begun another epoch; it takes part from the next run on"
            self._say(name, "other epoch", text, learner=name)
        server.elsewhere.clear()

    def _follow(self, node: str, reply: Reply, told: Accepted, data: Buffer, here: OpenRound) -> None:
        super()._follow(node, reply, told, data, here)
        if told.kind in ("enrolled", "refusal"):
            for asked in [key for key in here.asked if key.endswith(f" {told.learner}")]:
                del here.asked[asked]
        here.scan_at = 0.0

    def _complete(self, here: OpenRound) -> bool:
        server = self.server
        stage = (server.masks is None, server.list_number, server.stage)
        try:
            done = self._went_on(here)
        except CannotUnmask as error:
            self._say("shares", "wrong shares", str(error), logging.ERROR)
            done = False
        if (server.masks is None, server.list_number, server.stage) != stage:
            self._stage_since, here.scan_at = time.monotonic(), 0.0
            here.asked.clear()
        return done

    def _went_on(self, here: OpenRound) -> bool:
        server, masks = self.server, self.server.masks
        if masks is None:
            self._agree_on_keys()
            return False
        if server.stage == "mask":
            if super()._complete(here) and not server.name_set():
                self._say_too_few()
            return False
        self._result = server.go_on()
        if self._result is not None:
            return True
        waited_s = time.monotonic() - self._stage_since
        if server.stage == "set" and masks.named is not None:
            unsigned = set(server.names(masks.named.members - masks.signed))
            late = waited_s > max(_SIGN_S, self._plan.federation.grace_s)
            if late or unsigned & (self._attendance.away | set(server.refused)):
                server.give_up()
        elif waited_s > _SIGN_S and server.stage == "tell":
            self._say_waiting(f"too few neighbours of some learners are here to open round {masks.round}")
        elif waited_s > _SIGN_S and server.stage in ("open", "void"):
            need = server.rules.threshold if server.stage == "open" else server.rules.voids
            self._say_waiting(f"too few learners are here to {server.stage} round {masks.round}: it takes {need}")
        return False

    def _agree_on_keys(self) -> None:
        """Fix the list of keys, when all who can be expected have given theirs."""
        server = self.server
        if server.listed is not None:
            self._draw_graph()
            return
        if self.fold.seats.keys() - server.out - self._attendance.away - server.has_offered:
            return
        if not server.agree_on_keys():
            self._say_waiting(
                f"{len(server.has_offered)} learners have given keys, and only with {server.rules.least} are sums "
                "opened (privacy.honest and privacy.colluding)"
            )

    def _draw_graph(self) -> None:
        """Draw who shares masks with whom, when all of the list have told their part; else list those who have."""
        server = self.server
        assert server.listed is not None
        if server.draw():
            return
        missing = set(server.listed.names) - server.has_told
        late = time.monotonic() - self._stage_since > max(_SIGN_S, self._plan.federation.grace_s)
        if (late or missing <= self._attendance.away | set(server.refused)) and not server.list_again():
            self._say_waiting(f"{len(missing)} learners have given a key, and are not here to begin the run")

    def _say_too_few(self) -> None:
        masks, rules = self.server.masks, self.server.rules
        assert masks is not None
        wanted = rules.honest + rules.colluding
        if not rules.enough_core(len(masks.core)):
            self._say_waiting(
                f"{len(masks.core)} learners were part of every round, and the promise counts on {wanted}: this run is "
                f"over at round {masks.round}. Stop the server; --next-run begins another with all learners",
                logging.ERROR,
            )
            return
        if lonely := masks.links.lacking(masks.masked):
            self._say_waiting(
                f"{len(masks.masked)} of {masks.links.many} learners have answered; a sum needs {masks.rules.least}, "
                f"and {len(lonely)} of them have too few neighbours here"
            )
            return
        core = len(masks.core & masks.masked)
        self._say_waiting(
            f"{len(masks.masked)} learners have answered, {core} of them part of every round; a sum needs "
            f"{masks.rules.least}, and {wanted} of those"
        )

    def _closed(self) -> ClosedRound:
        if self._result is None:
            raise ProtocolError("a round that is closed before its sum is opened", "")
        closed = self.server.close_sum(self._result)
        self._result = None
        sums = self.server.sums
        if sums.refused_sum:
            text = f"the sum of round {closed.round} was refused, and the model stays: {sums.refused_sum}"
            self._say("sum", "sum refused", text, logging.ERROR)
        return closed
