"""`Plan`: everything a run needs, as validated TOML.

A plan that loads can run: names exist, shapes agree, budgets stand where noise is and nowhere else.
Errors name the key, its line, the value, the rule and the way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, MissingExtra
from veilstream.mechanisms import Workload
from veilstream.plans.plan_tables import (
    DataPlan,
    FederationPlan,
    LearningPlan,
    MethodPlan,
    PrivacyPlan,
    RunPlan,
    TelemetryPlan,
)
from veilstream.plans.plan_text import line_of, parse_toml, read_plan_text
from veilstream.plans.records import check_own_records, schema_of
from veilstream.plans.rules import METHOD_RULES, PLAN_RULES
from veilstream.plans.schema import PlanError, PlanTable, all_of, value
from veilstream.privacy import ONCE, Budget, Participation
from veilstream.privacy.guarantee import SumTrust, budget_remarks
from veilstream.privacy.telemetry import Telemetry

_WINDOW_STEPS = 1000  # of a learner, that an estimate of telemetry averages over by default


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
        """Refuse keys that do not agree, all of them at once."""
        checks: list[Callable[[], object]] = [partial(rule.check, self) for rule in PLAN_RULES]
        checks.append(self._check_table)
        for index, method in enumerate(self.methods):
            where = f"methods[{index}]"
            checks += [partial(rule.check, self, method, f"{where}.") for rule in METHOD_RULES]
            if method.method.adds_noise:
                checks.append(partial(self.budget_of, method, where))
            checks.append(partial(self.check_visits, method, where))
        problems: list[InputError] = []
        for check in checks:
            try:
                check()
            except PlanError as error:
                problems += error.together
        if problems:
            raise all_of(problems)

    def _check_table(self) -> None:
        if self.data.kind != "table":
            return
        try:  # code of one's own is not run to look at a plan
            (schema_of if self.data.encode is None else check_own_records)(self)
        except InputError as error:
            known = error.field.startswith("learning.")
            field = error.field if known else "data." + error.field.removeprefix("data.")
            raise PlanError(field, error.value, error.rule, error.way_out) from None

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

    def check_visits(self, plan: MethodPlan, where: str = "methods") -> None:
        """Refuse a promise to people who return whose separation is not in the method's own steps.

        Otherwise two visits may lie in one step, or closer together than the noise was calibrated for.
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

    def remarks(self) -> list[str]:
        """What is weak about the budgets of its private methods; a `Guarantee` has the same remarks."""
        found: list[str] = []
        for each in self.methods:
            if each.method.private:
                steps, clients = self.steps_and_clients(each)
                met = None if self.learning.unbounded else self.learning.rounds * steps * clients
                found += budget_remarks(self.budget_of(each), met)
        return list(dict.fromkeys(found))

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
    def order(self) -> str:
        """Who may know at which step a record is used."""
        return self.privacy.order if self.privacy else "known"

    @property
    def window(self) -> int | None:
        """Beside a secret order, steps of a window whose records are used in the next; None for a whole epoch."""
        return self.privacy.window if self.privacy else None

    @property
    def steps_of_epoch(self) -> int:
        """T = R·τ of the plan's own steps."""
        return self.learning.rounds * self.learning.local_steps

    @property
    def trust(self) -> SumTrust | None:
        """Whom the promise counts on where the server sees only sums over learners; None where it sees each."""
        if self.privacy is None or self.privacy.trust == "each":
            return None
        assert self.privacy.honest is not None  # by the rules
        return SumTrust(
            learners=self.learning.learners,
            honest=self.privacy.honest,
            colluding=self.privacy.colluding,
            runs=self.federation.epochs,
        )

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

    @property
    def epochs_per_person(self) -> int:
        """In how many epochs one person may take part."""
        return 1 if self.privacy is None else self.privacy.epochs_per_person

    @classmethod
    def load(cls, path: Path | str, overrides: dict[str, Any] | None = None) -> Plan:
        """Read a TOML file; ``overrides`` maps dotted keys to values."""
        path = Path(path)
        return cls._read(read_plan_text(path), overrides, str(path))

    @classmethod
    def parse(cls, text: str, overrides: dict[str, Any] | None = None) -> Plan:
        """From TOML text."""
        return cls._read(text, overrides, "")

    @classmethod
    def _read(cls, text: str, overrides: dict[str, Any] | None, file: str) -> Plan:
        """All problems at once: each with the file, its line, the rule and the way out."""
        content: dict[str, Any] = {}
        overridden: set[str] = set()
        try:
            content = parse_toml(text)
            overridden = {_override(content, key, given) for key, given in (overrides or {}).items()}
            return cls(**content)
        except PlanError as error:
            placed = []
            for each in error.together:
                line = None if each.field in overridden or "(line" in each.field else line_of(text, content, each.field)
                field = each.field if line is None else f"{each.field} (line {line})"
                placed.append((line or 0, PlanError(field, each.value, each.rule, each.way_out, file=file)))
            raise all_of([each for _, each in sorted(placed, key=lambda pair: pair[0])]) from None

    def to_toml(self) -> str:
        """TOML that parses to this plan."""
        try:
            import tomli_w
        except ImportError as error:
            raise MissingExtra("tomli_w", None, "writing a plan") from error
        content = dataclasses.asdict(self, dict_factory=_without_none)
        methods = content.pop("methods")
        content["data"] = {key: held for key, held in content["data"].items() if self.data.allows(key)}
        tables = [tomli_w.dumps(content), *("[[methods]]\n" + tomli_w.dumps(m) for m in methods)]
        return "\n".join(tables)


def _without_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: held for key, held in items if held is not None}


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
