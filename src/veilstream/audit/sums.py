"""Checks of a promise that rests on sums: what the server opens, and what it could take off single messages.

Deployed learners of one run send masked increments, and the deployed server's side opens their sums mod 2^64; keys,
masks, shares, signatures and certificates are those of production, and every learner answers by the calls that its
daemon makes. Every coordinate is a run of its own (`Apart`). One learner outside the core comes and goes: it is away,
its message comes too late, or it vanishes before it signs and the attempt is void; others are started again.

The adversary is the server with all learners but h honest ones of the core. It subtracts the increments of all others
from each opened sum. What is left must have the noise of h learners, and a canary in one of them be told apart no
better than was promised. Told the noise of h - 1 of them too, it has one learner's own increments: then the *floor*
must hold, at a learner of the core, and at the one that comes and goes, whose increments must hold the noise of all
steps that it missed.

Messages by themselves must be uniform words: as they are sent, as differences of two by one learner, and also where
the others have given away their masks with a learner that was left out.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from veilstream.audit.canary import Canary, offered_in_step
from veilstream.audit.checks import claimed
from veilstream.audit.disposable import OneByOne, quick_folder
from veilstream.audit.statistics import FALSE_ALARMS, Law, ManyRun, OneRun, many_run, one_run
from veilstream.audit.statistics.check import Check
from veilstream.audit.statistics.coordinates import whitened
from veilstream.audit.statistics.law import law_of, patterns
from veilstream.audit.statistics.pairs import lags
from veilstream.audit.transcript import reach_of
from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.terms import Terms
from veilstream.federation.keys.identity import LearnerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.masked_rounds import MaskedRounds
from veilstream.federation.masking.learner_side import MaskedMessage
from veilstream.federation.masking.masks import Words, add_mask
from veilstream.federation.masking.requests import KeysRequest, MaskRequest, VoidRequest, run_on_terms
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.server_side import MaskingServer
from veilstream.federation.masking.statements import KeyList, KeyOffer, OpenCertificate, unpack_parts
from veilstream.federation.protocol.messages import Buffer, Request
from veilstream.learning.tasks import Task
from veilstream.mechanisms.participation import ONCE
from veilstream.plans.plan import Plan
from veilstream.privacy.gaussian import mu_for

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Tick = Callable[[int], None]
Presence = Literal["here", "away", "late", "vanishes"]

MOST_HONEST, MOST_COLLUDING = 8, 1
MOST_ROUNDS = 48
_RUN = "a" * 32
_RESTARTS = 3
_POSITIONS = 8  # bytes of a word


def summed(plan: Plan) -> Plan:
    """The plan with as many learners and rounds as an audit of sums has, calibrated for them."""
    trust = plan.trust
    assert trust is not None
    assert plan.privacy is not None
    honest, colluding = min(trust.honest, MOST_HONEST), min(trust.colluding, MOST_COLLUDING)
    learning = dataclasses.replace(
        plan.learning, learners=learners_of(honest, colluding), rounds=min(plan.learning.rounds, MOST_ROUNDS)
    )
    return dataclasses.replace(
        plan, learning=learning, privacy=dataclasses.replace(plan.privacy, honest=honest, colluding=colluding)
    )


def learners_of(honest: int, colluding: int) -> int:
    """So many that sums are opened without one of them (`Rules`)."""
    return honest + colluding + max(1, 3 - honest)


@dataclass(frozen=True)
class Heard:
    """What the adversary reads of one or more learners: prefix sums, less all that it knows, one run a column."""

    prefixes: Floats
    """(rounds that were opened with them, runs), in the units of gradients."""
    rounds: tuple[int, ...]
    second: Bools
    """Which record each canary had."""
    canary: Floats
    """(as prefixes): what the canary added."""
    step: int | None
    """Where it came; None where there was none."""


@dataclass(frozen=True)
class Opened:
    """A run of all learners."""

    together: Heard
    """The h honest learners of the core: told nothing of their noise."""
    one: Heard
    """One of them, where the noise of all others is known."""
    outside: Heard
    """The learner that comes and goes, likewise."""
    checks: tuple[Check, ...]
    """Of single messages, and of the masks."""


@dataclass(frozen=True)
class SumsFound:
    """What an audit of sums says, beside its checks."""

    honest: int
    of: int
    """Honest learners of the plan; the audit has `honest` of them."""
    learners: int
    rounds: int
    together: ManyRun
    floor: ManyRun
    noise: OneRun
    """Of h learners together."""
    noise_of_one: OneRun

    @property
    def mu(self) -> float:
        """μ of the sums is at least this."""
        return max(self.together.mu_lower, self.noise.mu_lower)

    @property
    def mu_of_floor(self) -> float:
        """μ is at least this where all others' noise is known."""
        return max(self.floor.mu_lower, self.noise_of_one.mu_lower)


