"""The graph on which learners share masks: its tails and its claim, against enumeration, other formulas and draws."""

from __future__ import annotations

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from veilstream.federation.masking.links import Links, drawn, hashed, told_root
from veilstream.federation.masking.statements import KeyList, KeyOffer
from veilstream.mask_graph import (
    AWAY,
    FAILURE,
    LISTS,
    MISSED,
    SMALL,
    MaskGraph,
    _lacking,
    _most_inside,
    graph_failure,
    mask_graph,
)

SIZES = [(61, 0), (61, 3), (100, 10), (200, 20), (500, 25), (500, 50), (1000, 10), (1000, 100), (1000, 200)]


def adjacency(graph: MaskGraph) -> np.ndarray:
    n = graph.learners
    a = np.zeros((n, n))
    for place, offset in itertools.product(range(n), graph.offsets):
        a[place, (place + offset) % n] += 1
        a[(place + offset) % n, place] += 1
    return a


def placed(graph: MaskGraph, draw: int) -> Links:
    return Links(graph.learners, graph, hashlib.sha256(draw.to_bytes(8)).digest())


def parts(links: Links, members: set[int]) -> list[set[int]]:
    """Components of the graph on these learners."""
    left, found = set(members), []
    while left:
        part, edge = set(), {left.pop()}
        while edge:
            one = edge.pop()
            part.add(one)
            edge |= links.near(one) & left
            left -= edge
        found.append(part)
    return found


