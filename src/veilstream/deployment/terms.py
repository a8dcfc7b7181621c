"""The terms of a deployment: what the promise and the numbers rest on, from the plan alone.

Server and learner each work them out for themselves; what they get must be the same. So that
nothing is forgotten, `Terms.settings` carries one digest over all of it: every setting that decides
the model or the promise, the numbers of the noise program that runs, and the law of what is sent.
The settings themselves are there to say in words what differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from veilstream.errors import InputError
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

NOISE_LAW = "rounded Gaussian prefix sums, 2"
"""Version of the law of what is sent. It changes with anything that makes the same seeds give other
numbers, or the same noise another law; an epoch is never continued under another one."""


SAME_TERMS = (
    "use one plan and one version on both sides; where only `program` differs, NumPy or SciPy made "
    "other numbers of one plan: install the same versions"
)


@dataclass(frozen=True)
class Terms:
    """One private method, one client a step."""

    method: MethodPlan
    dim: int
    """Parameters of the model; a release has `release_dim` numbers."""
    rounds: int
    local_steps: int
    mechanism: Factorization
    """In blocks of one step: the mechanism whose sensitivity counts for a learner that releases
    step by step."""
    noise_std: float
    guarantee: Guarantee
    grid: Grid
    projection_radius: float | None
    model_norm_cap: float
    task: str = "logistic"
    ridge: float = 0.0
    learners: int = 1
    records: dict[str, Any] | None = None
    """What a record of a table is, and the hashes of code that the plan names."""
    epochs: int = 1
    """How many the server may lead learners through, one after the other."""
    start_sha256: str | None = None
    """Of the model that the run starts from, where the plan says it."""
    gamma: float | None = None
    """Gradients become g / (|g| + gamma); None where they are clipped as they are."""
    admission: Admission | None = None
    """Which records the task admits; None where only the plan is known, not the task itself."""
    telemetry: Telemetry | None = None
    """What clients contribute beside their gradients; its coordinates follow the model's."""

    @property
    def release_dim(self) -> int:
        """Numbers of a release: one for each parameter, and one for each metric of telemetry."""
        return self.dim + (0 if self.telemetry is None else len(self.telemetry.metrics))

    @classmethod
    def of(cls, plan: Plan, dim: int, task: Task | None = None) -> Terms:
        """What this plan means for a model with so many parameters, and for this task."""
        prepared = prepare(plan, _deployable(plan))
        method = prepared.plan
        assert prepared.factorization is not None
        telemetry = plan.telemetry_of(method)
        if telemetry is not None and task is not None:
            check_metrics(telemetry, task)
        noise = calibrate_release(
            plan.budget_of(method),
            prepared.factorization,
            plan.clip_norm_of(method),
            dim,
            neighbours=plan.neighbours,
            accounting=plan.accounting_of(method),
            participation=plan.participation,
            telemetry=telemetry,
        )
        rounds = plan.learning.rounds
        if plan.learning.unbounded:
            rounds = noise.mechanism.horizon // prepared.steps
        return cls(
            method,
            dim,
            rounds,
            prepared.steps,
            noise.mechanism,
            noise.std,
            noise.guarantee,
            noise.grid,
            plan.learning.projection_radius,
            plan.learning.model_norm_cap,
            plan.learning.task,
            plan.learning.ridge,
            plan.learning.learners,
            record_terms(plan),
            plan.federation.epochs,
            plan.learning.start_sha256,
            prepared.rule.gamma,
            _admission(task),
            telemetry,
        )

    @classmethod
    def promises(cls, plan: Plan, dim: int, stated: object) -> bool:
        """Whether a guarantee, as JSON holds it, is what this plan gives: worked out anew."""
        worked_out = cls.of(plan, dim).guarantee.as_dict()
        return bool(json.loads(json.dumps(worked_out)) == stated)

    @property
    def settings(self) -> dict[str, Any]:
        """As JSON holds them: kept in the ledger, compared at enrolment."""
        settings = {
            "d": self.dim,
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "mechanism": self.mechanism.name,
            "clip_norm": self.grid.clip_norm,
            "noise_std": self.noise_std,
            "grid": self.grid.step,
            "guarantee": self.guarantee.as_dict(),
            "objective": self.method.objective,
            "step_size": self.method.step_size,
            "server_step_size": self.method.server_step_size,
            "step_decay": self.method.step_decay,
            "averaging": self.method.averaging,
            "projection_radius": self.projection_radius,
            "model_norm_cap": self.model_norm_cap,
            "task": self.task,
            "ridge": self.ridge,
            "learners": self.learners,
            "records": self.records,
            "epochs": self.epochs,
            "start_sha256": self.start_sha256,
            "noise_law": NOISE_LAW,
            "program": program_digest(self.mechanism.program),
        }
        settings |= _memory(self.method)
        if self.gamma is not None:  # left out elsewhere: stores begun before it stay what they were
            settings["gamma"] = self.gamma
        as_stored: dict[str, Any] = json.loads(json.dumps(settings))
        as_stored["digest"] = _digest(as_stored)
        as_stored[_ADMITS] = self._admits()
        return as_stored

    def _admits(self) -> dict[str, Any] | None:
        """Shape and labels of records; not in the digest, since a server may not know them."""
        if self.admission is None:
            return None
        labels = self.admission.labels
        return {
            "features_shape": list(self.admission.shape),
            "labels": None if labels is None else [float(label) for label in labels],
        }


