"""Streams from a pool: no client twice, empty places where a share has run out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilstream.errors import InputError, PrivacyError, UnknownName
from veilstream.streams.mnist import MNIST_SPLITS, Mnist, mnist_stream
from veilstream.streams.pool import PoolStream
from veilstream.streams.splits import DirichletSplit, EvenSplit, PaperSplit


def stream(clients=40, **changes):
    """A pool whose client i has features full of i + 1 and target i % 4."""
    features = np.broadcast_to(np.arange(1, clients + 1)[:, None, None], (clients, 3, 2))
    settings = {
        "learners": 4,
        "rounds": 6,
        "per_round": 2,
        "features": features.astype(np.uint8),
        "targets": np.arange(clients) % 4,
        "held_features": np.arange(30, dtype=np.uint8).reshape(5, 3, 2),
        "held_targets": np.arange(5),
        "split": EvenSplit(),
        "provenance": "made here",
    }
    return PoolStream(**settings | changes)


@given(
    clients=st.integers(1, 80),
    learners=st.integers(1, 5),
    rounds=st.integers(1, 9),
    per_round=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    alpha=st.sampled_from([0.01, 0.5, 50.0]),
)
def test_no_client_is_met_twice_and_shares_end_in_empty_places(clients, learners, rounds, per_round, seed, alpha):
    s = stream(clients, learners=learners, rounds=rounds, per_round=per_round, split=DirichletSplit(alpha))
    met = s.indices(seed, 0, rounds)
    assert met.shape == (rounds, learners, per_round)
    assert met.dtype == np.int32
    real = met[met >= 0]
    assert len(np.unique(real)) == len(real)
    assert met.max(initial=-1) < clients
    counted = s.clients_met(seed)
    for learner in range(learners):
        places = met[:, learner].ravel()
        here = places >= 0
        assert here[: here.sum()].all()
        assert counted.met[learner] == here.sum()
        assert counted.absent[learner] == (~here).sum()
    assert counted.met.sum() + counted.unused.sum() == clients
    assert not ((counted.absent > 0) & (counted.unused > 0)).any()


def test_any_blocking_gives_the_same_clients():
    s = stream()
    whole = s.indices(7, 0, 6)
    again = np.concatenate([s.indices(7, 4, 2), s.indices(7, 0, 1), s.indices(7, 1, 3)])
    np.testing.assert_array_equal(again, whole[[4, 5, 0, 1, 2, 3]])
    np.testing.assert_array_equal(stream().indices(7, 0, 6), whole)
    assert not np.array_equal(s.indices(8, 0, 6), whole)


def test_a_round_is_the_clients_of_its_indices():
    s = stream()
    for r in range(s.rounds):
        chosen = s.indices(3, r, 1)[0]
        sample = s.round(3, r)
        here = chosen >= 0
        assert sample.features.shape == (4, 2, 3, 2)
        assert sample.features.dtype == np.uint8
        assert sample.present.dtype == np.float32
        np.testing.assert_array_equal(sample.present, here)
        expected = np.where(here, chosen + 1, 0)
        np.testing.assert_array_equal(sample.features, np.broadcast_to(expected[..., None, None], (4, 2, 3, 2)))
        np.testing.assert_array_equal(sample.target, np.where(here, chosen % 4, 0))
    assert s.round(3, 5).present.sum() == 0  # shares of 10 clients in 12 places
    assert (s.features > 0).all()  # the pool itself is untouched


def test_rounds_past_the_end_are_refused_even_if_clients_are_left():
    s = stream(400)
    assert (s.clients_met(0).unused == 88).all()
    for first, count in ((6, 1), (-1, 1), (0, 7)):
        with pytest.raises(InputError, match="rounds from 0 to 6"):
            s.indices(0, first, count)


def test_held_out_clients_are_the_same_for_all_seeds_and_more_extend_fewer():
    s = stream()
    few, all_ = stream().held_out(0, 3, 0), s.held_out(99, 1000, 5)
    np.testing.assert_array_equal(few.features, all_.features[:3])
    np.testing.assert_array_equal(few.target, all_.target[:3])
    assert sorted(all_.target.tolist()) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(all_.features[:, 0, 0], 6 * all_.target)
    with pytest.raises(InputError, match="count"):
        s.held_out(0, 0, 0)


@dataclass(frozen=True)
class Fixed:
    shares: tuple[tuple[int, ...], ...]

    def __call__(self, labels, learners, rng):
        return [np.array(share, np.int32) for share in self.shares]


@pytest.mark.parametrize(
    ("shares", "error", "why"),
    [
        (((0, 1), (1, 2)), PrivacyError, "met twice"),
        (((0, 0), (1, 2)), PrivacyError, "met twice"),
        (((0, -1), (1, 2)), InputError, "indices from 0 to 39"),
        (((0, 40), (1, 2)), InputError, "indices from 0 to 39"),
        (((0,), (1,), (2,)), InputError, "each of 2 learners"),
    ],
)
def test_a_split_that_breaks_the_promise_is_refused(shares, error, why):
    with pytest.raises(error, match=why):
        stream(learners=2, split=Fixed(shares)).indices(0, 0, 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"learners": 0}, "learners"),
        ({"rounds": 2.5}, "rounds"),
        ({"per_round": True}, "per_round"),
        ({"targets": np.arange(39)}, "features"),
        ({"targets": np.zeros((40, 1))}, "targets"),
        ({"targets": np.full(40, np.nan)}, "targets"),
        ({"features": np.full((40, 3, 2), np.inf)}, "features"),
        ({"features": np.full((40, 3, 2), "a")}, "features"),
        ({"held_targets": np.zeros(0)}, "held_targets"),
        ({"held_features": np.zeros((5, 6))}, "held_features"),
    ],
)
def test_bad_pools_are_refused(changes, field):
    with pytest.raises(InputError, match=rf"^{field} = "):
        stream(**changes)


def small_mnist(train=200, test=50):
    rng = np.random.default_rng(0)
    return Mnist(
        rng.integers(0, 256, (train, 784)).astype(np.uint8),
        (np.arange(train) % 10).astype(np.uint8),
        rng.integers(0, 256, (test, 784)).astype(np.uint8),
        (np.arange(test) % 10).astype(np.uint8),
    )


@pytest.mark.parametrize("split", ["paper", "dirichlet", "even"])
def test_mnist_becomes_a_stream(split):
    s = mnist_stream(small_mnist(), learners=10, rounds=5, per_round=4, split=split, alpha=0.7)
    sample = s.round(0, 0)
    assert sample.features.shape == (10, 4, 784)
    assert sample.features.dtype == np.uint8
    assert sample.target.dtype == np.int32
    assert s.held_out(0, 10_000, 0).features.shape == (50, 784)
    assert "CC BY-SA 3.0" in s.provenance
    assert split in s.provenance
    assert ("0.7" in s.provenance) == (split == "dirichlet")


def test_mnist_by_writers_needs_all_of_mnist():
    full = Mnist(
        np.zeros((60_000, 1), np.uint8), np.zeros(60_000, np.uint8), np.zeros((1, 1), np.uint8), np.zeros(1, np.uint8)
    )
    s = mnist_stream(full, learners=100, rounds=500, per_round=1, split="writers")
    counted = s.clients_met(0)
    shares = counted.met + counted.unused
    assert shares.sum() == 60_000
    assert shares.max() - shares.min() <= 131  # the most that one person wrote
    with pytest.raises(InputError, match="writers"):
        mnist_stream(small_mnist(), learners=2, rounds=1, per_round=1, split="writers").indices(0, 0, 1)


def test_mnist_splits_by_name():
    with pytest.raises(UnknownName, match="did you mean 'writers'"):
        mnist_stream(small_mnist(), learners=10, rounds=5, per_round=4, split="writer")
    with pytest.raises(InputError, match="10 classes"):
        mnist_stream(small_mnist(), learners=5, rounds=5, per_round=4).round(0, 0)
    assert MNIST_SPLITS[0] == "paper"
    assert isinstance(mnist_stream(small_mnist(), learners=10, rounds=5, per_round=4).split, PaperSplit)
