"""The server's fold, by itself: messages in, models out, against sums written by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.federation import DIM, plan_of
from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.protocol.fold import OtherEpoch, ServerFold
from veilstream.privacy.gradient_types import Noised

NAMES = ("a", "b", "c")
TERMS = Terms.of(plan_of(), DIM)


def terms_of(**method) -> Terms:
    return dataclasses.replace(TERMS, method=dataclasses.replace(TERMS.method, **method))


def fold_of(terms: Terms = TERMS) -> ServerFold:
    return ServerFold(terms, np.zeros(DIM, np.float32), NAMES)


def message(prefix, round_: int = 0, epoch: int = 0, grid: float = TERMS.grid.step) -> bytes:
    prefix = np.broadcast_to(np.asarray(prefix, np.int64), DIM)
    return encode(epoch, round_, 2 * (round_ + 1), grid, Noised(prefix))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.none() | st.integers(-(2**19), 2**19)] * len(NAMES)), min_size=1, max_size=6))
def test_whoever_answers_and_whenever_the_model_is_what_the_last_prefixes_say(rounds):
    """Weights stay 1/n, and a message makes good all that were lost before it."""
    fold = fold_of()
    last = dict.fromkeys(NAMES, 0)
    for sent in rounds:
        for name, prefix in zip(NAMES, sent, strict=True):
            if prefix is not None:
                assert fold.accept(name, message(prefix, fold.seats[name].round))
                last[name] = prefix
        closed = fold.close_round()
        assert set(closed.accepted) == {n for n, p in zip(NAMES, sent, strict=True) if p is not None}
        assert set(closed.missing) == set(NAMES) - set(closed.accepted)
    size = TERMS.method.step_size * TERMS.method.server_step_size
    expected = -size * sum(last.values()) * TERMS.grid.step / len(NAMES)
    tolerance = 1e-12 * size * TERMS.grid.step * 2**19
    np.testing.assert_allclose(fold.x, np.full(DIM, expected), rtol=1e-9, atol=tolerance)


def test_the_first_two_models_by_hand_with_decay_averaging_and_a_ball():
    terms = terms_of(step_size=0.5, server_step_size=2.0, step_decay=1.0, averaging=1.0)
    learning = dataclasses.replace(terms.plan.learning, projection_radius=1.0)
    terms = dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, learning=learning))
    fold = fold_of(terms)
    unit = round(1.0 / terms.grid.step)  # one, in units of the grid
    first = np.zeros(DIM, np.int64)
    first[0] = 3 * unit
    fold.accept("a", message(first))
    fold.close_round()
    # Size 1·(1+0)^-1 = 1, mean 3/3 = 1: x = -1 in the first coordinate, on the ball.
    np.testing.assert_allclose(fold.x[0], -1.0)
    np.testing.assert_allclose(fold.average[0], -1.0)  # blend (1+1)/(1+0+1) = 1
    fold.accept("a", message(first * 3, 1))
    fold.close_round()
    # Size 1/2, mean 6/3 = 2: x = -2, back onto the ball; blend (1+1)/(1+1+1) = 2/3.
    np.testing.assert_allclose(fold.x[0], -1.0)
    fold.accept("a", message(np.zeros(DIM), 2))
    fold.close_round()
    # Size 1/3, mean -9/3 = -3: x = -1 + 1 = 0; blend 2/4: the average is half of -1.
    np.testing.assert_allclose(fold.x[0], 0.0, atol=1e-12)
    np.testing.assert_allclose(fold.average[0], -0.5)
    assert fold.published.dtype == np.float32
    assert (fold.x[1:] == 0).all()


def test_forgetting_by_hand():
    terms = terms_of(step_size=0.5, server_step_size=2.0, forgetting=0.9)
    start = np.full(DIM, 2.0, np.float32)
    fold = ServerFold(terms, start, NAMES)
    unit = round(1.0 / terms.grid.step)
    for r, (prefix, x) in enumerate(
        [
            (3, 1.0),  # x = 2 + 0.9·0 - 1
            (3, 1.1),  # x = 2 + 0.9·(1 - 2) - 0
            (0, 2.19),  # x = 2 + 0.9·(1.1 - 2) + 1
        ]
    ):
        fold.accept("a", message(prefix * unit, r))
        fold.close_round()
        np.testing.assert_allclose(fold.x, x, atol=1e-12)
    fold.roll_back(np.ones(DIM, np.float32))
    fold.close_round()
    np.testing.assert_allclose(fold.x, 1.1, atol=1e-12)  # still towards the run's first model


def test_a_message_counts_once_and_another_for_the_same_round_is_refused():
    fold = fold_of()
    assert fold.accept("a", message(5))
    assert not fold.accept("a", message(5))
    with pytest.raises(ProtocolError, match="two different releases for its round 0"):
        fold.accept("a", message(6))
    with pytest.raises(ProtocolError, match="a second release of 'a' in one round"):
        fold.accept("a", message(7, 1))
    fold.close_round()
    assert fold.seats["a"].round == 1
    assert fold.seats["a"].accepted[0] == 0
    assert fold.accept("a", message(7, 1))
    assert fold.answered == ("a",)
    assert fold.missing == ("b", "c")


@pytest.mark.parametrize("wrong", [message(1, 1), message(1, grid=2 * TERMS.grid.step), message(1)[:-8]])
def test_what_was_not_asked_for_is_refused_and_changes_nothing(wrong):
    fold = fold_of()
    with pytest.raises((ProtocolError, InputError)):
        fold.accept("a", wrong)
    assert fold.answered == ()
    fold.close_round()
    assert (fold.x == 0).all()


def test_a_later_epoch_begins_at_zero_and_an_old_copy_is_refused():
    fold = fold_of()
    fold.accept("a", message(100))
    fold.close_round()
    with pytest.raises(OtherEpoch):
        fold.accept("a", message(9, epoch=1))
    fold.enrol("a", 1, 0)
    assert fold.seats["a"].accepted is None
    before = fold.x.copy()
    fold.accept("a", message(9, epoch=1))
    fold.close_round()
    size = TERMS.method.step_size * TERMS.method.server_step_size * TERMS.grid.step / 3
    np.testing.assert_allclose(fold.x - before, -9 * size, rtol=1e-9)
    for epoch, round_ in ((0, 5), (1, 0)):
        with pytest.raises(ProtocolError, match="its store is an old copy"):
            fold.enrol("a", epoch, round_)
    fold.enrol("a", 1, 1)  # where it stands: nothing changes
    assert fold.seats["a"].round == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_a_server_that_has_forgotten_rounds_says_that_its_folder_is_the_older_one(resumed):
    """Restored from a copy: either of round 1, or of before the learner had enrolled."""
    fold = fold_of()
    if resumed:
        fold.enrol("a", 0, 0)
        fold.accept("a", message(100))
        fold.close_round()
    known = int(resumed)
    fold.enrol("a", 0, known + 1)  # one ahead: its last release may have been lost on the way
    older = rf"^this server's folder \(round {known}\) is older than learner 'a' \(round 48\)"
    with pytest.raises(ProtocolError, match=older) as refused:
        fold.enrol("a", 0, 48)
    assert "restore the newest copy of the run's folder, or start with --reset a" in str(refused.value)
    fold.reset("a")
    fold.enrol("a", 0, 48)
    assert (fold.seats["a"].round, fold.seats["a"].state) == (48, "base")


def test_a_fold_resumed_between_rounds_goes_on_to_the_same_numbers():
    terms = terms_of(averaging=2.0, forgetting=0.9)
    start = np.ones(DIM, np.float32)
    whole, parts = ServerFold(terms, start, NAMES), ServerFold(terms, start, NAMES)
    rng = np.random.default_rng(0)
    for r in range(4):
        prefixes = rng.integers(-(2**18), 2**18, (3, DIM))
        for fold in (whole, parts):
            for name, prefix in zip(NAMES, prefixes, strict=True):
                fold.accept(name, message(prefix, r))
            fold.close_round()
        parts = ServerFold.resumed(parts.terms, parts.state, dict(parts.seats))
    np.testing.assert_array_equal(whole.x, parts.x)
    np.testing.assert_array_equal(whole.published, parts.published)
    assert (whole.x != whole.average).any()
