"""Bugs in the noise: drawn again, too little, shifted, clamped, stretched, shared."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from studies.mutations.findings import Finding, both, mu_of
from veilstream.audit.canary import canary_runs
from veilstream.audit.deployed import Unkind, listen
from veilstream.audit.report import unlike_each
from veilstream.audit.statistics import Law, one_run
from veilstream.audit.transcript import law_of_terms
from veilstream.deployment import learner_epochs as learner_module
from veilstream.deployment import local_rounds
from veilstream.deployment.epochs import EpochLedger
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.release import Payload, Release, decode, encode
from veilstream.deployment.terms import Terms
from veilstream.errors import HorizonExhausted, PrivacyError
from veilstream.learning.tasks import Sample
from veilstream.mechanisms import build
from veilstream.mechanisms.keystream import Row, fresh_secret
from veilstream.privacy import noise_law
from veilstream.privacy.calibration import calibrate
from veilstream.privacy.gaussian import mu_for
from veilstream.privacy.gradient_types import Noised, add_noise
from veilstream.privacy.grid_noise import GridNoise
from veilstream.privacy.guarantee import Neighbours

CLAIM = mu_for(2.0, 1e-3)


def redrawn(self, step, secret):
    return Row(fresh_secret(), step)


def redrawn_after_a_restart() -> Finding:
    plan, terms = both()
    with patch.object(LocalRounds, "row", redrawn):
        found = one_run(listen(plan, terms, restarts={5, 11}).residuals, law_of_terms(terms))
    return Finding(
        "noise redrawn after a restart",
        "conformance",
        found.stranger,
        f"covariance p = {found.covariance_p:.1g}; {found.outside} of 16 steps off their d'",
    )


_last_release = EpochLedger.last_release


def renoised(self):
    """Asked again, the learner takes its noise off and puts on other noise of the same law."""
    first = _last_release(self)
    if getattr(self, "_asked", None) != first.round:
        self._asked = first.round
        return first
    message = decode(first.payload)
    norm = np.sqrt(self.terms.mechanism.row_norms_squared()[message.steps - 1])
    fresh = np.random.default_rng(message.round).standard_normal(len(message.prefix))
    other = np.rint(self.terms.noise_std * norm * fresh / self.terms.grid.step).astype(np.int64)
    prefix = Noised(message.prefix - self.local.noise.cells + other)
    payload = encode(message.epoch, message.round, message.steps, message.grid, prefix)
    return Release(message.epoch, message.round, Payload(payload), "")


def resent_with_fresh_noise() -> Finding:
    plan, terms = both()
    first, again, known = [], [], []
    task = Unkind(terms)
    with (
        patch.object(EpochLedger, "last_release", renoised),
        tempfile.TemporaryDirectory() as folder,
        Learner(plan, Path(folder) / "s.db", task, create=True) as learner,
    ):
        for r in range(15):  # at the end of the horizon the noise to be taken off is gone
            learner.begin_round(r, np.zeros(terms.dim, np.float32))
            learner.observe(f"{r}", Sample(np.zeros((), np.float32), float(r)))
            first.append(decode(learner.finish_round().payload).prefix)
            again.append(decode(learner.finish_round().payload).prefix)
            known.append(task.known)
        grid = learner.grid.step
    unlike = sum(not np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    residuals = (np.array(first + again) - np.array(known + known)) * grid
    shifts = np.tril(np.ones((15, 15)))
    law = Law(np.concatenate([shifts, shifts]), 2.0, CLAIM)
    found = one_run(residuals, law)
    return Finding(
        "a round re-sent with fresh noise",
        "one run",
        bool(unlike) and found.violation,
        f"{unlike} of 15 repeats unlike; {mu_of(found.mu_surely, CLAIM)}",
    )


def halved(*args, **options):
    """Calibrated to B_g, promised for replace-one."""
    std, guarantee = calibrate(*args, **options | {"neighbours": "zero-out"})
    return std, dataclasses.replace(guarantee, neighbours=Neighbours.REPLACE_ONE)


def half_the_reach() -> Finding:
    with patch.object(noise_law, "calibrate", halved):
        plan, terms = both()
        found = one_run(listen(plan, terms).residuals, law_of_terms(terms))
    return Finding("B_g instead of 2·B_g", "one run", found.violation, mu_of(found.mu_surely, CLAIM))


class Late(GridNoise):
    """Each step has the noise of the one before."""

    def step(self, row):
        late = getattr(self, "_late", np.zeros(self._dim, np.int64))
        self._late = super().step(row).copy()
        return late


def row_shifted() -> Finding:
    plan, terms = both()
    with patch.object(local_rounds, "GridNoise", Late):
        found = one_run(listen(plan, terms).residuals, law_of_terms(terms))
    return Finding(
        "noise row shifted by one", "one run", found.violation, f"step 0 is bare: {mu_of(found.mu_surely, CLAIM)}"
    )


class Clamped(GridNoise):
    """Past the horizon, the last increment again."""

    def step(self, row):
        if self.position < self._program.horizon:
            self._last = super().step(row).copy()
        return self._last


def clamped_past_the_horizon() -> Finding:
    plan, terms = both()
    with (
        tempfile.TemporaryDirectory() as folder,
        Learner(plan, Path(folder) / "s.db", Unkind(terms), create=True) as learner,
    ):
        for r in range(16):
            learner.begin_round(r, np.zeros(terms.dim, np.float32))
            learner.finish_round()
        with pytest.raises(PrivacyError, match="past the horizon"):
            learner.begin_round(16, np.zeros(terms.dim, np.float32))
    noise = GridNoise(terms.mechanism.program, std=terms.noise_std, grid=terms.grid, dim=1)
    for step in range(16):
        noise.step(Row(fresh_secret(), step))
    with pytest.raises(HorizonExhausted):
        noise.step(Row(fresh_secret(), 16))
    longer = dataclasses.replace(terms, rounds=17)
    with (
        patch.object(Terms, "of", classmethod(lambda cls, plan, dim, task=None: longer)),
        patch.object(local_rounds, "GridNoise", Clamped),
    ):
        transcript = listen(plan, longer, rounds=17)
    found = one_run(transcript.residuals, Law(np.tril(np.ones((17, 17))), 2.0, CLAIM))
    return Finding(
        "index clamped past the horizon",
        "one run",
        found.violation,
        f"the last two steps differ by bare gradients: {mu_of(found.mu_surely, CLAIM)}",
        "learner: PrivacyError; noise: HorizonExhausted",
    )


def twice_the_horizon() -> Finding:
    """Noise for T steps, used for 2T."""

    def for_half(budget, mechanism, clip_norm, **options):
        short = build(mechanism.name, mechanism.horizon // 2).with_block_length(1)
        std, guarantee = calibrate(budget, short, clip_norm, **options)
        return std, dataclasses.replace(guarantee, horizon=mechanism.horizon)

    with patch.object(noise_law, "calibrate", for_half):
        plan, terms = both(40_000, rounds=64)
        found = one_run(listen(plan, terms).residuals, law_of_terms(terms))
    return Finding(
        "twice the horizon",
        "one run",
        found.violation,
        mu_of(found.mu_surely, CLAIM),
        "a learner of T steps stops at T (above)",
    )


def raw_step(self, gradient, secret):
    """Local steps on raw gradients, noise on the round's sum."""
    if self.taken < self.terms.local_steps - 1:
        return add_noise(gradient, np.zeros(self.dim, np.int64))
    return add_noise(gradient, self.noise.step(Row(secret, self.noise.position)))


