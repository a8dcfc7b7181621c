"""Which learners share masks: all pairs, or above `SMALL` learners a sparse graph, and with what probability it fails.

The graph is a circulant one, place p joined to p ± each offset, and learners are given its places by a permutation that
is drawn after they are listed. Its second eigenvalue is known, so what follows for *every* set of learners is certain,
whoever chooses the set. Only how many colluders are near a learner is left to the draw.

n learners, c of them colluding, k neighbours each, λ the largest modulus of an eigenvalue but the first. Rules of a set
U: at least `least_set` learners, each with at least `least_neighbours` neighbours in U.

**Colluders.** The neighbours of a learner are a uniform selection of k of the n - 1 others, so how many of them collude
is hypergeometric. More than m = `most_colluding` at any honest learner has probability at most
(n - c)·P[Hyp(n - 1, c, k) > m] (union bound; the tail is computed in whole numbers).

**Who draws.** A list is fixed before the last honest learner in it tells its part of the draw (`masking.links`), and no
learner takes part in more than `LISTS` lists of a run. Whoever drops lists that it does not like has so many tries at
most: the probability times `LISTS` is what is at most `FAILURE`. It is a run's; a server that begins further runs has
as many tries in each, and every one takes an epoch of its learners: `SumTrust.graph_failure` counts all their runs.

**Claim:** if no honest learner has more than m colluding neighbours, the honest learners of every such U are connected.
*Proof:* let N >= least_set - c be their number, and A a component of s <= N/2 of them, B the rest of N - s.
(1) No edge joins A and B, so by the expander mixing lemma k²·P <= λ²·(n(n - N) + P) with P = s(N - s): false for larger
s <= N/2 and for larger N where it is false once. Hence s <= s*, the largest s <= N/2 that meets it with
N = least_set - c. (2) A learner in A has at least `least_neighbours` - m honest neighbours in U, and all of them are in
A. But s learners have on average at most min(s - 1, λ + (k - λ)·s/n) neighbours among themselves (the quadratic form of
the graph at their indicator), and `least_neighbours` is more than m plus that at s*. ∎

Who colludes is taken to be settled before the draw. Whoever wins learners over afterwards, chosen by the graph, is held
off by nothing but each learner's own noise.

**Who may be away.** With a share `AWAY` of the learners away at random, some learner lacks neighbours with probability
at most `MISSED` a round (hypergeometric again). That costs the round, and never the promise.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

SMALL = 60
"""Up to so many learners all pairs share a mask."""
LISTS = 64
"""Lists of learners that one of them takes part in, at most; each may lead to another draw of the graph."""
FAILURE = 2.0**-40
"""Probability that any graph of a run is not what the promise needs, at most."""
AWAY = 0.15
MISSED = 1e-6
_TRIES = 64  # selections of offsets; that with the least eigenvalue is taken
_WIDEST = 512  # offsets that are looked at: beyond, all pairs would be as cheap


@dataclass(frozen=True)
class MaskGraph:
    """Of one list of learners, before they have their places in it."""

    learners: int
    offsets: tuple[int, ...]
    """Each joins a place to two others."""
    eigenvalue: float
    """λ"""
    most_colluding: int
    """m: so many neighbours of an honest learner collude at most."""
    least_set: int
    least_neighbours: int
    failure: float
    """Probability of more than m, in any of `LISTS` draws; 0 where m is all that may collude."""

    @property
    def degree(self) -> int:
        """k: neighbours of each learner."""
        return 2 * len(self.offsets)

    @property
    def shares_needed(self) -> int:
        """Shares that give a learner's own mask: more than its colluding neighbours have."""
        return self.most_colluding + 1


@lru_cache(maxsize=64)
def mask_graph(learners: int, colluding: int) -> MaskGraph | None:
    """The graph with the fewest neighbours; None where all pairs share a mask."""
    n, c = learners, colluding
    least_set = n - math.floor(AWAY * n)
    if n <= SMALL or least_set - c < 2:
        return None
    for half, (value, offsets) in enumerate(_circulants(n), start=1):
        k = 2 * half
        most, failure = _most_colluding(n, c, k)
        least = most + 1 + math.floor(_most_inside(n, least_set - c, k, value))
        if least <= k and _lacking(n, least_set, k, least) <= MISSED:
            return MaskGraph(n, offsets, value, most, least_set, least, failure)
    return None


def graph_failure(learners: int, colluding: int) -> float:
    """What a run of so many learners must charge for its graph, whichever of them take part."""
    return FAILURE if learners > SMALL and colluding else 0.0


@lru_cache(maxsize=16)
def _circulants(n: int) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """By half the number of neighbours: the least eigenvalue found, from above, and its offsets."""
    widest = min((n - 1) // 4, _WIDEST)  # at most half of all pairs
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * widest
    waves = np.arange(1, n // 2 + 1, dtype=np.int64)
    for attempt in range(_TRIES):

        def rank(offset: int, attempt: int = attempt) -> bytes:
            return hashlib.sha256(f"veilstream graph {n} {attempt} {offset}".encode()).digest()

        order = sorted(range(1, (n + 1) // 2), key=rank)[:widest]
        sums = np.zeros(len(waves))
        for half, offset in enumerate(order):
            sums += 2.0 * np.cos(2.0 * math.pi / n * (waves * offset % n))
            value = math.ceil(1e3 * (float(np.abs(sums).max()) + 1e-6)) / 1e3
            if value < best[half][0]:
                best[half] = value, tuple(order[: half + 1])
    return tuple(best)


def _most_colluding(n: int, c: int, k: int) -> tuple[int, float]:
    """m, and the probability of more: the least m with at most `FAILURE` over all learners and lists."""
    whole, above = math.comb(n - 1, k), 0
    m = min(c, k)
    while m > 0:
        more = above + math.comb(c, m) * math.comb(n - 1 - c, k - m)
        if (n - c) * LISTS * more * 2**40 > whole:
            break
        m, above = m - 1, more
    return m, (n - c) * LISTS * (above / whole)


def _most_inside(n: int, connected: int, k: int, value: float) -> float:
    """Neighbours among themselves, on average, of the largest part that could be cut off from so many at least."""

    def may_part(s: int) -> bool:
        return k**2 * s * (connected - s) <= value**2 * (n * (n - connected) + s * (connected - s))

    cut = max((s for s in range(1, connected // 2 + 1) if may_part(s)), default=0)
    if cut == connected // 2:
        cut = n // 2  # larger sets may be parted in larger halves
    return max(0.0, min(cut - 1.0, value + (k - value) * cut / n))


def _lacking(n: int, members: int, k: int, least: int) -> float:
    """Probability, by a union bound, that one of ``members`` at random has fewer than ``least`` neighbours in it."""
    below = sum(math.comb(members - 1, x) * math.comb(n - members, k - x) for x in range(least))
    return members * (below / math.comb(n - 1, k))
