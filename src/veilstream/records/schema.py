"""The schema of a record: named columns in, one client's sample out, or a reason.

Every constant is public: it stands in the plan, and nothing here is estimated from records. The largest norm
of an encoded record is known beforehand, so features have norm `RecordSchema.norm` or less whatever the
record says. A record that cannot be used is a `Refusal`: which rule, which column, never the value. It still
says whose record it was, since a named client takes a step whatever the record says.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError
from veilstream.records.cells import as_number, as_text, has_two_readings, is_missing
from veilstream.records.client_names import client_name
from veilstream.records.sample import Sample

Float32s = NDArray[np.float32]
Missing = Literal["refuse", "zero", "flag"]
Outside = Literal["clamp", "refuse"]
Unknown = Literal["other", "zero", "refuse"]

EACH_ROW = "#row"  # as the name of the client's column: every row is another person

REASONS = {
    "no column": "the column is not there",
    "missing": "the cell is empty",
    "not a number": "the cell is no finite number",
    "two readings": "the number can be read in two ways (1.300 beside decimal commas): write 1300 or 1,3",
    "out of range": "the number is outside the plan's range",
    "unknown category": "the text is not in the plan's vocabulary",
    "unknown label": "the label is none of the plan's",
    "no client": "nobody is named",
    "not a client": "who it is must be text or a whole number, without control characters",
    "not readable": "the row cannot be read as a record",
    "other features": "data.encode gave features of another shape than the task's",
    "not admitted": "features or target are not what the task takes",
    "other learner": "the record names another learner",
    "not repeatable": "data.encode gave two answers for one row; it must depend on the row alone",
}


@dataclass(frozen=True)
class Refusal:
    """Why a record cannot be used, without its values."""

    reason: str  # one of `REASONS`
    column: str = ""
    client: str | None = field(default=None, compare=False, repr=False)  # whose record; None if nobody is named

    def __str__(self) -> str:
        return f"{self.column}: {self.reason}" if self.column else self.reason

    @property
    def without_client(self) -> Refusal:
        """For counts, which hold no names."""
        return replace(self, client=None)


class RefusedRecord(Exception):
    """Carries a `Refusal` inside this room; outside it is returned."""

    def __init__(self, reason: str, column: str) -> None:
        super().__init__(reason)
        self.refusal = Refusal(reason, column)


@dataclass(frozen=True)
class Encoded:
    """A record that can be used."""

    client: str
    sample: Sample
    clamped: tuple[str, ...] = ()  # columns with a number outside its range, or a text outside the vocabulary

    def __repr__(self) -> str:
        return "Encoded(<hidden>)"  # people's data, not for logs


def _why_no_number(cell: object, decimal_comma: bool) -> str:
    return "two readings" if has_two_readings(cell, decimal_comma=decimal_comma) else "not a number"


def _check_range(field: str, low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(
            field,
            (low, high),
            "low < high, both finite",
            "give the range that anybody knows, not what the records show",
        )


@dataclass(frozen=True)
class Numeric:
    """A number with a public range; it becomes one from -1 to 1."""

    name: str
    low: float
    high: float
    outside: Outside = "clamp"
    missing: Missing = "refuse"

    def __post_init__(self) -> None:
        _check_range(f"features.{self.name}", self.low, self.high)

    @property
    def width(self) -> int:
        """Numbers that it becomes."""
        return 2 if self.missing == "flag" else 1

    @property
    def names(self) -> tuple[str, ...]:
        """What each of its numbers is called."""
        return (self.name, *_flag(self))

    def write(self, cell: object, into: Float32s, *, decimal_comma: bool) -> bool:
        """Write a cell into its place; True if it had to be clamped."""
        value = as_number(cell, decimal_comma=decimal_comma)
        if value is None:
            raise RefusedRecord(_why_no_number(cell, decimal_comma), self.name)
        inside = min(max(value, self.low), self.high)
        if inside != value and self.outside == "refuse":
            raise RefusedRecord("out of range", self.name)
        into[0] = 2.0 * (inside - self.low) / (self.high - self.low) - 1.0
        return inside != value


@dataclass(frozen=True)
class Categorical:
    """One of a public list of texts; each has a place of its own."""

    name: str
    vocabulary: tuple[str, ...]
    unknown: Unknown = "other"
    missing: Missing = "refuse"

    def __post_init__(self) -> None:
        known = [as_text(word) for word in self.vocabulary]
        if not known or len(set(known)) < len(known):
            raise InputError(
                f"features.{self.name}.vocabulary",
                self.vocabulary,
                "at least one text, each once",
                'vocabulary = ["north", "south"]',
            )

    @property
    def width(self) -> int:
        """Numbers that it becomes."""
        return len(self.vocabulary) + (self.unknown == "other") + (self.missing == "flag")

    @property
    def names(self) -> tuple[str, ...]:
        """What each of its numbers is called."""
        other = (f"{self.name} is another",) if self.unknown == "other" else ()
        return (*(f"{self.name} = {word}" for word in self.vocabulary), *other, *_flag(self))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {as_text(word): place for place, word in enumerate(self.vocabulary)}

    def write(self, cell: object, into: Float32s, *, decimal_comma: bool) -> bool:
        """Write a cell into its place; True if the vocabulary lacks it."""
        place = self._places.get(as_text(cell))
        if place is not None:
            into[place] = 1.0
            return False
        if self.unknown == "refuse":
            raise RefusedRecord("unknown category", self.name)
        if self.unknown == "other":
            into[len(self.vocabulary)] = 1.0
        return True


@dataclass(frozen=True)
class Hashed:
    """Any text, hashed to one of ``buckets`` places; two texts may share one."""

    name: str
    buckets: int
    missing: Missing = "refuse"

    def __post_init__(self) -> None:
        if not 1 <= self.buckets <= 1 << 20:
            raise InputError(f"features.{self.name}.width", self.buckets, "from 1 to 1048576", "try 64")

    @property
    def width(self) -> int:
        """Numbers that it becomes."""
        return self.buckets + (self.missing == "flag")

    @property
    def names(self) -> tuple[str, ...]:
        """What each of its numbers is called."""
        return (*(f"{self.name} #{place}" for place in range(self.buckets)), *_flag(self))

    def write(self, cell: object, into: Float32s, *, decimal_comma: bool) -> bool:
        """Write a cell into its place, the same on every machine."""
        hashed = hashlib.blake2b(as_text(cell).encode(), digest_size=8, person=b"veilstream").digest()
        into[int.from_bytes(hashed, "little") % self.buckets] = 1.0
        return False


Feature = Numeric | Categorical | Hashed


def _flag(feature: Feature) -> tuple[str, ...]:
    return (f"{feature.name} is missing",) if feature.missing == "flag" else ()


@dataclass(frozen=True)
class Label:
    """The label: one of a public list, or a number with a public range."""

    name: str
    classes: tuple[str, ...] | None = None  # texts of the classes in order; None for a number
    signed: bool = True  # two classes are -1 and +1; otherwise classes are 0, 1, 2, ...
    low: float = 0.0
    high: float = 1.0
    counts: bool = False  # a count: kept as it is, not moved to -1 to 1
    outside: Outside = "clamp"

    def __post_init__(self) -> None:
        if self.classes is None:
            _check_range("label_range", self.low, self.high)
            return
        known = [as_text(word) for word in self.classes]
        if len(set(known)) < max(len(known), 2):
            raise InputError(
                "labels", self.classes, "two texts or more, each once", 'labels = ["no", "yes"]; the second is +1'
            )
        if self.signed and len(known) > 2:
            raise InputError(
                "labels",
                self.classes,
                "two texts, since logistic regression tells two apart",
                'task = "softmax" takes more; or keep two',
            )

    @cached_property
    def _places(self) -> dict[str, int]:
        return {as_text(word): place for place, word in enumerate(self.classes or ())}

    @cached_property
    def _in_any_case(self) -> dict[str, int]:
        """Yes and YES are the plan's yes, unless the plan tells them apart."""
        found = {text.casefold(): place for text, place in self._places.items()}
        return found if len(found) == len(self._places) else {}

    def read(self, value: object, *, decimal_comma: bool) -> tuple[float, bool]:
        """The target, and whether it was clamped."""
        if self.classes is not None:
            text = as_text(value)
            place = self._places.get(text)
            if place is None and (number := as_number(value)) is not None:
                place = self._places.get(as_text(number))
            if place is None:
                place = self._in_any_case.get(text.casefold())
            if place is None:
                raise RefusedRecord("unknown label", self.name)
            return (2.0 * place - 1.0 if self.signed else float(place)), False
        number = as_number(value, decimal_comma=decimal_comma)
        if number is None:
            raise RefusedRecord(_why_no_number(value, decimal_comma), self.name)
        inside = min(max(number, self.low), self.high)
        if inside != number and self.outside == "refuse":
            raise RefusedRecord("out of range", self.name)
        if self.counts:
            return inside, inside != number
        return 2.0 * (inside - self.low) / (self.high - self.low) - 1.0, inside != number

    @property
    def unit(self) -> float:
        """The length of 1 on the scale of targets, in the label's own units."""
        return 1.0 if self.classes is not None or self.counts else 0.5 * (self.high - self.low)

    @property
    def target_range(self) -> tuple[float, float] | None:
        """The public range on the scale of targets, to which predictions are cut; None for classes."""
        if self.classes is not None:
            return None
        return (self.low, self.high) if self.counts else (-1.0, 1.0)

    def in_units(self, predicted: float) -> float | str:
        """A prediction as a class's text, or in the label's own units."""
        if self.classes is not None:
            place = int(predicted > 0) if self.signed else int(predicted)
            return self.classes[place] if 0 <= place < len(self.classes) else str(predicted)
        return float(self.numbers_in_units(predicted))

    def within(self, predicted: Any) -> Any:
        """Numbers that a task predicts, on its own scale, cut to the label's range; of arrays too."""
        if self.classes is not None:
            return predicted
        return np.clip(predicted, self.low, self.high) if self.counts else np.clip(predicted, -1.0, 1.0)

    def numbers_in_units(self, predicted: Any) -> Any:
        """The same in the label's own units."""
        found = self.within(predicted)
        if self.classes is not None or self.counts:
            return found
        return self.low + (found + 1.0) * 0.5 * (self.high - self.low)