class _Site:
    """One learner as its daemon has it, and the clients of the audit."""

    def __init__(self, plan: Plan, folder: Path, name: str, terms: Terms, second: Bools, visits: Sequence[int]) -> None:
        self._plan, self._store, self._terms = plan, folder / name / "store.db", terms
        self._parts = LearnerParts(rounds=OneByOne)
        self.keys = LearnerKeys.load(folder / "keys/learners" / name)
        self.name, self.visits = name, tuple(visits)
        self.task = Canary(terms, second, "loud")
        self.known = np.zeros(self.task.dim)
        """What the clients beside the canary added so far."""
        self.begin()

    def begin(self) -> None:
        """Open the store, as a process that starts does."""
        task: Any = self.task
        self.learner = _opened(self._plan, self._store, task, self._parts)
        self.learner.join(_RUN, self._parts)
        self.masked = MaskedRounds(self.learner, self.keys)

    def end(self) -> None:
        """Let go of it."""
        self.learner.close()

    def ask(self, kind: str, body: bytes = b"") -> bytes:
        """The body of its reply."""
        return self.masked.answer(Request(kind, _RUN, self.name, "0" * 32, body=body), self._local)

    def _local(self, round_: int, model: Buffer) -> None:
        """The local part of a round: what `Site` does, with clients who are here."""
        learner, terms = self.learner, self._terms
        x = np.frombuffer(bytes(model), "<f4")
        learner.catch_up(round_)
        if learner.round > round_:
            return
        self.task.x = x
        learner.begin_round(round_, x)
        offered = offered_in_step(terms, self.visits, False, 0, round_)
        outcomes = learner.take_many(offered)
        others = sum(o.used for each, o in zip(offered, outcomes, strict=False) if each.tag != "canary")
        learner.seal_round()
        self.known = self.known + others * terms.grid.clip_norm / terms.clients_per_step * np.sign(x)


def _opened(plan: Plan, store: Path, task: Task, parts: LearnerParts) -> Learner:
    return Learner(plan, store, task, create=True, parts=parts)