_ADMITS = "admits"


def _memory(method: MethodPlan) -> dict[str, Any]:
    """What the server remembers beside x, and what noise is made for; nothing where it is nothing.

    A store that was begun before these settings existed stays what it was.
    """
    kept = ("newest_weight", "momentum", "forgetting", "interior_weight")
    defaults = {field.name: field.default for field in dataclasses.fields(MethodPlan)}
    told = {name: getattr(method, name) for name in kept}
    return {name: given for name, given in told.items() if given != defaults[name]}


def _admission(task: Task | None) -> Admission | None:
    if task is None or TaskDetails.of(task).features_shape is None:
        return None
    return admission_of(task)


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
    changed = differences(ours, stored)
    if "noise_law" in changed:
        raise InputError(
            "store",
            f"an epoch under noise law {stored.get('noise_law', '1')!r}",
            f"one under {NOISE_LAW!r}, which this version runs",
            "`veilstream ledger epoch --abandon` gives that epoch up and begins one with new "
            "clients; or go on with the version that began it",
        )
    if changed:
        changed = dict(_leaves(changed))
        then = {key: before for key, (_, before) in changed.items()}
        raise InputError(
            "plan",
            {key: now for key, (now, _) in changed.items()},
            f"what this store was begun with: {then}",
            "use the same plan; after the epoch, `veilstream ledger epoch` begins one with another plan",
        )


def both_sides(unlike: dict[str, tuple[Any, Any]]) -> str:
    """`differences` between a server's settings and a learner's, in words.

    Of tables only the fields that differ are named, and none twice. Values are the other side's
    word: they are escaped and cut.
    """
    found = dict(_leaves(unlike))
    for name in [name for name in found if name.rpartition(".")[2] in unlike and "." in name]:
        del found[name]
    told = {k: pair for k, pair in found.items() if ".arithmetic_" not in k} or found
    lines = [f"{_cut(k)}: server {_cut(repr(s))}, learner {_cut(repr(o))}" for k, (s, o) in told.items()]
    more = f", and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
    return ", ".join(lines[:_MOST_NAMED]) + more


_MOST_NAMED, _LONGEST_VALUE = 12, 80


def _leaves(unlike: dict[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, (ours, theirs) in unlike.items():
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for field in dict.fromkeys([*ours, *theirs]):
                if ours.get(field) != theirs.get(field):
                    yield f"{name}.{field}", (ours.get(field), theirs.get(field))
        else:
            yield name, (ours, theirs)


def _cut(text: str) -> str:
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= _LONGEST_VALUE else shown[:_LONGEST_VALUE] + "..."


def _digest(settings: dict[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _deployable(plan: Plan) -> MethodPlan:
    """The plan's one private method."""
    private = [m for m in plan.methods if m.method.private]
    if len(private) != 1:
        raise InputError(
            "methods",
            [m.name for m in plan.methods],
            "exactly one private method",
            "a learner runs one; keep comparisons for simulation",
        )
    if plan.learning.unbounded and private[0].forgetting == 1.0:
        raise InputError(
            "learning.unbounded",
            True,
            "a method that forgets, where learners are deployed",
            "add forgetting = 0.999; or unbounded = false, with rounds that you will not reach",
        )
    if plan.learning.unbounded and private[0].mechanism_name == "independent":
        raise InputError(
            "learning.unbounded",
            True,
            "stationary noise, where learners are deployed: independent noise is for so many steps",
            'kind = "ours" without a mechanism; or unbounded = false, with rounds that you will not reach',
        )
    _, clients = plan.steps_and_clients(private[0])
    if clients != 1 or plan.learning.clients_per_step != 1:
        raise InputError(
            "clients_per_step",
            max(clients, plan.learning.clients_per_step),
            "1",
            "a deployed learner takes one client a step",
        )
    return private[0]
