"""A TOML table becomes a frozen dataclass, or a clear error.

Types are strict: true is no number and 2.0 no whole number; a whole number may stand for a float. A field is
a bool, int, float, str, Literal of texts or Table; or a ``tuple[X, ...]`` of one (an array; the rule is for
its items); or any of these ``| None``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin

from veilstream.errors import InputError, among

FILL_IN = "?"
"""Stands in a proposed plan where a person must write; no number, array or table is it."""

_BOUNDS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True, kw_only=True)
class FieldRule:
    """What a bool, int, float or str must be beyond its type, and the way out if it is not."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    empty: bool = True  # whether a text or an array may be empty
    choices: Collection[str] = ()  # a text is one of these, or fits ``pattern`` if that is given too
    pattern: str | None = None  # a text matches this from end to end; ``shape`` says it in words
    shape: str = ""
    hint: str = ""  # what to write instead
    only_with: str = ""  # another key of the table that must be given too
    only_where: tuple[str, str] | None = None  # another key of the table, and the value that it must have
    agreed: bool = False  # server and learner must hold the same value: it decides the model or the promise
    silent_default: bool = False  # terms leave its default out, as they did before there was the key

    @property
    def bounds(self) -> dict[str, float]:
        """Those that are set, by their sign."""
        given = zip(_BOUNDS, (self.gt, self.ge, self.lt, self.le), strict=True)
        return {sign: bound for sign, bound in given if bound is not None}

    def read(self, kind: type, given: Any) -> Any:
        """The value as a dataclass holds it, or MISSING if type or rule exclude it."""
        if kind is bool or isinstance(given, bool):
            return given if kind is bool and isinstance(given, bool) else MISSING
        if kind is str:
            return self._read_text(given) if isinstance(given, str) else MISSING
        if not isinstance(given, int if kind is int else int | float):
            return MISSING
        try:
            number = kind(given)
        except OverflowError:
            return MISSING
        # A whole number in TOML has 64 bits.
        fits = math.isfinite(number) if kind is float else -(2**63) <= number < 2**63
        fits = fits and all(_BOUNDS[sign](number, bound) for sign, bound in self.bounds.items())
        return number if fits else MISSING

    def _read_text(self, given: str) -> Any:
        text = str.__str__(given)  # a StrEnum's member becomes its name
        if re.search("[\ud800-\udfff]", text):  # half a character: no file can hold it
            return MISSING
        if self.choices or self.pattern is not None:
            matched = self.pattern is not None and re.fullmatch(self.pattern, text)
            return text if matched or text in self.choices else MISSING
        return text if text or self.empty else MISSING

    def in_words(self, kind: type) -> str:
        """What `read` accepts."""
        if kind is bool:
            return "true or false"
        if kind is str:
            options = [among("", self.choices)[0]] if self.choices else []
            options += [self.shape] if self.shape else []
            return ", or ".join(options) or ("text" if self.empty else "text that is not empty")
        finite = "finite " if self.lt is None and self.le is None else ""
        bounds = [f"{sign} {_short(bound)}" for sign, bound in self.bounds.items()]
        return f"a {'whole ' if kind is int else finite}number {' and '.join(bounds)}".rstrip()


def value(*, default: Any = MISSING, **rule: Any) -> Any:
    """A field with a `FieldRule`; without a default it must be given."""
    return dataclasses.field(default=default, metadata={"rule": FieldRule(**rule)})


def agreed(*, default: Any = MISSING, **rule: Any) -> Any:
    """A `value` that server and learner must hold alike: it decides the model or the promise."""
    return value(default=default, agreed=True, **rule)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(value, agreed))
class Table:
    """Subclasses are frozen dataclasses that check what they are made from; inner tables may be mappings.

    Unknown keys, at any depth, are refused before anything else: a misspelt key is also a missing one.
    """

    refusal: ClassVar[type[InputError]] = InputError  # what is raised
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _entries: ClassVar[dict[str, _Entry]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, init=False)(cls)
        cls._entries = _entries_of(cls)

    def __init__(self, /, **given: Any) -> None:
        problems = _unknown_keys(type(self), given, "")
        for name, entry in self._entries.items():
            if problems and name not in given:
                continue  # a misspelt key is also a missing one
            try:
                object.__setattr__(self, name, entry.accepted(given.get(name, entry.default)))
            except InputError as error:
                problems += error.together
        if problems:
            raise all_of(_once(problems))
        for name in self._entries:
            self._check_company(name)
        self.check()

    def given(self, name: str) -> bool:
        """Whether a field differs from its default."""
        return bool(getattr(self, name) != self._entries[name].default)

    def allows(self, name: str) -> bool:
        """Whether the table's other fields let this one be given."""
        rule = self._entries[name].rule
        other = rule.only_where is None or getattr(self, rule.only_where[0]) == rule.only_where[1]
        return other and not (rule.only_with and getattr(self, rule.only_with) is None)

    def _check_company(self, name: str) -> None:
        if not self.given(name) or self.allows(name):
            return
        rule, held = self._entries[name].rule, _shown(getattr(self, name))
        if rule.only_where is None:
            raise self.refusal(name, held, f"{rule.only_with} beside it", f"add {rule.only_with}, or remove {name}")
        key, wanted = rule.only_where
        raise self.refusal(name, held, f'nothing unless {key} is "{wanted}"', f'{key} = "{wanted}", or remove {name}')

    def check(self) -> None:
        """Raise what is wrong between fields; each of them is right by itself."""

    def agreed_values(self) -> dict[str, Any]:
        """Values of the fields made with `agreed`: part of the terms of server and learner."""
        entries = {name: entry.rule for name, entry in self._entries.items() if entry.rule.agreed}
        return {
            name: getattr(self, name) for name, rule in entries.items() if self.given(name) or not rule.silent_default
        }