class _Run:
    """Learners, the server's side, and what the adversary writes down."""

    def __init__(
        self, plan: Plan, terms: Terms, folder: Path, sites: Sequence[_Site], presence: Sequence[Presence]
    ) -> None:
        trust = plan.trust
        assert trust is not None
        self.terms, self.sites, self.presence = terms, sites, presence
        self.honest, self.outside = range(trust.honest), len(sites) - 1
        rules = Rules(len(sites), trust.honest, trust.colluding)
        told = [unpack_parts(site.ask("key"), 2) for site in sites]
        run = run_on_terms(_RUN, sites[0].learner.settings)
        keys = KeyList(run, tuple(KeyOffer.unpack(offer) for offer, _ in told))
        request = KeysRequest(keys.pack(), tuple(bytes(certificate) for _, certificate in told)).pack()
        for site in sites:
            site.ask("keys", request)
        dim = sites[0].learner.terms.release_dim
        self.masks = MaskingServer(rules, keys, {site.name: site.keys.identity.public.raw for site in sites}, dim)
        self.dim = sites[0].task.dim
        self.x = np.zeros(self.dim, np.float32)
        self.total = np.zeros(dim, np.int64)
        self.rows: dict[str, list[Integers]] = {"together": [], "one": [], "outside": []}
        self.counted: list[int] = []
        self.known: dict[str, list[Floats]] = {"together": [], "one": [], "outside": []}
        self.uniform = {"as they are sent": _Bytes(), "two of one learner": _Bytes(), "left out": _Bytes()}
        self._last: dict[int, Words] = {}
        self._last_bare: Words | None = None
        self.given: list[bytes] = []
        """Keys of masks with the learner that was left out."""
        self.unlike = 0
        """Rounds whose opened sum is not that of the increments."""
        self._waits_since: dict[int, int] = {}

    def round(self, r: int) -> None:
        """One round, opened."""
        masks, sites, presence = self.masks, self.sites, self.presence[r]
        here = [k for k in range(len(sites)) if k != self.outside or presence != "away"]
        self._mask(here, late=presence == "late")
        if presence == "vanishes":
            masks.name()
            self._seal([k for k in here if k != self.outside])
            request = VoidRequest(masks.at, self._proofs(0), masks.proof).pack()
            for k in here:
                if k != self.outside:
                    masks.take_void(k, sites[k].ask("void", request))
            assert masks.next_attempt()
            here = [k for k in here if k != self.outside]
            self._mask(here, late=False)
        members = sorted(masks.masked)
        increments = {k: np.array(sites[k].learner.increment(r)) for k in members}
        masks.name()
        self._seal(members)
        for k in members:
            masks.take_shares(k, sites[k].ask("open", masks.share_request(self._proofs(k)).pack()))
        self._strip(masks.outside_seeds())
        opened = masks.open()
        self.unlike += not np.array_equal(sum(increments.values()), opened.total)
        self._write_down(r, opened.total, increments)
        for k in (*members, *([self.outside] if presence in ("late", "vanishes") else [])):
            self._waits_since[k] = r

    def _proofs(self, k: int) -> tuple[OpenCertificate, ...]:
        """As the server sends them: of the last round, and of one whose outcome this learner waits for."""
        now, known = self.masks.round, self.masks.certificates
        wanted = sorted({self._waits_since.get(k, now - 1), now - 1})
        return tuple(known[r] for r in wanted if r in known)

    def _mask(self, here: Sequence[int], *, late: bool) -> None:
        masks, self._late = self.masks, None
        for k in here:
            request = MaskRequest(masks.at, self._proofs(k), masks.proof, self.x.astype("<f4").tobytes())
            content = self.sites[k].ask("mask", request.pack())
            words = MaskedMessage.unpack(content).words.copy()
            self.uniform["as they are sent"].add(words)
            if k in self._last:
                self.uniform["two of one learner"].add(words - self._last[k])
            self._last[k] = words
            if late and k == self.outside:
                self._late = words
            else:
                masks.take_masked(k, content)

    def _seal(self, members: Sequence[int]) -> None:
        """Shares for the set, and the keys of masks with those who were left out."""
        masks = self.masks
        what = masks.name()
        for k in members:
            masks.take_signed(k, self.sites[k].ask("set", what.pack()))

    def _strip(self, given: dict[int, dict[int, bytes]]) -> None:
        """Take all pairwise masks off the message of a learner that was left out, as the server can."""
        self.given += [seed for seeds in given.values() for seed in seeds.values()]
        bare = self._late
        if bare is None:
            return
        for signer, seeds in given.items():
            add_mask(bare, seeds[self.outside], 1 if signer < self.outside else -1)
        self.uniform["left out"].add(bare)
        if self._last_bare is not None:
            self.uniform["left out"].add(bare - self._last_bare)
        self._last_bare = bare

    def _write_down(self, r: int, total: Integers, increments: dict[int, Integers]) -> None:
        """What the adversary works out from an opened sum and all that it knows."""
        sites, dim = self.sites, self.dim

        def less(unknown: Sequence[int]) -> Integers:
            others = [value for k, value in increments.items() if k not in unknown]
            return np.asarray(total - sum(others, np.zeros_like(total)))[:dim]

        self.rows["together"].append(less(self.honest))
        self.known["together"].append(sum((sites[k].known for k in self.honest), np.zeros(dim)))
        self.rows["one"].append(less([0]))
        self.known["one"].append(sites[0].known)
        if self.outside in increments:
            self.rows["outside"].append(less([self.outside]))
            self.known["outside"].append(sites[self.outside].known)
            self.counted.append(r)
        self.total += total
        learned = self.total[:dim] * self.terms.grid.step / len(sites)
        self.x = (-0.1 * learned).astype(np.float32)


