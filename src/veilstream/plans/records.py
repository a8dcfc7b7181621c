"""A plan's `[data]` of kind "table": keys in TOML, and the record schema that they mean."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from veilstream.errors import InputError
from veilstream.learning.class_weights import ClassWeights
from veilstream.learning.task_kind import Target
from veilstream.learning.task_registry import task_kind
from veilstream.learning.tasks import admission_of
from veilstream.plans.own_code import code_hash, load_function
from veilstream.plans.schema import PlanTable, value
from veilstream.records.own_records import AS_IT_IS, OwnRecords
from veilstream.records.schema import Categorical, Feature, Hashed, Label, Numeric, RecordSchema

if TYPE_CHECKING:
    from veilstream.plans.plan import Plan


_SCALES = 3.0  # a number given by center and scale has a range of this many scales to either side


class FeaturePlan(PlanTable):
    """One column that predicts, with its public constants."""

    name: str = value(empty=False, hint="the column's name in the header")
    kind: Literal["numeric", "categorical", "hashed"] = "numeric"
    """A number, one of known texts, or any text."""
    low: float | None = value(default=None, hint="the range that anybody knows; low = 0.0")
    """Lower end of the range that anybody knows; it becomes -1."""
    high: float | None = value(default=None, hint="the range that anybody knows; high = 100.0")
    """Upper end of the range that anybody knows; it becomes 1."""
    center: float | None = value(default=None, hint="with scale, instead of low and high")
    """Middle of the range, with `scale`, instead of `low` and `high`."""
    scale: float | None = value(default=None, gt=0, hint="with center, instead of low and high")
    """A third of the way from the middle to either end."""
    vocabulary: tuple[str, ...] | None = value(
        default=None, empty=False, hint='texts that anybody knows: ["north", "south"]'
    )
    """Texts that anybody knows; each is a place of its own."""
    width: int | None = value(default=None, ge=1, le=1 << 20, hint="places to hash to; try 64")
    """How many places texts are hashed to."""
    outside: Literal["clamp", "refuse"] = "clamp"
    """What happens to a number outside its range."""
    unknown: Literal["other", "zero", "refuse"] = "other"
    """What happens to a text outside the vocabulary: a place for all such texts, zeros, or the
    record is refused."""
    missing: Literal["refuse", "zero", "flag"] = "refuse"
    """What happens to an empty cell: the record is refused, the feature is zero, or zero with a
    place of its own that says so."""

    def check(self) -> None:
        """Each kind has its constants, and only those."""
        wanted = {"numeric": set(), "categorical": {"vocabulary"}, "hashed": {"width"}}[self.kind]
        for key in sorted(wanted):
            if getattr(self, key) is None:
                raise InputError(key, None, f"given for kind = {self.kind!r}", f"add {key} to {self.name}")
        allowed = wanted | ({"low", "high", "center", "scale"} if self.kind == "numeric" else set())
        for key in ("low", "high", "center", "scale", "vocabulary", "width"):
            if key not in allowed and getattr(self, key) is not None:
                raise InputError(key, getattr(self, key), f"nothing for kind = {self.kind!r}", "remove it")
        if self.kind == "numeric":
            self._check_range()
        try:
            self.feature()
        except InputError as error:
            raise InputError(error.field.rpartition(".")[2], error.value, error.rule, error.way_out) from None

    def _check_range(self) -> None:
        by_range = (self.low is not None, self.high is not None)
        by_scale = (self.center is not None, self.scale is not None)
        if sorted([by_range, by_scale]) != [(False, False), (True, True)]:
            raise InputError(
                "low",
                self.low,
                f"low and high, or center and scale, for {self.name}",
                "constants that anybody knows, never ones that were read off private records",
            )
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise InputError(
                "low",
                self.low,
                f"less than high = {self.high:g} for {self.name}",
                "swap them; both are what anybody knows",
            )

    def feature(self) -> Feature:
        """The feature that encodes records."""
        if self.kind == "categorical":
            assert self.vocabulary is not None
            return Categorical(self.name, self.vocabulary, self.unknown, self.missing)
        if self.kind == "hashed":
            assert self.width is not None
            return Hashed(self.name, self.width, self.missing)
        low, high = self.low, self.high
        if self.center is not None and self.scale is not None:
            low, high = self.center - _SCALES * self.scale, self.center + _SCALES * self.scale
        assert low is not None
        assert high is not None
        return Numeric(self.name, low, high, self.outside, self.missing)


def schema_of(plan: Plan) -> RecordSchema:
    """The schema of this plan's records; an `InputError` for keys that do not fit each other."""
    data = plan.data
    if data.encode is not None:
        return _own_records(plan, data.encode)
    if data.label is None or data.client is None:
        missing = "label" if data.label is None else "client"
        raise InputError(
            f"data.{missing}",
            None,
            'a column, since data.kind is "table"',
            f'{missing} = "..."; `veilstream data check FILE` proposes one',
        )
    return RecordSchema(
        client=data.client,
        label=_label(plan, data.label),
        features=tuple(feature.feature() for feature in data.features),
        interactions=tuple(_pair(text) for text in data.interactions),
        bias=data.bias,
        norm=data.feature_norm,
        fit=data.fit,
        learner=data.learner,
        time=data.time,
    )


