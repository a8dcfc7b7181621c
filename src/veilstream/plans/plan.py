"""`Plan`: everything a run needs, as validated TOML.

A plan that loads can run: names exist, shapes agree, budgets stand where noise is and nowhere else.
Errors name the key, its line, the value, the rule and the way out.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.methods import METHODS, Method, method_of
from veilstream.mechanisms import MECHANISMS, Workload
from veilstream.mechanisms.workload import published_blend
from veilstream.plans.records import FeaturePlan, check_own_records, schema_of
from veilstream.plans.schema import PlanError, PlanTable, value
from veilstream.privacy import ONCE, Budget, Participation

__all__ = [
    "DataPlan",
    "FederationPlan",
    "LearningPlan",
    "MethodPlan",
    "Plan",
    "PlanError",
    "PrivacyPlan",
    "RunPlan",
    "parse_override",
]


_DATA_OF_TASK = {
    "logistic": ("synthetic", "table"), "least_squares": ("synthetic", "table"),
    "softmax": ("table",), "huber": ("table",), "poisson": ("table",),
    "ripple": ("ripple",), "cnn": ("mnist",), "edge_features": ("mnist",),
    "random_features": ("mnist",),
}  # fmt: skip


_OF_TABLES = (
    "source", "query", "learner", "client", "time", "label", "labels", "label_range",
    "label_outside", "features", "interactions", "bias", "fit", "encode", "held_out_share",
    "returning",
)  # fmt: skip
"""Keys of [data] that only records of a table have."""


_FOR_PUBLISHED = ("optimal", "buffered", "toeplitz", "toeplitz_normalised")
"""Mechanisms that can be made for what a method publishes."""


_ROUNDS_SIMULATED = 1000
"""Of a run without an end that does not say how many."""


class PrivacyPlan(PlanTable):
    """The budget of methods that do not name their own."""

    epsilon: float = value(gt=0, le=1e6, hint="lower means more private; try 1")
    delta: float = value(ge=1e-300, lt=1, hint="well below 1/clients; try 1e-6")
    accounting: Literal["exact", "zcdp"] = "exact"
    neighbours: Literal["replace-one", "zero-out"] = "replace-one"
    participations: int = value(default=1, ge=1, hint="how often a client may take part; try 1")
    min_separation: int = value(default=1, ge=1, hint="steps between two visits; try 1")


class LearningPlan(PlanTable):
    """Algorithm 1's numbers, shared by all methods."""

    rounds: int = value(
        ge=1, hint='R, how many models are released; try 1000, or "unbounded" for no end'
    )
    unbounded: bool = False
    """Noise without an end: `rounds` then only says how many of them are simulated. With forgetting
    it is stationary, without it comes in epochs of doubling length (`mechanisms.unbounded`).
    ``rounds = "unbounded"`` is short for it, with 1000 rounds simulated."""
    local_steps: int = value(default=1, ge=1, hint="τ, steps between two releases; try 1")
    learners: int = value(default=1, ge=1, hint="n, how many are averaged; try 1")
    clients_per_step: int = value(default=1, ge=1, hint="how many a step averages; try 1")
    clip_norm: float = value(default=1.0, ge=1e-15, le=1e15, hint="of a gradient; try 1")
    task: str = value(
        default="logistic", choices=(*_DATA_OF_TASK, "custom"), pattern=r"[^\W\d][\w.]*:[^\W\d]\w*",
        shape='"package.module:function"',
    )  # fmt: skip
    """What is learned. "package.module:function" names a function that makes a task of your own, on
    every machine; "custom" is one given in Python: run(plan, task=...)."""
    ridge: float = value(default=0.0, ge=0, hint="0 for none")
    projection_radius: float | None = value(default=None, gt=0, hint="leave it out for none")
    model_norm_cap: float = value(default=1e6, gt=0, hint="try 1e6")
    """A deployed learner refuses models with a larger norm."""
    start: str | None = value(default=None, empty=False, hint="leave it out for the task's own")
    """Start from an earlier model: the folder of a finished run, an .npz file, or the address of a
    server's models (`veilstream.plans.start`). Learners do not read it: they get the server's x."""
    start_sha256: str | None = value(
        default=None, pattern=r"[0-9a-f]{64}", shape="64 hexadecimal digits",
        hint="start.json of a run says it",
    )  # fmt: skip
    """Which model `start` must be; server and learners then agree on it."""
    start_ca: str | None = value(default=None, empty=False, hint="leave it out for the system's")
    """Who vouches for a server that `start` names: a PEM file."""

    def __init__(self, /, **given: Any) -> None:
        if given.get("rounds") == "unbounded":
            given |= {"rounds": _ROUNDS_SIMULATED, "unbounded": True}
        super().__init__(**given)


