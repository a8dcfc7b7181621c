"""Bugs where only sums are seen: too little noise in them, or masks that can be taken off."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

import numpy as np

from studies.mutations.findings import Finding, each_by_name
from veilstream.audit.programme import auditable
from veilstream.audit.statistics.check import Check, alarming
from veilstream.audit.sums import sum_checks, summed
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.terms import Terms
from veilstream.federation.learner.masked_rounds import MaskedRounds
from veilstream.federation.masking import learner_side
from veilstream.federation.masking.agreement import PairKeys
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised
from veilstream.privacy.guarantee import SumTrust

ROUNDS, RUNS = 16, 4000
_noisy = LocalRounds.noisy
_mask_seed = PairKeys.mask_seed
_add_mask = learner_side.add_mask


def sum_plan(honest: int = 3, colluding: int = 1, **changes: object) -> Plan:
    """A small plan, as an audit takes it."""
    return summed(
        auditable(
            Plan(
                learning={"rounds": ROUNDS, "learners": 6, "model_norm_cap": 1e30},
                data={"dim": 4},
                privacy={"epsilon": 2.0, "delta": 1e-3, "trust": "sum", "honest": honest, "colluding": colluding}
                | changes,
                methods=[{"name": "ours", "mechanism": "toeplitz", "step_size": 0.1}],
            )
        )
    )


def checks(seed: int = 0, **changes: object) -> list[Check]:
    """What an audit checks of sums; the terms are worked out here, as a command does, with whatever is planted."""
    plan = sum_plan(**changes)  # type: ignore[arg-type]
    return sum_checks(plan, Terms.of(plan, 1), RUNS, seed=seed)[0]


def divided_by_h() -> AbstractContextManager[object]:
    """V/h instead of V/√h, as if noise added up like signals."""
    return patch.object(SumTrust, "gain", property(lambda self: float(self.honest)))


def missed_steps_forgotten() -> AbstractContextManager[object]:
    """A learner that was away goes on without the noise of the steps it missed."""

    def miss(self, noisy):
        self.round += 1

    return patch.object(LocalRounds, "miss", miss)


def one_without_noise() -> AbstractContextManager[object]:
    """One learner of the core adds none; the sum over the others hides less than was promised."""
    seen: list[LocalRounds] = []

    def noisy(self, gradient, secret):
        if not any(each is self for each in seen):
            seen.append(self)
        of_second = len(seen) > 1 and seen[1] is self
        return Noised(np.array(gradient.reveal())) if of_second else _noisy(self, gradient, secret)

    return patch.object(LocalRounds, "noisy", noisy)


def prefixes() -> AbstractContextManager[object]:
    """What was opened before is sent again."""
    return patch.object(LocalRounds, "clear", lambda self: None)


def own_masks_alike() -> AbstractContextManager[object]:
    """A learner's own mask is the same in every attempt: two messages that were left out give their difference."""

    def masked(self, told, local):
        fresh, self._known()._random = self._known()._random, lambda size: bytes(size)
        try:
            return _mask(self, told, local)
        finally:
            self._masks._random = fresh

    return patch.object(MaskedRounds, "_mask", masked)


_mask = MaskedRounds._mask


def no_own_mask() -> AbstractContextManager[object]:
    """No own mask: whoever is left out can be read as soon as the others give their masks with it away."""
    calls = {"left": 0}

    def add_mask(words, seed, sign=1):
        """The last of a message's masks is its own."""
        calls["left"] -= 1
        if calls["left"]:
            _add_mask(words, seed, sign)

    def mask(self, at, increment, proof=None):
        calls["left"] = len(self._list.offers)
        return _message(self, at, increment, proof)

    patches = patch.multiple(learner_side, add_mask=add_mask)
    return _Both(patches, patch.object(learner_side.MaskingLearner, "mask", mask))


_message = learner_side.MaskingLearner.mask


def masks_of_a_run() -> AbstractContextManager[object]:
    """Pairwise masks are those of the run: what is given away with a learner opens its other messages."""

    def mask_seed(self, other, at):
        return _mask_seed(self, other, type(at)(at.keys, 0, 1))

    return patch.object(PairKeys, "mask_seed", mask_seed)


class _Both:
    """Two patches as one."""

    def __init__(self, *patches: AbstractContextManager[object]) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for each in self._patches:
            each.__enter__()

    def __exit__(self, *error: object) -> None:
        for each in self._patches:
            each.__exit__(*error)  # type: ignore[arg-type]


PLANTED = {
    "V/h instead of V/√h": divided_by_h,
    "noise of missed steps forgotten": missed_steps_forgotten,
    "a learner of the core without noise": one_without_noise,
    "prefixes instead of increments": prefixes,
    "an own mask that is always the same": own_masks_alike,
    "no own mask": no_own_mask,
    "pairwise masks that are always the same": masks_of_a_run,
}


def found(bug: str) -> Finding:
    """Plant it, and make the checks of sums."""
    with PLANTED[bug]():
        alarms = alarming(checks())
    figure = f"{alarms[0].name}: {alarms[0].figure}" if alarms else "nothing was found"
    return Finding(bug, "sums", bool(alarms), f"{len(alarms)} alarms; {figure}"[:300])


BUGS = each_by_name(PLANTED, found)