_OF_COLUMNS = ("label_range", "features", "interactions")  # keys of [data] that say what `encode` says in code


def check_own_records(plan: Plan) -> None:
    """Refuse keys that do not go with `data.encode`, without running that code."""
    data = plan.data
    for key in _OF_COLUMNS:
        if getattr(data, key):
            raise InputError(
                f"data.{key}", getattr(data, key), "nothing beside data.encode, which does it", "remove one of the two"
            )
    if data.client is None:
        raise InputError(
            "data.client",
            None,
            "a column that says who, also with data.encode",
            'client = "person", or "#row" if nobody returns',
        )
    if plan.learning.task == "custom":
        raise InputError(
            "learning.task",
            "custom",
            "a task by name, since data.encode must know its features",
            'task = "my_model:make_task"',
        )


def _own_records(plan: Plan, name: str) -> OwnRecords:
    from veilstream.plans.tasks import task_of

    check_own_records(plan)
    data, admission = plan.data, admission_of(task_of(plan))
    assert data.client is not None
    label = AS_IT_IS
    if data.labels is not None:
        signed = admission.labels is not None and set(admission.labels) == {-1.0, 1.0}
        label = Label(data.label or AS_IT_IS.name, data.labels, signed=signed)
    elif data.label is not None:
        label = dataclasses.replace(AS_IT_IS, name=data.label)
    return OwnRecords(
        client=data.client,
        label=label,
        norm=data.feature_norm,
        learner=data.learner,
        time=data.time,
        function=load_function("data.encode", name),
        shape=admission.shape,
        targets=admission.labels,
    )


def class_weights_of(plan: Plan) -> ClassWeights | None:
    """What a client's gradient counts, by its label; None for all alike."""
    weights, shares = plan.learning.class_weights, plan.data.label_shares
    kind = task_kind(plan.learning.task)
    signed = kind is not None and kind.target is Target.SIGN
    if shares is not None:
        return ClassWeights.of_shares(shares, signed=signed)
    return None if weights is None else ClassWeights(weights, signed)


def record_terms(plan: Plan) -> dict[str, Any] | None:
    """The part of the terms about records: columns and constants, code by its hash."""
    terms: dict[str, Any] = {}
    if plan.data.kind == "table" and plan.data.encode is None:
        schema = dataclasses.asdict(schema_of(plan))
        for own in ("learner", "time"):  # each learner may keep its records in its own way
            del schema[own]
        terms |= json.loads(json.dumps(schema))
    elif plan.data.encode is not None:
        terms |= {"client": plan.data.client, "norm": plan.data.feature_norm}
    if plan.data.label_shares is not None:
        terms["label_shares"] = list(plan.data.label_shares)
    for key, name in (("learning.task", plan.learning.task), ("data.encode", plan.data.encode)):
        if name is not None and ":" in name:
            terms[key] = {"name": name, "sha256": code_hash(key, name)}
    return terms or None


def label_names(plan: Plan, targets: Sequence[float]) -> tuple[str, ...] | None:
    """What the plan calls a task's labels, in the order of their targets; None if it names others or none."""
    named = plan.data.labels if plan.data.kind == "table" else None
    return named if named is not None and len(named) == len(targets) else None


def target_range(plan: Plan) -> tuple[float, float] | None:
    """The public range of a table's label that is a number, on the scale of targets; predictions are cut to it."""
    if plan.data.kind != "table" or plan.data.label_range is None:
        return None
    return schema_of(plan).label.target_range


def label_unit(plan: Plan) -> float:
    """The length of 1 on the scale of the task's targets, in the label's own units."""
    if plan.data.kind != "table" or plan.data.encode is not None:
        return 1.0
    return schema_of(plan).label.unit


def _label(plan: Plan, name: str) -> Label:
    data, task = plan.data, plan.learning.task
    kind = task_kind(task)
    target = None if kind is None else kind.target
    known, classifies = target is not None, target is not None and target.classifies
    if data.labels is not None and data.label_range is not None:
        raise InputError("data.labels", data.labels, "either labels or label_range", "remove one")
    if known and classifies and data.labels is None:
        raise InputError("data.labels", None, f"the label's texts, since {task} classifies", 'labels = ["no", "yes"]')
    if data.labels is not None:
        if known and not classifies:
            raise InputError(
                "data.labels", data.labels, f"label_range, since {task} predicts a number", "label_range = [0.0, 100.0]"
            )
        return Label(name, data.labels, signed=target is Target.SIGN)
    if data.label_range is None or len(data.label_range) != 2:
        raise InputError(
            "data.label_range", data.label_range, "two numbers, the label's public range", "label_range = [0.0, 100.0]"
        )
    low, high = data.label_range
    counts = target is Target.COUNT
    if counts and low < 0:
        raise InputError("data.label_range", data.label_range, "from 0 on: counts", "[0.0, 50.0]")
    return Label(name, None, low=low, high=high, counts=counts)


def _pair(text: str) -> tuple[str, str]:
    left, star, right = text.partition("*")
    if not star or "*" in right:
        raise InputError("data.interactions", text, '"one * other"', '["hour * weekday"]')
    return left.strip(), right.strip()