class DataPlan(PlanTable):
    """Where clients come from."""

    kind: Literal["synthetic", "ripple", "mnist", "table", "custom"] = "synthetic"
    """"table" is records of your own: the keys from `source` on. "custom" is a stream given in
    Python: run(plan, stream=...)."""
    dim: int = value(default=100, ge=1, hint="d, parameters of the model; try 100")
    alpha: float = value(default=0.1, ge=0, hint="0 for learners with one model; try 0.1")
    beta: float = value(default=0.1, ge=0, hint="0 for learners with like features; try 0.1")
    feature_norm: float = value(default=1.0, ge=1e-15, le=1e15, hint="try 1")
    clients: int | None = value(default=None, ge=1, hint="leave it out for as many as needed")
    """How many clients a learner has; the horizon may not need more."""
    drift: Literal["none", "abrupt", "gradual", "seasonal"] = "none"
    split: Literal["paper", "dirichlet", "writers", "even"] = "paper"
    """How MNIST is dealt to the learners."""
    concentration: float = value(default=0.5, ge=1e-3, le=1e6, hint="small is uneven; try 0.5")
    """Of the Dirichlet split."""
    directory: str | None = value(default=None, empty=False, hint="leave it out for the cache")
    """Where the MNIST files are, if not in the user's data directory."""
    walk: float = value(default=0.02, ge=0, hint="0 for a target that stays; try 0.02")
    held_out: int = value(default=2000, ge=1, hint="clients that accuracy is measured on; try 2000")
    source: str | None = value(default=None, empty=False, hint='a file, or "stations/*.csv"')
    """Where a simulation's records are: a file, several by a pattern, "sqlite:FILE", or
    "data:NAME", a public data set that `veilstream data get NAME` fetches."""
    query: str | None = value(default=None, empty=False, hint="SELECT ... ORDER BY time")
    """Of a SQLite file: which records, in order."""
    learner: str | None = value(default=None, empty=False, hint="leave it out for one file each")
    """Column that says at which learner a record is."""
    client: str | None = value(default=None, empty=False, hint='"#row" if each row is someone else')
    """Column that says who; "#row" where every row is another person."""
    time: str | None = value(default=None, empty=False, hint="leave it out for the file's order")
    """Column that orders records."""
    label: str | None = value(default=None, empty=False, hint="the column that is predicted")
    labels: tuple[str, ...] | None = value(default=None, empty=False, hint='["no", "yes"]')
    """The label's texts; in logistic regression the second is +1."""
    label_range: tuple[float, ...] | None = value(default=None, hint="[0.0, 100.0]")
    """The label's public range, where it is a number."""
    label_outside: Literal["clamp", "refuse"] = "clamp"
    features: tuple[FeaturePlan, ...] = value(default=())
    """Columns that predict, each a [[data.features]]."""
    interactions: tuple[str, ...] = value(default=(), hint='["hour * weekday"]')
    bias: bool = True
    fit: Literal["scale", "clip"] = "scale"
    """How features get a norm of at most `feature_norm`: divided by the largest that they can have,
    or cut where they are longer."""
    encode: str | None = value(
        default=None, pattern=r"[^\W\d][\w.]*:[^\W\d]\w*", shape='"package.module:function"',
        hint="a function from a row to features, for features of your own",
    )  # fmt: skip
    """A function of a row's cells that returns (features, target), instead of [[data.features]]."""
    held_out_share: float = value(default=0.2, ge=0, lt=1, hint="try 0.2")
    """Share of a table's people who are measured on and not learned from."""
    returning: Literal["refuse", "first"] = "refuse"
    """What a simulation does with people who come more often than the promise allows: refuse the
    plan, or use only as many of their records as it does."""
    missing: float = value(default=0.0, ge=0, lt=1, hint="0 for nobody; try 0.3")
    """In a simulation, how likely each learner is to miss a round; drawn by the run's seeds. In a
    federation learners miss what they miss."""
    late: float = value(default=0.0, ge=0, le=1, hint="0 for nobody; try 0.2")
    """In a simulation, the share of learners that come at a later round."""
    leaving: float = value(default=0.0, ge=0, le=1, hint="0 for nobody; try 0.2")
    """In a simulation, the share of learners that leave for good."""
    missing_weights: Literal["constant", "answered"] = "constant"
    """What a release weighs where learners are missing: 1/n of the enrolled, as a server does it.
    "answered", 1/(who answered), is there to show that correlated noise then stays in the model."""

    @property
    def partial_attendance(self) -> bool:
        """Whether some learners do not take part in every round."""
        return max(self.missing, self.late, self.leaving) > 0.0