@dataclass(frozen=True)
class _Entry:
    name: str
    kind: type
    array: bool
    optional: bool
    default: Any
    rule: FieldRule
    refusal: type[InputError]

    @property
    def table(self) -> type[Table] | None:
        return self.kind if issubclass(self.kind, Table) else None

    def accepted(self, given: Any) -> Any:
        """The value as the dataclass holds it."""
        if given is None and self.optional:
            return None
        if given is MISSING:
            raise self._refused(self.name, None)
        if not self.array:
            return self._one(self.name, given)
        if not isinstance(given, list | tuple) or not (given or self.rule.empty):
            raise self._refused(self.name, given)
        problems: list[InputError] = []
        held = []
        for i, item in enumerate(given):
            try:
                held.append(self._one(f"{self.name}[{i}]", item))
            except InputError as error:
                problems += error.together
        if problems:
            raise all_of(problems)
        return tuple(held)

    def _one(self, place: str, given: Any) -> Any:
        if self.table is None:
            held = self.rule.read(self.kind, given)
            if held is not MISSING:
                return held
        elif isinstance(given, self.table):
            return given
        elif isinstance(given, Mapping):
            try:
                return self.table(**{key: held for key, held in given.items() if isinstance(key, str)})
            except InputError as error:
                inside = [self.refusal(f"{place}.{e.field}", e.value, e.rule, e.way_out) for e in error.together]
                raise all_of(inside) from None
        raise self._refused(place, given)

    def _refused(self, place: str, given: Any) -> InputError:
        rule = "a table" if self.table else self.rule.in_words(self.kind)
        if self.array and place == self.name:
            rule = f"an array, {'' if self.rule.empty else 'not empty, '}each item {rule}"
        return self.refusal(place, _shown(given), rule, self._way_out(given))

    def _way_out(self, given: Any) -> str:
        if given == FILL_IN:
            return f"fill it in: {self.rule.hint or self.name}"
        written = f"{self.name} = ..."
        if self.table:
            written = f"[[{self.name}]]" if self.array else f"[{self.name}]"
        if given is None:
            return "; ".join(filter(None, [f"add {written}", self.rule.hint]))
        if self.rule.hint:
            return self.rule.hint
        if self.rule.choices:
            return among(str(_shown(given)), self.rule.choices)[1]
        if self.table or self.default is MISSING:
            return f"write {written}"
        if self.default is None:
            return "or leave it out"
        return f"try {str(self.default).lower() if self.kind is bool else self.default}"


def _entries_of(table: type[Table]) -> dict[str, _Entry]:
    kinds = typing.get_type_hints(table)
    entries = {}
    for each in dataclasses.fields(table):
        kind, array, optional = kinds[each.name], False, False
        rule = each.metadata.get("rule", FieldRule())
        if get_origin(kind) in (typing.Union, UnionType):
            (kind,) = (arm for arm in get_args(kind) if arm is not NoneType)
            optional = True
        if get_origin(kind) is tuple:
            kind, array = get_args(kind)[0], True
        if get_origin(kind) is Literal:
            kind, rule = str, dataclasses.replace(rule, choices=get_args(kind))
        entries[each.name] = _Entry(each.name, kind, array, optional, each.default, rule, table.refusal)
    return entries


def all_of(problems: Sequence[InputError]) -> InputError:
    """One error that tells all of them."""
    first, *rest = problems
    if not rest:
        return first
    return type(first)(first.field, first.value, first.rule, first.way_out, file=first.file, further=rest)


def _once(problems: list[InputError]) -> list[InputError]:
    """Each field's first: an unknown key of an inner table is found from outside, too."""
    return list({error.field: error for error in reversed(problems)}.values())[::-1]


def _unknown_keys(table: type[Table], given: Mapping[Any, Any], where: str) -> list[InputError]:
    entries, found = table._entries, []
    for key, held in given.items():
        if key not in entries:
            found.append(table.refusal(f"{where}{key}", _shown(held), *among(str(key), entries)))
            continue
        items = {f"{where}{key}": held}
        if entries[key].array and isinstance(held, list | tuple):
            items = {f"{where}{key}[{i}]": item for i, item in enumerate(held)}
        for place, item in items.items():
            if (inner := entries[key].table) and isinstance(item, Mapping):
                found += _unknown_keys(inner, item, f"{place}.")
    return found


def _shown(given: Any) -> object:
    if isinstance(given, int) and abs(given) >= 2**63:
        return "<whole number beyond 64 bits>"
    if given is None or isinstance(given, str | int | float):
        return given
    names = {"dict": "table", "list": "array"}
    return f"<{names.get(type(given).__name__, type(given).__name__)}>"


def _short(bound: float) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{bound:g}")


class PlanError(InputError):
    """A plan that cannot run."""


class PlanTable(Table):
    """A table of a plan."""

    refusal = PlanError