class _Bytes:
    """How often each byte came at each position of a word."""

    def __init__(self) -> None:
        self.counts = np.zeros((_POSITIONS, 256), np.int64)

    def add(self, words: Words) -> None:
        """Count these."""
        each = words.astype("<u8").view(np.uint8).reshape(-1, _POSITIONS)
        for position in range(_POSITIONS):
            self.counts[position] += np.bincount(each[:, position], minlength=256)

    @property
    def words(self) -> int:
        """How many have come."""
        return int(self.counts[0].sum())

    def p(self) -> float:
        """Of the hypothesis that all are uniform; by thousands of words for each byte, χ² is close to exact."""
        if not self.words:
            return 1.0
        mean = self.words / 256
        statistic = float(((self.counts - mean) ** 2).sum() / mean)
        return float(chi2.sf(statistic, _POSITIONS * 255))


def presence_of(rounds: int, seed: int, *, once: bool) -> list[Presence]:
    """When the learner outside the core takes part: never left out for good, and here in the end.

    Where people return, or steps are secret, one whose message was not counted takes no further part, so there it is
    away or here.
    """
    rng = np.random.default_rng([seed, 23])
    kinds: list[Presence] = ["away", "late", "vanishes"] if once else ["away"]
    found: list[Presence] = ["here"] * rounds
    for r in range(1, rounds - 1):
        if rng.random() < 0.5:
            found[r] = kinds[int(rng.integers(len(kinds)))]
    for place, kind in enumerate(kinds):
        if 1 + place < rounds - 1:
            found[1 + place] = kind
    return found


def law_of_sum(terms: Terms, honest: int, *, floor: bool, rounds: Sequence[int] | None = None) -> Law:
    """What these terms say of prefix sums over so many honest learners, in these rounds; or of one alone.

    The claim is the (ε, δ) that people are told. That h learners' noise is √h of one's is said here once more, on
    purpose: an audit that took it from the code that calibrates would share its mistakes.
    """
    promise = terms.guarantee
    law = law_of(
        terms.mechanism.noising_matrix(),
        std=terms.noise_std * (1.0 if floor else math.sqrt(honest)),
        reach=reach_of(terms),
        claim=mu_for(promise.floor_epsilon if floor else promise.epsilon, promise.delta) * (1.0 + 1e-9),
        participation=promise.participation,
    )
    if rounds is None:
        return law
    assert law.covariance is not None
    rows = list(rounds)
    return dataclasses.replace(law, shifts=law.shifts[rows], covariance=law.covariance[np.ix_(rows, rows)])


def open_sums(plan: Plan, terms: Terms, runs: int, *, seed: int = 0, tick: Tick = lambda _: None) -> Opened:
    """Run all learners of a plan that `summed` made to its end."""
    trust = plan.trust
    assert trust is not None
    count, once = plan.learning.learners, plan.participation == ONCE
    presence = presence_of(terms.rounds, seed, once=once)
    there = [r for r, kind in enumerate(presence) if kind == "here"]
    law = law_of_sum(terms, trust.honest, floor=False)
    outside_law = law_of_sum(terms, trust.honest, floor=True, rounds=there)
    assert outside_law.expected is not None
    serves = [r for r, kind in enumerate(presence) if kind != "away"]
    visits = patterns(terms.rounds, plan.participation)[law.worst]
    last = max(serves, key=lambda r: float(outside_law.expected[r])) if once else None  # type: ignore[index]
    coins = np.random.default_rng([seed, 29])
    second = [coins.integers(0, 2, runs).astype(bool) for _ in range(2)]
    nobody = np.zeros(runs, bool)
    restarts = {int(r) for r in coins.permutation(terms.rounds)[:_RESTARTS]}
    names = [f"learner-{k:02}" for k in range(count)]
    sites: list[_Site] = []
    with tempfile.TemporaryDirectory(prefix="veilstream-audit-", dir=quick_folder()) as temporary:
        folder = Path(temporary)
        make_keys(folder / "keys", ["127.0.0.1"], names)
        try:
            for k, name in enumerate(names):
                where = visits if k == 0 else (last,) if k == count - 1 and last is not None else ()
                coin = second[0] if k == 0 else second[1] if k == count - 1 else nobody
                sites.append(_Site(plan, folder, name, terms, coin, where))
            run = _Run(plan, terms, folder, sites, presence)
            for r in range(terms.rounds):
                if r in restarts:
                    for site in sites:
                        site.end()
                        site.begin()
                run.round(r)
                tick(count)
        finally:
            for site in sites:
                site.end()
    everywhere = tuple(range(terms.rounds))
    return Opened(
        _heard(run, "together", everywhere, visits, second[0]),
        _heard(run, "one", everywhere, visits, second[0]),
        _heard(run, "outside", tuple(run.counted), () if last is None else (last,), second[1]),
        tuple(_message_checks(run)),
    )