class RunPlan(PlanTable):
    """How often, and how much of it is looked at."""

    seeds: int = value(default=10, ge=1, hint="how many repetitions; try 10")
    first_seed: int = value(default=0, ge=0, hint="try 0")
    evaluate_every: int = value(default=10, ge=1, hint="in rounds; try 10")
    memory_mib: int = value(default=4096, ge=1, hint="try 4096")
    """Budget for the simulation's memory, besides the data set; block length and the number of
    seeds that run together follow from it. Changes memory and speed, nothing else."""
    noise: Literal["auto", "host", "device"] = "auto"
    """Where noise is made: "device" has the same draws on every machine; "auto" is "host" on a CPU
    (faster there) and "device" on a GPU."""
    regret: bool = True


class FederationPlan(PlanTable):
    """How a server waits for learners on other machines."""

    quorum: float = value(default=0.5, gt=0, le=1, hint="share of learners a round needs; try 0.5")
    deadline_s: float = value(default=60.0, gt=0, hint="to wait for the rest; try 60")
    patience_s: float = value(default=30.0, ge=0, hint="a learner's wait for clients; try 30")
    min_clients: int = value(default=1, ge=0, hint="0 answers every round; try 1")
    """How many clients must wait at a learner for it to begin a round. Where fewer do, it sits the
    round out and spends nothing; the server sees that it does."""
    epochs: int = value(default=1, ge=1, hint="how many runs in a row learners go along; try 1")
    """A learner goes into the server's next run by itself until it has been in so many; each is an
    epoch of its own, with fresh noise and for new clients only."""
    combine: Literal["mean", "trimmed", "median"] = "mean"
    """How the server makes one direction of a round's increments, coordinate by coordinate. Only
    the mean lets correlated noise cancel; the others resist learners that lie within bounds."""
    trim: float = value(default=0.1, gt=0, lt=0.5, hint="share cut off at each end; try 0.1")
    """For "trimmed"."""


