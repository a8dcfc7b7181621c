"""Bugs in what is done with clients' data: used twice, not clipped, not a number, too fine."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from tests.support.known_secrets import known_secrets

from studies.mutations.findings import Finding, both, mu_of
from studies.precision import Float32Draws, Setting, attack
from veilstream.audit.canary import canary_runs
from veilstream.audit.deployed import Replaced, listen, twin_runs
from veilstream.audit.report import _on_grid
from veilstream.audit.statistics import Law, one_run
from veilstream.audit.transcript import law_of_terms
from veilstream.deployment.learner import Learner
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.ledger.witness import Witness
from veilstream.deployment.release import decode
from veilstream.errors import LedgerError, PrivacyError
from veilstream.learning.tasks import Sample
from veilstream.privacy import gradient_types, noise_law
from veilstream.privacy import grid as grid_module
from veilstream.privacy.clipping import clip_one
from veilstream.privacy.gaussian import mu_for
from veilstream.privacy.grid import Grid, OnGrid, grid_for

CLAIM = mu_for(2.0, 1e-3)


def _one_client(step: int) -> Sample:
    return Sample(np.zeros((), np.float32), float(step))


def rolled_back() -> Finding:
    """The store as it was before the client came; then another client, under the same secret."""
    plan, terms = both(200, rounds=2)
    tasks = [Replaced(terms, 0, sign) for sign in (-1.0, 1.0)]
    sent = []

    def round_zero(store: Path, task) -> None:
        with Learner(plan, store, task, create=True) as learner:
            if not learner.pinned:
                learner.begin_round(0, np.zeros(terms.dim, np.float32))
            learner.observe("someone", _one_client(0))
            sent.append(decode(learner.finish_round().payload).prefix - task.known)

    def unseen(self):
        self.witness_path.unlink(missing_ok=True)
        return Witness.create(self.witness_path, self.tag_key, self._entries_from(0))

    with tempfile.TemporaryDirectory() as folder:
        store, copy = Path(folder) / "s.db", Path(folder) / "copy.db"
        with Learner(plan, store, tasks[0], create=True) as learner:
            learner.begin_round(0, np.zeros(terms.dim, np.float32))
        shutil.copy(store, copy)
        with known_secrets(lambda: hashlib.sha256(b"the same").digest()):
            round_zero(store, tasks[0])
            shutil.copy(copy, store)
            with pytest.raises(LedgerError, match="old copy"):
                Learner(plan, store, tasks[1], create=True)
            with patch.object(Ledger, "_open_witness", unseen):
                round_zero(store, tasks[1])
    residuals = np.array(sent) * terms.grid.step
    # Two answers to one round: the client who was replaced is in the first only.
    found = one_run(residuals, Law(np.array([[1.0], [0.0]]), 2.0, CLAIM))
    return Finding(
        "rollback: the same noise, other data",
        "one run",
        found.violation,
        f"two answers differ by bare gradients: {mu_of(found.mu_surely, CLAIM)}",
        "ledger: LedgerError (an old copy); without it, a fresh secret for the step",
    )


def unclipped(raw, bound, gamma=None):
    return np.nan_to_num(raw, nan=0.0)


def not_clipped() -> Finding:
    plan, terms = both(1)
    with patch.object(gradient_types, "clip_one", unclipped):
        with pytest.raises(PrivacyError, match="exceeds its norm"):
            canary_runs(plan, terms, 400, seed=0)
        with patch.object(grid_module, "_square_norm", lambda units, bound: 0):
            found = canary_runs(plan, terms, 4000, seed=0)
            twins = twin_runs(*both(50), at=2)
    best = max(g.mu_surely for g in found.guesses)
    return Finding(
        "clipping off",
        "many runs",
        found.violation and twins.alarm,
        f"{mu_of(best, CLAIM)}; same draws: {twins.unexplained_units:,} units unexplained",
        "grid: PrivacyError (norm checked in integers)",
    )


def nan_let_through() -> Finding:
    def kept(raw, bound, gamma=None):
        return clip_one(raw, bound) if np.isfinite(raw).all() else raw

    def unchecked(self, clipped, clients_per_step=1):
        with np.errstate(invalid="ignore"):
            return OnGrid(np.trunc(np.asarray(clipped, np.float64) / self.step).astype(np.int64))

    plan, terms = both()
    with patch.object(gradient_types, "clip_one", kept):
        with pytest.raises(PrivacyError, match="not finite"):
            listen(plan, terms, adaptive=False)
        with patch.object(Grid, "gradient", unchecked):
            found = one_run(listen(plan, terms, adaptive=False).residuals, law_of_terms(terms))
    return Finding(
        "NaN let through",
        "conformance",
        found.stranger,
        f"{found.outside} of 16 steps off their d'; normality p = {found.normality_p:.1g}",
        "grid: PrivacyError (not finite)",
    )


def same_client_twice() -> Finding:
    plan, terms = both(1)
    kept = canary_runs(plan, terms, 400, insist=True, seed=0)
    with patch.object(Learner, "_spent", lambda self, tag, step, stored: False):
        found = canary_runs(plan, terms, 4000, insist=True, seed=0)
        epochs = canary_runs(plan, terms, 8000, insist=True, epochs=2, seed=0)
    best = max(g.mu_surely for g in found.guesses)
    return Finding(
        "the same client twice",
        "many runs",
        found.violation and epochs.violation and not kept.alarm,
        f"comes again at every step: {mu_of(best, CLAIM)}",
        "ledger: tags of all epochs; a client who was taken is answered and not used",
    )


class FarTooFine(Grid):
    """A grid below float32's own steps."""

    def gradient(self, clipped, clients_per_step=1):
        return np.trunc(np.asarray(clipped, np.float64) / self.step).astype(np.int64)


def fine(clip_norm, std, clients_per_step=1):
    """Noise and gradient as floating-point numbers: messages as fine as float32 makes them."""
    return Grid(grid_for(clip_norm, std, clients_per_step).step * 2.0**-14, clip_norm)


def without_the_grid() -> Finding:
    with patch.object(noise_law, "grid_for", fine):
        plan, terms = both(200)
        transcript = listen(plan, terms)
    setting = Setting("independent", 1.0, 0.5)
    finer = FarTooFine(setting.grid.step * 2.0**-11, setting.clip_norm)
    telling = attack(setting, 40_000, grid=finer, noise=Float32Draws).telling
    return Finding(
        "float release without the grid",
        "conformance",
        not _on_grid(transcript, terms) and telling > 0,
        f"grid 2^{int(np.log2(transcript.grid))} where the promise needs "
        f"2^{int(np.log2(grid_for(1.0, terms.noise_std).step))}; {telling} telling messages of "
        "80,000 in the low-order bits",
        "type: `encode` takes whole numbers only",
    )


BUGS = (rolled_back, not_clipped, nan_let_through, same_client_twice, without_the_grid)