def test_up_to_sixty_learners_all_pairs_share_masks_and_nothing_is_charged() -> None:
    for n in range(1, SMALL + 1):
        assert mask_graph(n, n // 4) is None
        assert graph_failure(n, n // 4) == 0.0
    assert mask_graph(200, 190) is None


@pytest.mark.parametrize(("n", "c"), SIZES)
def test_the_graph_has_the_degree_and_eigenvalue_that_it_says(n: int, c: int) -> None:
    """By a dense solver."""
    graph = mask_graph(n, c)
    assert graph is not None
    a = adjacency(graph)
    assert np.array_equal(a, a.T)
    assert a.max() == 1.0
    assert np.trace(a) == 0.0
    assert (a.sum(axis=0) == graph.degree).all()
    values = np.sort(np.abs(np.linalg.eigvalsh(a)))
    assert values[-1] == pytest.approx(graph.degree)
    assert values[-2] <= graph.eigenvalue <= values[-2] + 0.01


@pytest.mark.parametrize(("n", "c"), SIZES)
def test_the_failure_is_the_hypergeometric_tail_over_all_learners_and_lists(n: int, c: int) -> None:
    """By scipy's distribution, and the least such number of colluders."""
    graph = mask_graph(n, c)
    assert graph is not None
    m, k = graph.most_colluding, graph.degree
    others = stats.hypergeom(n - 1, c, k)
    assert graph.failure == pytest.approx((n - c) * LISTS * others.sf(m), rel=1e-6, abs=1e-300)
    assert graph.failure <= FAILURE
    assert m == 0 or (n - c) * LISTS * others.sf(m - 1) > FAILURE
    assert graph.failure <= graph_failure(n, c)


@pytest.mark.parametrize(("n", "c"), SIZES)
def test_neighbours_enough_are_here_when_the_stated_share_is_away(n: int, c: int) -> None:
    graph = mask_graph(n, c)
    assert graph is not None
    here = graph.least_set
    assert here == n - math.floor(AWAY * n)
    assert here * stats.hypergeom(n - 1, here - 1, graph.degree).cdf(graph.least_neighbours - 1) <= MISSED * (1 + 1e-6)


def test_who_is_near_is_drawn_as_the_formula_says_by_all_selections() -> None:
    """Eight learners on a small circulant, all 8! orders: the law of colluding neighbours is the hypergeometric one."""
    graph = MaskGraph(8, (1, 3), 4.0, 1, 6, 2, 0.0)
    counts = dict.fromkeys(range(5), 0)
    links = Links(8, graph, bytes(32))
    for order in itertools.permutations(range(8)):
        links.__dict__.pop("_places", None)
        links._order = list(order)
        counts[len(links.near(0) & {1, 2, 3})] += 1
    total = math.factorial(8)
    for x, seen in counts.items():
        assert Fraction(seen, total) == Fraction(math.comb(3, x) * math.comb(4, 4 - x), math.comb(7, 4))


def test_the_share_of_sets_without_neighbours_enough_is_below_its_bound_by_all_sets() -> None:
    graph = MaskGraph(9, (1, 2), 4.0, 1, 6, 3, 0.0)
    links = placed(graph, 1)
    sets = [frozenset(each) for each in itertools.combinations(range(9), 6)]
    lonely = sum(bool(links.lacking(each)) for each in sets)
    single = sum(len(links.near(0) & each) < 3 for each in sets if 0 in each) / sum(0 in each for each in sets)
    assert _lacking(9, 6, 4, 3) == pytest.approx(6 * single)
    assert 0 < lonely / len(sets) <= _lacking(9, 6, 4, 3)


def test_draws_of_real_graphs_follow_the_tail() -> None:
    """2,000 draws of 200 learners, 20 of them colluding: chi-square of colluders near one learner; false alarm 1e-6."""
    graph = mask_graph(200, 20)
    assert graph is not None
    seen = [len(placed(graph, draw).near(7) & frozenset(range(100, 120))) for draw in range(2000)]
    law = stats.hypergeom(199, 20, graph.degree)
    edges = [-1, 2, 3, 4, 5, 6, 7, 20]
    expected = np.diff([law.cdf(edge) for edge in edges]) * 2000
    counted = np.diff([sum(x <= edge for x in seen) for edge in edges])
    assert stats.chisquare(counted, expected * counted.sum() / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize(("c", "most"), [(0, 0), (2, 1), (2, 2), (3, 2)])
def test_every_allowed_set_of_a_small_graph_is_connected_without_colluders_by_enumeration(c: int, most: int) -> None:
    """13 learners, all sets and all colluders of a kind that the claim allows."""
    n, offsets = 13, (1, 3, 4)
    a = adjacency(MaskGraph(n, offsets, 0.0, 0, 0, 0, 0.0))
    value = float(np.sort(np.abs(np.linalg.eigvalsh(a)))[-2])
    least_set = 11
    least = most + 1 + math.floor(_most_inside(n, least_set - c, 6, value))
    links = placed(MaskGraph(n, offsets, value, most, least_set, least, 0.0), 3)
    checked = 0
    for size in range(least_set, n + 1):
        for members in map(frozenset, itertools.combinations(range(n), size)):
            if not links.joined(members):
                continue
            for colluding in map(frozenset, itertools.combinations(range(n), c)):
                honest = members - colluding
                if any(len(links.near(k) & colluding) > most for k in honest):
                    continue
                checked += 1
                assert len(parts(links, set(honest))) == 1
    assert checked > 0


@pytest.mark.parametrize(("n", "c"), [(100, 10), (500, 50), (1000, 100)])
def test_a_server_that_leaves_out_whom_it_likes_cannot_cut_honest_learners_off(n: int, c: int) -> None:
    """It knows the graph and who colludes, and leaves neighbours of a few learners out: refused, or still connected."""
    graph = mask_graph(n, c)
    assert graph is not None
    refused = allowed = 0
    for draw in range(6):
        links = placed(graph, draw)
        rng = np.random.default_rng(draw)
        colluding = set(rng.choice(n, c, replace=False).tolist())
        honest = sorted(set(range(n)) - colluding)
        assert max(len(links.near(k) & colluding) for k in honest) <= graph.most_colluding
        for target in honest[:4]:
            cut = [*rng.permutation(sorted(links.near(target) - colluding)), *honest]
            for out in (0, n // 20, n // 10, n - graph.least_set, n - graph.least_set + 5):
                members = frozenset(set(range(n)) - {k for k in cut[:out] if k != target})
                if len(members) < links.least or not links.joined(members):
                    refused += 1
                    continue
                allowed += 1
                assert len(parts(links, set(members - colluding))) == 1
    assert refused
    assert allowed


def test_without_the_rule_on_neighbours_one_learner_is_cut_off() -> None:
    """Which is why a set needs it: a third of the learners left out is enough to bare one."""
    graph = mask_graph(200, 20)
    assert graph is not None
    links = placed(graph, 0)
    assert graph.degree <= 200 - 2 * 200 // 3
    bare = frozenset(range(200)) - links.near(5)
    assert {5} in parts(links, set(bare))
    assert not links.joined(bare)


def offers(many: int) -> tuple[list[bytes], KeyList]:
    privates = [hashlib.sha256(k.to_bytes(4)).digest() for k in range(many)]
    each = [
        KeyOffer(f"l{k:03d}", 0, private, hashed(told_root(private), LISTS), bytes(64))
        for k, private in enumerate(privates)
    ]
    return privates, KeyList("run", tuple(each), 3)


def test_a_draw_takes_every_learners_part_and_each_changes_it() -> None:
    privates, keys = offers(5)
    told = [hashed(told_root(private), LISTS - 3) for private in privates]
    seed = drawn(keys, told)
    assert len(seed) == 32
    assert drawn(KeyList("run", keys.offers, 3), told) == seed
    with pytest.raises(Exception, match="did not commit"):
        drawn(keys, [*told[:4], told[3]])
    with pytest.raises(Exception, match="did not commit"):
        drawn(KeyList("run", keys.offers, 4), told)
    with pytest.raises(Exception, match="without every"):
        drawn(keys, told[:4])
    other = KeyList("run", keys.offers[:4], 3)
    assert drawn(other, told[:4]) != seed
