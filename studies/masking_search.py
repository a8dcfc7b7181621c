"""Every state that a server without scruples can lead learners to, in small cases: how many sums does it ever learn?

    python -m studies.masking_search            all cases below, and every sabotage
    python -m studies.masking_search --long     with 4 learners too

The server may ask each honest learner anything in any order, as often as it likes: mask, sign any set, share, void,
move on. It shows different sets to different learners, replays, hides and delays; what it can show as proof is what
honest learners have signed, and whatever colluding ones sign. Learners' decisions are the deployed functions
(`federation.masking.decisions`); signatures are taken to be what they say. A learner that crashes is one that was
asked nothing; one that crashes between writing and sending is one whose answer the server drops. Both are among
the paths. States that differ only in what learners are called count once, and a round that all have left counts by
what was opened of it.

What the server then knows follows from the masks alone. Of attempt a, let G be the graph on honest learners with an
edge where their pairwise mask is not known. The sums that it can compute are those over components of G of
which every learner's message has come and every own mask has shares enough out, for the set that its learner has
sealed for. Then the masks that it shares with those outside that set are known, too. `wrong` asks of every state:

    1. of a round, over all attempts, at most one component is known, and it has h learners at least;
    2. no step of a learner is in two known sums;
    3. learners that are in every known sum add the same steps to each: their noise only ever shows summed up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from veilstream.errors import VeilstreamError
from veilstream.federation.masking import decisions
from veilstream.federation.masking.decisions import Standing
from veilstream.federation.masking.rules import Rules

T = TypeVar("T")
Set = frozenset[int]
Fact = tuple[str, int, int, Set]
"""What the server has of an attempt: "mask" (a learner's message; the set is of the rounds that it holds), "sign"
(it has sealed), "share" (it agrees), "tell" or "void", by which learner, in which attempt."""
Facts = frozenset[Fact]
_NOTHING: Set = frozenset()


@dataclass(frozen=True)
class Conduct:
    """What honest learners do: the deployed functions, unless a sabotage replaces one."""

    mask: Callable[..., Standing] = decisions.mask
    sign: Callable[..., Standing] = decisions.sign
    share: Callable[..., Standing] = decisions.share
    tell: Callable[..., Standing] = decisions.tell
    void: Callable[..., Standing] = decisions.void
    moved_on: Callable[..., tuple[Standing, bool]] = decisions.moved_on
    remembers: bool = True
    """Whether nothing leaves before the standing is written down."""


@dataclass(frozen=True)
class Case:
    """How large."""

    rules: Rules
    colluders: int
    rounds: int
    attempts: int
    conduct: Conduct = Conduct()
    eager: bool = False
    """Whether every learner masks the first attempt as it comes to a round. That takes nothing from the server, since a
    first message stops no learner from anything, and makes states fewer."""
    two_steps: bool = False
    """Whether pads are told when t have agreed, as where a graph says who holds shares. One more than collude
    then gives an own mask. All are neighbours in so small a case."""
    bound: bool = True
    """Whether what is sealed is of use for its set alone."""

    @property
    def loyal(self) -> int:
        """Learners that keep to the rules: those with the first places."""
        return self.rules.learners - self.colluders


@dataclass(frozen=True)
class State:
    """Learners, the rounds whose steps each takes to be in no opened sum, and what the server has of each round."""

    learners: tuple[Standing, ...]
    pending: tuple[Set, ...]
    seen: tuple[Facts, ...]


class Search:
    """All states of one case, depth first."""

    def __init__(self, case: Case) -> None:
        self.case = case
        everybody = range(case.rules.learners)
        self._sets = [
            frozenset(members) for size in everybody for members in itertools.combinations(everybody, size + 1)
        ]
        self._orders = list(itertools.permutations(range(case.loyal)))
        self.decide = cache(self._decide)
        self.known_sums = cache(self._known_sums)
        self.renamed = cache(self._renamed)
        self.renamed_facts = cache(self._renamed_facts)

    def start(self) -> State:
        """All have the list of keys."""
        core, loyal = frozenset(range(self.case.rules.learners)), self.case.loyal
        standings = tuple(Standing(me, core) for me in range(loyal))
        now = State(standings, (frozenset([0]),) * loyal, (_NOTHING,) * self.case.rounds)
        for me in range(loyal):
            now = self._begun(now, me)
        return now

    def _begun(self, now: State, me: int) -> State:
        """Where learners are eager: after its first message of the round that it has come to."""
        standing = now.learners[me]
        if not self.case.eager or standing.round >= self.case.rounds:
            return now
        decided = self.decide("mask", standing, standing.round, 1, 0)
        if decided is None:
            return now
        seen = list(now.seen)
        seen[standing.round] |= {("mask", me, 1, now.pending[me])}
        return State(_with(now.learners, me, decided), now.pending, tuple(seen))

    def _decide(self, kind: str, now: Standing, *asked: object) -> Standing | None:
        conduct, rules = self.case.conduct, self.case.rules
        try:
            if kind == "void":
                return conduct.void(now, *asked)
            if kind == "mask":
                return conduct.mask(now, rules, *asked)
            return {"sign": conduct.sign, "share": conduct.share, "tell": conduct.tell}[kind](now, rules, *asked)
        except VeilstreamError:
            return None

    def after(self, now: State) -> Iterator[State]:
        """Every state that one question to one learner leads to."""
        for me, standing in enumerate(now.learners):
            for round_ in range(self.case.rounds):
                seen = now.seen[round_]
                for fact, decided in self._answers(me, standing, now.pending[me], round_, seen):
                    if decided is None or (fact in seen and decided == standing):
                        continue
                    later = (*now.seen[:round_], seen | {fact}, *now.seen[round_ + 1 :])
                    yield State(_with(now.learners, me, decided), now.pending, later)
                    if not self.case.conduct.remembers:
                        yield State(now.learners, now.pending, later)
                yield from self._moved_on(now, me, round_)

    def _answers(
        self, me: int, standing: Standing, pending: Set, round_: int, seen: Facts
    ) -> Iterator[tuple[Fact, Standing | None]]:
        case, void = self.case, self._proved_void(seen)
        for attempt in range(1, case.attempts + 1):
            fact: Fact = ("mask", me, attempt, pending)
            if not any(f[:3] == fact[:3] for f in seen) or not case.conduct.remembers:
                yield fact, self.decide("mask", standing, round_, attempt, void)
            if attempt < case.attempts:  # one of the last would only stop the round
                yield ("void", me, attempt, _NOTHING), self.decide("void", standing, round_, attempt, void)
            for members in self._sets:
                asked = (round_, attempt, standing.core, members)
                yield ("sign", me, attempt, members), self.decide("sign", standing, *asked)
                yield ("share", me, attempt, members), self.decide("share", standing, *asked)
                if case.two_steps:
                    agreed = len(self._helpers(seen, "share", attempt, members)) + case.colluders
                    yield ("tell", me, attempt, members), self.decide("tell", standing, *asked, agreed)

    def _moved_on(self, now: State, me: int, round_: int) -> Iterator[State]:
        case, seen = self.case, now.seen[round_]
        for attempt, members in {(f[2], f[3]) for f in seen if f[0] == "share"}:
            openers = sum(("share", who, attempt, members) in seen for who in range(case.loyal))
            if openers + case.colluders < case.rules.threshold:
                continue
            try:
                standing, mine = case.conduct.moved_on(
                    now.learners[me], case.rules, round_, attempt, self._core_of(now, round_), members
                )
            except VeilstreamError:
                continue
            if standing != now.learners[me]:
                left = _NOTHING if mine else now.pending[me]
                steps = left | set(range(now.learners[me].round + 1, standing.round + 1))
                yield self._shortened(State(_with(now.learners, me, standing), _with(now.pending, me, steps), now.seen))

    def _core_of(self, now: State, round_: int) -> Set:
        """The core that signers of this round had: those of every sum before."""
        core = frozenset(range(self.case.rules.learners))
        for seen in now.seen[:round_]:
            opened = [f[3] for f in seen if f[0] == "share"]
            core &= max(opened, key=opened.count) if opened else core
        return core

    def _helpers(self, seen: Facts, kind: str, attempt: int, members: Set) -> Set:
        """Which honest learners agreed on a set (or told pads for it)."""
        return frozenset(k for k in range(self.case.loyal) if (kind, k, attempt, members) in seen)

    def _opened_own(self, seen: Facts, attempt: int, who: int) -> Set | None:
        """The set for which this learner's own mask can be taken off; None while it cannot."""
        case = self.case
        kind, need = ("tell", case.colluders + 1) if case.two_steps else ("share", case.rules.threshold)
        for fact in seen:
            if fact[:3] != ("sign", who, attempt):
                continue
            sets = [fact[3]] if case.bound else [f[3] for f in seen if f[0] == kind and f[2] == attempt and who in f[3]]
            if any(len(self._helpers(seen, kind, attempt, each)) + case.colluders >= need for each in sets):
                return fact[3]
        return None

    def _proved_void(self, seen: Facts) -> int:
        """The highest attempt of which it can show a certificate."""
        for attempt in range(self.case.attempts, 0, -1):
            voids = sum(("void", who, attempt, _NOTHING) in seen for who in range(self.case.loyal))
            if voids + self.case.colluders >= self.case.rules.voids:
                return attempt
        return 0

    def _shortened(self, now: State) -> State:
        """Of a round that all have left, only what is known of it."""
        seen = list(now.seen)
        for round_ in range(self.case.rounds):
            if all(standing.round > round_ for standing in now.learners) and len(self.known_sums(seen[round_])) == 1:
                (known,) = self.known_sums(seen[round_])
                shared = [f[2:] for f in seen[round_] if f[0] == "share"]
                _, members = max(shared, key=shared.count)  # the set with a certificate
                facts = [("mask", who, 1, held) for who, held in known.items()]
                facts += [(kind, who, 1, members) for kind in ("sign", "share", "tell") for who in known]
                seen[round_] = frozenset(facts)
        return replace(now, seen=tuple(seen))

    def _known_sums(self, seen: Facts) -> tuple[dict[int, Set], ...]:
        """Every sum of a round that the server can compute: whose, and which rounds' steps each adds."""
        found: dict[tuple[int, ...], dict[int, Set]] = {}
        for attempt in range(1, self.case.attempts + 1):
            came = {f[1]: f[3] for f in seen if f[0] == "mask" and f[2] == attempt}
            own = {who: self._opened_own(seen, attempt, who) for who in came}
            bare = {who for who, members in own.items() if members is not None}
            given = {
                frozenset((who, other))
                for who, members in own.items()
                for other in range(self.case.loyal)
                if members is not None and other not in members
            }
            left = set(range(self.case.loyal))
            while left:
                part, edge = set[int](), {left.pop()}
                while edge:
                    one = edge.pop()
                    part.add(one)
                    near = {other for other in left if frozenset((one, other)) not in given}
                    left -= near
                    edge |= near
                if part <= bare:
                    found[(attempt, *sorted(part))] = {who: came[who] for who in sorted(part)}
        return tuple(found.values())

    def wrong(self, now: State) -> str | None:
        """What the server has learned that it must not; None where the state is as promised."""
        known: list[dict[int, Set]] = []
        for round_, seen in enumerate(now.seen):
            sums = self.known_sums(seen)
            if len(sums) > 1:
                return f"two sums of round {round_}: {[sorted(each) for each in sums]}"
            known += sums
        for each in known:
            if len(each) < self.case.rules.honest:
                return f"a sum over honest learners {sorted(each)} only"
        for one, other in itertools.combinations(known, 2):
            if any(one[who] & other[who] for who in one.keys() & other.keys()):
                return "a step of a learner is in two sums"
        always = frozenset.intersection(*(frozenset(each) for each in known)) if known else _NOTHING
        if known and len(always) < self.case.rules.honest:
            return f"only {len(always)} honest learners are in every sum"
        if any(len({each[who] for who in always}) > 1 for each in known):
            return "learners that are in every sum add different steps to one"
        return None

    def as_one(self, now: State) -> tuple[object, ...]:
        """The same for all states that differ in names alone."""
        return min(self._form(now, order) for order in self._orders)

    def _form(self, now: State, order: tuple[int, ...]) -> tuple[object, ...]:
        back = sorted(range(len(order)), key=order.__getitem__)  # who has each place
        return (
            tuple(self.renamed(now.learners[k], order) for k in back),
            tuple(tuple(sorted(now.pending[k])) for k in back),
            tuple(self.renamed_facts(seen, order) for seen in now.seen),
        )

    def _renamed(self, standing: Standing, order: tuple[int, ...]) -> tuple[object, ...]:
        signed, opened = standing.signed, standing.opened
        return (
            standing.round,
            standing.masked,
            standing.voided,
            _moved(standing.core, order),
            () if signed is None else _moved(signed, order),
            () if opened is None else (opened[0], _moved(opened[1], order)),
        )

    def _renamed_facts(self, seen: Facts, order: tuple[int, ...]) -> tuple[object, ...]:
        return tuple(
            sorted(
                (kind, order[who], attempt, tuple(sorted(about)) if kind == "mask" else _moved(about, order))
                for kind, who, attempt, about in seen
            )
        )

    def run(self, most: int = 100_000_000) -> Found:
        """Go on until a state is wrong, or all have been seen."""
        first = self.start()
        known: set[int] = {hash(self.as_one(first))}
        waiting, opened, done = [first], 0, 0
        while waiting:
            for state in self.after(waiting.pop()):
                form = hash(self.as_one(state))
                if form in known:
                    continue
                if (wrong := self.wrong(state)) is not None:
                    return Found(len(known), wrong, False, opened, done)
                known.add(form)
                waiting.append(state)
                opened += any(self.known_sums(seen) for seen in state.seen)
                done += all(standing.round == self.case.rounds for standing in state.learners)
                if len(known) >= most:
                    return Found(len(known), None, False, opened, done)
        return Found(len(known), None, True, opened, done)


@dataclass(frozen=True)
class Found:
    """How far a search went."""

    states: int
    wrong: str | None
    complete: bool
    opened: int
    """States in which the server has a sum: without any, a search would prove nothing."""
    done: int
    """States in which all rounds are done."""


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _moved(members: Iterable[int], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(order[k] if k < len(order) else k for k in members))


class LowThreshold(Rules):
    """One share fewer opens a sum."""

    @property
    def threshold(self) -> int:
        return super().threshold - 1


def _signs_any(now: Standing, rules: Rules, *asked: object) -> Standing:
    return decisions.sign(replace(now, signed=None), rules, *asked)


def _shares_after_void(now: Standing, rules: Rules, *asked: object) -> Standing:
    return replace(decisions.share(replace(now, voided=0), rules, *asked), voided=now.voided)


def _shares_twice(now: Standing, rules: Rules, *asked: object) -> Standing:
    return decisions.share(replace(now, opened=None), rules, *asked)


def _tells_alone(now: Standing, rules: Rules, *asked: object) -> Standing:
    return decisions.tell(now, rules, *asked[:-1], rules.threshold)


def _masks_without_proof(now: Standing, rules: Rules, r: int, a: int, _: int) -> Standing:
    return decisions.mask(now, rules, r, a, a - 1)


def _signs_small(now: Standing, rules: Rules, *asked: object) -> Standing:
    return decisions.sign(now, Rules(rules.learners, 1, 0), *asked)


def _forgets_core(now: Standing, rules: Rules, r: int, a: int, core: Set, members: Set) -> tuple[Standing, bool]:
    after, mine = decisions.moved_on(now, rules, r, a, core, members)
    return replace(after, core=frozenset(range(rules.learners))), mine


SABOTAGES: dict[str, Case] = {
    "a threshold that is too low": Case(LowThreshold(3, 1, 0), 0, 1, 1),
    "shares after a void": Case(Rules(3, 2, 1), 1, 1, 2, Conduct(share=_shares_after_void), eager=True),
    "shares for two sets": Case(
        Rules(3, 2, 0), 0, 1, 2, Conduct(share=_shares_twice, mask=_masks_without_proof), eager=True
    ),
    "seals for two sets, bound to neither": Case(Rules(3, 2, 0), 0, 1, 1, Conduct(sign=_signs_any), bound=False),
    "pads before enough agree": Case(Rules(3, 2, 0), 0, 1, 2, Conduct(tell=_tells_alone), eager=True, two_steps=True),
    "attempts without proof of void": Case(Rules(3, 2, 1), 1, 1, 2, Conduct(mask=_masks_without_proof), eager=True),
    "nothing is durable": Case(Rules(3, 2, 1), 1, 1, 2, Conduct(remembers=False)),
    "the core is forgotten": Case(Rules(3, 2, 0), 0, 2, 1, Conduct(moved_on=_forgets_core)),
}
CASES: dict[str, Case] = {
    "3 learners, 2 rounds, 2 attempts, 2 honest": Case(Rules(3, 2, 0), 0, 2, 2, eager=True),
    "3 learners, 2 rounds, 2 attempts, 1 of them colluding": Case(Rules(3, 2, 1), 1, 2, 2, eager=True),
    "3 learners, 2 rounds, 2 attempts, 1 of them colluding, two steps": Case(
        Rules(3, 2, 1), 1, 2, 2, eager=True, two_steps=True
    ),
    "3 learners, 2 rounds, 2 attempts, floor of 1": Case(Rules(3, 1, 0), 0, 2, 2, eager=True),
}
if __name__ == "__main__":
    for name, case in {**SABOTAGES, **CASES}.items():
        began = time.monotonic()
        print(f"{name}: {Search(case).run()} in {time.monotonic() - began:.1f} s", flush=True)
