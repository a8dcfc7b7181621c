"""Synthetic clients: reproducible from any round, bounded, heterogeneous, drifting when asked."""

from __future__ import annotations

import numpy as np
import pytest

from veilstream.errors import InputError, UnknownName
from veilstream.streams.synthetic import RippleStream, SyntheticStream


def stream(**changes):
    return SyntheticStream(**{"learners": 4, "rounds": 40, "per_round": 5, "dim": 8} | changes)


def test_any_round_can_be_read_at_any_time():
    one, two = stream(), stream()
    later = one.round(3, 17)
    for r in range(5):
        two.round(3, r)
    np.testing.assert_array_equal(later.features, two.round(3, 17).features)
    assert later.features.shape == (4, 5, 8)
    assert later.target.shape == (4, 5)


def test_seeds_rounds_and_held_out_clients_differ():
    s = stream()
    a, b, c = s.round(0, 0), s.round(1, 0), s.round(0, 1)
    assert not np.isclose(a.features, b.features).any()
    assert not np.isclose(a.features, c.features).any()
    held_out = s.held_out(0, 33, 0)
    assert held_out.features.shape == (33, 8)
    seen = a.features.reshape(-1, 8)
    assert not np.isclose(held_out.features[:, None], seen).all(axis=-1).any()


def test_held_out_clients_follow_the_drift():
    s = stream(drift="abrupt")
    before, after = s.held_out(0, 400, 19), s.held_out(0, 400, 20)
    np.testing.assert_array_equal(before.features, after.features)
    assert (before.target != after.target).mean() > 0.05


@pytest.mark.parametrize("norm", [1.0, 0.3])
def test_features_have_the_promised_norm(norm):
    features = stream(feature_norm=norm).round(0, 0).features.astype(float)
    np.testing.assert_allclose(np.linalg.norm(features, axis=-1), norm, rtol=1e-6)


def test_labels_are_signs_and_features_follow_the_recipe():
    """Raw features around the learner's centre with variances j^-1.2, then scaled to norm one."""
    s = stream(learners=1, per_round=200_000, dim=5, rounds=1)
    _, _, centres, scales = s._world(0)
    np.testing.assert_allclose(scales**2, np.arange(1, 6) ** -1.2)
    drawn = s.round(0, 0)
    assert set(np.unique(drawn.target)) <= {-1.0, 1.0}
    rng = np.random.default_rng([0, 2, 0])
    raw = centres[0] + scales * rng.standard_normal((1, 200_000, 5))[0]
    direction = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(drawn.features[0], direction, atol=1e-6)


def test_learners_that_share_a_model_agree_on_every_record_and_others_do_not():
    """shared = 1: the sign of one linear score, whoever's the record; shared = 0: the recipe, to the bit."""
    ours = stream(shared=1.0, dim=3, learners=5, per_round=400)
    w, c, centres, scales = ours._world(2)
    assert np.ptp(w, axis=1).max() == np.ptp(c, axis=1).max() == 0.0
    raw = centres[:, None] + scales * np.random.default_rng([2, 2, 0]).standard_normal((5, 400, 3))
    np.testing.assert_array_equal(ours.round(2, 0).target, np.where(raw @ w[0, 0] + c[0, 0] >= 0, 1.0, -1.0))
    alone = stream(dim=3)._world(2)[0]
    assert np.ptp(alone, axis=1).min() > 0.01


def test_half_a_shared_model_is_half_by_variance():
    """Correlation of two learners' models over 4,000 coordinates: 0.5 ± 0.06 (five standard deviations)."""
    w = stream(shared=0.5, learners=2, dim=4000, alpha=0.0)._world(1)[0][0]
    assert np.corrcoef(w)[0, 1] == pytest.approx(0.5, abs=0.06)
    assert w.std() == pytest.approx(1.0, abs=0.05)


def test_a_wider_spread_draws_clients_from_their_centre_and_labels_apart():
    one, wide = stream(dim=50, per_round=500), stream(dim=50, per_round=500, spread=16.0)
    np.testing.assert_allclose(wide._world(0)[3], 16.0 * one._world(0)[3])

    def commonest(s):
        return float(np.abs(s.round(0, 0).target.mean(axis=1)).mean())

    assert commonest(one) > commonest(wide) + 0.2
    assert "spread 16, shared 0" in wide.provenance
    assert "spread" not in one.provenance


def test_abrupt_drift_changes_labels_half_way_and_only_there():
    steady, abrupt = stream(per_round=400), stream(per_round=400, drift="abrupt")
    np.testing.assert_array_equal(steady.round(0, 19).target, abrupt.round(0, 19).target)
    changed = (steady.round(0, 20).target != abrupt.round(0, 20).target).mean()
    assert changed > 0.05
    np.testing.assert_array_equal(steady.round(0, 20).features, abrupt.round(0, 20).features)


def test_gradual_drift_turns_from_one_model_to_the_other():
    gradual, abrupt = stream(per_round=400, drift="gradual"), stream(per_round=400, drift="abrupt")
    steady = stream(per_round=400)
    np.testing.assert_array_equal(gradual.round(0, 0).target, steady.round(0, 0).target)
    np.testing.assert_array_equal(gradual.round(0, 39).target, abrupt.round(0, 39).target)


def test_seasonal_drift_goes_to_the_other_model_and_back_four_times():
    """40 rounds have seasons of 10: at 25 the second model has taken over, at 30 the first."""
    seasonal, abrupt = (stream(per_round=400, drift=kind) for kind in ("seasonal", "abrupt"))
    steady = stream(per_round=400)
    for there in (25, 35):
        np.testing.assert_array_equal(seasonal.round(0, there).target, abrupt.round(0, there).target)
    for back in (0, 10, 20, 30):
        np.testing.assert_array_equal(seasonal.round(0, back).target, steady.round(0, back).target)
    between = seasonal.round(0, 22).target
    assert (between != steady.round(0, 22).target).any()
    assert (between != abrupt.round(0, 22).target).any()


def test_bad_settings_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'gradual'"):
        stream(drift="gradul")
    with pytest.raises(InputError, match=r"data\.alpha"):
        stream(alpha=-1.0)


def test_ripple_targets_walk_and_are_shared():
    s = RippleStream(learners=3, rounds=10, per_round=2, dim=4, step=0.1)
    drawn = s.round(0, 5).features
    assert (drawn == drawn[0, 0]).all()
    moved = np.linalg.norm(s.centre(0, 6) - s.centre(0, 5))
    assert moved == pytest.approx(0.1)
