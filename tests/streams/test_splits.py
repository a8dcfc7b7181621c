"""Splits: every client to exactly one learner, in the proportions that each split promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilstream.errors import InputError
from veilstream.streams.splits import DirichletSplit, EvenSplit, PaperSplit, WriterSplit


def generator(seed=0):
    return np.random.default_rng(seed)


@st.composite
def pools(draw):
    """(labels, learners, seed), with every class from 0 to learners - 1 among the labels."""
    learners = draw(st.integers(1, 8))
    more = draw(st.lists(st.integers(0, learners - 1), max_size=120))
    labels = np.array([*range(learners), *more])
    seed = draw(st.integers(0, 2**31))
    return generator(seed).permutation(labels), learners, seed


SPLITS = {
    "even": lambda labels: EvenSplit(),
    "paper": lambda labels: PaperSplit(),
    "dirichlet": lambda labels: DirichletSplit(0.3),
    "unequal dirichlet": lambda labels: DirichletSplit(1e-3),
    "writers": lambda labels: WriterSplit(np.arange(len(labels)) // 2 % 29 + (labels.size < 20)),
    "writers in order": lambda labels: WriterSplit(np.arange(len(labels)), in_order=True),
}


@pytest.mark.parametrize("name", SPLITS)
@given(pool=pools())
def test_every_client_goes_to_exactly_one_learner_and_seeds_repeat(name, pool):
    labels, learners, seed = pool
    split = SPLITS[name](labels)
    if name == "writers":
        learners = min(learners, len(np.unique(split.writers)))
    shares = split(labels, learners, generator(seed))
    assert len(shares) == learners
    assert all(share.dtype == np.int32 for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    for one, two in zip(shares, split(labels, learners, generator(seed)), strict=True):
        np.testing.assert_array_equal(one, two)


@given(pool=pools())
def test_even_shares_differ_by_at_most_one(pool):
    labels, learners, seed = pool
    sizes = [len(share) for share in EvenSplit()(labels, learners, generator(seed))]
    assert max(sizes) - min(sizes) <= 1


@given(pool=pools())
def test_papers_shares_are_half_even_and_half_by_class(pool):
    """Foreign labels come from the even half only, which has len // 2 clients in equal parts."""
    labels, learners, seed = pool
    half = len(labels) // 2
    for learner, share in enumerate(PaperSplit()(labels, learners, generator(seed))):
        own = (labels[share] == learner).sum()
        assert len(share) - own <= -(-half // learners)
        assert len(share) >= half // learners


def test_papers_shares_of_a_pool_like_mnist():
    """3,000 evenly each, and about half of the 6,000 of one digit (fixed seed; 5 std wide)."""
    labels = generator(1).permutation(np.repeat(np.arange(10), 6000))
    shares = PaperSplit()(labels, 10, generator(2))
    for digit, share in enumerate(shares):
        assert abs(len(share) - 6000) < 5 * np.sqrt(6000 * 0.25)
        others = np.delete(np.bincount(labels[share], minlength=10), digit)
        assert abs(others.sum() - 2700) < 5 * np.sqrt(3000 * 0.09)


def test_papers_shares_do_not_drift():
    """A learner's own digit is as frequent early as late (fixed seed; 5 std wide)."""
    labels = generator(1).permutation(np.repeat(np.arange(10), 600))
    for digit, share in enumerate(PaperSplit()(labels, 10, generator(2))):
        own = labels[share] == digit
        early, late = own[: len(own) // 2].mean(), own[len(own) // 2 :].mean()
        assert abs(early - late) < 5 * np.sqrt(4 * 0.25 / len(own))


@pytest.mark.parametrize("learners", [9, 11, 20])
def test_papers_split_needs_one_learner_for_each_class(learners):
    with pytest.raises(InputError, match="10 classes from 0 to 9"):
        PaperSplit()(np.arange(100) % 10, learners, generator())


def test_the_order_within_a_share_is_mixed():
    """In pool order, indices would rise; mixed, half of the neighbours do (fixed seed; 6 std)."""
    labels = np.arange(8000) % 4
    for split in (EvenSplit(), PaperSplit(), DirichletSplit(5.0), WriterSplit(labels + 10)):
        for share in split(labels, 4, generator(3)):
            rises = (np.diff(share) > 0).mean()
            assert abs(rises - 0.5) < 6 * np.sqrt(1 / 12 / len(share)), split


def test_dirichlet_shares_are_more_unequal_for_small_alpha():
    """Each class's variance of shares is (1/n)(1 - 1/n)/(n·alpha + 1); mean over 200 classes."""
    n, each = 5, 400
    labels = np.repeat(np.arange(200), each)
    for alpha in (0.1, 1.0, 20.0):
        shares = DirichletSplit(alpha)(labels, n, generator(4))
        parts = np.array([np.bincount(labels[s], minlength=200) for s in shares]) / each
        expected = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
        # over 1,000 squared deviations at a fixed seed, a factor of 1.3 is beyond 3 std
        assert expected / 1.3 < parts.var(axis=0).mean() < expected * 1.3


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_dirichlet_refuses_a_bad_alpha(alpha):
    with pytest.raises(InputError, match="alpha"):
        DirichletSplit(alpha)


@given(
    counts=st.lists(st.integers(1, 40), min_size=6, max_size=60),
    learners=st.integers(1, 6),
    in_order=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_writer_stays_with_one_learner_and_shares_are_balanced(counts, learners, in_order, seed):
    writers = generator(seed).permutation(np.repeat(100 + np.arange(len(counts)), counts))
    shares = WriterSplit(writers, in_order)(np.zeros(len(writers)), learners, generator(seed))
    met = [set(writers[share].tolist()) for share in shares]
    assert sum(len(m) for m in met) == len(counts) == len(set().union(*met))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= max(counts)
    if in_order:
        for share, mine in zip(shares, met, strict=True):
            assert (np.diff(writers[share].astype(int)) != 0).sum() == len(mine) - 1
            for writer in mine:
                assert (np.diff(share[writers[share] == writer]) > 0).all()


def test_writers_must_fit_the_pool():
    with pytest.raises(InputError, match="one writer for each of 5 labels"):
        WriterSplit(np.arange(4))(np.zeros(5), 2, generator())
    with pytest.raises(InputError, match="each of 2 writers"):
        WriterSplit(np.array([7, 7, 8]))(np.zeros(3), 3, generator())


@pytest.mark.parametrize("split", [EvenSplit(), PaperSplit(), DirichletSplit()])
def test_empty_pools_and_no_learners_are_refused(split):
    with pytest.raises(InputError, match="labels"):
        split(np.zeros(0), 2, generator())
    with pytest.raises(InputError, match="labels"):
        split(np.zeros((2, 2)), 2, generator())
    with pytest.raises(InputError, match="learners"):
        split(np.zeros(3), 0, generator())
