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
from typing import Any

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.task_registry import task_kind
from veilstream.mechanisms import Workload
from veilstream.mechanisms.registry import MADE_FOR_PUBLISHED
from veilstream.plans.plan_tables import (
    DataPlan,
    FederationPlan,
    LearningPlan,
    MethodPlan,
    PrivacyPlan,
    RunPlan,
    TelemetryPlan,
)
from veilstream.plans.records import check_own_records, schema_of
from veilstream.plans.schema import PlanError, PlanTable, value
from veilstream.privacy import ONCE, Budget, Participation
from veilstream.privacy.telemetry import Telemetry

_OF_TABLES = (
    "source",
    "query",
    "learner",
    "client",
    "time",
    "label",
    "labels",
    "label_range",
    "label_outside",
    "features",
    "interactions",
    "bias",
    "fit",
    "encode",
    "held_out_share",
    "returning",
)
"""Keys of [data] that only records of a table have."""


_WINDOW_STEPS = 1000
"""Of a learner, that an estimate of telemetry averages over where the plan does not say."""


class Plan(PlanTable):
    """A whole run."""

    name: str = value(
        default="run",
        pattern=r"(?!\.+$)[^/\\\x00-\x1f\x7f]+",
        shape="text without slashes and control characters",
        hint="it names the run's folder",
    )
    description: str = ""
    """For people; figures and summaries show it."""
    learning: LearningPlan
    data: DataPlan = DataPlan()
    privacy: PrivacyPlan | None = None
    telemetry: TelemetryPlan | None = None
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
                    f"learning.{field}",
                    getattr(self.learning, field),
                    "learning.start beside it",
                    "name the model, or remove it",
                )
        if self.federation.min_clients > self.learning.local_steps:
            raise PlanError(
                "federation.min_clients",
                self.federation.min_clients,
                f"at most learning.local_steps = {self.learning.local_steps}, a round's clients",
                f"min_clients = {self.learning.local_steps}",
            )
        need = self.learning.rounds * self.learning.local_steps * self.learning.clients_per_step
        if self.data.clients is not None and need > self.data.clients:
            raise PlanError(
                "learning.rounds",
                self.learning.rounds,
                f"a horizon of at most {self.data.clients} clients a learner (needs {need})",
                f"rounds = {self.data.clients * self.learning.rounds // need}, or more clients",
            )
        for index, method in enumerate(self.methods):
            self._check_method(f"methods[{index}]", method)
        if self.telemetry is not None:
            self._check_telemetry(self.telemetry)

    def _check_telemetry(self, telemetry: TelemetryPlan) -> None:
        """Metrics that the task and the methods have."""
        metrics, kind = list(telemetry.metrics), task_kind(self.learning.task)
        if "accuracy" in metrics and kind is not None and not kind.target.classifies:
            raise PlanError(
                "telemetry.metrics",
                metrics,
                f"no accuracy where {kind.name} predicts a number",
                'metrics = ["loss"], with a loss_cap',
            )
        if "clipped" in metrics and any(m.method.normalises for m in self.methods):
            raise PlanError(
                "telemetry.metrics",
                metrics,
                "no clipped beside a method that normalises gradients: none is ever clipped",
                "remove it",
            )

    def telemetry_of(self, plan: MethodPlan) -> Telemetry | None:
        """What each client contributes beside its gradient; None for nothing."""
        told = self.telemetry
        if told is None:
            return None
        return Telemetry(told.metrics, told.scale * self.clip_norm_of(plan), told.loss_cap)

    @property
    def telemetry_window(self) -> int:
        """Rounds that an estimate averages over: as the plan says, or 1000 steps of a learner."""
        said = None if self.telemetry is None else self.telemetry.window
        window = -(-_WINDOW_STEPS // self.learning.local_steps) if said is None else said
        return min(window, self.learning.rounds)

    def _check_data(self) -> None:
        task, data = self.learning.task, self.data
        kind = task_kind(task)
        fitting = (data.kind,) if kind is None else kind.data
        if data.kind not in (*fitting, "custom"):
            listed = ", ".join(f'"{kind}"' for kind in fitting)
            raise PlanError(
                "data.kind",
                data.kind,
                f'{listed} or "custom" for task = "{task}"',
                f'kind = "{fitting[0]}", or another task',
            )
        self._check_table()
        if data.kind != "synthetic" and data.drift != "none":
            raise PlanError("data.drift", data.drift, f"none for {data.kind} data", "remove it")
        self._check_attendance()
        if self.learning.ridge and (kind is None or not kind.takes_ridge):
            raise PlanError("learning.ridge", self.learning.ridge, f"0 for {task}", "remove it")
        if (data.kind, data.split) == ("mnist", "paper") and self.learning.learners != 10:
            raise PlanError(
                "learning.learners",
                self.learning.learners,
                "10 for the paper's split by digit",
                'learners = 10, or data.split = "even", "dirichlet" or "writers"',
            )

    def _check_attendance(self) -> None:
        data = self.data
        if data.partial_attendance and self.run.noise == "device":
            raise PlanError(
                "run.noise",
                self.run.noise,
                '"host" where learners miss rounds: each has noise at a pace of its own',
                'noise = "host"; or remove data.missing, data.late and data.leaving',
            )
        often = self.participation
        if data.partial_attendance and often.times > 1 and often.min_separation > 1:
            raise PlanError(
                "privacy.min_separation",
                often.min_separation,
                "1 where people return and learners miss rounds: a learner that sat some out has "
                "taken fewer steps between two visits than the run has",
                "min_separation = 1 (more noise); or remove data.missing, data.late and data.leaving",
            )

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
                    f"data.{key}",
                    getattr(data, key),
                    'nothing unless data.kind is "table"',
                    'kind = "table", or remove it',
                )

    def _check_method(self, where: str, plan: MethodPlan) -> None:
        method = plan.method
        if not method.adds_noise:
            for field in ("epsilon", "delta", "accounting", "mechanism"):
                if getattr(plan, field) is not None:
                    raise PlanError(
                        f"{where}.{field}",
                        getattr(plan, field),
                        f"nothing: {plan.kind} adds no noise and protects no one",
                        f"remove it, or take another kind than {plan.kind}",
                    )
        else:
            self.budget_of(plan, where)
        if method.fixed_mechanism and plan.mechanism not in (None, method.default_mechanism):
            raise PlanError(
                f"{where}.mechanism",
                plan.mechanism,
                f"{method.default_mechanism} for {plan.kind}",
                'kind = "ours" takes any',
            )
        if method.chooses_steps:
            self._check_auto(where, plan)
        fitting = MADE_FOR_PUBLISHED if plan.objective == "published" else ("optimal",)
        if plan.objective is not None and plan.mechanism_name not in fitting:
            raise PlanError(
                f"{where}.objective", plan.objective, f"only with mechanism = {', '.join(fitting)}", "remove it"
            )
        met = self.learning.local_steps * self.learning.clients_per_step
        if plan.clients_per_step is not None and met % plan.clients_per_step:
            raise PlanError(
                f"{where}.clients_per_step",
                plan.clients_per_step,
                f"a divisor of {met}, the clients that a learner meets in a round",
                f"clients_per_step = {math.gcd(met, plan.clients_per_step)}",
            )
        if plan.objective and plan.mechanism_name == "banded":
            returning = self.participation.times > 1
            if not returning or not self.workload_of(plan).plain:
                raise PlanError(
                    f"{where}.objective",
                    plan.objective,
                    "people who return ([privacy] participations > 1) and models as they are: "
                    "banded is tuned for nothing else",
                    "remove it, or take optimal or buffered",
                )
        self.check_visits(plan, where)
        endless = "toeplitz" if plan.forgetting < 1.0 else "buffered"
        if self.learning.unbounded and plan.mechanism not in (None, endless, "independent"):
            raise PlanError(
                f"{where}.mechanism",
                plan.mechanism,
                f"nothing, or {endless}, for unbounded rounds: this one needs an end",
                "remove it; or learning.unbounded = false, with the rounds that there will be",
            )
        if self.learning.unbounded and plan.objective is not None:
            raise PlanError(
                f"{where}.objective",
                plan.objective,
                "nothing beside unbounded rounds: their noise is made for forgetting, or for epochs of doubling length",
                "remove it; or learning.unbounded = false, with the rounds that there will be",
            )
        if plan.averaging is not None and plan.newest_weight is not None:
            raise PlanError(
                f"{where}.newest_weight", plan.newest_weight, "one kind of averaging", "remove averaging, or this"
            )
        one = self.learning.learners == 1 and self.learning.local_steps == 1
        if method.one_machine and not one:
            raise PlanError(
                f"{where}.kind",
                plan.kind,
                "learners = 1 and local_steps = 1 (one machine)",
                f"this plan has learners = {self.learning.learners}, local_steps = {self.learning.local_steps}",
            )

    def _check_auto(self, where: str, plan: MethodPlan) -> None:
        """What is chosen is not said: a number beside it would be tuned on someone's data."""
        entries = MethodPlan._entries
        for field in ("step_size", "server_step_size", "clip_norm"):
            if getattr(plan, field) != entries[field].default:
                raise PlanError(
                    f"{where}.{field}",
                    getattr(plan, field),
                    "nothing: auto takes it from public facts",
                    'remove it, or kind = "ours"',
                )
        if self.learning.unbounded:
            raise PlanError(
                f"{where}.kind",
                plan.kind,
                "a run with an end: auto's step depends on it",
                'rounds that you will not reach, or kind = "ours" with a step_size',
            )

    def check_visits(self, plan: MethodPlan, where: str = "methods") -> None:
        """Refuse a promise to people who return whose separation is not in the method's own steps.

        Visits are kept apart in the plan's steps. A method with other steps may have two of them in
        one step, or closer together than its noise was calibrated for.

        Args:
            plan: the method; of this plan, or another that is to run with it.
            where: its place in the plan, for the error.

        Raises:
            PlanError: for a private method with other steps, where people may take part again.

        """
        own = self.learning.local_steps, self.learning.clients_per_step
        steps, clients = self.steps_and_clients(plan)
        times = self.participation.times
        if not plan.method.private or times == 1 or (steps, clients) == own:
            return
        field = f"{where}.kind" if plan.clients_per_step is None else f"{where}.clients_per_step"
        raise PlanError(
            field,
            plan.kind if plan.clients_per_step is None else plan.clients_per_step,
            f"the plan's steps beside privacy.participations = {times}: a round of {plan.name} has "
            f"{steps} x {clients} clients, the plan's {own[0]} x {own[1]}, in which visits are "
            "kept apart",
            f"learning.local_steps = {steps} and clients_per_step = {clients} for all methods, or participations = 1",
        )

    def budget_of(self, plan: MethodPlan, where: str = "methods") -> Budget:
        """The method's own budget, or the plan's."""
        epsilon = plan.epsilon or (self.privacy.epsilon if self.privacy else None)
        delta = plan.delta or (self.privacy.delta if self.privacy else None)
        if epsilon is None or delta is None:
            missing = "epsilon" if epsilon is None else "delta"
            raise PlanError(
                f"{where}.{missing}",
                None,
                "a budget for a method that adds noise",
                f"add [privacy] with {missing}, or {missing} to the method",
            )
        return Budget(epsilon, delta)

    def steps_and_clients(self, plan: MethodPlan) -> tuple[int, int]:
        """A method's steps in a round and clients in a step; together the clients of a round."""
        steps, clients = plan.method.steps_and_clients(self.learning.local_steps, self.learning.clients_per_step)
        if plan.clients_per_step is None:
            return steps, clients
        return steps * clients // plan.clients_per_step, plan.clients_per_step

    def workload_of(self, plan: MethodPlan) -> Workload:
        """What the method publishes, as a linear map of its gradients."""
        steps, _ = self.steps_and_clients(plan)
        return Workload(
            horizon=self.learning.rounds * steps,
            local_steps=steps,
            step_decay=plan.step_decay,
            averaging=plan.averaging,
            newest_weight=plan.newest_weight,
            forgetting=plan.forgetting,
            interior_weight=plan.interior_weight,
        )

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
        named = {m["name"]: i for i, m in enumerate(methods) if isinstance(m, dict) and isinstance(m.get("name"), str)}
        rest = key.removeprefix("methods.")
        # Names may hold dots: the longest that fits is meant.
        fitting = [name for name in named if rest.startswith(f"{name}.")]
        if not fitting:
            raise PlanError("--set", key, "methods.NAME.key with a NAME of the plan", "there are " + ", ".join(named))
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
