"""Bugs in the law of the noise: missing, shared, repeated, weakly seeded, on float32's lattice.

Averages over coordinates show none of them. They are planted where noise, in units of the grid,
meets the gradient (`add_noise`), where a step's keystream is opened, and where seeds are made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from unittest.mock import patch

import numpy as np
import pytest

from tests.mutations.findings import Finding, both
from veilstream.engines import learner as learner_module
from veilstream.engines.audit.checks import cell_checks, run_checks, seed_check
from veilstream.engines.audit.deployed import listen
from veilstream.engines.audit.small_runs import small_checks
from veilstream.engines.audit.transcript import law_of_terms
from veilstream.engines.learner import Learner
from veilstream.errors import PrivacyError
from veilstream.mechanisms import NoiseKey, NoiseStream
from veilstream.mechanisms.keystream import row_opener
from veilstream.privacy.audit.check import Check, alarming
from veilstream.privacy.hidden import add_noise
from veilstream.privacy.seeds import check_generator

MANY = 100_000


def without_noise(*coordinates: int):
    """`add_noise` that leaves some coordinates bare."""

    def planted(gradient, units):
        units = units.copy()
        units[[k for k in coordinates if k < len(units)]] = 0
        return add_noise(gradient, units)

    return patch.object(learner_module, "add_noise", planted)


def sharing(first: int, second: int, sign: int = 1):
    """`add_noise` that gives two coordinates the same noise, or opposite noise."""

    def planted(gradient, units):
        units = units.copy()
        if max(first, second) < len(units):
            units[second] = sign * units[first]
        return add_noise(gradient, units)

    return patch.object(learner_module, "add_noise", planted)


_SECRET = secrets.token_bytes(32)


def _planted_row(learner: Learner, epoch: bytes, step: int):
    """A row of noise that a store gives again after a restart."""
    store = str(learner._ledger.path).encode()
    return row_opener(NoiseKey(hashlib.sha256(_SECRET + store + epoch).digest()))(step)


def every_epoch_alike():
    """Seeds derived from a secret of the store and the step, the epoch left out."""

    def derived(self, step):
        return _planted_row(self, b"", step)

    return patch.object(Learner, "_open_row", derived)


def _float32_step(self, gradient, tag):
    """A step as in 0.3.0: float32 normals, multiplied in float32, their sum rounded to the grid."""
    step = self._round * self._tau + self._taken
    if step == 0 or not hasattr(self, "_planted"):
        epoch = b"%d" % self._epoch
        self._planted = NoiseStream(
            self._mechanism.program, std=self.noise_std, dim=self._task.dim, private=True,
            open_row=lambda step: _planted_row(self, epoch, step),
        )  # fmt: skip
        self._planted_prefix = np.zeros(self._task.dim)
    while self._planted.position < step:  # after a restart
        self._planted_prefix = self._planted_prefix + self._planted.step()
    before = self.grid.noise(self._planted_prefix)
    self._planted_prefix = self._planted_prefix + self._planted.step()
    noisy = add_noise(gradient, self.grid.noise(self._planted_prefix) - before)
    kept = {f"noisy/{self._taken}": learner_module._pack(noisy)}
    self._write("step", {"epoch": self._epoch, "step": step}, tag=tag, keep=kept)
    self._apply(noisy)


def float32_products():
    return patch.object(Learner, "_step", _float32_step)


def weak_seeds(bits: int = 16):
    """32 bytes that look drawn, from a few bits that are."""

    def weak():
        few = secrets.randbits(bits).to_bytes(8, "big")
        return hashlib.sha256(few).digest()

    return patch.object(learner_module, "_fresh_seed", weak)


def _figure(checks: list[Check], of: str) -> tuple[bool, str]:
    """Whether the named check raises an alarm, and its words."""
    found = [check for check in alarming(checks) if check.name.startswith(of)]
    if not found:
        return False, "; ".join(check.figure for check in checks if check.name.startswith(of))
    return True, f"{found[0].figure}; p = {found[0].p:.1g}"


def _in_a_run(bug: str, by: str, of: str, planted) -> Finding:
    plan, terms = both(MANY)
    with planted:
        transcript = listen(plan, terms, restarts={5})
    caught, figure = _figure(run_checks(transcript, terms, law_of_terms(terms)), of)
    return Finding(bug, by, caught, figure)


def one_bare_coordinate() -> Finding:
    return _in_a_run(
        "one coordinate without noise", "coordinates", "noise of every", without_noise(77_777)
    )


def ten_bare_coordinates() -> Finding:
    ten = range(5, MANY, MANY // 10)
    return _in_a_run(
        "ten coordinates without noise", "coordinates", "noise of every", without_noise(*ten)
    )


def two_share_noise() -> Finding:
    """Far apart in a large run, at no telling distance; and in a small one, opposite."""
    found = _in_a_run(
        "two coordinates sharing noise", "pairs", "equal or opposite", sharing(123, 87_001)
    )
    plan, terms = both(128)
    with sharing(3, 99, -1):
        caught, figure = _figure(small_checks(plan, terms, learners=2), "all pairs")
    return dataclasses.replace(
        found, caught=found.caught and caught, figure=f"{found.figure}; {figure}"
    )


def epochs_repeat() -> Finding:
    plan, terms = both(128)
    with every_epoch_alike():
        caught, figure = _figure(small_checks(plan, terms, learners=2), "second epoch")
    return Finding("seeds from a secret of the store and the step", "epochs", caught, figure)


def float32_cells() -> Finding:
    """At T = 64 the first message's cells have η² = 1.4e-4."""
    plan, terms = both(1, "buffered", rounds=64)
    with float32_products():
        caught, figure = _figure(cell_checks(plan, terms, 4_000_000), "float32 lattice")
    return Finding("float32 products under the grid", "cells", caught, figure)


def seeds_of_16_bits() -> Finding:
    with weak_seeds():
        caught, figure = _figure([seed_check()], "seeds")
        with pytest.raises(PrivacyError, match="came twice"):
            check_generator(learner_module._fresh_seed)
    return Finding(
        "seeds of 16 bits", "guard", caught, figure,
        "check_generator: PrivacyError; in messages they have the right law",
    )  # fmt: skip


BUGS = (
    one_bare_coordinate,
    ten_bare_coordinates,
    two_share_noise,
    epochs_repeat,
    float32_cells,
    seeds_of_16_bits,
)
