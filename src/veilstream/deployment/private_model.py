"""`PrivateModel`: dictionaries in, predictions out, as river has it, around a learner.

    model = PrivateModel(learner)                 deployed: a `veilstream.Learner` with its ledger
    model = PrivateModel.simulated(plan)          in this process, to try things out
    model.learn_one({"hour": 8.5, "channel": "phone"}, "yes", client="ann")
    model.predict_one({"hour": 8.5, "channel": "phone"})

It keeps only counts; the learner holds the model and the promise. river itself is not needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.learner import Learner
from veilstream.deployment.simulated_learner import SimulatedLearner
from veilstream.errors import InputError
from veilstream.learning.tasks import Logistic, Sample, Task
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.records.admission import Answer
from veilstream.records.schema import EACH_ROW, RecordSchema, Refusal

Features = NDArray[np.float32]


class PrivateModel:
    """A model that learns from one dictionary at a time, as river's do, through a learner.

    Around a `Learner` it is as private as that learner: `learner.guarantee` for every client's
    record, against the server and everyone who reads what is sent (unit: one record; replace-one
    neighbours; the plan's participation, horizon and accounting). Rounds are begun and finished as
    for any learner, by its daemon or by you; predictions come from the newest model that the server
    has sent. Around a simulation (`simulated`) it **protects no one**: the noise comes from a seed.

    A dictionary becomes features by the plan's columns or `data.encode` (kind = "table"), or by the
    task itself (`vs.models.DictLogistic`, `DictRegression`).

    Args:
        learner: a `Learner`, open, or a simulated one.

    Raises:
        InputError: where neither plan nor task says what a dictionary means.

    """

    def __init__(self, learner: Learner | SimulatedLearner) -> None:
        self._learner = learner
        self._schema: RecordSchema | None = None
        if learner.plan.data.kind == "table":
            self._schema = schema_of(learner.plan)
        elif not (hasattr(learner.task, "encode_one") and hasattr(learner.task, "encode_targets")):
            raise InputError(
                "learner",
                type(learner.task).__name__,
                'a plan whose [data] has kind = "table", or a task that encodes dictionaries',
                "name the columns in the plan, or take vs.models.DictLogistic",
            )
        self.refused: Counter[str] = Counter()
        """Records that could not be used, by reason: for this machine only."""

    @classmethod
    def simulated(cls, plan: Plan, task: Task | None = None, seed: int = 0) -> PrivateModel:
        """A simulation of one learner and its server in this process: **protects no one**.

        Args:
            plan: with one learner and one private method.
            task: what is learned; the plan's where it is left out.
            seed: of the noise and of the start; the same seed gives the same model.

        Returns:
            A model that can be pickled and copied, unlike one around a deployed learner.

        Raises:
            InputError: for another plan.

        """
        return cls(SimulatedLearner(plan, task, seed))

    @property
    def learner(self) -> Learner | SimulatedLearner:
        """The learner behind it; `learner.guarantee` is the promise."""
        return self._learner

    @property
    def protects(self) -> bool:
        """Whether anyone is protected: not in a simulation."""
        return not isinstance(self._learner, SimulatedLearner)

    def learn_one(self, x: Mapping[Any, object], y: object, client: str | bytes | None = None) -> Answer:
        """Learn from one client's record; what cannot be used is refused and counted, and takes its step.

        Args:
            x: the record's cells by name; it is not changed or kept.
            y: its label, in the table's own words.
            client: who; the same whenever the same person comes. A deployed learner must be told;
                a simulation takes None for someone who never returns.

        Returns:
            Taken or refused. Who has come too often already is taken and not used.

        Raises:
            InputError: at a deployed learner for no client, or where no round is open.
            PrivacyError: past the horizon.

        """
        if client is None and self.protects:
            raise InputError(
                "client",
                None,
                "who this record is of, since nobody may be used too often",
                "learn_one(x, y, client=...)",
            )
        why = "not admitted by the task"
        sample: Sample | Refusal | None
        try:
            sample = self._sample(x, y)
        except Exception as error:  # of the task's own encoder: an `InputError` names a key and a type, no value
            sample, why = None, error.rule if isinstance(error, InputError) else "not readable"
        if isinstance(sample, Refusal):
            sample, why = None, str(sample)
        answer = self._observe(client, sample)  # with a zero gradient where there is no sample
        if answer is Answer.REFUSED:
            self.refused[why] += 1
        return answer

    def predict_one(self, x: Mapping[Any, object]) -> Any:
        """What the newest released model says of a record, in the label's own words.

        Args:
            x: its cells by name.

        Returns:
            A label or a number; None for a record that cannot be read, or before the first model.

        """
        model, features = self._learner.model, self._features(x)
        if model is None or features is None:
            return None
        said = np.asarray(self._learner.task.predict(model, features[None]))[0]
        if self._schema is not None:
            return self._schema.label.in_units(float(said))
        return bool(said > 0) if self._signed else float(said)

    def predict_proba_one(self, x: Mapping[Any, object]) -> dict[Any, float]:
        """Probability of each of two labels, by logistic regression.

        Args:
            x: the record's cells by name.

        Returns:
            By label; empty for a record that cannot be read, or before the first model.

        Raises:
            NotImplementedError: for a task that is no logistic regression.

        """
        if not isinstance(self._learner.task, Logistic):
            raise NotImplementedError("probabilities are there for logistic regression only")
        model, features = self._learner.model, self._features(x)
        if model is None or features is None:
            return {}
        score = float(features.astype(np.float64) @ model)
        p = 0.5 * (1.0 + math.tanh(0.5 * score))
        if self._schema is None:
            return {False: 1.0 - p, True: p}
        return {self._schema.label.in_units(v): q for v, q in ((-1.0, 1.0 - p), (1.0, p))}

    @property
    def _signed(self) -> bool:
        return bool(self._learner.task.classifies)

    def _sample(self, x: Mapping[Any, object], y: object) -> Sample | Refusal:
        schema = self._schema
        if schema is None:
            task: Any = self._learner.task
            return Sample(task.encode_one(x), task.encode_targets([y])[0])
        row = {**x, schema.label.name: y}
        if schema.client != EACH_ROW:
            row[schema.client] = "x"  # who it is goes to the learner alone
        made = schema.encode(row, row_name="x")
        return made if isinstance(made, Refusal) else made.sample

    def _features(self, x: Mapping[Any, object]) -> Features | None:
        if self._schema is None:
            task: Any = self._learner.task
            try:
                encoded: Features = task.encode_one(x)
            except InputError:
                return None
            return encoded
        found = self._schema.features_of(x)
        return None if isinstance(found, Refusal) else found

    def _observe(self, client: str | bytes | None, sample: Sample | None) -> Answer:
        if isinstance(self._learner, SimulatedLearner):
            return self._learner.observe(client, sample)
        assert client is not None
        return self._learner.observe(client, cast(Sample, sample))

    def __repr__(self) -> str:
        learner = self._learner
        if isinstance(learner, SimulatedLearner):
            stands = f"{learner.steps} of {learner.horizon} steps"
            return f"PrivateModel(simulated, protects no one: {stands})"
        return f"PrivateModel(deployed, round {learner.round}: {learner.guarantee})"
