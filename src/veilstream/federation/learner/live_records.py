"""Records that callers of the learner API send: from JSON to one client's sample, or a refusal.

The fields of a ``record`` are the plan's columns by name, encoded as rows of a file are; `data.encode`
is called if the plan has it. Other fields are ignored. ``features`` and ``target`` are numbers that
the caller encoded. A refusal names the field and the rule, never the field's value, and goes to the
caller alone. Where it has a field for who it is, it says whose record it was (``client``): that client takes a
step with a zero gradient, as with a file, so that the server sees nothing of the refusal. Where that field names
nobody, the record stands for a client of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.tasks import Sample
from veilstream.records.admission import Admission
from veilstream.records.cells import as_text, is_missing
from veilstream.records.client_names import NAME_RULE, client_name
from veilstream.records.column_rules import rule_of
from veilstream.records.own_records import OwnRecords
from veilstream.records.schema import EACH_ROW, REASONS, Encoded, RecordSchema, Refusal

_FIELDS = frozenset({"client", "record", "features", "target"})
_LONGEST_SHOWN = 32
_NUMBER_BYTES = 32
_OTHER_BYTES = 8 << 10  # a name, the fields' names, blanks
_RECORD_BYTES = 64 << 10


class RefusedRequest(Exception):
    """A request that is refused; ``record``: why its record cannot be used, None if the request is wrong."""

    def __init__(
        self,
        why: str,
        record: Refusal | None = None,
        *,
        status: int = 422,
        reason: str = "record",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(why)
        self.why, self.record, self.status, self.reason = why, record, status, reason
        self.headers = dict(headers or {})

    @property
    def client(self) -> str | None:
        """Who takes a step all the same; None if nobody does."""
        return None if self.record is None else self.record.client


class LiveRecords:
    """Turns a caller's JSON into a sample; a record that names another learner is refused."""

    def __init__(self, admission: Admission, schema: RecordSchema | None, learner: str) -> None:
        self._admission, self._schema, self._learner = admission, schema, learner

    @property
    def largest_bytes(self) -> int:
        """The largest request for one record."""
        encoded = _OTHER_BYTES + _NUMBER_BYTES * int(np.prod(self._admission.shape, dtype=np.int64))
        return encoded if self._schema is None else max(encoded, _RECORD_BYTES)

    def observation(self, said: Mapping[str, Any]) -> Encoded:
        """The client, and a sample that the task admits; a `RefusedRequest` says whose record is refused."""
        if not isinstance(said, Mapping):
            raise RefusedRequest("expected a JSON object for each record")
        try:
            return self._encoded(said)
        except RefusedRequest as error:
            refused = error
        except Exception:  # whatever a value is
            refused = RefusedRequest("record: it cannot be read", Refusal("not readable"))
        who = self._who_takes_its_step(said)
        if who is not None:
            refused.record = replace(refused.record or Refusal("not readable"), client=who)
        raise refused

    def _who_takes_its_step(self, said: Mapping[str, Any]) -> str | None:
        """The client of a refused record; a new one if no one person is named.

        None for another learner's record, and for a request without a field for a name, as for a file without the
        column: a program that forgets it must not use up the steps.
        """
        schema, record = self._schema, said.get("record")
        row = record if isinstance(record, dict) else {}
        if schema is not None and schema.learner is not None:
            told = row.get(schema.learner)
            if not is_missing(told) and as_text(told) != self._learner:
                return None
        named = [said["client"]] if "client" in said else []
        if schema is not None and schema.client != EACH_ROW and schema.client in row:
            named.append(row[schema.client])
        if not named:
            return None
        names = {client_name(who) for who in named if not is_missing(who)}
        return (names.pop() if len(names) == 1 else None) or f"nobody {secrets.token_hex(16)}"

    def _encoded(self, said: Mapping[str, Any]) -> Encoded:
        if unknown := set(said) - _FIELDS:
            raise RefusedRequest(f"unknown field {_shown(min(unknown))}")
        who = said.get("client")
        if "record" not in said:
            if self._schema is not None and "features" not in said:
                why = "record: expected an object of the plan's fields by name"
                raise RefusedRequest(why, Refusal("not readable"))
            name = self._name(who)
            sample = self._admission.admitted(Sample(said.get("features"), said.get("target")))
            if sample is None:
                raise self._not_admitted()
            return Encoded(name, sample)
        if extra := {"features", "target"} & set(said):
            raise RefusedRequest(f"{min(extra)}: expected nothing beside record")
        schema, row = self._row(said["record"])
        name = self._name(who) if "client" in said or schema.client == EACH_ROW else ""
        if schema.client != EACH_ROW and "client" in said:
            if not is_missing(row.get(schema.client)) and client_name(row[schema.client]) != name:
                why = f"record.{schema.client}: expected the same person as client, or left out"
                raise RefusedRequest(why, Refusal("no client", schema.client))
            row[schema.client] = name
        found = schema.encode(row, row_name=name)
        if isinstance(found, Refusal):
            raise self._refused(found)
        sample = self._admission.admitted(found.sample)
        if sample is None:
            raise self._not_admitted()
        return Encoded(found.client, sample, found.clamped)

    def features(self, said: Mapping[str, Any]) -> NDArray[np.float32]:
        """The numbers to predict from: ``features``, or a ``record``, which needs no label or client."""
        if "record" in said:
            if "features" in said:
                raise RefusedRequest("features: expected nothing beside record")
            schema, row = self._row(said["record"])
            found = schema.features_of(row)
            if isinstance(found, Refusal):
                raise self._refused(found)
            features = found
        else:
            try:
                with np.errstate(all="ignore"):  # a number that is too large becomes infinite, and is refused
                    features = np.asarray(said.get("features"), np.float32)
            except (ValueError, TypeError, OverflowError):
                features = np.zeros(0, np.float32)
        if features.shape != self._admission.shape or not np.isfinite(features).all():
            raise RefusedRequest(f"features: expected {self._shape} numbers")
        return features

    def in_words(self, prediction: object) -> dict[str, Any]:
        """A prediction in the plan's own words, if it names a label: ``{"label": "yes"}``."""
        label = None if self._schema is None else self._schema.label
        if label is None or isinstance(prediction, bool) or not isinstance(prediction, int | float):
            return {}
        return {"label": label.in_units(float(prediction))}

    def _name(self, who: object) -> str:
        name = None if is_missing(who) else client_name(who)
        if name is None:
            why = f"client: expected {NAME_RULE}; NA, null and the like name nobody"
            raise RefusedRequest(why, Refusal("no client", "client"))
        return name

    def _row(self, record: object) -> tuple[RecordSchema, dict[str, Any]]:
        schema = self._schema
        if schema is None:
            raise RefusedRequest(
                'record: this plan names no fields ([data] kind is not "table"); send features and target'
            )
        if not isinstance(record, dict):
            why = "record: expected an object of the plan's fields by name"
            raise RefusedRequest(why, Refusal("not readable"))
        if not isinstance(schema, OwnRecords):
            for column in schema.columns:
                if column != schema.client and isinstance(record.get(column), dict | list):
                    why = f"record.{column}: expected {rule_of(schema, column)}, no list or object"
                    raise RefusedRequest(why, Refusal("not readable", column))
        told = None if schema.learner is None else record.get(schema.learner)
        if not is_missing(told) and as_text(told) != self._learner:
            why = f"record.{schema.learner}: expected this learner's name, or left out"
            raise RefusedRequest(why, Refusal("other learner", schema.learner or ""))
        return schema, dict(record)

    def _refused(self, refusal: Refusal) -> RefusedRequest:
        assert self._schema is not None
        where = f"record.{refusal.column}" if refusal.column else "record"
        rule = rule_of(self._schema, refusal.column)
        return RefusedRequest(f"{where}: {REASONS[refusal.reason]}; expected {rule}", refusal)

    def _not_admitted(self) -> RefusedRequest:
        labels = self._admission.labels
        target = "a number" if labels is None else f"one of {', '.join(map(str, labels))}"
        expected = f"expected {self._shape} numbers in features, and {target} as target"
        return RefusedRequest(expected, Refusal("not admitted"))

    @property
    def _shape(self) -> str:
        return " x ".join(map(str, self._admission.shape))


def _shown(name: str) -> str:
    return ascii(name[:_LONGEST_SHOWN])
