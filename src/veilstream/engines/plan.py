"""`Plan`: everything a run needs, as validated TOML.

A plan that loads can run: names exist, shapes agree, budgets stand where noise is and nowhere else.
Errors name the key, its line, the value, the rule and the way out.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from veilstream.errors import InputError, among
from veilstream.learning.methods import METHODS, Method, method_of
from veilstream.mechanisms import MECHANISMS
from veilstream.privacy import Budget

__all__ = ["DataPlan", "LearningPlan", "MethodPlan", "Plan", "PlanError", "PrivacyPlan", "RunPlan"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Probability = Annotated[float, Field(ge=1e-300, lt=1, strict=True)]
Scale = Annotated[float, Field(ge=1e-15, le=1e15, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]


class PlanError(InputError):
    """A plan that cannot run."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PrivacyPlan(_Part):
    """The budget of methods that do not name their own."""

    epsilon: Positive
    delta: Probability
    accounting: Literal["exact", "zcdp"] = "exact"
    neighbours: Literal["replace-one", "zero-out"] = "replace-one"


class LearningPlan(_Part):
    """Algorithm 1's numbers, shared by all methods."""

    rounds: Count
    local_steps: Count = 1
    learners: Count = 1
    clients_per_step: Count = 1
    clip_norm: Scale = 1.0
    task: Literal["logistic", "least_squares", "ripple"] = "logistic"
    ridge: NonNegative = 0.0
    projection_radius: Positive | None = None


class DataPlan(_Part):
    """Where clients come from."""

    kind: Literal["synthetic", "ripple"] = "synthetic"
    dim: Count = 100
    alpha: NonNegative = 0.1
    beta: NonNegative = 0.1
    feature_norm: Scale = 1.0
    clients: Count | None = None
    """How many clients a learner has; the horizon may not need more."""
    drift: Literal["none", "abrupt", "gradual"] = "none"
    walk: NonNegative = 0.02
    held_out: Count = 2000


class RunPlan(_Part):
    """How often, and how much of it is looked at."""

    seeds: Count = 10
    first_seed: Annotated[int, Field(ge=0, strict=True)] = 0
    evaluate_every: Count = 10
    memory_mib: Count = 256
    """Largest block of noise and clients held at once; changes memory and speed, nothing else."""
    regret: bool = True


