"""A running federation, audited from the bytes that its server receives.

All is as deployed, over the Loopback transport; only the clients are the audit's own.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.checks import claimed, pooled_checks, telemetry_checks
from veilstream.audit.deployed import Unkind
from veilstream.audit.statistics import FALSE_ALARMS, one_run
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import every_coordinate, whitened
from veilstream.audit.statistics.pairs import duplicates, lags
from veilstream.audit.transcript import Transcript, law_of_terms
from veilstream.audit.visits import Visitors, Way, ways
from veilstream.deployment.learner import Learner
from veilstream.deployment.terms import Terms
from veilstream.errors import PrivacyError
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.loopback import Loopback
from veilstream.federation.protocol.messages import Reply
from veilstream.federation.protocol.transport import Failure, Received
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.open_round import Standing
from veilstream.plans.plan import Plan
from veilstream.streams.intake import AlwaysReady, Observe

_LEAST_DIM = 4000
_NAMES = ("north", "south")


class Wiretap(Loopback):
    """Carries messages, and keeps what came back."""

    def __init__(self, learners: Mapping[str, Callable[[bytes], bytes]]) -> None:
        super().__init__(learners)
        self.heard: list[bytes] = []

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """What the server gets."""
        came = super().receive(timeout_s)
        self.heard += [bytes(data) for _, data in came if not isinstance(data, Failure)]
        return came


class _Clients(AlwaysReady):
    """A source whose clients the audit knows, and who come in every way; one sum of gradients a round."""

    def __init__(self, plan: Plan, task: Unkind, served: Sequence[Way]) -> None:
        self._task, self._served = task, served
        self.visitors = Visitors(plan, task)
        self.known: dict[int, NDArray[np.int64]] = {}

    def serve(self, round_: int, observe: Observe, wanted: Callable[[], int]) -> None:
        self.visitors.begin_round()
        self.visitors.serve(self._served[round_], observe, wanted)
        self.known[round_] = self._task.settle()


def listen_to_federation(
    plan: Plan,
    terms: Terms,
    *,
    seed: int = 0,
    make: Callable[..., Learner] = Learner,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, Transcript]:
    """Run server and learners to the horizon; a transcript for each learner, from the wire."""
    plan = dataclasses.replace(
        plan,
        learning=dataclasses.replace(plan.learning, learners=len(_NAMES)),
        federation=dataclasses.replace(plan.federation, quorum=1.0, deadline_s=120.0),
    )
    done = 0

    def watch(now: Standing) -> None:
        nonlocal done
        tick(max(0, now.round - done))
        done = max(done, now.round)

    with tempfile.TemporaryDirectory(prefix="vs-audit-") as folder:
        root = Path(folder)
        make_keys(root / "keys", ["127.0.0.1"], list(_NAMES))
        daemons: list[Daemon] = []
        clients: dict[str, _Clients] = {}
        try:
            for k, name in enumerate(_NAMES):
                task: Any = Unkind(terms, seed=k)
                learner = make(plan, root / name / "store.db", task, create=True)
                clients[name] = _Clients(plan, task, ways(terms.rounds, seed + k))
                keys = LearnerKeys.load(root / "keys/learners" / name)
                daemon = Daemon(learner, keys, clients[name], replies="when done")  # no people, and no times audited
                daemons.append(daemon)
            server = ServerKeys.load(root / "keys/server")
            start = np.zeros(terms.dim, np.float32)
            coordinator = Coordinator(plan, start, server, root / "run", watch=watch)
            wire = Wiretap({daemon.name: daemon.handle for daemon in daemons})
            coordinator.go(wire)
        finally:
            for daemon in daemons:
                daemon.close()
        return {name: _transcript(name, wire.heard, clients[name], server) for name in _NAMES}


def _transcript(name: str, heard: list[bytes], clients: _Clients, server: ServerKeys) -> Transcript:
    """The releases of one learner; a message that came twice must have come alike."""
    known = clients.known
    first: list[bytes] = []
    for data in heard:
        if Reply.claimed_learner(data) != name:
            continue
        reply = Reply.read(data, server.learners[name])
        if reply.kind == "refusal":
            raise PrivacyError(f"learner {name!r} refused to take part in its audit: {reply.facts.get('why')}")
        if reply.kind == "release" and reply.body not in first:
            first.append(bytes(reply.body))
    unlike = max(0, len(first) - len(known))
    came = clients.visitors
    heard_of = Transcript.of(first[: len(known)], [known[r] for r in sorted(known)], unlike)
    return dataclasses.replace(heard_of, left_out=came.left_out, used_again=came.used_again)


def federation_checks(
    plan: Plan, terms: Terms, *, tick: Callable[[int], None] = lambda _: None, **options: Any
) -> tuple[Check, ...]:
    """Every learner of a running federation: the claimed noise, in all coordinates, its own."""
    terms = dataclasses.replace(terms, dim=max(_LEAST_DIM, 2 * terms.rounds + 2))
    law, steps = law_of_terms(terms), terms.rounds * terms.local_steps
    transcripts = listen_to_federation(plan, terms, tick=tick, **options)
    checks: list[Check] = []
    for name, heard in transcripts.items():
        white = whitened(heard.residuals, law)
        checks += [
            claimed(one_run(heard.residuals, law, false_alarms=FALSE_ALARMS / 100)),
            every_coordinate(heard.residuals, law, grid=heard.grid, steps=steps),
            lags(white),
            duplicates(heard.units, law, grid=heard.grid, steps=steps),
            Check(
                "repeats",
                0.0 if heard.repeats_unlike else 1.0,
                f"{heard.repeats_unlike} messages came twice, unlike",
                "a round was answered twice, unlike",
            ),
        ]
        checks[-5:] = [dataclasses.replace(c, name=f"{name}: {c.name}") for c in checks[-5:]]
    checks += pooled_checks("both learners", list(transcripts.values()), terms, law)
    checks += telemetry_checks(transcripts.values(), terms, law)
    return tuple(dataclasses.replace(c, name=f"federation, {c.name}") for c in checks)