def _heard(run: _Run, who: str, rounds: tuple[int, ...], visits: Sequence[int], second: Bools) -> Heard:
    terms = run.terms
    share, reach = terms.grid.clip_norm / terms.clients_per_step, reach_of(terms)
    units = np.cumsum(np.stack(run.rows[who]), axis=0)
    prefixes = np.multiply(units, terms.grid.step, dtype=np.float64) - np.stack(run.known[who])
    so_far = np.array([sum(step <= r for step in visits) for r in rounds], np.float64)
    canary: Floats = so_far[:, None] * np.where(second, share, share - reach)
    return Heard(prefixes, rounds, second, canary, visits[0] if visits else None)


def _message_checks(run: _Run) -> list[Check]:
    found = [
        Check(
            f"sums: messages, {name}",
            each.p(),
            f"{each.words:,} words, by their bytes",
            "a masked message says something of what is in it",
        )
        for name, each in run.uniform.items()
    ]
    again = len(run.given) - len(set(run.given))
    return [
        *found,
        Check(
            "sums: keys of one attempt",
            0.0 if again else 1.0,
            f"{len(run.given)} keys were given away, {again} of them twice",
            "a key that is given away takes masks off in other rounds too",
        ),
        Check(
            "sums: masks cancel",
            0.0 if run.unlike else 1.0,
            f"{run.unlike} of {len(run.presence)} opened sums are not those of the increments",
            "what is opened is not the sum of what learners added",
        ),
    ]


def sum_checks(
    plan: Plan, terms: Terms, runs: int, *, of: int = 0, seed: int = 0, tick: Tick = lambda _: None
) -> tuple[list[Check], SumsFound]:
    """What the opened sums tell, with the noise of all but h honest learners known, and of all but one.

    ``of``: honest learners of the plan that is audited. Each bound has a level far below a check's, as in `claimed`.
    """
    trust = plan.trust
    assert trust is not None
    opened = open_sums(plan, terms, runs, seed=seed, tick=tick)
    checks, judged, noises = list(opened.checks), list[ManyRun](), list[OneRun]()
    for name, heard, alone, missed in (
        (f"sums: h = {trust.honest}", opened.together, False, False),
        ("sums: the floor", opened.one, True, False),
        ("sums: the floor, with rounds missed", opened.outside, True, True),
    ):
        law = law_of_sum(terms, trust.honest, floor=alone, rounds=heard.rounds if missed else None)
        residuals = heard.prefixes - heard.canary
        noises.append(one_run(residuals, law, false_alarms=FALSE_ALARMS / 100))
        noise = claimed(noises[-1])
        checks.append(dataclasses.replace(noise, name=f"{name}, {noise.name}"))
        checks.append(dataclasses.replace(lags(whitened(residuals, law)), name=f"{name}, steps of the noise"))
        if heard.step is None:
            continue
        who = heard.step if plan.participation == ONCE else law.worst
        many = many_run(
            heard.prefixes,
            heard.second,
            law,
            delta=terms.guarantee.delta,
            client=who,
            expected=None if law.expected is None else float(law.expected[who]),
            centre=terms.grid.clip_norm / terms.clients_per_step - 0.5 * law.reach,
            false_alarms=FALSE_ALARMS / 100,
        )
        judged.append(many)
        checks.append(
            Check(
                f"{name}, runs with a canary",
                0.0 if many.alarm else 1.0,
                f"{many.runs:,} runs: mu >= {many.mu_lower:.4g} of {many.claim:.4g}",
                "the canary is told apart better than was promised, or not as the claimed noise allows",
            )
        )
    rounds, learners = plan.learning.rounds, plan.learning.learners
    return checks, SumsFound(
        trust.honest, of or trust.honest, learners, rounds, judged[0], judged[1], noises[0], noises[1]
    )
