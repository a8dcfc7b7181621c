"""Linear models on records that are dictionaries, as river and most event streams have them.

A record {"age": 0.4, "city": "Oslo"} becomes a vector by signed feature hashing (Weinberger et al.
2009): a number adds ±value to the column of its name, a string ±1 to the column of "name=value".
The hash is stable and public: learners exchange no vocabulary, the gradient of a record is a function
of that record alone, and no token stays in memory after a call.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from veilstream.errors import InputError
from veilstream.learning.tasks import LeastSquares, Logistic
from veilstream.mechanisms.checks import positive_integer, positive_number
from veilstream.privacy.clipping import clip

Float32s = NDArray[np.float32]
Record = Mapping[str | int, object]

_LARGEST = 1e30  # sums and squares of such numbers stay finite


@dataclass(frozen=True)
class DictEncoder:
    """Records to vectors of ``dim`` columns: column 0 is the constant 1, the others are hashed.

    Missing names and None count as 0; True and False as 1 and 0. Each vector is scaled down by itself.

    Args:
        dim: columns of a vector, the constant included.
        feature_norm: largest norm of a vector; None leaves it as it is.
        salt: public text that decides which names share a column.

    Raises:
        InputError: for a value that the rules exclude.

    """

    dim: int
    feature_norm: float | None = 1.0
    salt: str = ""

    def __post_init__(self) -> None:
        if positive_integer("dim", self.dim, "try 1024") < 2:
            raise InputError("dim", self.dim, ">= 2: the constant, and a column", "try 1024")
        if self.feature_norm is not None:
            positive_number("feature_norm", self.feature_norm, "try 1")
        if not isinstance(self.salt, str) or len(self.salt.encode()) > 64:
            raise InputError("salt", self.salt, "a text of at most 64 bytes", "shorten it")

    def encode_one(self, x: Record) -> Float32s:
        """The vector of one record."""
        encoded: Float32s = self._encode([x], ["features"])[0]
        return encoded

    def encode(self, xs: Iterable[Record]) -> Float32s:
        """The vectors of many records, (records, dim)."""
        records = list(xs)
        return self._encode(records, [f"features[{i}]" for i in range(len(records))])

    def _encode(self, records: list[Record], names: list[str]) -> Float32s:
        rows = np.zeros((len(records), self.dim))
        places: dict[str, tuple[int, float]] = {}  # tokens are people's data: gone with this call
        for row, record, name in zip(rows, records, names, strict=True):
            row[0] = 1.0
            if not isinstance(record, Mapping):
                raise InputError(name, f"a {type(record).__name__}", "a dictionary {name: value}", "pass one")
            # In order of the tokens: where columns meet, rounding depends on who comes first.
            for token, value in sorted(_tokens(name, record)):
                if token not in places:
                    places[token] = _place(token, self.salt, self.dim)
                column, sign = places[token]
                row[column] += sign * value
        if self.feature_norm is None:
            return rows.astype(np.float32)
        scaled = clip(rows, self.feature_norm).astype(np.float32)
        # Rounding to float32 may step over the bound again.
        return np.asarray(clip(scaled, self.feature_norm), np.float32)


class _OnDicts:
    encoder: DictEncoder

    def encode_one(self, x: Record) -> Float32s:
        """The vector of one record."""
        return self.encoder.encode_one(x)

    def encode(self, xs: Iterable[Record]) -> Float32s:
        """The vectors of many records, (records, dim)."""
        return self.encoder.encode(xs)

    def _score(self, params: ArrayLike, x: Record) -> float:
        return float(self.encode_one(x) @ np.asarray(params, np.float32))


class DictLogistic(_OnDicts, Logistic):
    """Logistic regression on records, for labels True/False or +1/-1.

    Without ridge, the gradient of a record has norm at most ``feature_norm``: a clip norm of that
    size changes nothing.

    Args:
        dim: columns of a vector, the constant included.
        feature_norm: largest norm of a vector; None leaves it as it is.
        salt: public text that decides which names share a column.
        ridge: weight of the squared norm in the loss.

    Raises:
        InputError: for a value that the rules exclude.

    """

    def __init__(self, dim: int, *, feature_norm: float | None = 1.0, salt: str = "", ridge: float = 0.0) -> None:
        self.encoder = DictEncoder(dim, feature_norm, salt)
        super().__init__(dim, ridge)

    def encode_targets(self, ys: Iterable[object]) -> Float32s:
        """Labels as the loss wants them: -1 and +1."""
        return np.array([_label(i, y) for i, y in enumerate(ys)], np.float32)

    def predict_one(self, params: ArrayLike, x: Record) -> bool:
        """The likelier label."""
        return self._score(params, x) >= 0

    def predict_proba_one(self, params: ArrayLike, x: Record) -> dict[bool, float]:
        """Probability of each label."""
        p = 0.5 * (1.0 + float(np.tanh(0.5 * self._score(params, x))))
        return {False: 1.0 - p, True: p}


class DictRegression(_OnDicts, LeastSquares):
    """Least squares on records. Arguments and errors as for `DictLogistic`.

    Scaling a record to ``feature_norm`` scales what a linear model says about it: choose the norm,
    and public units, so that typical records are not scaled.

    Args:
        dim: columns of a vector, the constant included.
        feature_norm: largest norm of a vector; None leaves it as it is.
        salt: public text that decides which names share a column.
        ridge: weight of the squared norm in the loss.

    Raises:
        InputError: for a value that the rules exclude.

    """

    def __init__(self, dim: int, *, feature_norm: float | None = 1.0, salt: str = "", ridge: float = 0.0) -> None:
        self.encoder = DictEncoder(dim, feature_norm, salt)
        super().__init__(dim, ridge)

    def encode_targets(self, ys: Iterable[object]) -> Float32s:
        """Values as the loss wants them."""
        values = [_number(f"targets[{i}]", y, "a number", "pass one") for i, y in enumerate(ys)]
        return np.array(values, np.float32)

    def predict_one(self, params: ArrayLike, x: Record) -> float:
        """Fitted value."""
        return self._score(params, x)


def _tokens(name: str, record: Record) -> Iterable[tuple[str, float]]:
    for key, value in record.items():
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise InputError(
                f"{name}[{key!r}]", f"a name of type {type(key).__name__}", "a text or an integer", "rename it"
            )
        if isinstance(value, str):
            yield f"{key}={value}", 1.0
        elif value is not None:
            yield (
                str(key),
                _number(
                    f"{name}[{key!r}]",
                    value,
                    "a number, a text, True, False or None",
                    "flatten what is nested into names of its own, such as 'address.city'",
                ),
            )


def _number(field: str, value: object, rule: str, way_out: str) -> float:
    # The message names the type alone: the value is a client's.
    if not isinstance(value, numbers.Real | np.bool_):
        raise InputError(field, f"a {type(value).__name__}", rule, way_out)
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not abs(number) <= _LARGEST:  # nan as well
        found = "nan" if number != number else "too large"
        raise InputError(field, found, f"a finite number of size at most {_LARGEST:g}", "None means that it is missing")
    return number


def _label(index: int, y: object) -> float:
    if isinstance(y, bool | np.bool_):
        return 1.0 if y else -1.0
    if not isinstance(y, numbers.Real) or y not in (-1, 1):
        found = f"<a {type(y).__name__}, not shown>"  # a client's own: never repeated
        raise InputError(f"targets[{index}]", found, "True or False, or +1 or -1", "pass y == 1")
    return float(y)


def _place(token: str, salt: str, dim: int) -> tuple[int, float]:
    """Column and sign of a token, from 64 bits of BLAKE2b keyed with the salt."""
    text = token.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, key=salt.encode()).digest()
    bits = int.from_bytes(digest, "big")
    return 1 + (bits >> 1) % (dim - 1), -1.0 if bits & 1 else 1.0
