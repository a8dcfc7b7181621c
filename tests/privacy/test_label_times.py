"""A step does the same work whatever its client's label: no shorter way that its time would tell."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from studies import label_times

from veilstream.deployment.learner import Learner
from veilstream.learning.tasks import Logistic
from veilstream.privacy import clipping

DIM = 40


def lines_of_a_step(label: float, weight: float, tmp_path) -> Counter:
    """Lines of our code that run for one client, and how often."""
    ran: Counter = Counter()

    def trace(frame, event, _):
        if "veilstream" not in frame.f_code.co_filename:
            return None
        if event == "line":
            ran[frame.f_code.co_filename, frame.f_lineno] += 1
        return trace

    store = tmp_path / f"{label}-{weight}.db"
    with Learner(label_times.plan_of(DIM, 8), store, Logistic(DIM), create=True) as learner:
        learner.begin_round(0, label_times.attacked_model(DIM, weight))
        learner.observe("first", label_times.record(DIM, 1.0, np.random.default_rng(1)))
        record = label_times.record(DIM, label, np.random.default_rng(2))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            learner.observe("client", record)
        finally:
            sys.settrace(before)
    # Cells that float64 cannot tell are decided with more bits of the noise, whatever the client.
    return Counter({line: n for line, n in ran.items() if "normals" not in line[0] and "grid_noise" not in line[0]})


@pytest.mark.parametrize("weight", label_times.WEIGHTS)
def test_both_labels_run_the_same_lines(weight, tmp_path):
    clipped, short = (lines_of_a_step(label, weight, tmp_path) for label in (-1.0, 1.0))
    assert clipped == short
    assert any("clipping" in name for name, _ in clipped)


def test_a_shorter_way_inside_the_norm_is_noticed(tmp_path, monkeypatch):
    whole = clipping.clip_one

    def early(gradient, clip_norm):
        if float(np.linalg.norm(gradient)) <= clip_norm:
            return gradient.astype(np.float64)
        return whole(gradient, clip_norm)

    monkeypatch.setattr("veilstream.privacy.gradient_types.clip_one", early)
    clipped, short = (lines_of_a_step(label, 20.0, tmp_path) for label in (-1.0, 1.0))
    assert clipped != short


def test_no_number_of_a_gradient_is_denormal():
    """At weight 88 the gradient of one label would be: products with such numbers take far longer."""
    for label in (-1.0, 1.0):
        record = label_times.record(DIM, label, np.random.default_rng(2))
        sample = record._replace(features=record.features, target=np.float32(label))
        for weight in (88.0, 95.0, 103.0):
            gradient = Logistic(DIM).host_gradient(label_times.attacked_model(DIM, weight), sample)
            small = np.abs(np.asarray(gradient, np.float32))
            assert not ((small > 0) & (small < np.finfo(np.float32).tiny)).any()


def test_the_area_under_the_curve_is_that_of_counted_pairs():
    rng = np.random.default_rng(3)
    took, label = rng.integers(0, 9, 40).astype(float), np.repeat([-1.0, 1.0], 20)
    pairs = [(a > b) + 0.5 * (a == b) for a in took[label > 0] for b in took[label < 0]]
    assert label_times.area_under_curve(took, label) == pytest.approx(np.mean(pairs))
