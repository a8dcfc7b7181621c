"""What it costs that only sums are seen: whole rounds beside plain ones, in one process without a network.

    python benchmarks/masking.py --learners 3 10 100 1000 --dim 61482

On either side real `Site`s (learner, ledger on disk, noise, signed messages; only the gradient is free) answer the real
server's side. A few of the learners are such sites, and what they take is counted. The others send messages that the
server cannot tell from theirs, and share masks with the sites alone, so that a thousand learners fit into one process;
the server's work with all of them is counted. Prints CPU time and bytes, medians over rounds; a first round is not
counted. "Both" is the server with one learner, since learners work at the same time. A twentieth of the learners may
collude; above 60 learners masks follow the graph.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.audit.disposable import quick_folder
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.keys.peers import own_certificate
from veilstream.federation.learner.site import Site
from veilstream.federation.masking import learner_side
from veilstream.federation.masking.learner_side import MaskingLearner, commitment, own_mask
from veilstream.federation.masking.masks import add_mask
from veilstream.federation.masking.requests import KeysRequest, MaskRequest, ShareRequest, run_on_terms
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.statements import KeyList, SetOfRound, pack_parts
from veilstream.federation.protocol.fold import ServerFold
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.federation.protocol.sum_fold import SumFold
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.federation.server.server import Server
from veilstream.federation.server.sum_server import SumServer
from veilstream.learning.tasks import Sample
from veilstream.plans.plan import Plan
from veilstream.streams.intake import Offered

CLIENTS = 16


class Free:
    """A model of any size whose gradient costs nothing."""

    classifies = False

    def __init__(self, dim: int) -> None:
        self.dim, self.features_shape = dim, (1,)

    def host_gradient(self, z: np.ndarray, sample: Sample) -> np.ndarray:
        return np.zeros(self.dim, np.float32)


def plan_of(learners: int, rounds: int, *, sums: bool) -> Plan:
    trust = {"trust": "sum", "honest": (learners + 1) // 2, "colluding": learners // 20} if sums else {}
    return Plan(
        learning={
            "rounds": rounds,
            "local_steps": 1,
            "clients_per_step": CLIENTS,
            "learners": learners,
            "task": "custom",
        },
        data={"kind": "custom"},
        privacy={"epsilon": 2.0, "delta": 1e-5, **trust},
        federation={"quorum": 1.0},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


@dataclass
class Account:
    """CPU seconds and bytes of the round under way."""

    learners: float = 0.0
    """Of those that are counted."""
    server: float = 0.0
    sent: int = 0
    """To and from the learners that are counted."""
    rounds: list[tuple[float, float, int]] = field(default_factory=list)

    def close(self) -> None:
        """Begin the next round."""
        self.rounds.append((self.learners, self.server, self.sent))
        self.learners, self.server, self.sent = 0.0, 0.0, 0

    def on_server(self, work: Callable[..., Any], *args: Any) -> Any:
        """Count what the server does."""
        began = time.process_time()
        try:
            return work(*args)
        finally:
            self.server += time.process_time() - began


class Light:
    """A learner that is not counted: no noise, no ledger, and masks with the counted ones alone."""

    def __init__(
        self, keys: LearnerKeys, rules: Rules | None, run: str, settings: dict, counted: Sequence[str]
    ) -> None:
        self.keys, self.settings, self.run, self.counted = keys, settings, run, counted
        self.masks: MaskingLearner | None = None
        if rules is not None:
            state = MaskingLearner.fresh(keys.name, 0, run_on_terms(run, settings), os.urandom)
            self.masks = MaskingLearner(state, rules, keys.identity.sign, os.urandom)
        self.told: KeysRequest | None = None

    def answer(self, data: bytes, shared: dict[str, Any]) -> bytes:
        request = Request.read(data, self.keys.server)
        answers = digest(data)
        if request.kind == "enrol":
            facts = {"epoch": 0, "round": 0, "daemon": "0" * 16, "settings": self.settings, "time": int(time.time())}
            return Reply("enrolled", self.keys.name, answers, facts).sign(self.keys.identity)
        if request.kind == "round":
            body = encode(0, request.round, request.round + 1, shared["grid"], shared["zeros"])
            return Reply("release", self.keys.name, answers, {}, body).sign(self.keys.identity)
        kinds = {"key": "key", "keys": "keys", "mask": "masked", "set": "signed", "open": "opened"}
        body = getattr(self, f"_{request.kind}")(bytes(request.body), shared)
        return Reply(kinds[request.kind], self.keys.name, answers, {}, body).sign(self.keys.identity)

    def _key(self, body: bytes, shared: dict[str, Any]) -> bytes:
        return pack_parts([self.masks.offer().pack(), own_certificate(self.keys.path)])

    def _keys(self, body: bytes, shared: dict[str, Any]) -> bytes:
        """Taken without a check, and as one object for all."""
        told = shared.setdefault("told", {})
        if body not in told:
            told.clear()
            request = KeysRequest.unpack(body)
            told[body] = request, KeyList.unpack(request.keys)
        request, keys = told[body]
        me, everybody = keys.names.index(self.keys.name), frozenset(range(len(keys.names)))
        standing = learner_side.Standing(me, everybody)
        seed = self.masks.take_draw(request.told).seed if request.told and not shared.get("seed") else b""
        shared["seed"] = seed = seed or (shared.get("seed", b"") if request.told else b"")
        self.masks.keep(replace(self.masks.state, keys=request.keys, standing=standing, seed=seed))
        return self.masks.told()

    def _mask(self, body: bytes, shared: dict[str, Any]) -> bytes:
        at = MaskRequest.unpack(body).at
        me, masks = self.masks.standing.me, self.masks
        names = masks._list.names
        words = np.zeros(shared["dim"], np.uint64)
        for name in self.counted:
            other = names.index(name)
            if other in masks._links.near(me):
                add_mask(words, masks._pairs.mask_seed(other, at), 1 if me < other else -1)
        own = os.urandom(64)
        add_mask(words, own_mask(own[:32]))
        core = masks.standing.core
        masks.keep(replace(masks.state, own=own, standing=learner_side.Standing(me, core, at.round, at.attempt)))
        packed = (learner_side._MAGIC, me, at.keys, commitment(own[:32]), at.round, at.attempt, len(words))
        return learner_side._MASKED.pack(*packed) + words.tobytes()

    def _set(self, body: bytes, shared: dict[str, Any]) -> bytes:
        state, answer = self.masks.seal(SetOfRound.unpack(body))
        self.masks.keep(state)
        return answer

    def _open(self, body: bytes, shared: dict[str, Any]) -> bytes:
        """Nothing is checked that others signed."""
        told, me = ShareRequest.unpack(body), self.masks.standing.me
        held: list[int] = []
        if told.agreed is not None or not self.masks.rules.two_steps:
            held = sorted(told.what.members & (self.masks._links.near(me) | {me}))
        pads = [self.masks._pairs.pad(place, me, told.what) for place in held]
        return b"".join([self.keys.identity.sign(told.what.open_content()), *pads])


def others_share_nothing() -> None:
    """Learners that are not counted keep one list and one graph together."""
    learner_side.Links = lru_cache(maxsize=2)(learner_side.Links)
    unpack = KeyList.unpack
    KeyList.unpack = staticmethod(lru_cache(maxsize=2)(lambda content: unpack(content)))


def clients(round_: int) -> Iterator[Offered]:
    for k in range(CLIENTS):
        yield Offered(f"{round_}/{k}", Sample(np.zeros(1, np.float32), 0.0))


def rounds_of(root: Path, made: Path, learners: int, dim: int, rounds: int, counted: int, *, sums: bool) -> Account:
    """A run of so many rounds."""
    plan = plan_of(learners, rounds, sums=sums)
    names = [f"l{k:05d}" for k in range(learners)]
    terms, keys, run = Terms.of(plan, dim), ServerKeys.load(made / "server"), "a" * 32
    fold = (SumFold if sums else ServerFold)(terms, np.zeros(dim, np.float32), names)
    server = (SumServer if sums else Server).over(plan, terms, fold, keys, run)
    if sums:
        (root / "run").mkdir()
        server.resume(MaskingFiles(root / "run"))
    picked = names[:: max(1, learners // counted)][:counted]
    sites = {}
    for name in picked:
        learner = Learner(plan, root / name / "store.db", Free(dim), create=True)
        sites[name] = Site(learner, LearnerKeys.load(made / "learners" / name))
    settings = json.loads(json.dumps(terms.settings))
    rules = server.rules if sums else None
    light = {
        name: Light(LearnerKeys.load(made / "learners" / name), rules, run, settings, picked)
        for name in names
        if name not in sites
    }
    shared = {"dim": dim, "zeros": np.zeros(terms.release_dim, np.int64), "grid": terms.grid.step}
    account = Account()

    def answered(name: str, data: bytes) -> bytes:
        if name not in sites:
            return light[name].answer(data, shared)
        began = time.process_time()
        reply = sites[name].answer(data, list(clients(fold.round)))
        account.learners += time.process_time() - began
        account.sent += len(data) + len(reply)
        return reply

    def ask_all(ask: Callable[[str], bytes | None]) -> None:
        for name in names:
            data = account.on_server(ask, name)
            if data is not None:
                told = account.on_server(server.accept, answered(name, data))
                assert told.kind != "refusal", told

    def next_question(name: str) -> bytes | None:
        kind = server.question(name)
        return None if kind is None else b"".join(server.ask(name, kind))

    ask_all(server.enrol)
    if sums:
        ask_all(next_question)
        server.agree_on_keys()
        if server.listed is not None:
            ask_all(next_question)
            assert server.draw()
        ask_all(next_question)
    account.learners, account.server, account.sent = 0.0, 0.0, 0
    for _ in range(rounds):
        if not sums:
            ask_all(server.request)
            account.on_server(server.close_round)
        else:
            ask_all(next_question)
            account.on_server(server.name_set)
            result = None
            while result is None:
                ask_all(next_question)
                result = account.on_server(server.go_on)
            account.on_server(server.close_sum, result)
            assert not server.sums.refused_sum
        account.close()
    for site in sites.values():
        site.close()
    if sums:
        graph = server.masks.links.graph
        account.near = learners - 1 if graph is None else graph.degree
    return account


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[3, 10, 100])
    parser.add_argument("--dim", type=int, default=61_482)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counted", type=int, default=5)
    given = parser.parse_args()
    others_share_nothing()
    print(f"d = {given.dim}; milliseconds of CPU and bytes both ways, a round")
    print("learners near   learner: plain  sums          server: plain    sums            both  bytes: plain    sums")
    for n in given.learners:
        found = []
        with tempfile.TemporaryDirectory(prefix="veilstream-benchmark-", dir=quick_folder()) as folder:
            made = Path(folder) / "keys"
            make_keys(made, ["127.0.0.1"], [f"l{k:05d}" for k in range(n)])
            for sums in (False, True):
                with tempfile.TemporaryDirectory(prefix="veilstream-benchmark-") as root:
                    account = rounds_of(Path(root), made, n, given.dim, given.rounds, min(n, given.counted), sums=sums)
                timed = account.rounds[1:]
                found.append([statistics.median(each[k] for each in timed) for k in range(3)])
        many = min(n, given.counted)
        (a, b, c), (x, y, z) = found
        print(
            f"{n:8d} {account.near:4d} {1e3 * a / many:16.1f} {1e3 * x / many:6.1f} ({x / a:5.2f}x)"
            f" {1e3 * b:12.1f} {1e3 * y:8.1f} ({y / b:5.2f}x) {(x / many + y) / (a / many + b):8.2f}x"
            f" {c / many:10.0f} {z / many:8.0f}"
            f" ({z / c:.4f}x, {(z - c) / many / account.near:.0f} a neighbour)",
            flush=True,
        )


if __name__ == "__main__":
    main()