class MethodPlan(_Part):
    """One line of the comparison."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[^/\\\x00-\x1f\x7f]+$")]
    kind: str = "ours"
    mechanism: str | None = None
    step_size: Positive
    """η, of a local step."""
    server_step_size: Positive = 1.0
    """η_g."""
    step_decay: NonNegative = 0.0
    """Both step sizes together fall like (1 + round)^-step_decay."""
    epsilon: Positive | None = None
    delta: Probability | None = None
    accounting: Literal["exact", "zcdp"] | None = None
    objective: Literal["mean", "max", "rounds"] | None = None
    """For the mechanism `optimal`."""

    @property
    def method(self) -> Method:
        """Whose method this is."""
        return method_of(self.kind)

    @property
    def mechanism_name(self) -> str | None:
        """The mechanism that makes its noise, if any."""
        return self.mechanism or self.method.default_mechanism


class Plan(_Part):
    """A whole run."""

    name: Annotated[str, Field(min_length=1)] = "run"
    description: str = ""
    learning: LearningPlan
    data: DataPlan = DataPlan()
    privacy: PrivacyPlan | None = None
    run: RunPlan = RunPlan()
    methods: Annotated[tuple[MethodPlan, ...], Field(min_length=1)]

    def __init__(self, **parts: Any) -> None:
        try:
            super().__init__(**parts)
        except ValidationError as error:
            raise _readable(error, "") from None

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise PlanError("methods.name", names, "a name of its own for each", "rename one")
        if (self.learning.task == "ripple") != (self.data.kind == "ripple"):
            raise PlanError(
                "data.kind", self.data.kind, "ripple data for the ripple task, and only for it",
                f'task = "{self.learning.task}" needs kind = '
                + ('"ripple"' if self.learning.task == "ripple" else '"synthetic"'),
            )  # fmt: skip
        if self.data.kind == "ripple" and (self.learning.ridge or self.data.drift != "none"):
            raise PlanError("data.kind", "ripple", "no ridge and no drift", "walk moves its target")
        need = self.learning.rounds * self.learning.local_steps * self.learning.clients_per_step
        if self.data.clients is not None and need > self.data.clients:
            raise PlanError(
                "learning.rounds", self.learning.rounds,
                f"a horizon of at most {self.data.clients} clients a learner (needs {need})",
                f"rounds = {self.data.clients * self.learning.rounds // need}, or more clients",
            )  # fmt: skip
        for index, method in enumerate(self.methods):
            self._check_method(f"methods[{index}]", method)
        return self

    def _check_method(self, where: str, plan: MethodPlan) -> None:
        if plan.kind not in METHODS:
            raise PlanError(f"{where}.kind", plan.kind, *among(plan.kind, METHODS))
        method = plan.method
        if not method.private:
            for field in ("epsilon", "delta", "accounting", "mechanism"):
                if getattr(plan, field) is not None:
                    raise PlanError(
                        f"{where}.{field}", getattr(plan, field),
                        f"nothing: {plan.kind} adds no noise and protects no one",
                        f"remove it, or take another kind than {plan.kind}",
                    )  # fmt: skip
        else:
            self.budget_of(plan, where)
        if plan.mechanism is not None and plan.mechanism not in MECHANISMS:
            raise PlanError(
                f"{where}.mechanism", plan.mechanism, *among(plan.mechanism, MECHANISMS),
            )  # fmt: skip
        if method.fixed_mechanism and plan.mechanism not in (None, method.default_mechanism):
            raise PlanError(
                f"{where}.mechanism", plan.mechanism, f"{method.default_mechanism} for {plan.kind}",
                'kind = "ours" takes any',
            )  # fmt: skip
        if plan.objective is not None and plan.mechanism_name != "optimal":
            raise PlanError(
                f"{where}.objective", plan.objective, "only with mechanism = optimal", "remove it"
            )
        one = self.learning.learners == 1 and self.learning.local_steps == 1
        if method.one_machine and not one:
            raise PlanError(
                f"{where}.kind", plan.kind, "learners = 1 and local_steps = 1 (one machine)",
                f"this plan has learners = {self.learning.learners}, "
                f"local_steps = {self.learning.local_steps}",
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

    def accounting_of(self, plan: MethodPlan) -> str:
        """The method's own accounting, or the plan's."""
        return plan.accounting or (self.privacy.accounting if self.privacy else "exact")

    @property
    def neighbours(self) -> str:
        """The plan's relation between neighbours."""
        return self.privacy.neighbours if self.privacy else "replace-one"

    @classmethod
    def load(cls, path: Path | str, overrides: dict[str, Any] | None = None) -> Plan:
        """Read a TOML file; ``overrides`` maps dotted keys to values."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError("plan", str(path), "a file that can be read", str(error)) from error
        return cls.parse(text, overrides)

    @classmethod
    def parse(cls, text: str, overrides: dict[str, Any] | None = None) -> Plan:
        """From TOML text."""
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError("plan", "<text>", "TOML", str(error)) from error
        for key, value in (overrides or {}).items():
            _override(content, key, value)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise _readable(error, text) from None
        except PlanError as error:
            raise _with_line(error, text) from None

    def to_toml(self) -> str:
        """TOML that parses to this plan."""
        content = self.model_dump(exclude_none=True, mode="json")
        lines = [f"{k} = {_toml(v)}" for k, v in content.items() if not isinstance(v, dict | list)]
        for table, values in content.items():
            if isinstance(values, dict):
                lines += ["", f"[{table}]", *(f"{k} = {_toml(v)}" for k, v in values.items())]
        for method in content["methods"]:
            lines += ["", "[[methods]]", *(f"{k} = {_toml(v)}" for k, v in method.items())]
        return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _override(content: dict[str, Any], key: str, value: object) -> None:
    methods = content.get("methods")
    if key.startswith("methods.") and isinstance(methods, list):
        named = {m["name"]: m for m in methods if isinstance(m, dict) and "name" in m}
        rest = key.removeprefix("methods.")
        # Names may hold dots: the longest that fits is meant.
        fitting = [name for name in named if rest.startswith(f"{name}.")]
        if not fitting:
            raise PlanError(
                "--set", key, "methods.NAME.key with a NAME of the plan",
                "there are " + ", ".join(map(str, named)),
            )  # fmt: skip
        name = max(fitting, key=len)
        named[name][rest.removeprefix(f"{name}.")] = value
        return
    *tables, last = key.split(".")
    place: Any = content
    for table in tables:
        place = place.setdefault(table, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise PlanError("--set", key, "a dotted key such as learning.rounds", "see the plan")
    place[last] = value


def _readable(error: ValidationError, text: str) -> PlanError:
    """The first error of pydantic, in our words."""
    # A misspelt key is also a missing one: the misspelling is the news.
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        plain = PlanError(cause.field, cause.value, cause.rule, cause.way_out)
        return _with_line(plain, text)
    path = ".".join(f"[{part}]" if isinstance(part, int) else part for part in first["loc"])
    path = path.replace(".[", "[")
    value = first["input"]
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"])
        plan = PlanError(path, value, *among(str(first["loc"][-1]), known))
    elif first["type"] == "missing":
        plan = PlanError(path, None, "a value", f"add {first['loc'][-1]} = ...")
    else:
        shown = value if isinstance(value, str | int | float | bool) else type(value).__name__
        plan = PlanError(path, shown, first["msg"].lower(), "see the plan's documentation")
    return _with_line(plan, text)


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    parts: dict[str, type[BaseModel]] = {
        "learning": LearningPlan, "data": DataPlan, "privacy": PrivacyPlan, "run": RunPlan,
        "methods": MethodPlan,
    }  # fmt: skip
    model = parts.get(str(location[0]), Plan) if len(location) > 1 else Plan
    return list(model.model_fields)


def _with_line(error: PlanError, text: str) -> PlanError:
    """The same error, with the line of the key where the text has it."""
    line = _line_of(text, error.field)
    if line is None or error.field.endswith(")"):
        return error
    return PlanError(f"{error.field} (line {line})", error.value, error.rule, error.way_out)


def _line_of(text: str, field: str) -> int | None:
    table, _, key = field.rpartition(".")
    index = 0
    if match := re.fullmatch(r"(\w+)\[(\d+)\]", table):
        table, index = match[1], int(match[2])
    current, seen = "", 0 if table == "" else -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]?\]", line):
            current = header[1]
            seen += current == table
        elif re.match(rf"\s*{re.escape(key)}\s*=", line) and (current, seen) == (table, index):
            return number
    return None