@dataclass(frozen=True)
class RecordSchema:
    """A plan's columns."""

    client: str  # column that says who; `EACH_ROW` where every row is another person
    label: Label
    features: tuple[Feature, ...]
    interactions: tuple[tuple[str, str], ...] = ()  # products of the numbers of two features
    bias: bool = True  # a feature that is always 1
    norm: float = 1.0  # features have at most this norm
    fit: Literal["scale", "clip"] = "scale"  # divide all by the largest norm (linear), or only longer ones
    learner: str | None = None  # column that says at whose learner a record is; None for one file each
    time: str | None = None  # column that orders records; None for the order of the file

    def __post_init__(self) -> None:
        names = [feature.name for feature in self.features]
        others = [self.client, self.label.name]
        if not names or len(set(names)) < len(names) or set(names) & set(others):
            raise InputError(
                "features",
                names,
                "at least one column, each once, and neither client nor label",
                "list the columns that predict",
            )
        for pair in self.interactions:
            if not set(pair) <= set(names):
                raise InputError("interactions", " * ".join(pair), "two of the features", f"there are {names}")

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each feature's numbers stand, before interactions and bias."""
        places, at = {}, 0
        for feature in self.features:
            places[feature.name] = slice(at, at + feature.width)
            at += feature.width
        return places

    @cached_property
    def width(self) -> int:
        """Numbers in a record's features."""
        widths = {feature.name: feature.width for feature in self.features}
        products = sum(widths[a] * widths[b] for a, b in self.interactions)
        return sum(widths.values()) + products + self.bias

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """What each number of a record's features is called."""
        named = {feature.name: feature.names for feature in self.features}
        products = [f"{one} * {other}" for a, b in self.interactions for one in named[a] for other in named[b]]
        all_names = [*(name for names in named.values() for name in names), *products, *(["bias"] if self.bias else [])]
        taken = Counter(all_names)
        return tuple(f"{name} ({at})" if taken[name] > 1 else name for at, name in enumerate(all_names))

    @property
    def largest_norm(self) -> float:
        """Largest norm before it is fitted to `norm`."""
        return math.sqrt(len(self.features) + len(self.interactions) + self.bias)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a record must have."""
        named = [self.label.name, *(feature.name for feature in self.features)]
        if self.client != EACH_ROW:
            named.insert(0, self.client)
        return tuple(named)

    def encode(
        self, row: Mapping[str, object], *, row_name: str = "", decimal_comma: bool = False
    ) -> Encoded | Refusal:
        """Encode one record; never raises, whatever is in it. A refusal names the client if the record does.

        A row that names nobody stands for a client of its own (``row_name``), unless all of its cells are empty.
        """
        client = None
        try:
            client = self._client(row, row_name)
            return self._encoded(row, client, decimal_comma)
        except RefusedRecord as refused:
            return replace(refused.refusal, client=client or _nobodys(row, row_name))
        except Exception:  # whatever a cell holds
            return Refusal("not readable", client=client or _nobodys(row, row_name))

    def features_of(self, row: Mapping[str, object]) -> Float32s | Refusal:
        """Features alone, for a prediction."""
        found = self.encode_features(row)
        return found if isinstance(found, Refusal) else found[0]

    def encode_features(
        self, row: Mapping[str, object], *, decimal_comma: bool = False
    ) -> tuple[Float32s, list[str]] | Refusal:
        """Features alone, and the columns that were clamped; never raises."""
        try:
            return self._features(row, decimal_comma)
        except RefusedRecord as refused:
            return refused.refusal
        except Exception:
            return Refusal("not readable")

    def _encoded(self, row: Mapping[str, object], client: str, decimal_comma: bool) -> Encoded:
        told = _cell(row, self.label.name)
        if is_missing(told):
            raise RefusedRecord("missing", self.label.name)
        target, moved = self.label.read(told, decimal_comma=decimal_comma)
        features, clamped = self._features(row, decimal_comma)
        if moved:
            clamped.append(self.label.name)
        return Encoded(client, Sample(features, np.float32(target)), tuple(clamped))

    def _client(self, row: Mapping[str, object], row_name: str) -> str:
        if self.client == EACH_ROW:
            if not row_name:
                raise RefusedRecord("no client", "")
            return row_name
        told = _cell(row, self.client)
        if is_missing(told):
            raise RefusedRecord("no client", self.client)
        named = client_name(told)
        if named is None:
            raise RefusedRecord("not a client", self.client)
        return named

    def _features(self, row: Mapping[str, object], comma: bool) -> tuple[Float32s, list[str]]:
        into = np.zeros(self.width, np.float32)
        clamped: list[str] = []
        for feature in self.features:
            place = into[self.places[feature.name]]
            value = _cell(row, feature.name)
            if is_missing(value):
                if feature.missing == "refuse":
                    raise RefusedRecord("missing", feature.name)
                if feature.missing == "flag":
                    place[-1] = 1.0
            elif feature.write(value, place, decimal_comma=comma):
                clamped.append(feature.name)
        at = sum(feature.width for feature in self.features)
        for a, b in self.interactions:
            product = np.outer(into[self.places[a]], into[self.places[b]]).ravel()
            into[at : at + len(product)] = product
            at += len(product)
        if self.bias:
            into[at] = 1.0
        if self.fit == "scale":
            into *= np.float32(self.norm / self.largest_norm)
        else:
            norm = float(np.linalg.norm(into.astype(np.float64)))
            if norm > self.norm:
                into *= np.float32(self.norm / norm)
        return into, clamped


def _nobodys(row: Mapping[str, object], row_name: str) -> str | None:
    """Who takes the step of a row that names nobody; None for a blank row."""
    return row_name if row_name and not all(map(is_missing, row.values())) else None


def _cell(row: Mapping[str, Any], column: str) -> object:
    if column not in row:
        raise RefusedRecord("no column", column)
    value: object = row[column]
    return value
