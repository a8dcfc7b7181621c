"""`veilstream.load`: a released model that predicts from records as they are.

    model = vs.load("runs/air")            a run's folder, a model's file, or a server's URL
    model.predict([{"age": 41, "ward": "north"}])

The plan in the file says how records are encoded, so predictions are the same wherever the model is. Linear models
need NumPy alone. A released model is public: predicting with it costs nobody's privacy.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.learning.linear_tasks import Huber, LeastSquares, Logistic, Poisson, Softmax
from veilstream.learning.quality import probabilities
from veilstream.learning.tasks import Task, TaskDetails
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.plans.tasks import task_of
from veilstream.privacy.guarantee import Guarantee
from veilstream.records.column_rules import rule_of
from veilstream.records.own_records import OwnRecords
from veilstream.records.schema import REASONS, RecordSchema, Refusal
from veilstream.runs.coefficients import coefficients_of, coefficients_per_unit
from veilstream.runs.model_rows import EncodedRows, encode
from veilstream.runs.released_model import ReleasedModel, model_sha256

if TYPE_CHECKING:
    from veilstream.runs.sklearn_model import SklearnModel

_LINEAR = (Logistic, LeastSquares, Huber, Poisson, Softmax)
_TOGETHER = 4096  # rows that a task predicts at once
_SHOWN = 5  # rows that an error names


@dataclass(frozen=True)
class Predictions:
    """What a model says of rows, in their order; a row that cannot be used has None (a number: nan)."""

    values: NDArray[Any]
    """Labels as texts, or numbers in the label's own units and range."""
    probabilities: NDArray[np.float64] | None
    """Of each label, in the order of `Model.classes`; None where the task has none."""
    refused: dict[int, Refusal]
    """Rows, counted from 0, that cannot be used, and why."""
    clamped: Counter[str]
    """Numbers outside the plan's range and texts outside its vocabulary, by column: they count as the plan says."""
    rows: EncodedRows
    targets: NDArray[np.float64]
    """Of the usable rows: what the task says, on its own scale."""
    logits: NDArray[np.float64] | None
    """Of the usable rows: what labels are decided by."""

    def __len__(self) -> int:
        return len(self.values)


