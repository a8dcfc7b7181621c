"""Records that are dictionaries: a stable hash, a bounded norm, errors that name the key."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilstream.errors import InputError
from veilstream.learning.models.linear_dicts import DictEncoder, DictLogistic, DictRegression
from veilstream.learning.tasks import Sample

RECORD = {"age": 0.4, "city": "Oslo", "vip": True, "seen": 3, "note": None}

names = st.text(max_size=6) | st.integers(0, 9)
number = st.floats(-1e6, 1e6, width=32) | st.integers(-1000, 1000) | st.booleans()
record = st.dictionaries(names, number | st.text(max_size=4) | st.none(), max_size=12)


def place(token: str, salt: str, dim: int) -> tuple[int, int]:
    """The rule, written again: 64 bits, the lowest for the sign, the others for the column."""
    digest = hashlib.blake2b(token.encode(), digest_size=8, key=salt.encode()).hexdigest()
    bits = int(digest, 16)
    return 1 + (bits // 2) % (dim - 1), 1 - 2 * (bits % 2)


def test_columns_and_signs_follow_from_the_public_hash():
    dim = 1024
    expected = np.zeros(dim)
    expected[0] = 1
    for token, value in (("age", 0.4), ("city=Oslo", 1), ("vip", 1), ("seen", 3)):
        column, sign = place(token, "s", dim)
        expected[column] += sign * value
    found = DictEncoder(dim, feature_norm=None, salt="s").encode_one(RECORD)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("token", "digest"),
    # printf age | b2sum -l 64 (coreutils), and so on
    [("age", "dbe7195fbcf8af7e"), ("city=Oslo", "d5cb230b496ed07f"), ("", "e4a6a0577479b2b4")],
)
def test_columns_are_pinned(token, digest):
    bits = int(digest, 16)
    column, sign = 1 + (bits >> 1) % 4095, -1.0 if bits & 1 else 1.0
    encoded = DictEncoder(4096, feature_norm=None).encode_one({token: 2.0})
    assert encoded[column] == 2.0 * sign
    assert np.flatnonzero(encoded).tolist() == [0, column]


def test_columns_do_not_depend_on_the_process():
    code = (
        "from veilstream.learning.models.linear_dicts import DictEncoder;"
        f"print(DictEncoder(64).encode_one({RECORD!r}).tobytes().hex())"
    )
    here = DictEncoder(64).encode_one(RECORD).tobytes().hex()
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        assert out.stdout.strip() == here


@given(record, st.randoms(use_true_random=False))
def test_order_does_not_matter(x, random):
    items = list(x.items())
    random.shuffle(items)
    encoder = DictEncoder(3, feature_norm=None)  # two columns: all names meet
    first, second = encoder.encode_one(x), encoder.encode_one(dict(items))
    assert first.tobytes() == second.tobytes()


@given(st.lists(record, max_size=4), st.sampled_from([1.0, 0.3, 7.0]))
def test_norm_never_exceeds_the_bound(xs, bound):
    for row in DictEncoder(8, feature_norm=bound).encode(xs):
        assert sum(Fraction(float(v)) ** 2 for v in row) <= Fraction(bound) ** 2


@given(st.lists(record, min_size=1, max_size=4))
def test_each_record_is_encoded_by_itself(xs):
    encoder = DictEncoder(8)
    alone = np.array([encoder.encode_one(x) for x in xs])
    np.testing.assert_array_equal(encoder.encode(xs), alone)


def test_missing_none_and_zero_are_the_same():
    encoder = DictEncoder(32)
    nothing = encoder.encode_one({})
    np.testing.assert_allclose(nothing, np.eye(32)[0], rtol=1e-6)
    np.testing.assert_array_equal(encoder.encode_one({"a": None, "b": 0, "c": False}), nothing)
    assert encoder.encode([]).shape == (0, 32)


def test_short_records_keep_their_length_and_long_ones_their_direction():
    encoder, plain = DictEncoder(32, feature_norm=2.0), DictEncoder(32, feature_norm=None)
    np.testing.assert_array_equal(encoder.encode_one({"a": 1}), plain.encode_one({"a": 1}))
    long = plain.encode_one({"a": 30, "b": -40})
    expected = 2.0 * long / np.linalg.norm(long)
    np.testing.assert_allclose(encoder.encode_one({"a": 30, "b": -40}), expected, rtol=1e-5)


def test_another_salt_makes_other_collisions():
    tokens = [f"t{i}" for i in range(200)]

    def columns(salt):
        rows = DictEncoder(50, None, salt).encode([{t: 1} for t in tokens])
        return np.abs(rows[:, 1:]).argmax(axis=1)

    assert (columns("") != columns("other")).mean() > 0.9
    assert len(set(columns(""))) > 40  # spread out


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"a": float("nan")}, r"features\['a'\] = 'nan': expected a finite number"),
        ({"a": float("inf")}, r"features\['a'\]"),
        ({"ok": 1, "a": 10**400}, r"features\['a'\] = 'too large'"),
        ({"a": -1e31}, r"features\['a'\] = 'too large'"),
        ({"address": {"city": "Oslo"}}, r"features\['address'\] = 'a dict'.*flatten"),
        ({"a": [1, 2]}, r"features\['a'\] = 'a list'"),
        ({"a": np.zeros(2)}, r"features\['a'\] = 'a ndarray'"),
        ({"a": 1j}, r"features\['a'\] = 'a complex'"),
        ({("a", 1): 1.0}, r"features\[\('a', 1\)\] = 'a name of type tuple'"),
        ([("a", 1.0)], "features = 'a list': expected a dictionary"),
    ],
)
def test_what_is_no_number_or_text_is_refused_by_name(x, message):
    with pytest.raises(InputError, match=message):
        DictEncoder(8).encode_one(x)
    with pytest.raises(InputError, match=message.replace("features", r"features\[1\]")):
        DictEncoder(8).encode([{}, x])


def test_an_error_does_not_repeat_what_a_client_wrote():
    with pytest.raises(InputError) as caught:
        DictEncoder(8).encode_one({"diagnosis": ["secret"]})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 1}, "dim = 1"),
        ({"dim": 2.0}, r"dim = 2\.0"),
        ({"dim": 8, "feature_norm": 0.0}, r"feature_norm = 0\.0"),
        ({"dim": 8, "salt": "x" * 65}, "at most 64 bytes"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InputError, match=message):
        DictLogistic(**settings)


RECORDS = [
    {"age": 0.2, "city": "Oslo"},
    {"age": -0.5, "city": "Lima"},
    {"age": 1.5, "vip": True},
    {"city": "Oslo", "vip": False},
]
LABELS = [True, False, True, False]


def test_logistic_equals_brute_force():
    """Loss, gradient and probability from the formula, in float64, record by record."""
    task = DictLogistic(16, ridge=0.1)
    x = np.random.default_rng(0).normal(size=16)
    features, targets = task.encode(RECORDS), task.encode_targets(LABELS)
    assert targets.tolist() == [1, -1, 1, -1]
    for a, y, rec in zip(features.astype(float), targets, RECORDS, strict=True):
        sample = Sample(a.astype(np.float32), y)
        p = 1 / (1 + np.exp(-(a @ x)))
        loss = -np.log(p if y > 0 else 1 - p) + 0.05 * x @ x
        assert float(task.loss(x.astype(np.float32), sample)) == pytest.approx(loss, rel=1e-5)
        slope = (p - (y > 0)) * a + 0.1 * x
        gradient = task.gradient(x.astype(np.float32), sample)
        np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)
        both = task.predict_proba_one(x, rec)
        assert both[True] == pytest.approx(p, rel=1e-5)
        assert both[True] + both[False] == 1.0
        assert task.predict_one(x, rec) is bool(p >= 0.5)


def test_regression_equals_brute_force():
    task = DictRegression(16, feature_norm=5.0)
    x = np.random.default_rng(0).normal(size=16)
    targets = task.encode_targets([0.5, -2, 1, True])
    for a, y, rec in zip(task.encode(RECORDS).astype(float), targets, RECORDS, strict=True):
        gradient = task.gradient(x.astype(np.float32), Sample(a.astype(np.float32), y))
        np.testing.assert_allclose(gradient, (a @ x - y) * a, rtol=1e-4, atol=1e-6)
        assert task.predict_one(x, rec) == pytest.approx(a @ x, rel=1e-5)


def test_gradient_of_a_record_is_within_its_norm():
    task = DictLogistic(64, feature_norm=0.7)
    rng = np.random.default_rng(0)
    wild = [{f"n{i}": 10 ** rng.uniform(-3, 20) for i in range(9)} for _ in range(50)]
    samples = Sample(task.encode(wild), task.encode_targets(rng.choice([True, False], 50)))
    x = rng.normal(size=64).astype(np.float32) * 100
    gradients = jax.vmap(task.gradient, in_axes=(None, 0))(x, samples)
    assert np.linalg.norm(gradients, axis=1).max() <= 0.7 * (1 + 1e-6)


def test_labels_are_true_and_false_or_plus_and_minus_one():
    task = DictLogistic(8)
    accepted = [True, False, np.bool_(True), 1, -1, 1.0, np.int64(-1)]
    assert task.encode_targets(accepted).tolist() == [1, -1, 1, 1, -1, 1, -1]
    for wrong in (0, 2, "yes", None, 0.5, float("nan")):
        with pytest.raises(InputError, match=r"targets\[1\].*True or False, or \+1 or -1"):
            task.encode_targets([True, wrong])
    with pytest.raises(InputError, match=r"targets\[0\] = 'a str': expected a number"):
        DictRegression(8).encode_targets(["high"])
