"""The server: announces x, collects releases, moves x; one piece of code for every engine.

Learners have constant weights, 1/n of those that the plan names, whoever answers: otherwise the
correlated noise would no longer cancel. A learner's message is the prefix sum of all its noisy
steps; the server keeps the last one that it accepted and takes the difference, so a reply that was
lost or late is made good by the next. A learner's own round advances only when it takes part; the
server asks each for the round that is its next.

Written down before the next round is announced: model, round, and for each learner its prefix and
the (round, hash) that is echoed to it as acknowledgement. A server that is started again goes on to
the same numbers. Nothing here imports noise or clients' data.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import decode
from veilstream.deployment.terms import SAME_TERMS, Terms, both_sides, differences
from veilstream.errors import InputError, ProtocolError, VeilstreamError
from veilstream.federation.identity import ServerKeys
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.federation.protocol.transport import Failure, Transport
from veilstream.federation.services.checkpoint import ModelFile, Position, Seat
from veilstream.files import write_file
from veilstream.learning.algorithm import blend, moved, step_size
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.run_folder import check_folder, versions

__all__ = ["Coordinator", "Standing"]

_AGAIN_S = 5.0  # before an unanswered request is sent once more
_REFUSED_AGAIN_S = 25.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Standing:
    """For whoever watches."""

    round: int
    rounds: int
    answered: tuple[str, ...]
    missing: tuple[str, ...]
    note: str = ""
    """Something worth a line: a refusal, a learner that came or went."""


@dataclass
class _Asked:
    """What a learner has been asked in this round."""

    request: bytes
    at: float
    node: str


@dataclass
class _Enrolling:
    """A node that has been asked who it is."""

    asked: set[str] = field(default_factory=set)
    """Hashes of the requests; any of them may be answered."""
    again_at: float = 0.0


@dataclass
class _Place:
    """Where a learner sits in the engine."""

    node: str
    daemon: str


@dataclass
class _Round:
    """A round in flight."""

    began: float
    asked: dict[str, _Asked] = field(default_factory=dict)
    increments: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    listed: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Epoch, round and hash of what was accepted."""


