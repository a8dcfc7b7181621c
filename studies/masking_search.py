"""Every state that a server without scruples can lead learners to, in small cases: how many sums does it ever learn?

    python -m studies.masking_search            all cases below, and every sabotage
    python -m studies.masking_search --long     with 4 learners, and 3 rounds, too

The server may ask each honest learner anything in any order, as often as it likes: mask, sign any set, share, void,
move on. It shows different sets to different learners, replays, hides and delays; what it can show as proof is what
honest learners have signed, and whatever colluding ones sign. Learners' decisions are the deployed functions
(`federation.masking.decisions`); signatures are taken to be what they say. A learner that crashes is one that was
asked nothing; one that crashes between writing and sending is one whose answer the server drops. Both are among
the paths.

**What counts once.** States that differ only in what learners are called; a round that all have left counts by what
was opened of it. A state is known again by 16 bytes of its hash: that two of N states share them has probability below
N²/2^129, for a million of them 2e-27.

**What is not gone through** (`Search.settled`, for learners that keep to the rules). What the server has only
ever lets it do more and know more: who agreed, what is proved void, certificates and known sums grow with it. So a path
on which it has more, and learners can still do all that they could, stands for one on which it has less:

* A learner masks its first attempt as it comes to a round. A first message stops no learner from anything: proof of a
  later round, which it takes only before it has masked, leads where the proofs one by one do.
* An attempt is *dead* in a state if fewer than t learners have agreed on a set of it, or still may. No own mask of it
  can ever be taken off, nor has it a certificate. What was masked, sealed and agreed on in it is forgotten; voids are
  kept, since they prove the next attempt.
* Where a dead attempt's void is proved, so that another void of it adds nothing, every learner of the round is taken to
  have signed one, and masks the next attempt: what else it could do in the dead one leads to nothing.
* In the last round nobody moves on: that would only end what a learner can be asked.

What the server then knows follows from the masks alone. Of attempt a, let G be the graph on honest learners with an
edge where their pairwise mask is not known. The sums that it can compute are those over components of G of
which every learner's message has come and every own mask has shares enough out, for the set that its learner has
sealed for. Then the masks that it shares with those outside that set are known, too. What t learners have agreed to
open counts as known, since learners go on as if it were, though somebody may not have sealed. `wrong` asks of every
state:

    1. of a round, over all attempts, at most one component is known, and it has h learners at least;
    2. no step of a learner is in two known sums;
    3. learners that are in every known sum add the same steps to each: their noise only ever shows summed up.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import marshal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    may_reduce: bool = True
    """Whether it keeps to what `Search.settled` counts on: nobody agrees after a void, nor tells before t agree."""


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

    def __init__(self, case: Case, *, reduced: bool | None = None) -> None:
        """``reduced``: go through settled states only; by default where learners keep to what that counts on."""
        self.case = case
        self.reduced = case.eager and case.conduct.may_reduce if reduced is None else reduced
        everybody = range(case.rules.learners)
        self._sets = [
            frozenset(members) for size in everybody for members in itertools.combinations(everybody, size + 1)
        ]
        self._orders = list(itertools.permutations(range(case.loyal)))
        self.decide = cache(self._decide)
        self.known_sums, self.sums = cache(self._known_sums), cache(self._sums)
        self.renamed = cache(self._renamed)
        self.renamed_facts = cache(self._renamed_facts)
        self.about = cache(self._about)

    def start(self) -> State:
        """All have the list of keys."""
        core, loyal = frozenset(range(self.case.rules.learners)), self.case.loyal
        standings = tuple(Standing(me, core) for me in range(loyal))
        now = State(standings, (frozenset([0]),) * loyal, (_NOTHING,) * self.case.rounds)
        for me in range(loyal):
            now = self._begun(now, me)
        return self.settled(now) if self.reduced else now

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
        """Every state that one question to one learner leads to; settled, where the search is reduced."""
        for state in self._after(now):
            yield self.settled(state) if self.reduced else state

    def _after(self, now: State) -> Iterator[State]:
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

    def settled(self, now: State) -> State:
        """The same state without what can have no consequences, and with all that stops nobody from anything."""
        case, learners, seen = self.case, list(now.learners), list(now.seen)
        for me, standing in enumerate(learners):
            if standing.round < case.rounds and not standing.masked:
                self._mask(learners, seen, now.pending, me, 1, 0)
        for round_ in range(case.rounds):
            for attempt in range(1, case.attempts + 1):
                if not self._dead(learners, seen[round_], round_, attempt):
                    continue
                voids = {f for f in seen[round_] if f[2] == attempt and f[0] == "void"}
                seen[round_] = frozenset(f for f in seen[round_] if f[2] != attempt) | voids
                proved = self._proved_void(seen[round_]) >= attempt
                if proved:
                    seen[round_] |= {("void", who, attempt, _NOTHING) for who in range(case.loyal)}
                for me, standing in enumerate(learners):
                    if (standing.round, standing.masked) != (round_, attempt):
                        continue
                    opened, of_this = standing.opened, standing.opened is not None and standing.opened[0] <= attempt
                    if of_this:  # else of a later attempt, in which it is no member
                        opened = None if proved else (attempt, _NOTHING)
                    voided = max(standing.voided, attempt) if proved else standing.voided
                    learners[me] = replace(standing, signed=_NOTHING, opened=opened, voided=voided)
                    if proved and attempt < case.attempts:
                        self._mask(learners, seen, now.pending, me, attempt + 1, attempt)
        return State(tuple(learners), now.pending, tuple(seen))

    def _mask(
        self, learners: list[Standing], seen: list[Facts], pending: tuple[Set, ...], me: int, attempt: int, proved: int
    ) -> None:
        round_ = learners[me].round
        decided = self.decide("mask", learners[me], round_, attempt, proved)
        if decided is not None:
            learners[me] = decided
            seen[round_] |= {("mask", me, attempt, pending[me])}

    def _dead(self, learners: Sequence[Standing], seen: Facts, round_: int, attempt: int) -> bool:
        """Whether no sum of this attempt can ever be known, whatever is asked from here on."""
        case = self.case
        shared = {f[1] for f in seen if f[0] == "share" and f[2] == attempt}
        still = {
            who
            for who, standing in enumerate(learners)
            if standing.round < round_ or (standing.round == round_ and standing.voided < attempt)
        }
        return len(shared | still) + case.colluders < case.rules.threshold

    def _moved_on(self, now: State, me: int, round_: int) -> Iterator[State]:
        case, seen = self.case, now.seen[round_]
        if self.reduced and round_ == case.rounds - 1:
            return
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
            if all(standing.round > round_ for standing in now.learners) and len(self.sums(seen[round_])) == 1:
                (known,) = self.sums(seen[round_])
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

    def _sums(self, seen: Facts) -> tuple[dict[int, Set], ...]:
        """The same, with what t learners have agreed to open as if it were known; who has not masked adds no steps."""
        known, found = self.known_sums(seen), list[dict[int, Set]]()
        for attempt, members in {(f[2], f[3]) for f in seen if f[0] == "share"}:
            if len(self._helpers(seen, "share", attempt, members)) + self.case.colluders >= self.case.rules.threshold:
                came = {f[1]: f[3] for f in seen if f[0] == "mask" and f[2] == attempt}
                agreed = {who: came.get(who, _NOTHING) for who in sorted(members) if who < self.case.loyal}
                if agreed not in (*known, *found):
                    found.append(agreed)
        return (*known, *found)

    def wrong(self, now: State) -> str | None:
        """What the server has learned that it must not; None where the state is as promised."""
        known: list[dict[int, Set]] = []
        for round_, seen in enumerate(now.seen):
            sums = self.sums(seen)
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
        if any(len({each[who] for who in always if each[who]}) > 1 for each in known):
            return "learners that are in every sum add different steps to one"
        return None

    def as_one(self, now: State) -> bytes:
        """The same for all states that differ in names alone.

        Learners are sorted by what is known of each without names; of all names that do so, those with the least form.
        """
        facts = [(f[1], (f[0], f[2], len(f[3]))) for seen in now.seen for f in seen]
        about = [
            (self.about(standing), len(pending), *sorted(what for who, what in facts if who == me))
            for me, (standing, pending) in enumerate(zip(now.learners, now.pending, strict=True))
        ]
        wanted = sorted(about)
        orders = (order for order in self._orders if all(wanted[order[k]] == about[k] for k in range(len(order))))
        least = min(self._form(now, order) for order in orders)
        return hashlib.blake2b(marshal.dumps(least, 2), digest_size=16).digest()

    def _about(self, now: Standing) -> tuple[int, ...]:
        """Of one learner, without names."""
        signed = -1 if now.signed is None else len(now.signed)
        opened = (0, 0) if now.opened is None else (now.opened[0], len(now.opened[1]))
        return (now.round, now.masked, now.voided, len(now.core), signed, *opened)

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

    def run(self, most: int = 100_000_000, tick: Callable[[int, int], None] = lambda known, waiting: None) -> Found:
        """Go on until a state is wrong, or all have been seen; ``tick`` is told how many are known, and wait."""
        first = self.start()
        known: set[bytes] = {self.as_one(first)}
        waiting, opened, done = [first], 0, 0
        while waiting:
            tick(len(known), len(waiting))
            for state in self.after(waiting.pop()):
                form = self.as_one(state)
                if form in known:
                    continue
                if (wrong := self.wrong(state)) is not None:
                    return Found(len(known), wrong, False, opened, done)
                known.add(form)
                waiting.append(state)
                sums = [self.known_sums(seen) for seen in state.seen]
                opened += any(sums)
                done += all(sums)
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
    """States in which it has one of every round."""


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
    "shares after a void": Case(
        Rules(3, 2, 1), 1, 1, 2, Conduct(share=_shares_after_void, may_reduce=False), eager=True
    ),
    "shares for two sets": Case(
        Rules(3, 2, 0), 0, 1, 2, Conduct(share=_shares_twice, mask=_masks_without_proof), eager=True
    ),
    "seals for two sets, bound to neither": Case(Rules(3, 2, 0), 0, 1, 1, Conduct(sign=_signs_any), bound=False),
    "pads before enough agree": Case(
        Rules(3, 2, 0), 0, 1, 2, Conduct(tell=_tells_alone, may_reduce=False), eager=True, two_steps=True
    ),
    "attempts without proof of void": Case(Rules(3, 2, 1), 1, 1, 2, Conduct(mask=_masks_without_proof), eager=True),
    "nothing is durable": Case(Rules(3, 2, 0), 0, 1, 1, Conduct(remembers=False, may_reduce=False), eager=True),
    "the core is forgotten": Case(Rules(3, 2, 0), 0, 2, 1, Conduct(moved_on=_forgets_core), eager=True),
}
CASES: dict[str, Case] = {
    "3 learners, 2 rounds, 2 attempts, 2 honest": Case(Rules(3, 2, 0), 0, 2, 2, eager=True),
    "3 learners, 2 rounds, 2 attempts, 1 of them colluding": Case(Rules(3, 2, 1), 1, 2, 2, eager=True),
    "3 learners, 2 rounds, 2 attempts, 1 of them colluding, two steps": Case(
        Rules(3, 2, 1), 1, 2, 2, eager=True, two_steps=True
    ),
    "3 learners, 2 rounds, 2 attempts, floor of 1": Case(Rules(3, 1, 0), 0, 2, 2, eager=True),
}
LONG: dict[str, Case] = {
    "3 learners, 3 rounds, 2 attempts, 2 honest": Case(Rules(3, 2, 0), 0, 3, 2, eager=True),
    "3 learners, 2 rounds, 3 attempts, 2 honest": Case(Rules(3, 2, 0), 0, 2, 3, eager=True),
    "4 learners, 2 rounds, 2 attempts, 1 of them colluding": Case(Rules(4, 2, 1), 1, 2, 2, eager=True),
    "4 learners, 2 rounds, 2 attempts, 2 honest": Case(Rules(4, 2, 0), 0, 2, 2, eager=True),
}


def _progress() -> Callable[[int, int], None]:
    """A line every five seconds."""
    began = last = time.monotonic()

    def tick(known: int, waiting: int) -> None:
        nonlocal last
        if time.monotonic() > last + 5.0:
            last = time.monotonic()
            print(f"  {known:,} states, {waiting:,} wait, {last - began:.0f} s", file=sys.stderr, flush=True)

    return tick


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="larger cases too")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    given = parser.parse_args()
    cases, wrong = {**CASES, **(LONG if given.long else {})}, 0
    for name, case in {**SABOTAGES, **cases}.items():
        if given.only not in name:
            continue
        began = time.monotonic()
        found = Search(case).run(tick=_progress())
        wrong += (found.wrong is None) == (name in SABOTAGES) or not (found.complete or name in SABOTAGES)
        print(f"{name}: {found} in {time.monotonic() - began:.1f} s", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