class MethodPlan(PlanTable):
    """One line of the comparison."""

    name: str = value(
        pattern=r"[^/\\\x00-\x1f\x7f]+", shape="text without slashes and control characters",
        hint="a short name for tables and figures",
    )  # fmt: skip
    kind: str = value(default="ours", choices=METHODS)
    mechanism: str | None = value(default=None, choices=MECHANISMS)
    step_size: float | None = value(default=None, gt=0, hint="try 0.1")
    """η, of a local step. Only kind = "auto" leaves it out, and must: it follows from the plan."""
    server_step_size: float = value(default=1.0, gt=0, hint="try 1")
    """η_g. Chosen by kind = "auto" too."""
    step_decay: float = value(default=0.0, ge=0, hint="0 for none, 0.5 for 1/sqrt(round)")
    """Both step sizes together fall like (1 + round)^-step_decay."""
    averaging: float | None = value(default=None, ge=0, hint="leave it out for none; try 3")
    """Publish an average of the models so far, in which model r weighs about r^averaging. Learners
    still start from the latest one. Post-processing: it costs nothing of the promise."""
    newest_weight: float | None = value(default=None, gt=0, le=1, hint="leave it out; try 0.01")
    """Publish an exponential average instead, in which the newest model has this weight."""
    momentum: float = value(default=0.0, ge=0, lt=1, hint="0 for none; try 0.9")
    """Of the server: m <- momentum·m + direction, and x moves along m."""
    forgetting: float = value(default=1.0, gt=0, le=1, hint="1 forgets nothing; try 0.999")
    """ρ: every round the server first draws the model to where the run began, x⁰ + ρ·(x - x⁰)."""
    clip_norm: float | None = value(default=None, ge=1e-15, le=1e15, hint="of a gradient; try 1")
    """B_g of this method, if not the plan's; its noise is calibrated to it."""
    clients_per_step: int | None = value(default=None, ge=1, hint="leave it out for the plan's")
    """How many of a round's clients a step of this method averages, if not the plan's: fewer and
    larger steps in as many rounds. Divides local_steps x clients_per_step of the plan."""
    epsilon: float | None = value(default=None, gt=0, le=1e6, hint="lower means more private")
    delta: float | None = value(default=None, ge=1e-300, lt=1, hint="well below 1/clients")
    accounting: Literal["exact", "zcdp"] | None = None
    objective: Literal["mean", "max", "rounds", "published"] | None = None
    """What the mechanism is best for. "published" is the noise in what this method publishes, by
    its steps, averaging, momentum and forgetting, at round ends (and `buffered` is then tuned for
    people who return, where [privacy] allows it); the others are for `optimal`."""
    interior_weight: float = value(default=0.1, gt=0, le=1, hint="try 0.1")
    """For "published" and "rounds": what noise in models that are not published counts beside."""

    def check(self) -> None:
        """Refuse a method that neither says its step size nor chooses it."""
        if self.step_size is None and not self.method.chooses_steps:
            raise PlanError(
                "step_size", None, "a finite number > 0",
                'add step_size = ...; try 0.1, or kind = "auto" which needs none',
            )  # fmt: skip

    @property
    def method(self) -> Method:
        """Whose method this is."""
        return method_of(self.kind)

    @property
    def local_step_size(self) -> float:
        """η, of a local step.

        Raises:
            InputError: for a method of kind "auto" as a plan holds it; `prepare` chooses it.

        """
        if self.step_size is None:
            raise InputError(
                "step_size", None, f"a number: {self.name} has not chosen its own yet",
                "take the method from prepare(plan, method).plan",
            )  # fmt: skip
        return self.step_size

    def blend(self, round_: Any) -> Any:
        """Weight of the model that a round ends with in the average that is published."""
        return published_blend(self.averaging, self.newest_weight, round_)

    @property
    def memory(self) -> tuple[bool, bool]:
        """Whether the server has momentum, and whether it forgets."""
        return self.momentum > 0.0, self.forgetting < 1.0

    @property
    def mechanism_name(self) -> str | None:
        """The mechanism that makes its noise, if any."""
        return self.mechanism or self.method.default_mechanism


