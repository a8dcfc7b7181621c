"""`veilstream server`'s way of driving a `Server`: when learners are asked, how long a round waits, what is written.

What a message says and may do is `server`; what is kept is `run_files`. One piece of code for every transport
that has nodes. Nothing here imports noise or clients' data.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError, UnknownName, VeilstreamError
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.protocol.bounds import OutOfBounds
from veilstream.federation.protocol.fold import ClosedRound, OtherEpoch
from veilstream.federation.protocol.messages import Buffer, Reply
from veilstream.federation.protocol.transport import Failure, Received, Transport
from veilstream.federation.repeated_lines import RepeatedLines
from veilstream.federation.server.attendance import NO_CLIENTS, REFUSES, Absence, Attendance
from veilstream.federation.server.open_round import Asked, OpenRound, Place, Standing
from veilstream.federation.server.run_files import RunFiles, learners_of
from veilstream.federation.server.run_start import server_keys
from veilstream.federation.server.server import Accepted, OtherTerms, Server
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.wording import shown

_log = logging.getLogger(__name__)

_AGAIN_S = 5.0  # before an unanswered request is sent once more
_REFUSED_AGAIN_S = 25.0
_ABSENT_AGAIN_S = 2.0
_LOOK_S = 0.2
_SCAN_S = 5e-5  # a learner: between two looks through all of them
_TELL_S = 0.1
_CLOCKS_APART_S = 3600
_SAY_AGAIN_S = 300.0
_GONE_S = 600.0
_LONGEST_LINE = 2000


class Coordinator:
    """One run of the server, in one folder."""

    for_sums = False
    """Whether it is for plans under which only sums over learners are seen (`sum_coordinator`)."""

    def __init__(
        self,
        plan: Plan,
        x0: NDArray[np.float32],
        keys: ServerKeys,
        folder: Path,
        *,
        start: Mapping[str, Any] | None = None,
        among: frozenset[str] | None = None,
        task: Task | None = None,
        watch: Callable[[Standing], None] = lambda _: None,
    ) -> None:
        """``among``: learners of the run before, who alone take part in this one; None where all who have keys do."""
        if self.for_sums != (plan.trust is not None):
            raise InputError(
                "privacy.trust",
                "each" if plan.trust is None else "sum",
                "a server for it",
                '`veilstream server` takes both; others only trust = "each"',
            )
        self._plan, self._watch = plan, watch
        self.terms = Terms.of(plan, len(x0), task)
        n = plan.learning.learners
        begun = learners_of(folder) or among
        later = sorted(keys.learners.keys() - begun) if begun else []
        if begun:
            keys = replace(keys, learners={name: keys.learners[name] for name in sorted(begun & keys.learners.keys())})
        if later:
            _log.info(
                "%s: keys are known, but this run was begun without; a run of a plan with %d learners takes all",
                ", ".join(later),
                n + len(later),
            )
        if begun is None:
            server_keys(plan, keys, None)
        self._keys = keys
        self._files = RunFiles(folder, plan, self.terms, start)
        self.fold = self._files.open(x0, sorted(begun or keys.learners))
        self.models, self.run = self._files.models, self._files.run
        self.server = self._served()
        """What says and hears messages."""
        self.telemetry = self._files.telemetry
        """Private estimates so far (`TelemetryFiles.latest`); None where the plan has none."""
        self._published = self.fold.round
        self._places: dict[str, Place] = {}
        self._present: set[str] = set()
        self._attendance = Attendance(
            self.fold.seats, plan.federation.grace_s, max(plan.federation.grace_s, plan.federation.deadline_s)
        )
        self._tell_at = 0.0
        self._scan_s = min(_SCAN_S * n, _LOOK_S)
        self._again_at: dict[str, float] = {}  # by node: when it is asked once more who is there
        self._end_again_at: dict[str, float] = {}  # likewise, after the last round
        self._said_stuck = -_SAY_AGAIN_S
        self.messages_refused: Counter[str] = Counter()
        """How many messages were not acted on, by the kind of error."""
        self._lines = RepeatedLines()
        self._looked_at = time.monotonic()
        for name in self.fold.seats.keys() - keys.learners.keys():
            if self.fold.seats[name].state != "void":
                self.void(name, "its keys were removed")

    def _served(self) -> Server:
        """What says and hears messages."""
        return Server.over(self._plan, self.terms, self.fold, self._keys, self.run, self._files.follows)

    @property
    def round(self) -> int:
        """Rounds that are done and durable; the model after them is released."""
        return self._published

    @property
    def idle_s(self) -> float:
        """Seconds since messages were last looked for: a few at most while all is well, also when it waits."""
        return time.monotonic() - self._looked_at

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.fold.finished

    @property
    def seated(self) -> frozenset[str]:
        """Learners that have enrolled and can be asked."""
        return frozenset(self._places)

    @property
    def reachable(self) -> frozenset[str]:
        """Those of them whom the transport reaches now."""
        return frozenset(name for name, place in self._places.items() if place.node in self._present)

    @property
    def absences(self) -> dict[str, Absence]:
        """Learners that take no part now: since when, and why in a few words of ours."""
        return self._attendance.absences

    @property
    def core(self) -> tuple[int, int] | None:
        """Learners that were part of every sum so far, and how many must be; None where each is seen."""
        return None

    @property
    def refused(self) -> dict[str, str]:
        """Learners that cannot take part, and why."""
        return dict(self.server.refused)

    def go(self, transport: Transport, until: int | None = None, look: Callable[[], None] = lambda: None) -> None:
        """Run rounds until the horizon (or ``until``); ``look`` is called often, and may raise to end it."""
        last = self.terms.rounds if until is None else min(until, self.terms.rounds)
        while self.fold.round < last:
            here = OpenRound(time.monotonic())
            while not self._complete(here):
                look()
                if time.monotonic() >= here.scan_at:
                    here.scan_at = time.monotonic() + self._scan_s
                    self._ask_newcomers(transport)
                    self._ask_for_rounds(transport, here)
                self._take_all(transport, here)
            self._close(here)

    def enrol(self, transport: Transport) -> None:
        """Ask newcomers who they are, and look at what has come back; no round is begun."""
        self._ask_newcomers(transport)
        self._take_all(transport, OpenRound(time.monotonic()))

    def after_end(self, transport: Transport) -> tuple[str, ...]:
        """Tell learners, also late ones, that the run is over; returns who has not confirmed. Call it again."""
        now, nodes = time.monotonic(), transport.nodes()
        self._forget_gone(self._end_again_at, nodes, now)
        for node in nodes:
            if now > self._end_again_at.get(node, 0.0):
                self._end_again_at[node] = now + _AGAIN_S
                transport.send(node, self.server.end(node))
        self._say_repeated()
        for node, data in self._receive(transport):
            try:
                self._take_end(node, data)
            except Exception as error:  # whatever it is: no message may end the server
                self._note_refused(node, error)
        return tuple(sorted(set(self._keys.learners) - self.server.ended))

    def end_all(
        self, transport: Transport, within_s: float, look: Callable[[], None] = lambda: None
    ) -> tuple[str, ...]:
        """`after_end` until every learner has confirmed, or so many seconds have passed."""
        until = time.monotonic() + within_s
        while (left := self.after_end(transport)) and time.monotonic() < until:
            look()
        return left

    def _take_end(self, node: str, data: Received) -> None:
        if isinstance(data, Failure):
            return
        told = self.server.accept(data, node)
        if told.kind == "ended":
            self._end_again_at[node] = float("inf")
            _log.info(
                "learner %s has closed its epoch", told.learner, extra=_fields("epoch over", told.learner, self.round)
            )
        elif told.kind == "refusal":
            self._end_again_at[node] = time.monotonic() + _REFUSED_AGAIN_S
            _log.warning("learner %s does not end its epoch: %s", told.learner, told.why)

    def _take_all(self, transport: Transport, here: OpenRound) -> None:
        for node, data in self._receive(transport):
            self._take(node, data, here)
        if time.monotonic() > self._tell_at:
            self._say_repeated()
            self._tell()

    def _receive(self, transport: Transport) -> list[tuple[str, Received]]:
        self._looked_at = time.monotonic()
        return transport.receive(_LOOK_S)

    def _complete(self, here: OpenRound) -> bool:
        n, answered = self._plan.learning.learners, self.fold.answered_count
        if answered == n:
            return True
        if time.monotonic() < here.judge_at:
            return False
        here.judge_at = time.monotonic() + self._scan_s
        out, needed = self.server.out, self.server.needed
        absent = self.server.absent - out - set(self.fold.answered)
        away = self._attendance.away - out - absent - set(self.fold.answered)
        if n - len(out) < needed:
            self._stuck(out, needed)
        elif absent and n - len(out) - len(absent) < needed:
            self._say_waiting(
                f"{', '.join(sorted(absent))} of {n} learners have no clients now; a round needs "
                f"{needed}, so they are asked again"
            )
        elif n - len(out) - len(absent) - len(away) < needed:
            self._say_waiting(f"{', '.join(sorted(away))} of {n} learners are away; a round needs {needed}")
        if answered + len(out) + len(absent) + len(away) >= n and answered >= needed:
            return True
        late = time.monotonic() - here.began > self._plan.federation.deadline_s
        return late and answered >= needed

    def _stuck(self, out: set[str], needed: int) -> None:
        """Too few can take part: a run that never began ends; one that did waits, so no message can end it."""
        n, seats = self._plan.learning.learners, self.fold.seats
        refused = self.server.refused
        spent = {name for name, seat in seats.items() if seat.round >= self.terms.rounds and name not in refused}
        if out == spent:
            self._say_waiting(
                f"{len(spent)} of {n} learners have no rounds left, since they were further than this server's folder, "
                f"and a round needs {needed}: the run stays at {self.fold.round} of {self.terms.rounds} rounds. Its "
                "last model is served: stop the server, or have them begin another epoch with `veilstream ledger epoch`"
            )
            return
        self.server.check_possible()
        why = "; ".join(refused.get(name, f"{name}: {seats[name].why or 'no rounds left'}") for name in sorted(out))
        self._say_waiting(
            f"{len(out)} of {n} learners cannot take part ({why}); a round needs {needed}: repair "
            "them, or start the server again with --reset or --void",
            logging.ERROR,
        )

    def _say_waiting(self, why: str, level: int = logging.WARNING) -> None:
        if time.monotonic() - self._said_stuck >= _SAY_AGAIN_S:
            self._said_stuck = time.monotonic()
            _log.log(level, "waiting: %s", why, extra=_fields("waiting", None, self.fold.round))

    def _ask_newcomers(self, transport: Transport) -> None:
        now, nodes = time.monotonic(), transport.nodes()
        self._present = nodes
        self._look_who_is_here(nodes)
        self._forget_gone(self._again_at, nodes, now)
        seated = {place.node for place in self._places.values()}
        for node in nodes - seated:
            if now > self._again_at.get(node, 0.0):
                self._again_at[node] = now + _AGAIN_S
                transport.send(node, self.server.enrol(node))

    def _forget_gone(self, again_at: dict[str, float], present: set[str], now: float) -> None:
        """Nodes that left long ago: where every connection is another node, they would pile up."""
        for node in again_at.keys() - present:
            if now > again_at[node] + _GONE_S:
                del again_at[node]
                self.server.forget(node)

    def _look_who_is_here(self, nodes: set[str]) -> None:
        connected = {name for name, place in self._places.items() if place.node in nodes}
        found = self._attendance.look(connected | (nodes & self._keys.learners.keys()))
        for name in found.away:
            why = self._attendance.absences[name].why if name in self._attendance.absences else "it is away"
            text = f"learner {name} is away ({why}): rounds no longer wait for it, and its weight stays 1/n"
            self._say(name, "away", text, learner=name)
        for name, seconds in found.back:
            text = f"learner {name} is back after {seconds:.0f} s"
            self._say(name, "back", text, logging.INFO, learner=name)

    def _ask_for_rounds(self, transport: Transport, here: OpenRound) -> None:
        now, answered, server = time.monotonic(), set(self.fold.answered), self.server
        for name, place in self._places.items():
            if name in answered or place.node not in self._present or name in server.refused:
                continue
            if not server.askable(self.fold.seats[name]):
                continue
            asked = here.asked.get(name)
            if asked and asked.node == place.node and now - asked.at < self._patience_s:
                continue
            here.asked[name] = Asked(now, place.node)
            transport.send(place.node, server.round_head(name), server.round_body)

    @property
    def _patience_s(self) -> float:
        """A learner may wait for its clients; only then is silence a loss."""
        return self._plan.federation.patience_s + _AGAIN_S

    def _take(self, node: str, data: Received, here: OpenRound) -> None:
        if isinstance(data, Failure):
            self._say(node, "delivery failed", f"{self._name_at(node)}: {shown(data.why)}")
            for asked in here.asked.values():
                if asked.node == node:
                    asked.at = min(asked.at, time.monotonic() - self._patience_s + 1.0)
            return
        try:
            reply = self.server.read(data, node)
            if reply.kind == "enrolled":
                self._check_alone(node, reply)
            self._follow(node, reply, self._taken(node, reply, here), data, here)
        except Exception as error:  # whatever it is: no message may end the server
            self._note_refused(node, error)

    def _note_refused(self, node: str, error: Exception) -> None:
        kind, who = type(error).__name__, self._name_at(node)
        self.messages_refused[kind] += 1
        if isinstance(error, VeilstreamError):
            self._say(node, kind, f"{who}: {shown(error, _LONGEST_LINE)}")
        else:
            text = f"{who}: {kind} while reading a reply, which was dropped; this is a defect"
            self._say(node, kind, text, logging.ERROR)

    def _say(self, node: str, reason: str, text: str, level: int = logging.WARNING, **fields: object) -> None:
        """Write one line a minute for each peer and reason: no peer may fill the disk."""
        if (line := self._lines.add(node, reason, text)) is not None:
            _log.log(level, "%s", line, extra={"event": reason, "round": self.fold.round, **fields})

    def _say_repeated(self) -> None:
        for line in self._lines.due():
            _log.warning("%s", line)

    def _check_alone(self, node: str, reply: Reply) -> None:
        """Refuse a second process with a learner's keys while the first is connected."""
        name = reply.learner
        place = self._places.get(name)
        elsewhere = place and place.node != node and place.node in self._present
        if place and elsewhere and place.daemon != str(reply.facts["daemon"]):
            self._ask_later(node)
            raise ProtocolError(
                f"a second learner calls itself {name!r}",
                "each learner needs keys of its own; if it moved, stop the first",
            )

    def _taken(self, node: str, reply: Reply, here: OpenRound) -> Accepted:
        """What the server made of it; after an error, who is to be asked again and when."""
        name = reply.learner
        try:
            return self.server.take(reply, node)
        except OutOfBounds:
            here.asked.pop(name, None)
            raise
        except OtherEpoch:
            self._leave(name, here)
            if self.server.refusals[name] > 1:
                self._ask_later(node)
            raise
        except OtherTerms:
            raise
        except ProtocolError:
            if reply.kind == "enrolled":
                self._ask_later(node)
            raise

    def _follow(self, node: str, reply: Reply, told: Accepted, data: Buffer, here: OpenRound) -> None:
        name, facts = told.learner, reply.facts
        if told.kind == "enrolled":
            self._files.keep_enrolment(name, facts["epoch"], told.request, data)
            apart = abs(int(time.time()) - facts["time"])
            if apart > _CLOCKS_APART_S:
                _log.warning("the clocks of learner %s and of this server are %d s apart", name, apart)
            self._again_at.pop(node, None)
            here.asked.pop(name, None)
            self._places[name] = Place(node, str(facts["daemon"]))
            here.scan_at = 0.0
            _log.info("learner %s has enrolled", name, extra=_fields("enrolled", name, self.fold.round))
        elif told.kind == "release":
            _log.debug("learner %s has answered", name, extra=_fields("answered", name, self.fold.round))
            self._attendance.took_part(name)
        elif told.kind == "absent":
            self._attendance.absent(name, NO_CLIENTS)
            if name in here.asked:
                here.asked[name].at = time.monotonic() - self._patience_s + _ABSENT_AGAIN_S
            _log.debug("learner %s has no clients now", name)
        elif told.kind == "refusal":
            self._leave(name, here)
            if name not in self.server.refused:
                self._again_at.pop(node, None)
            else:
                self._attendance.absent(name, REFUSES)
                self._ask_later(node)  # someone may repair it
            self._say(node, "refusal", f"learner {name} refuses: {told.why}", learner=name)

    def _leave(self, name: str, here: OpenRound) -> None:
        self._places.pop(name, None)
        here.asked.pop(name, None)

    def _ask_later(self, node: str) -> None:
        self._again_at[node] = time.monotonic() + _REFUSED_AGAIN_S

    def _close(self, here: OpenRound) -> None:
        closed = self._closed()
        seconds = time.monotonic() - here.began
        self._files.close_round(self.fold, closed, seconds)
        self._published = self.fold.round
        for name in closed.dropped:
            _log.error(
                "learner %s was left out of round %d and is not asked again: %s; start the server "
                "again with --reset %s or --void %s",
                name,
                closed.round,
                self.fold.seats[name].why,
                name,
                name,
                extra=_fields("left out", name, closed.round),
            )
        self._log_closed(closed, here)
        self._tell(closed, seconds)

    def _closed(self) -> ClosedRound:
        """The round that is over, and its model made."""
        return self.server.close_round()

    def _log_closed(self, closed: ClosedRound, here: OpenRound) -> None:
        done, rounds = self.fold.round, self.terms.rounds
        without = f", this one without {', '.join(closed.missing)}" if closed.missing else ""
        a_tenth = done * 10 // rounds > (done - 1) * 10 // rounds
        level = logging.INFO if a_tenth else logging.DEBUG
        _log.log(level, "%d of %d rounds closed%s", done, rounds, without, extra=_fields("round closed", None, done))
        known = self._attendance.absences.keys() | self.server.refused.keys() | set(closed.dropped)
        for name in closed.missing:
            if name not in known and name in here.asked:
                passed_s = time.monotonic() - here.asked[name].at
                text = (
                    f"round {closed.round} was closed without learner {name}, which was asked {passed_s:.1f} s before"
                )
                self._say(name, "late", text, learner=name)

    def roll_back(self, round_: int) -> None:
        """Go on from the model published after so many rounds; rounds that learners have spent stay spent."""
        if not 0 <= round_ < self.fold.round:
            raise InputError(
                "--roll-back",
                round_,
                f"a round that is done, below {self.fold.round}",
                "rounds.csv in the run's folder lists them",
            )
        self.fold.roll_back(self.models.read(round_))
        self._files.record_operation(self.fold, "roll back", str(round_), "")
        _log.warning("x is the model of round %d again, in round %d", round_, self.fold.round)

    def void(self, learner: str, why: str = "by the operator") -> None:
        """Never ask this learner again; its weight stays 1/n."""
        self.server.void(self._known(learner, "--void"), why)
        self._places.pop(learner, None)
        self._files.record_operation(self.fold, "void", learner, why)
        _log.warning("the seat of learner %s is void", learner)

    def reset(self, learner: str) -> None:
        """Take this learner at its next enrolment as it is."""
        before = self.fold.seats[self._known(learner, "--reset")]
        stood = f"epoch {before.epoch}, round {before.round}, {before.state} {before.why}".strip()
        self.server.reset(learner)
        self._places.pop(learner, None)
        self._again_at.clear()  # learners without a seat are asked at once
        self._files.record_operation(self.fold, "reset", learner, stood)
        _log.warning("learner %s is taken as it is at its next enrolment", learner)

    def _known(self, learner: str, option: str) -> str:
        if learner not in self.fold.seats:
            raise UnknownName(option, learner, sorted(self.fold.seats))
        return learner

    def _tell(self, closed: ClosedRound | None = None, seconds: float = 0.0) -> None:
        fold, rounds = self.fold, self.terms.rounds
        self._tell_at = time.monotonic() + _TELL_S
        self._watch(Standing(fold.round, rounds, fold.answered, fold.missing, closed, seconds))

    def _name_at(self, node: str) -> str:
        names = [name for name, place in self._places.items() if place.node == node]
        return names[0] if names else f"node {node}"


def _fields(event: str, learner: str | None, round_: int) -> dict[str, object]:
    """For log lines as JSON."""
    return {"event": event, "round": round_, **({} if learner is None else {"learner": learner})}