def one_draw_a_round() -> Finding:
    plan, terms = both(1, "independent", rounds=4, local_steps=4)
    with patch.object(LocalRounds, "noisy", raw_step):
        found = canary_runs(plan, terms, 4000, others="echo", seed=0)
    best = max(g.mu_surely for g in found.guesses)
    return Finding(
        "one noise draw per round, raw local steps",
        "many runs",
        found.violation,
        f"clients who echo the local model: {mu_of(best, CLAIM)}",
    )


def seed_of_the_operator() -> Finding:
    assert not any("seed" in name for name in inspect.signature(Learner.__init__).parameters)
    plan, terms = both()
    transcripts = []
    for _ in range(2):
        drawn = (hashlib.sha256(b"operator %d" % i).digest() for i in itertools.count())
        with patch.object(learner_module, "fresh_secret", lambda drawn=drawn: next(drawn)):
            transcripts.append(listen(plan, terms))
    p = unlike_each(*transcripts, law_of_terms(terms))
    return Finding(
        "a seed chosen by the operator",
        "conformance",
        p < 1e-6,
        f"two learners' noise is the same: p = {p:.1g}; another seed for each learner cannot be "
        "seen in messages: only the guard",
        "no argument takes a seed, and no setting names one",
    )


BUGS = (
    redrawn_after_a_restart,
    resent_with_fresh_noise,
    half_the_reach,
    row_shifted,
    clamped_past_the_horizon,
    twice_the_horizon,
    one_draw_a_round,
    seed_of_the_operator,
)
