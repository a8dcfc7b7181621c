"""Bugs in the law of the noise: missing, shared, repeated, weakly seeded, on float32's lattice.

Averages over coordinates show none of them. They are planted where noise, in units of the grid,
meets the gradient (`add_noise`), where a step's keystream is opened, and where seeds are made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from unittest.mock import patch

import pytest

from studies.cell_attack import planted
from studies.mutations.findings import Finding, both
from veilstream.audit.checks import cell_checks, run_checks, seed_check, small_checks
from veilstream.audit.deployed import listen
from veilstream.audit.statistics.check import Check, alarming
from veilstream.audit.transcript import law_of_terms
from veilstream.deployment import learner_epochs as learner_module
from veilstream.deployment import local_rounds
from veilstream.deployment.epochs import EpochLedger
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.errors import PrivacyError
from veilstream.mechanisms.keystream import Row
from veilstream.privacy.gradient_types import add_noise
from veilstream.privacy.seeds import check_generator

MANY = 100_000


def without_noise(*coordinates: int):
    """`add_noise` that leaves some coordinates bare."""

    def planted(gradient, units):
        units = units.copy()
        units[[k for k in coordinates if k < len(units)]] = 0
        return add_noise(gradient, units)

    return patch.object(local_rounds, "add_noise", planted)


def sharing(first: int, second: int, sign: int = 1):
    """`add_noise` that gives two coordinates the same noise, or opposite noise."""

    def planted(gradient, units):
        units = units.copy()
        if max(first, second) < len(units):
            units[second] = sign * units[first]
        return add_noise(gradient, units)

    return patch.object(local_rounds, "add_noise", planted)


_SECRET = secrets.token_bytes(32)


def every_epoch_alike():
    """Secrets derived from one of the store and the step, the epoch left out."""

    class Derived(LocalRounds):
        store = b""

        def row(self, step, secret):
            return Row(hashlib.sha256(_SECRET + self.store).digest(), step)

    def derived(self, epoch):
        rounds = Derived(self.terms, epoch)
        rounds.store = str(self.ledger.path).encode()
        return rounds

    return patch.object(EpochLedger, "new_rounds", derived)


def weak_seeds(bits: int = 16):
    """32 bytes that look drawn, from a few bits that are."""

    def weak():
        few = secrets.randbits(bits).to_bytes(8, "big")
        return hashlib.sha256(few).digest()

    return patch.object(learner_module, "fresh_secret", weak)


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
    return _in_a_run("one coordinate without noise", "coordinates", "noise of every", without_noise(77_777))


def ten_bare_coordinates() -> Finding:
    ten = range(5, MANY, MANY // 10)
    return _in_a_run("ten coordinates without noise", "coordinates", "noise of every", without_noise(*ten))


def two_share_noise() -> Finding:
    """Far apart in a large run, at no telling distance; and in a small one, opposite."""
    found = _in_a_run("two coordinates sharing noise", "pairs", "equal or opposite", sharing(123, 87_001))
    plan, terms = both(128)
    with sharing(3, 99, -1):
        caught, figure = _figure(small_checks(plan, terms, learners=2), "all pairs")
    return dataclasses.replace(found, caught=found.caught and caught, figure=f"{found.figure}; {figure}")


def epochs_repeat() -> Finding:
    plan, terms = both(128)
    with every_epoch_alike():
        caught, figure = _figure(small_checks(plan, terms, learners=2), "second epoch")
    return Finding("seeds from a secret of the store and the step", "epochs", caught, figure)


def float32_cells() -> Finding:
    """At T = 64 the first message's cells have η² = 1.4e-4."""
    plan, terms = both(1, "buffered", rounds=64)
    with planted():
        caught, figure = _figure(cell_checks(plan, terms, 4_000_000), "float32 lattice")
    return Finding("float32 products under the grid", "cells", caught, figure)


def seeds_of_16_bits() -> Finding:
    with weak_seeds():
        caught, figure = _figure([seed_check()], "seeds")
        with pytest.raises(PrivacyError, match="came twice"):
            check_generator(learner_module.fresh_secret)
    return Finding(
        "seeds of 16 bits",
        "guard",
        caught,
        figure,
        "check_generator: PrivacyError; in messages they have the right law",
    )


BUGS = (one_bare_coordinate, ten_bare_coordinates, two_share_noise, epochs_repeat, float32_cells, seeds_of_16_bits)
