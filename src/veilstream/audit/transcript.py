"""A learner's messages, read from the bytes, and the gradients that the audit knows to be in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.audit.statistics import Law, law_of
from veilstream.deployment.release import decode
from veilstream.deployment.terms import Terms
from veilstream.errors import PrivacyError
from veilstream.privacy.gaussian import mu_for
from veilstream.privacy.guarantee import Neighbours

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_REACH = {Neighbours.REPLACE_ONE: 2.0, Neighbours.ZERO_OUT: 1.0}
"""How far neighbours' gradients are apart, in clip norms. Said here once more, on purpose: an audit
that took it from the code that calibrates would share its mistakes."""


@dataclass(frozen=True, eq=False)
class Transcript:
    """The messages of one learner, in order, one row each."""

    prefixes: Integers
    """(R, d), in units of the grid."""
    known: Integers
    """(R, d): sums of the gradients that should be in them, worked out by the audit."""
    grid: float
    sizes: tuple[int, ...]
    repeats_unlike: int = 0
    """Messages that were asked for again and came back other than before."""
    left_out: int = 0
    """Places of steps that stayed empty though enough people came."""
    used_again: int = 0
    """Places of people who may take none any more."""

    @classmethod
    def of(cls, payloads: Sequence[bytes], known: Sequence[Integers], repeats_unlike: int = 0) -> Transcript:
        """Read what was sent: from a learner, or off a federation's wire."""
        messages = [decode(payload) for payload in payloads]
        grids = {message.grid for message in messages}
        if len(grids) != 1:
            raise PrivacyError(f"messages on {len(grids)} grids: one run has one")
        return cls(
            np.stack([message.prefix for message in messages]).astype(np.int64),
            np.stack([np.asarray(row, np.int64) for row in known]),
            grids.pop(),
            tuple(len(payload) for payload in payloads),
            repeats_unlike,
        )

    @property
    def units(self) -> Integers:
        """What should be noise and nothing else, in units of the grid."""
        values: Integers = self.prefixes - self.known
        return values

    @property
    def moved(self) -> Integers:
        """What each message adds to the one before, less what clients should have added."""
        return np.diff(self.units, axis=0, prepend=0)

    @property
    def residuals(self) -> Floats:
        """The same, in the units of gradients."""
        values: Floats = np.multiply(self.units, self.grid, dtype=np.float64)
        return values


def reach_of(terms: Terms) -> float:
    """How far apart neighbours move a step: a step averages the gradients of ``clients_per_step``."""
    return _REACH[terms.guarantee.neighbours] * terms.guarantee.clip_norm / terms.clients_per_step


def law_of_terms(terms: Terms, reach: float | None = None) -> Law:
    """What these terms say about a transcript, with ``reach`` for how far neighbours are apart.

    The claim is the (ε, δ) that people are told, through the Gaussian curve; not the sensitivity
    and noise that the program worked out for it.
    """
    promise = terms.guarantee
    return law_of(
        terms.mechanism.noising_matrix(),
        std=terms.noise_std,
        reach=reach_of(terms) if reach is None else reach,
        claim=mu_for(promise.epsilon, promise.delta) * (1.0 + 1e-9),
        local_steps=terms.local_steps,
        participation=promise.participation,
    )
