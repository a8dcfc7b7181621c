"""Every mechanism in every variant, as functions of the horizon, for conformance tests."""

from __future__ import annotations

from functools import partial

import numpy as np

import veilstream.mechanisms as m

VARIANTS = {
    "independent": m.independent,
    "tree": m.tree,
    "tree_online": m.tree_online,
    "tree_full": m.tree_full,
    "optimal": m.optimal,
    "optimal-max": partial(m.optimal, objective="max"),
    "optimal-rounds": lambda T: m.optimal(
        T, objective="rounds", local_steps=next(t for t in (4, 3, 2, 1) if T % t == 0)
    ),
    "optimal-averaged": lambda T: m.optimal(T, workload=m.Workload(horizon=T, averaging=3.0)),
    "optimal-momentum": lambda T: m.optimal(
        T, workload=m.Workload(horizon=T, momentum=0.5, forgetting=0.99, step_decay=0.5)
    ),
    "toeplitz": m.toeplitz,
    "toeplitz-forgetting": lambda T: m.toeplitz(T, workload=m.Workload(horizon=T, forgetting=0.9)),
    "toeplitz_normalised": m.toeplitz_normalised,
    "buffered": m.buffered,
    "buffered-plain-2": partial(m.buffered, buffers=2, normalise=False),
    "buffered-averaged": lambda T: m.buffered(T, workload=m.Workload(horizon=T, averaging=3.0)),
    "doubling": partial(m.doubling, first=4, buffers=3),
    "banded": partial(m.banded, bands=6),
    "banded-plain": partial(m.banded, bands=4, normalise=False),
    "banded_inverse": partial(m.banded_inverse, bands=6),
    "buffered-mean": partial(m.buffered, buffers=3, objective="mean", normalise=False),
}

assert {name.split("-")[0] for name in VARIANTS} >= set(m.MECHANISMS)


def prefix_sums(T: int) -> np.ndarray:
    """A, the workload."""
    return np.tril(np.ones((T, T)))
