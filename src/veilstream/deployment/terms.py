"""The terms of a deployment: what the promise and the numbers rest on, from the plan alone.

Server and learner each work them out, and must get the same digest.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from veilstream.deployment.deployable import deployed_method
from veilstream.errors import InputError
from veilstream.learning.class_weights import ClassWeights
from veilstream.learning.client_metrics import check_metrics
from veilstream.learning.tasks import Task, TaskDetails, admission_of
from veilstream.mechanisms import Factorization
from veilstream.mechanisms.program import NoiseProgram
from veilstream.plans.plan import Plan
from veilstream.plans.plan_tables import MethodPlan
from veilstream.plans.prepare import prepare
from veilstream.plans.records import record_terms
from veilstream.privacy import Guarantee
from veilstream.privacy.grid import Grid
from veilstream.privacy.noise_law import calibrate_release
from veilstream.privacy.telemetry import Telemetry
from veilstream.records.admission import Admission
from veilstream.wording import shown

NOISE_LAW = "rounded Gaussian prefix sums, 1"
"""Version of the law of what is sent. It changes with anything that makes the same seeds give other
numbers, or the same noise another law; an epoch is never continued under another one."""


SAME_TERMS = (
    "use one plan and one version on both sides; where only `program` differs, NumPy or SciPy made "
    "other numbers of one plan: install the same versions"
)

_ADMITS = "admits"
_MANY_STEPS = 100_000
_MASK_WORDS = 200  # a learner: certificates of keys, signatures and sealed shares, each far below it

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """One private method, as it is deployed."""

    plan: Plan
    method: MethodPlan
    """As prepared: with the step sizes that `kind = "auto"` chose."""
    dim: int
    """Parameters of the model; a release has `release_dim` numbers."""
    rounds: int
    local_steps: int
    clients_per_step: int
    """A step is the sum of up to so many clients' gradients, divided by this number, however many came."""
    learners: int
    mechanism: Factorization
    """In blocks of one step: the mechanism whose sensitivity counts for a learner that releases
    step by step."""
    noise_std: float
    guarantee: Guarantee
    grid: Grid
    gamma: float | None
    """Gradients become g / (|g| + gamma); None where they are clipped as they are."""
    admission: Admission | None
    """Which records the task admits; None where only the plan is known, not the task itself."""
    telemetry: Telemetry | None
    """What clients contribute beside their gradients; its coordinates follow the model's."""
    class_weights: ClassWeights | None = None
    """What a client's gradient counts, by its label; None for all alike."""

    @classmethod
    def of(cls, plan: Plan, dim: int, task: Task | None = None) -> Terms:
        """What this plan means for a model with so many parameters, and for this task."""
        prepared = prepare(plan, deployed_method(plan))
        method = prepared.plan
        assert prepared.factorization is not None
        telemetry = plan.telemetry_of(method)
        if telemetry is not None and task is not None:
            check_metrics(telemetry, task)
        if prepared.factorization.horizon > _MANY_STEPS:
            _log.info(
                "working out the noise of %s steps, which takes minutes for millions; the sensitivity is computed at "
                "every start and never read from a cache, since one that was changed would break the promise",
                f"{prepared.factorization.horizon:,}",
            )
        noise = calibrate_release(
            plan.budget_of(method),
            prepared.factorization,
            plan.clip_norm_of(method),
            dim,
            neighbours=plan.neighbours,
            accounting=plan.accounting_of(method),
            participation=plan.participation,
            clients_per_step=prepared.clients,
            telemetry=telemetry,
            trust=plan.trust,
            order=plan.order,
            window=plan.window,
        )
        rounds = plan.learning.rounds
        if plan.learning.unbounded:
            rounds = noise.mechanism.horizon // prepared.steps
        known = task is not None and TaskDetails.of(task).features_shape is not None
        return cls(
            plan=plan,
            method=method,
            dim=dim,
            rounds=rounds,
            local_steps=prepared.steps,
            clients_per_step=prepared.clients,
            learners=plan.learning.learners,
            mechanism=noise.mechanism,
            noise_std=noise.std,
            guarantee=replace(noise.guarantee, epochs=plan.epochs_per_person),
            grid=noise.grid,
            gamma=prepared.rule.gamma,
            admission=admission_of(task) if known and task is not None else None,
            telemetry=telemetry,
            class_weights=prepared.rule.weights,
        )

    @classmethod
    def promises(cls, plan: Plan, dim: int, stated: object) -> bool:
        """Whether a guarantee, as JSON holds it, is what this plan gives: worked out anew."""
        worked_out = cls.of(plan, dim).guarantee.as_dict()
        return bool(json.loads(json.dumps(worked_out)) == stated)

    @property
    def release_dim(self) -> int:
        """Numbers of a release: one for each parameter, and one for each metric of telemetry."""
        return self.dim + (0 if self.telemetry is None else len(self.telemetry.metrics))

    @property
    def wire_dim(self) -> int:
        """What bounds the size of messages, in numbers of eight bytes: a model, and what masks need beside it."""
        return self.dim if self.plan.trust is None else self.release_dim + _MASK_WORDS * self.learners

    @property
    def projection_radius(self) -> float | None:
        """The server moves a model that is longer back to this norm."""
        return self.plan.learning.projection_radius

    @property
    def model_norm_cap(self) -> float:
        """A learner refuses models with a larger norm."""
        return self.plan.learning.model_norm_cap

    @property
    def settings(self) -> dict[str, Any]:
        """As JSON holds them: kept in the ledger, compared at enrolment."""
        settings = self._of_plan() | {
            "d": self.dim,
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "mechanism": self.mechanism.name,
            "clip_norm": self.grid.clip_norm,
            "noise_std": self.noise_std,
            "grid": self.grid.step,
            "gamma": self.gamma,
            "guarantee": self.guarantee.as_dict(),
            "records": record_terms(self.plan),
            "noise_law": NOISE_LAW,
            "program": program_digest(self.mechanism.program),
        }
        return settings_digest(settings) | {_ADMITS: self._admits()}

    def _of_plan(self) -> dict[str, Any]:
        """Every key that the plan's tables mark as agreed, as a plan spells it."""
        plan = self.plan
        tables = {
            "learning": plan.learning,
            "privacy": plan.privacy,
            "federation": plan.federation,
            "telemetry": plan.telemetry,
            "methods": self.method,
        }
        return {
            f"{name}.{key}": value
            for name, table in tables.items()
            if table is not None
            for key, value in table.agreed_values().items()
        }

    def _admits(self) -> dict[str, Any] | None:
        """Shape and labels of records; not in the digest, since a server may not know them."""
        if self.admission is None:
            return None
        labels = self.admission.labels
        return {
            "features_shape": list(self.admission.shape),
            "labels": None if labels is None else [float(label) for label in labels],
        }