class Plan(PlanTable):
    """A whole run."""

    name: str = value(
        default="run", pattern=r"(?!\.+$)[^/\\\x00-\x1f\x7f]+",
        shape="text without slashes and control characters", hint="it names the run's folder",
    )  # fmt: skip
    description: str = ""
    learning: LearningPlan
    data: DataPlan = DataPlan()
    privacy: PrivacyPlan | None = None
    run: RunPlan = RunPlan()
    federation: FederationPlan = FederationPlan()
    methods: tuple[MethodPlan, ...] = value(empty=False)

    def check(self) -> None:
        """Refuse parts that do not agree."""
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise PlanError("methods.name", names, "a name of its own for each", "rename one")
        self._check_data()
        for field in ("start_sha256", "start_ca"):
            if getattr(self.learning, field) is not None and self.learning.start is None:
                raise PlanError(
                    f"learning.{field}", getattr(self.learning, field),
                    "learning.start beside it", "name the model, or remove it",
                )  # fmt: skip
        if self.federation.min_clients > self.learning.local_steps:
            raise PlanError(
                "federation.min_clients", self.federation.min_clients,
                f"at most learning.local_steps = {self.learning.local_steps}, a round's clients",
                f"min_clients = {self.learning.local_steps}",
            )  # fmt: skip
        need = self.learning.rounds * self.learning.local_steps * self.learning.clients_per_step
        if self.data.clients is not None and need > self.data.clients:
            raise PlanError(
                "learning.rounds", self.learning.rounds,
                f"a horizon of at most {self.data.clients} clients a learner (needs {need})",
                f"rounds = {self.data.clients * self.learning.rounds // need}, or more clients",
            )  # fmt: skip
        for index, method in enumerate(self.methods):
            self._check_method(f"methods[{index}]", method)

    def _check_data(self) -> None:
        task, data = self.learning.task, self.data
        fitting = _DATA_OF_TASK.get(task, (data.kind,))
        if data.kind not in (*fitting, "custom"):
            listed = ", ".join(f'"{kind}"' for kind in fitting)
            raise PlanError(
                "data.kind", data.kind, f'{listed} or "custom" for task = "{task}"',
                f'kind = "{fitting[0]}", or another task',
            )  # fmt: skip
        self._check_table()
        if data.kind != "synthetic" and data.drift != "none":
            raise PlanError("data.drift", data.drift, f"none for {data.kind} data", "remove it")
        self._check_attendance()
        if self.learning.ridge and task not in ("logistic", "least_squares"):
            raise PlanError("learning.ridge", self.learning.ridge, f"0 for {task}", "remove it")
        if (data.kind, data.split) == ("mnist", "paper") and self.learning.learners != 10:
            raise PlanError(
                "learning.learners", self.learning.learners, "10 for the paper's split by digit",
                'learners = 10, or data.split = "even", "dirichlet" or "writers"',
            )  # fmt: skip

    def _check_attendance(self) -> None:
        data = self.data
        if data.missing_weights != "constant" and not data.partial_attendance:
            raise PlanError(
                "data.missing_weights", data.missing_weights,
                '"constant" where every learner takes part in every round',
                "remove it, or add data.missing, data.late or data.leaving",
            )  # fmt: skip
        if data.partial_attendance and self.run.noise == "device":
            raise PlanError(
                "run.noise", self.run.noise,
                '"host" where learners miss rounds: each has noise at a pace of its own',
                'noise = "host"; or remove data.missing, data.late and data.leaving',
            )  # fmt: skip

    def _check_table(self) -> None:
        """The keys of records stand where records are, and nowhere else."""
        data = self.data
        if data.kind == "table":
            try:  # code of one's own is not run to look at a plan
                (schema_of if data.encode is None else check_own_records)(self)
            except InputError as error:
                known = error.field.startswith("learning.")
                field = error.field if known else "data." + error.field.removeprefix("data.")
                raise PlanError(field, error.value, error.rule, error.way_out) from None
            return
        for key in _OF_TABLES:
            if getattr(data, key) != DataPlan._entries[key].default:
                raise PlanError(
                    f"data.{key}", getattr(data, key), 'nothing unless data.kind is "table"',
                    'kind = "table", or remove it',
                )  # fmt: skip

    def _check_method(self, where: str, plan: MethodPlan) -> None:
        method = plan.method
        if not method.adds_noise:
            for field in ("epsilon", "delta", "accounting", "mechanism"):
                if getattr(plan, field) is not None:
                    raise PlanError(
                        f"{where}.{field}", getattr(plan, field),
                        f"nothing: {plan.kind} adds no noise and protects no one",
                        f"remove it, or take another kind than {plan.kind}",
                    )  # fmt: skip
        else:
            self.budget_of(plan, where)
        if method.fixed_mechanism and plan.mechanism not in (None, method.default_mechanism):
            raise PlanError(
                f"{where}.mechanism", plan.mechanism, f"{method.default_mechanism} for {plan.kind}",
                'kind = "ours" takes any',
            )  # fmt: skip
        if method.chooses_steps:
            self._check_auto(where, plan)
        fitting = _FOR_PUBLISHED if plan.objective == "published" else ("optimal",)
        if plan.objective is not None and plan.mechanism_name not in fitting:
            raise PlanError(
                f"{where}.objective", plan.objective,
                f"only with mechanism = {', '.join(fitting)}", "remove it",
            )  # fmt: skip
        met = self.learning.local_steps * self.learning.clients_per_step
        if plan.clients_per_step is not None and met % plan.clients_per_step:
            raise PlanError(
                f"{where}.clients_per_step", plan.clients_per_step,
                f"a divisor of {met}, the clients that a learner meets in a round",
                f"clients_per_step = {math.gcd(met, plan.clients_per_step)}",
            )  # fmt: skip
        endless = "toeplitz" if plan.forgetting < 1.0 else "buffered"
        if self.learning.unbounded and plan.mechanism not in (None, endless, "independent"):
            raise PlanError(
                f"{where}.mechanism", plan.mechanism,
                f"nothing, or {endless}, for unbounded rounds: this one needs an end",
                "remove it; or learning.unbounded = false, with the rounds that there will be",
            )  # fmt: skip
        if plan.averaging is not None and plan.newest_weight is not None:
            raise PlanError(
                f"{where}.newest_weight", plan.newest_weight, "one kind of averaging",
                "remove averaging, or this",
            )  # fmt: skip
        one = self.learning.learners == 1 and self.learning.local_steps == 1
        if method.one_machine and not one:
            raise PlanError(
                f"{where}.kind", plan.kind, "learners = 1 and local_steps = 1 (one machine)",
                f"this plan has learners = {self.learning.learners}, "
                f"local_steps = {self.learning.local_steps}",
            )  # fmt: skip

    def _check_auto(self, where: str, plan: MethodPlan) -> None:
        """What is chosen is not said: a number beside it would be tuned on someone's data."""
        entries = MethodPlan._entries
        for field in ("step_size", "server_step_size", "clip_norm"):
            if getattr(plan, field) != entries[field].default:
                raise PlanError(
                    f"{where}.{field}", getattr(plan, field),
                    "nothing: auto takes it from public facts", 'remove it, or kind = "ours"',
                )  # fmt: skip
        if self.learning.unbounded:
            raise PlanError(
                f"{where}.kind", plan.kind, "a run with an end: auto's step depends on it",
                'rounds that you will not reach, or kind = "ours" with a step_size',
            )  # fmt: skip

    def budget_of(self, plan: MethodPlan, where: str = "methods") -> Budget:
        """The method's own budget, or the plan's."""
        epsilon = plan.epsilon or (self.privacy.epsilon if self.privacy else None)
        delta = plan.delta or (self.privacy.delta if self.privacy else None)
        if epsilon is None or delta is None:
            missing = "epsilon" if epsilon is None else "delta"
            raise PlanError(
                f"{where}.{missing}", None, "a budget for a method that adds noise",
                f"add [privacy] with {missing}, or {missing} to the method",
            )  # fmt: skip
        return Budget(epsilon, delta)

    def steps_and_clients(self, plan: MethodPlan) -> tuple[int, int]:
        """A method's steps in a round and clients in a step; together the clients of a round."""
        steps, clients = plan.method.steps_and_clients(
            self.learning.local_steps, self.learning.clients_per_step
        )
        if plan.clients_per_step is None:
            return steps, clients
        return steps * clients // plan.clients_per_step, plan.clients_per_step

    def workload_of(self, plan: MethodPlan) -> Workload:
        """What the method publishes, as a linear map of its gradients."""
        steps, _ = self.steps_and_clients(plan)
        return Workload(
            horizon=self.learning.rounds * steps, local_steps=steps, step_decay=plan.step_decay,
            averaging=plan.averaging, newest_weight=plan.newest_weight, momentum=plan.momentum,
            forgetting=plan.forgetting, interior_weight=plan.interior_weight,
        )  # fmt: skip

    def clip_norm_of(self, plan: MethodPlan) -> float:
        """The method's own B_g, or the plan's; of normalised gradients it is one."""
        if plan.method.normalises:
            return 1.0
        return plan.clip_norm or self.learning.clip_norm

    def accounting_of(self, plan: MethodPlan) -> str:
        """The method's own accounting, or the plan's."""
        return plan.accounting or (self.privacy.accounting if self.privacy else "exact")

    @property
    def neighbours(self) -> str:
        """The plan's relation between neighbours."""
        return self.privacy.neighbours if self.privacy else "replace-one"

    @property
    def feature_count(self) -> int:
        """Numbers of one client's features: what the columns come to, or `data.dim`."""
        own_columns = self.data.kind == "table" and self.data.encode is None
        return schema_of(self).width if own_columns else self.data.dim

    @property
    def participation(self) -> Participation:
        """How often one client may take part."""
        if self.privacy is None:
            return ONCE
        return Participation(self.privacy.participations, self.privacy.min_separation)

    @classmethod
    def load(cls, path: Path | str, overrides: dict[str, Any] | None = None) -> Plan:
        """Read a TOML file; ``overrides`` maps dotted keys to values."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PlanError("plan", str(path), "a file that can be read", str(error)) from error
        return cls.parse(text, overrides)

    @classmethod
    def parse(cls, text: str, overrides: dict[str, Any] | None = None) -> Plan:
        """From TOML text."""
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError("plan", "<text>", "TOML", str(error)) from error
        overridden = {_override(content, key, given) for key, given in (overrides or {}).items()}
        try:
            return cls(**content)
        except PlanError as error:
            line = None if error.field in overridden else _line_of(text, error.field)
            if line is None:
                raise
            field = f"{error.field} (line {line})"
            raise PlanError(field, error.value, error.rule, error.way_out) from None

    def to_toml(self) -> str:
        """TOML that parses to this plan."""
        try:
            import tomli_w
        except ImportError as error:
            raise MissingExtra("tomli_w", None, "writing a plan") from error
        content = dataclasses.asdict(self, dict_factory=_without_none)
        methods = content.pop("methods")
        if self.data.kind != "table":
            content["data"] = {k: v for k, v in content["data"].items() if k not in _OF_TABLES}
        tables = [tomli_w.dumps(content), *("[[methods]]\n" + tomli_w.dumps(m) for m in methods)]
        return "\n".join(tables)


def _without_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: held for key, held in items if held is not None}


def parse_override(text: str) -> tuple[str, Any]:
    """Key and value of ``key=value``; the value is TOML, or else plain text."""
    key, equals, given = text.partition("=")
    if not equals or not key:
        raise InputError("--set", text, "key=value", "try learning.rounds=200")
    try:
        return key.strip(), tomllib.loads(f"value = {given}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), given.strip()


def _override(content: dict[str, Any], key: str, given: object) -> str:
    """Set a dotted key; returns the field that it is."""
    methods = content.get("methods")
    if key.startswith("methods.") and isinstance(methods, list):
        named = {
            m["name"]: i
            for i, m in enumerate(methods)
            if isinstance(m, dict) and isinstance(m.get("name"), str)
        }
        rest = key.removeprefix("methods.")
        # Names may hold dots: the longest that fits is meant.
        fitting = [name for name in named if rest.startswith(f"{name}.")]
        if not fitting:
            raise PlanError(
                "--set", key, "methods.NAME.key with a NAME of the plan",
                "there are " + ", ".join(named),
            )  # fmt: skip
        name = max(fitting, key=len)
        field = rest.removeprefix(f"{name}.")
        methods[named[name]][field] = given
        return f"methods[{named[name]}].{field}"
    *tables, last = key.split(".")
    place: Any = content
    for table in tables:
        place = place.setdefault(table, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise PlanError("--set", key, "a dotted key such as learning.rounds", "see the plan")
    place[last] = given
    return key


def _line_of(text: str, field: str) -> int | None:
    table, _, key = field.rpartition(".")
    index = 0
    if match := re.fullmatch(r"([\w.]+)\[(\d+)\]", table):
        table, index = match[1], int(match[2])
    current, seen = "", 0 if table == "" else -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]?\]", line):
            current = header[1]
            seen += current == table
        elif re.match(rf"\s*{re.escape(key)}\s*=", line) and (current, seen) == (table, index):
            return number
    return None