class Coordinator:
    """One run of the server, in one folder."""

    def __init__(
        self,
        plan: Plan,
        x0: NDArray[np.float32],
        keys: ServerKeys,
        folder: Path,
        *,
        engine: str = "",
        task: Task | None = None,
        watch: Callable[[Standing], None] = lambda _: None,
    ) -> None:
        self._plan, self._keys, self._folder, self._watch = plan, keys, folder, watch
        self.terms = Terms.of(plan, len(x0), task)
        self._settings = self.terms.settings
        n = plan.learning.learners
        if len(keys.learners) != n:
            raise InputError(
                "learning.learners", n, f"as many as have keys ({len(keys.learners)})",
                "`veilstream keys add` makes more; weights are 1/n of all, present or not",
            )  # fmt: skip
        self._needed = max(1, int(np.ceil(plan.federation.quorum * n)))
        self.models = ModelFile(folder / "models.f32", len(x0))
        resumed = (folder / "checkpoint.npz").exists()
        check_folder(folder, plan, resume=resumed or _killed_at_birth(folder))
        self._position = self._load(x0) if resumed else self._begin(x0, engine)
        self._published = self._position.round
        if self.finished and not (folder / "summary.json").exists():
            self._sum_up()
        self._places: dict[str, _Place] = {}
        self._present: set[str] = set()
        self._enrolling: dict[str, _Enrolling] = {}  # by node
        self._refusals: dict[str, int] = {}  # since the last release
        self._refused: dict[str, str] = {}
        self._outstanding: dict[str, set[str]] = {name: set() for name in keys.learners}

    # --- where it stands -------------------------------------------------------------------------

    @property
    def run(self) -> str:
        """Name of this run, the same after a restart."""
        return self._position.run

    @property
    def round(self) -> int:
        """Rounds that are done and durable; the model after them is released."""
        return self._published

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self._position.round == self.terms.rounds

    def _begin(self, x0: NDArray[np.float32], engine: str) -> Position:
        names = sorted(self._keys.learners)
        seats = {name: Seat(name, np.zeros(len(x0), np.int64)) for name in names}
        x = x0.astype(np.float64)
        run = f"{self._plan.name}-{secrets.token_hex(4)}"
        write_file(self._folder / "plan.toml", self._plan.to_toml())
        write_file(self._folder / "guarantee.json", _json(self.terms.guarantee.as_dict()))
        write_file(self._folder / "versions.json", _json(versions() | {"engine": engine}))
        write_file(self._folder / "rounds.csv", "round,seconds,answered,missing\n")
        write_file(self._folder / "releases.csv", "round,learner,epoch,learner_round,hash\n")
        self.models.write(0, x0)
        position = Position(run, 0, x, x.copy(), seats)
        position.save(self._folder / "checkpoint.npz")
        return position

    def _load(self, x0: NDArray[np.float32]) -> Position:
        position = Position.load(self._folder / "checkpoint.npz")
        if set(position.seats) != set(self._keys.learners) or len(position.x) != len(x0):
            raise InputError(
                "learners", sorted(self._keys.learners),
                f"those that the run was begun with: {sorted(position.seats)}",
                "name another folder for another run",
            )  # fmt: skip
        return position

    # --- rounds ----------------------------------------------------------------------------------

    def go(
        self,
        transport: Transport,
        until: int | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Run rounds until the horizon (or ``until``); what is done is kept whatever happens.

        ``look`` is called often, and may raise to end it.
        """
        last = self.terms.rounds if until is None else min(until, self.terms.rounds)
        while self._position.round < last:
            here = _Round(time.monotonic())
            while not self._complete(here):
                look()
                self._call_on(transport, here)
                for node, data in transport.receive(_LOOK_S):
                    self._take(node, data, here)
            self._move(here)

    def _complete(self, here: _Round) -> bool:
        n, answered = self._plan.learning.learners, len(here.increments)
        if answered == n:
            return True
        if n - len(self._refused) < self._needed:
            why = "; ".join(self._refused.values())
            raise ProtocolError(
                f"{len(self._refused)} of {n} learners cannot take part ({why})",
                f"a round needs {self._needed}: repair them, then start the server again",
            )
        if answered + len(self._refused) >= n and answered >= self._needed:
            return True
        late = time.monotonic() - here.began > self._plan.federation.deadline_s
        return late and answered >= self._needed

    def _call_on(self, transport: Transport, here: _Round) -> None:
        """Ask newcomers who they are, and every learner for its round; again if need be."""
        now, nodes = time.monotonic(), transport.nodes()
        self._present = nodes
        seated = {place.node for place in self._places.values()}
        for node in nodes - seated:
            asking = self._enrolling.setdefault(node, _Enrolling())
            if now > asking.again_at:
                request = Request(
                    "enrol", self.run, "", secrets.token_hex(8), settings=self._settings
                ).sign(self._keys.identity)
                asking.asked.add(digest(request))
                asking.again_at = now + _AGAIN_S
                transport.send(node, request)
        for name, place in self._places.items():
            if name in here.increments or place.node not in nodes or name in self._refused:
                continue
            asked = here.asked.get(name)
            if asked and asked.node == place.node and now - asked.at < self._patience_s:
                continue
            request = self._request(name) if asked is None else asked.request
            here.asked[name] = _Asked(request, now, place.node)
            self._outstanding[name].add(digest(request))
            transport.send(place.node, request)

    @property
    def _patience_s(self) -> float:
        """A learner may wait for its clients; only then is silence a loss."""
        return self._plan.federation.patience_s + _AGAIN_S

    def _request(self, name: str) -> bytes:
        seat = self._position.seats[name]
        x = self._position.x.astype("<f4").tobytes()
        return Request(
            "round", self.run, name, secrets.token_hex(8), seat.round, seat.accepted, body=x
        ).sign(self._keys.identity)

    # --- replies ---------------------------------------------------------------------------------

    def _take(self, node: str, data: bytes | Failure, here: _Round) -> None:
        if isinstance(data, Failure):
            self._note(here, f"{self._name_at(node)}: {data.why}")
            for asked in here.asked.values():
                if asked.node == node:
                    asked.at = min(asked.at, time.monotonic() - self._patience_s + 1.0)
            return
        try:
            reply = self._checked(data)
            if reply.kind == "refusal":
                self._note_refusal(node, reply, here)
            elif reply.kind == "enrolled":
                self._seat(node, reply, here)
            else:
                self._accept(reply, here)
        except VeilstreamError as error:
            self._note(here, f"{self._name_at(node)}: {error}")
        except (KeyError, TypeError, ValueError, AttributeError):
            self._note(here, f"{self._name_at(node)}: a reply of unknown form; check its version")

    def _checked(self, data: bytes) -> Reply:
        """From a known learner, signed, in answer to something that was asked."""
        name = Reply.claimed_learner(data)
        if name not in self._keys.learners:
            raise ProtocolError(
                f"a reply from {name!r}, who is not enrolled", "`veilstream keys add` enrols it"
            )
        reply = Reply.read(data, self._keys.learners[name])
        enrolling = set().union(*(asking.asked for asking in self._enrolling.values()))
        if reply.answers not in self._outstanding[name] | enrolling:
            raise ProtocolError(
                f"a reply from {name!r} to nothing that was asked", "an old message was sent again"
            )
        return reply

    def _seat(self, node: str, reply: Reply, here: _Round) -> None:
        """Enrol: same terms, one daemon a name."""
        name, facts = reply.learner, reply.facts
        unlike = differences(self._settings, facts.get("settings", {}))
        if unlike:
            both = both_sides(unlike)
            self._refused[name] = f"{name}: another plan ({both})"
            raise ProtocolError(f"learner {name!r} has another plan ({both})", SAME_TERMS)
        place, daemon = self._places.get(name), str(facts.get("daemon"))
        elsewhere = place and place.node != node and place.node in self._present
        if place and elsewhere and place.daemon != daemon:
            self._ask_later(node)
            raise ProtocolError(
                f"a second learner calls itself {name!r}",
                "each learner needs keys of its own; if it moved, stop the first",
            )
        epoch, round_ = int(facts["epoch"]), int(facts["round"])
        seat = self._position.seats[name]
        if epoch > seat.epoch:  # it lost its store: a new epoch, whose sums begin at zero
            seat.epoch, seat.round, seat.accepted = epoch, 0, None
            seat.prefix = np.zeros_like(seat.prefix)
        elif epoch < seat.epoch or round_ < seat.round:
            self._refused[name] = f"{name}: its store is an old copy"
            raise ProtocolError(
                f"learner {name!r} is at epoch {epoch}, round {round_}, and had come to epoch "
                f"{seat.epoch}, round {seat.round}",
                "its store is an old copy: put the newest one back",
            )
        self._enrolling.pop(node, None)
        self._refused.pop(name, None)
        here.asked.pop(name, None)
        self._places[name] = _Place(node, daemon)
        self._note(here, f"{name}: here")

    def _accept(self, reply: Reply, here: _Round) -> None:
        name, message = reply.learner, decode(reply.body)
        seat = self._position.seats[name]
        if (message.epoch, message.round) < (seat.epoch, seat.round):
            if seat.accepted and (seat.epoch, seat.accepted[0]) == (message.epoch, message.round):
                _check_same(name, seat, message.hash)
            return  # the same again
        if (message.epoch, message.round, message.grid, len(message.prefix)) != (
            seat.epoch, seat.round, self.terms.grid.step, self.terms.dim,
        ):  # fmt: skip
            if message.epoch != seat.epoch:  # it has begun another: ask who it is now
                self._places.pop(name, None)
                here.asked.pop(name, None)
            raise ProtocolError(
                f"a release of epoch {message.epoch}, round {message.round} from {name!r}",
                f"epoch {seat.epoch}, round {seat.round} was asked for",
            )
        here.increments[name] = message.prefix - seat.prefix
        here.listed[name] = (message.epoch, message.round, message.hash)
        self._refusals.pop(name, None)
        seat.prefix, seat.accepted = message.prefix, (message.round, message.hash)
        seat.round += 1
        self._outstanding[name].clear()
        self._note(here, "")

    def _note_refusal(self, node: str, reply: Reply, here: _Round) -> None:
        """A learner may have come back in another epoch: it is asked once more who it is."""
        name, why = reply.learner, str(reply.facts.get("why", ""))
        self._refusals[name] = self._refusals.get(name, 0) + 1
        first = self._refusals[name] == 1 and reply.answers in self._outstanding[name]
        self._places.pop(name, None)
        here.asked.pop(name, None)
        if first:
            self._enrolling.pop(node, None)
        else:
            self._refused[name] = f"{name}: {why}"
            self._ask_later(node)  # someone may repair it
        self._note(here, f"{name} refuses: {why}")

    def _ask_later(self, node: str) -> None:
        asking = self._enrolling.setdefault(node, _Enrolling())
        asking.again_at = time.monotonic() + _REFUSED_AGAIN_S

    # --- the model -------------------------------------------------------------------------------

    def _move(self, here: _Round) -> None:
        """x^{r+1} = x^r - η·η_g/n·Σ increments (eq-comp-alg, η̃·ĝ with ĝ the mean over τ)."""
        position, method = self._position, self.terms.method
        r = position.round
        total = np.zeros(self.terms.dim, np.int64)
        for increment in here.increments.values():
            total += increment
        mean = total * (self.terms.grid.step / self._plan.learning.learners)
        size = step_size(method.step_size * method.server_step_size, method.step_decay, r)
        x = moved(position.x, mean, size, self.terms.projection_radius)
        weight = blend(method.averaging, r)
        position.x, position.round = x, r + 1
        position.average = (1.0 - weight) * position.average + weight * x
        self._list_releases(r, here)
        self.models.write(r + 1, position.average.astype(np.float32))
        position.save(self._folder / "checkpoint.npz")
        self._published = position.round
        missing = sorted(set(position.seats) - set(here.increments))
        with (self._folder / "rounds.csv").open("a") as file:
            seconds = time.monotonic() - here.began
            file.write(f"{r},{seconds:.4f},{len(here.increments)},{' '.join(missing)}\n")
        if self.finished:
            self._sum_up()
        self._note(here, "")

    def _list_releases(self, r: int, here: _Round) -> None:
        """Which messages a round is made of; done again after a kill, it is listed again."""
        with (self._folder / "releases.csv").open("a") as file:
            for name, (epoch, round_, link) in sorted(here.listed.items()):
                file.write(f"{r},{name},{epoch},{round_},{link}\n")

    def _sum_up(self) -> None:
        seats = self._position.seats.values()
        summary = {
            "name": self._plan.name, "run": self.run, "rounds": self._position.round,
            "learners": {s.name: {"epoch": s.epoch, "rounds": s.round} for s in seats},
            "guarantee": self.terms.guarantee.as_dict(),
        }  # fmt: skip
        write_file(self._folder / "summary.json", _json(summary))

    def _note(self, here: _Round, note: str) -> None:
        answered = tuple(sorted(here.increments))
        missing = tuple(sorted(set(self._position.seats) - set(answered)))
        self._watch(Standing(self._position.round, self.terms.rounds, answered, missing, note))

    def _name_at(self, node: str) -> str:
        names = [name for name, place in self._places.items() if place.node == node]
        return names[0] if names else f"node {node}"


def _killed_at_birth(folder: Path) -> bool:
    """Whether a server was killed here before its first checkpoint: it may begin again."""
    for stray in folder.glob(".partial-*"):
        stray.unlink(missing_ok=True)
    ours = {"plan.toml", "guarantee.json", "versions.json", "rounds.csv", "releases.csv"}
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return "plan.toml" in found and found <= ours | {"models.f32", "engine"}


def _check_same(name: str, seat: Seat, link: str) -> None:
    assert seat.accepted is not None
    if seat.accepted[1] != link:
        raise ProtocolError(
            f"learner {name!r} has sent two different releases for its round {seat.accepted[0]}",
            "its noise may have been used twice: stop it, and look at its ledger",
        )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