def program_digest(program: NoiseProgram) -> str:
    """SHA-256 of the numbers that a noise program multiplies with, to the last bit."""
    content = hashlib.sha256()
    sizes = (program.horizon, program.block_length, program.state_size, len(program.matrices))
    content.update(np.array(sizes, "<i8").tobytes())
    content.update(np.asarray(program.matrix_of_block, "<i8").tobytes())
    scale = np.zeros(0) if program.row_scale is None else program.row_scale
    for numbers in (scale, *program.matrices):
        content.update(np.array([numbers.ndim, *numbers.shape], "<i8").tobytes())
        kept = numbers.dtype.newbyteorder("<")
        content.update(kept.str.encode() + numbers.astype(kept).tobytes())
    return content.hexdigest()


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same on both sides; none exactly if the digests are equal.

    What records look like is compared where both sides know it. The digest itself is listed only if
    nothing else explains why it differs.
    """
    keys = dict.fromkeys([*ours, *theirs])
    found = {k: (ours.get(k), theirs.get(k)) for k in keys if ours.get(k) != theirs.get(k)}
    if ours.get(_ADMITS) is None or theirs.get(_ADMITS) is None:
        found.pop(_ADMITS, None)
    if len(found) > 1:
        found.pop("digest", None)
    return found


def check_settings(ours: dict[str, Any], stored: dict[str, Any]) -> None:
    """Refuse to go on with an epoch under other settings than it was begun with."""
    changed = causes(differences(ours, stored))
    if changed:
        then = {key: before for key, (_, before) in changed.items()}
        raise InputError(
            "plan",
            {key: now for key, (now, _) in changed.items()},
            f"what this store was begun with: {then}",
            "use the same plan and version; `veilstream ledger epoch` begins an epoch with another, for new "
            "clients (--abandon gives up one that is not over)",
        )


def both_sides(unlike: dict[str, tuple[Any, Any]]) -> str:
    """`differences` between a server's settings and a learner's, in words.

    Of tables only the fields that differ are named. Values are the other side's word: they are
    escaped and cut.
    """
    told = causes(unlike)
    lines = [
        f"{shown(k, _LONGEST)}: server {shown(repr(s), _LONGEST)}, learner {shown(repr(o), _LONGEST)}"
        for k, (s, o) in told.items()
    ]
    more = f", and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
    return ", ".join(lines[:_MOST_NAMED]) + more


_MOST_NAMED, _LONGEST = 12, 83


def causes(unlike: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """What differs, without what only follows from it: numbers that were worked out from plans that differ."""
    if any("." in name for name in unlike):  # keys of the plan
        unlike = {name: pair for name, pair in unlike.items() if name not in _WORKED_OUT}
    return dict(_leaves(unlike))


_WORKED_OUT = frozenset(
    ["rounds", "local_steps", "mechanism", "clip_norm", "noise_std", "grid", "gamma", "guarantee", "program"]
)


def _leaves(unlike: dict[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, (ours, theirs) in unlike.items():
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for field in dict.fromkeys([*ours, *theirs]):
                if ours.get(field) != theirs.get(field):
                    yield f"{name}.{field}", (ours.get(field), theirs.get(field))
        else:
            yield name, (ours, theirs)


def settings_digest(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON holds them, with the ``digest`` that stands for all of them."""
    as_stored: dict[str, Any] = json.loads(json.dumps(settings))
    text = json.dumps(as_stored, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return as_stored | {"digest": hashlib.sha256(text.encode()).hexdigest()}