class Model:
    """A released model, to predict with; `veilstream.load` makes one.

    Args:
        released: parameters, plan and guarantee.
        source: where it comes from, for errors.
        task: what it learned, where the plan does not say (`learning.task = "custom"`).
        own_code: run the functions that the plan names ("my_model:make_task"); a model's file may name any.
        method: the method of a simulation that it is of.

    """

    def __init__(
        self,
        released: ReleasedModel,
        *,
        source: str = "model",
        task: Task | None = None,
        own_code: bool = False,
        method: str | None = None,
    ) -> None:
        self.released, self.source, self.method = released, source, method
        self.plan: Plan = _plan_of(released, source)
        self.guarantee: Guarantee | None = _guarantee_of(released, source)
        self._task, self._own_code = task, own_code
        if self.needs_code is None:
            self._check_size()

    @property
    def parameters(self) -> NDArray[np.float32]:
        """The model as numbers."""
        return self.released.model

    @property
    def round(self) -> int:
        """After how many rounds it was published."""
        return self.released.round

    @property
    def rounds(self) -> int:
        """How many rounds the plan has."""
        return self.released.rounds

    @property
    def run(self) -> str:
        """The run that it is of."""
        return self.released.run

    @property
    def simulated(self) -> bool:
        """Whether it is a simulation's: then seeds made its noise, and its guarantee protected no one."""
        return self.released.simulated

    @cached_property
    def sha256(self) -> str:
        """Hash of its parameters, by which learners, servers and files name it."""
        return model_sha256(self.parameters)

    @property
    def needs_code(self) -> str | None:
        """What must be given before it predicts: the function of one's own that its plan names; None where nothing is.

        A model's file may come from anyone, so a function that it names runs only for a plan that was given.
        """
        named = self.plan.learning.task
        if self._task is None and (named == "custom" or (":" in named and not self._own_code)):
            return named
        return None if self._own_code else self.plan.data.encode

    @cached_property
    def task(self) -> Task:
        """What it learned."""
        if self._task is not None:
            return self._task
        name = self.plan.learning.task
        if name == "custom":
            raise InputError("task", None, "the task, since the plan's is custom", "veilstream.load(..., task=task)")
        if ":" in name:
            self._check_trust("learning.task", name)
        return task_of(self.plan)

    def _check_trust(self, key: str, name: str) -> None:
        if not self._own_code:
            raise InputError(
                key,
                name,
                "a plan that you trust, since this model runs a function that it names",
                'give that plan: veilstream.load(..., plan="plan.toml"), or --plan plan.toml',
            )

    @cached_property
    def schema(self) -> RecordSchema | None:
        """How records are encoded; None where the plan names no columns."""
        if self.plan.data.kind != "table":
            return None
        if self.plan.data.encode is not None:
            self._check_trust("data.encode", self.plan.data.encode)
        return schema_of(self.plan)

    def _check_size(self) -> None:
        if len(self.parameters) != self.task.dim:
            rule = f"a model of {self.task.dim} parameters, as its plan has (this has {len(self.parameters)})"
            raise InputError("model", self.source, rule, "its file is damaged: fetch or export it again")

    @property
    def facts(self) -> dict[str, str]:
        """What it is, as texts: for formats that keep such beside the numbers."""
        promise = self.guarantee
        said = "none: this method protects no one" if promise is None else str(promise)
        return {
            "format": "veilstream model",
            "name": self.plan.name,
            "run": self.run,
            "round": str(self.round),
            "rounds": str(self.rounds),
            "sha256": self.sha256,
            "task": self.plan.learning.task,
            "promise": f"a simulation, which protects no one; deployed: {said}" if self.simulated else said,
            "plan": self.released.plan_toml,
        }

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one encoded record; None where nobody says."""
        return TaskDetails.of(self.task).features_shape

    @property
    def linear(self) -> bool:
        """Whether it is linear in its features, so that its parameters have names."""
        return type(self.task) in _LINEAR

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Labels that it tells apart, in order; None for one that predicts numbers."""
        if not self.task.classifies:
            return None
        if self.plan.data.labels is not None:
            return self.plan.data.labels
        labels = TaskDetails.of(self.task).labels
        return None if labels is None else tuple(f"{label:g}" for label in labels)

    @cached_property
    def feature_names(self) -> tuple[str, ...] | None:
        """What each number of an encoded record is called; None where the plan names no columns."""
        if self.schema is None or isinstance(self.schema, OwnRecords):
            return None
        return self.schema.feature_names

    @property
    def coefficients(self) -> dict[str, Any]:
        """Parameters by name, in the encoder's units (a number is from -1 to 1 over its range); linear models only.

        For more than two labels: by label, then by name.
        """
        return coefficients_of(self)

    @property
    def coefficients_per_unit(self) -> dict[str, Any] | None:
        """The same in the columns' own units, with an intercept: their sum is a log odds, a log rate, or a prediction.

        None where no such list exists: with interactions, hashed texts, or `fit = "clip"`.
        """
        return coefficients_per_unit(self)

    def predict(self, rows: Any, *, unusable: Literal["raise", "missing"] = "raise") -> Any:
        """What the model says of records.

        Args:
            rows: one record as a dictionary by column, a list of them, a data frame (pandas, Polars, Arrow), the
                path of a file (CSV, JSON lines, Parquet), or an array of encoded numbers. Neither label nor client is
                needed.
            unusable: what a row that cannot be used does: raise an error, or give None (for a number nan).

        Returns:
            Labels as texts, or numbers in the label's own units and range: an array, or one value for one record.

        Raises:
            InputError: for rows that cannot be used, by number, column and rule.

        """
        found = self._usable(rows, unusable)
        return found.values[0] if found.rows.single else found.values

    def predict_proba(self, rows: Any, *, unusable: Literal["raise", "missing"] = "raise") -> NDArray[np.float64]:
        """Probability of each label, in the order of `classes`: an array (rows, labels), or (labels,) for one record.

        Arguments and errors are those of `predict`; a row that cannot be used may give nan.
        """
        if self.classes is None:
            raise InputError(
                "predict_proba", self.plan.learning.task, "a task that tells labels apart", "predict() gives numbers"
            )
        found = self._usable(rows, unusable)
        if found.probabilities is None:
            name = type(self.task).__name__
            raise InputError("task", name, "a task with logits(params, features)", "predict() gives labels alone")
        return found.probabilities[0] if found.rows.single else found.probabilities

    def _usable(self, rows: Any, unusable: str) -> Predictions:
        if unusable not in ("raise", "missing"):
            raise InputError("unusable", unusable, '"raise" or "missing"', 'try "missing"')
        found = self.predictions(rows)
        if found.refused and unusable == "raise":
            raise self._refused(rows, found)
        return found

    def _refused(self, rows: Any, found: Predictions) -> InputError:
        first = [f"row {row + 1}: {self.why(why)}" for row, why in list(found.refused.items())[:_SHOWN]]
        more = f"; and {len(found.refused) - _SHOWN} more" if len(found.refused) > _SHOWN else ""
        where = str(rows) if isinstance(rows, str | Path) else f"{len(found.refused)} of {len(found)}"
        way_out = f'{"; ".join(first)}{more}; unusable="missing" leaves them empty'
        return InputError("rows", where, "records that the plan can encode", way_out)

    def why(self, refusal: Refusal) -> str:
        """Why a row cannot be used: column, reason and rule."""
        where = f"{refusal.column}: " if refusal.column else ""
        schema = self.schema
        rule = rule_of(schema, refusal.column) if schema is not None and refusal.column else None
        return f"{where}{REASONS[refusal.reason]}{'' if rule is None else f'; expected {rule}'}"

    def predictions(self, rows: Any) -> Predictions:
        """What the model says of records, beside what could not be used; raises for no single row."""
        self._check_size()
        encoded = encode(rows, self.schema, self.shape)
        targets, logits = self.decisions(encoded.features)
        values, shares = self._in_words(targets, logits)
        usable = encoded.usable
        if not usable.all():
            whole = np.full(len(usable), None if self.classes is not None else np.nan, values.dtype)
            whole[usable] = values
            values = whole
            if shares is not None:
                all_shares = np.full((len(usable), shares.shape[1]), np.nan)
                all_shares[usable] = shares
                shares = all_shares
        return Predictions(values, shares, encoded.refused, encoded.clamped, encoded, targets, logits)

    def decisions(self, features: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Of encoded records: targets on the task's scale, numbers within the label's range; and logits, if any."""
        task, details = self.task, TaskDetails.of(self.task)
        # In double precision where NumPy computes: the same to 1e-6 in every program that the model goes to.
        precise = np.float64 if self.linear else np.float32
        parameters = self.parameters.astype(precise)
        targets, logits = list[NDArray[np.float64]](), list[NDArray[np.float64]]()
        for first in range(0, len(features), _TOGETHER):
            some = features[first : first + _TOGETHER].astype(precise)
            with np.errstate(all="ignore"):
                targets.append(np.asarray(task.predict(parameters, some), np.float64))
                if details.logits is not None:
                    logits.append(np.asarray(details.logits(parameters, some), np.float64))
        if not targets:
            return np.zeros(0), None if details.logits is None else np.zeros((0, len(self.classes or ())))
        said = np.concatenate(targets)
        if not task.classifies and self.schema is not None:
            said = self.schema.label.within(said)
        return said, np.concatenate(logits) if logits else None

    def _in_words(
        self, targets: NDArray[np.float64], logits: NDArray[np.float64] | None
    ) -> tuple[NDArray[Any], NDArray[np.float64] | None]:
        classes = self.classes
        if classes is None:
            return targets if self.schema is None else self.schema.label.numbers_in_units(targets), None
        names = np.array([classes[place] for place in self.places(targets)], object)
        return names, None if logits is None else probabilities(logits)

    def places(self, targets: NDArray[np.float64]) -> NDArray[np.int64]:
        """Places of predicted targets in `classes`."""
        labels = TaskDetails.of(self.task).labels
        assert self.classes is not None
        if labels is None:
            labels = tuple(range(len(self.classes)))
        return np.array([labels.index(target) for target in targets.tolist()], np.int64)

    def as_sklearn(self) -> SklearnModel:
        """A fitted scikit-learn estimator, frozen, with the same predictions."""
        from veilstream.runs.sklearn_model import sklearn_model

        return sklearn_model(self)

    def renewed(self, parameters: NDArray[np.float32], round_: int, run: str) -> Model:
        """Another model of the same plan."""
        made = copy.copy(self)
        made.released = replace(self.released, model=parameters, round=round_, run=run)
        vars(made).pop("sha256", None)
        return made

    def save(self, path: Path | str) -> None:
        """Write it as a model's file, which `veilstream.load` reads."""
        self.released.save(path)

    def __repr__(self) -> str:
        what = f"{len(self.parameters)} parameters, round {self.round} of {self.rounds}"
        return f"Model({self.plan.name!r}, {self.plan.learning.task}: {what}; {self.sha256[:12]})"


def _plan_of(released: ReleasedModel, source: str) -> Plan:
    try:
        return released.plan
    except InputError as error:
        way_out = "its file is damaged, or of another version of veilstream: read it with that one"
        raise InputError("model", source, f"a plan that this version reads ({error})", way_out) from error


def _guarantee_of(released: ReleasedModel, source: str) -> Guarantee | None:
    if not released.guarantee:
        return None
    try:
        return Guarantee.from_dict(released.guarantee)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            "model", source, "a guarantee as veilstream states it", f"{error!r}; fetch it again"
        ) from error
