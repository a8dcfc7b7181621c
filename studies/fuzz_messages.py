"""What the fuzz study sends: records and models of every wrong kind, and a task that fails."""

from __future__ import annotations

import array
import hashlib
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from veilstream.deployment.release import HEADER_BYTES
from veilstream.errors import InputError, PrivacyError
from veilstream.learning.tasks import Sample

D, ROUNDS, TAU = 5, 12, 3
LABELS = (-1.0, 1.0)
BATCH = 5_000
RESTART_EVERY = 1_000

TAG = "Ms-Recognisable-5551234"
INSIDE = 34567.8125  # may be admitted
OUTSIDE = 1234567.8125  # beyond what is admitted
NEEDLES = (TAG, TAG.encode().hex(), "34567.8125", "34567.81", "1234567.8", "1.2345678")

Rng = random.Random


# --- what clients send ---------------------------------------------------------------------------


class Hostile:
    """An object that raises wherever it is touched, with a client's number."""

    def _raise(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{OUTSIDE} {TAG}")

    __array__ = __len__ = __iter__ = __float__ = __int__ = __index__ = __bool__ = _raise
    __getitem__ = __eq__ = __repr__ = __str__ = _raise
    __hash__ = object.__hash__


class HostileServer(Hostile):
    """The same from a server, who knows no client."""

    def _raise(self, *_: object, **__: object) -> Any:
        raise RuntimeError("a server's own words")

    __array__ = __len__ = __iter__ = __float__ = __int__ = __index__ = __bool__ = _raise
    __getitem__ = __eq__ = __repr__ = __str__ = _raise
    __hash__ = object.__hash__


class HostileText(str):
    """A tag of the right type that does not behave like one."""

    __slots__ = ()

    def _raise(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{OUTSIDE} {TAG}")

    __len__ = encode = _raise  # type: ignore[assignment]


class OwnArray(np.ndarray):
    """A subclass that refuses arithmetic."""

    def __array_ufunc__(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{OUTSIDE} {TAG}")


class ServersArray(np.ndarray):
    """The same from a server."""

    def __array_ufunc__(self, *_: object, **__: object) -> Any:
        raise RuntimeError("a server's own words")


def _nested(depth: int) -> Any:
    value: Any = OUTSIDE
    for _ in range(depth):
        value = [value]
    return value


def _loop() -> list[Any]:
    value: list[Any] = [OUTSIDE]
    value.append(value)
    return value


_PAIR = np.dtype([("a", "f4"), ("b", "f4")])

BAD_FEATURES: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: np.full(rng.choice((0, 1, D - 1, D + 1, 40)), INSIDE),
    lambda rng: np.full((1, D), INSIDE),
    lambda rng: np.full((D, 1), INSIDE, np.float32),
    lambda rng: np.broadcast_to(np.float32(INSIDE), (10**9,)),
    lambda rng: np.float64(INSIDE),
    lambda rng: np.array([INSIDE] * D, object),
    lambda rng: np.full(D, INSIDE, complex),
    lambda rng: np.array([str(INSIDE)] * D),
    lambda rng: np.array([b"1"] * D),
    lambda rng: np.zeros(D, "datetime64[s]"),
    lambda rng: np.zeros(D, "timedelta64[s]"),
    lambda rng: np.zeros(D, _PAIR),
    lambda rng: np.zeros(D, "V8"),
    lambda rng: _with(rng, np.nan),
    lambda rng: _with(rng, rng.choice((np.inf, -np.inf))),
    lambda rng: _with(rng, rng.choice((OUTSIDE, -OUTSIDE, 1e30, -1e300, 1.7e308))),
    lambda rng: _with(rng, np.nan).astype(np.float16),
    lambda rng: np.full(D, np.longdouble("1e4000")),
    lambda rng: np.full(D, 2**63, np.uint64),
    lambda rng: [OUTSIDE, *([10**400] * (D - 1))],
    lambda rng: [[OUTSIDE], [OUTSIDE, 1.0]],
    lambda rng: _nested(rng.choice((2, 30, 70, 500))),
    lambda rng: _loop(),
    lambda rng: None,
    lambda rng: str(OUTSIDE),
    lambda rng: {OUTSIDE: OUTSIDE},
    lambda rng: {OUTSIDE},
    lambda rng: iter([OUTSIDE] * D),
    lambda rng: Hostile(),
    lambda rng: [Hostile()] * D,
    lambda rng: OUTSIDE,
    lambda rng: np.matrix([INSIDE] * D),
    lambda rng: np.full(D, OUTSIDE).view(OwnArray),
    lambda rng: lambda: OUTSIDE,
    lambda rng: memoryview(b"12345"[: rng.randrange(1, 5)]),
)

BAD_TARGETS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: rng.choice((0.0, 2.0, -2.0, 1.0 + 1e-9, OUTSIDE, INSIDE, 1e300)),
    lambda rng: rng.choice((np.nan, np.inf, -np.inf)),
    lambda rng: rng.choice((None, "1", b"1", 1 + 0j, {}, [], (), object)),
    lambda rng: np.ones(1),
    lambda rng: np.ones((1, 1, 1)),
    lambda rng: np.array("1"),
    lambda rng: np.datetime64(1, "s"),
    lambda rng: 10**400,
    lambda rng: Hostile(),
    lambda rng: np.zeros((), _PAIR),
    lambda rng: np.longdouble("1e4000"),
)

BAD_RECORDS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: None,
    lambda rng: (),
    lambda rng: (good_features(rng, 0),),
    lambda rng: (good_features(rng, 0), 1.0, None, OUTSIDE),
    lambda rng: [good_features(rng, 0), 1.0],
    lambda rng: {"features": OUTSIDE},
    lambda rng: str(OUTSIDE),
    lambda rng: OUTSIDE,
    lambda rng: np.full((2, D), INSIDE),
    lambda rng: Hostile(),
    lambda rng: iter((OUTSIDE, 1.0)),
)


def _with(rng: Rng, value: float) -> np.ndarray:
    """Good features with one bad number."""
    features = np.array([0.0, INSIDE, 1.0, -1.0, 0.5])
    features[rng.randrange(D)] = value
    return features


def bad_record(rng: Rng) -> Any:
    """A client's record that must be refused."""
    place = rng.random()
    if place < 0.2:
        return rng.choice(BAD_RECORDS)(rng)
    if place < 0.4:
        return Sample(good_features(rng, 0), rng.choice(BAD_TARGETS)(rng))
    features = rng.choice(BAD_FEATURES)(rng)
    return Sample(features, 1.0) if place < 0.9 else (features, rng.choice(BAD_TARGETS)(rng), None)


def good_features(rng: Rng, behaviour: int) -> Any:
    """Features that must be admitted; the first asks the task for a behaviour."""
    small = rng.choice((0.0, -0.0, 1e-45, 1e-310, 5e-324, 0.25, -3.0, INSIDE))
    numbers = [float(behaviour), INSIDE, small, rng.uniform(-2.0, 2.0), rng.choice((0.0, 999999.5))]
    form = rng.randrange(9)
    if form == 0:
        return numbers
    if form == 1:
        return tuple(numbers)
    if form == 2:
        return array.array("d", numbers)
    if form == 3:
        return np.array(numbers).astype(">f8")
    if form == 4:
        return np.array(numbers, np.longdouble)
    if form == 5:
        return np.array([int(n) for n in numbers], rng.choice((np.int32, np.int64)))
    if form == 6:
        return np.ma.masked_array(np.array(numbers), mask=[0, 1, 0, 1, 0])
    if form == 7:
        return np.repeat(np.array(numbers, np.float32), 2)[::2]
    return np.array(numbers, np.float32)


def good_record(rng: Rng, behaviour: int) -> Any:
    """A client's record that must be admitted."""
    label = rng.choice((-1, 1, -1.0, 1.0, True, np.float32(1), np.int8(-1), np.array(1.0)))
    features = good_features(rng, behaviour)
    return rng.choice((Sample(features, label), (features, label), (features, label, Hostile())))


BAD_TAGS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: rng.choice((None, 5, 5.0, True, object, [], (), {}, [TAG], (TAG,), OUTSIDE)),
    lambda rng: rng.choice(("", b"")),
    lambda rng: TAG * 1000,
    lambda rng: TAG.encode() * 1000,
    lambda rng: bytearray(TAG.encode()),
    lambda rng: memoryview(TAG.encode()),
    lambda rng: np.frombuffer(TAG.encode(), np.uint8),
    lambda rng: Hostile(),
)


def fresh_tag(rng: Rng, number: int) -> str | bytes:
    """A tag that nobody has used."""
    name = f"{TAG}/{number}"
    form = rng.randrange(6)
    if form == 0:
        return name.encode()
    if form == 1:
        return "\u202e" + name + "\u0301\u200bx"
    if form == 2:
        return b"\xff\x00" + name.encode()
    if form == 3:
        return name.ljust(1024, "\U0001f600")
    return name


# --- a task that fails as it is asked to ---------------------------------------------------------


def _raiser(error: type[Exception]) -> Callable[[Any, Sample], Any]:
    def behave(z: Any, sample: Sample) -> Any:
        raise error(f"{sample.features} {TAG}")

    return behave


def _input_error(z: Any, sample: Sample) -> Any:
    raise InputError("features", sample.features, "not these", TAG)


def _some(z: Any, sample: Sample) -> Any:
    return np.where(np.arange(D) == 1, sample.features, 0.0)


ZERO_BEHAVIOURS: tuple[Callable[[Any, Sample], Any], ...] = (
    *map(_raiser, (ValueError, ZeroDivisionError, RecursionError, MemoryError, StopIteration)),
    *map(_raiser, (PrivacyError, OSError, AssertionError, FloatingPointError, RuntimeWarning)),
    _input_error,
    lambda z, sample: np.full(D, np.nan, np.float32),
    lambda z, sample: _some(z, sample) / np.zeros(D),
    lambda z, sample: np.exp(sample.features.astype(np.float32) * np.float32(1e5)),
    lambda z, sample: np.full(D, 1e300),
    lambda z, sample: np.full(D, -np.inf),
    lambda z, sample: np.full(D, np.longdouble("1e4000")),
    lambda z, sample: np.full(D + 1, INSIDE),
    lambda z, sample: np.full((1, D), INSIDE),
    lambda z, sample: np.float32(INSIDE),
    lambda z, sample: INSIDE,
    lambda z, sample: None,
    lambda z, sample: Hostile(),
    lambda z, sample: np.arange(D),
    lambda z, sample: np.ones(D, bool),
    lambda z, sample: np.full(D, INSIDE, complex),
    lambda z, sample: np.full(D, INSIDE, object),
    lambda z, sample: np.array([str(INSIDE)] * D),
    lambda z, sample: np.zeros(D, _PAIR),
    lambda z, sample: [[1.0], [1.0, 2.0]],
    lambda z, sample: np.full(D, 1e-45, np.float32),
    lambda z, sample: np.zeros(D),
)

STEP_BEHAVIOURS: tuple[Callable[[Any, Sample], Any], ...] = (
    _some,
    lambda z, sample: _some(z, sample) * 1e30,
    lambda z, sample: np.full(D, np.finfo(np.float32).max),
    lambda z, sample: [-1.0] * D,
    lambda z, sample: np.full(D, INSIDE, np.float16),
    lambda z, sample: np.full(D, INSIDE, ">f8"),
    lambda z, sample: np.full(D, np.longdouble(INSIDE)),
    lambda z, sample: np.full(D, INSIDE, np.float32).view(OwnArray),
    lambda z, sample: np.ma.masked_array(np.full(D, INSIDE), mask=True),
    lambda z, sample: 0.2 + 0.01 * z,
)

BEHAVIOURS = STEP_BEHAVIOURS + ZERO_BEHAVIOURS


class Temperamental:
    """A task whose gradient does what the client's first number says."""

    dim, classifies, labels, features_shape = D, True, LABELS, (D,)

    def host_gradient(self, z: Any, sample: Sample) -> Any:
        """Of the behaviour that was asked for."""
        return BEHAVIOURS[int(sample.features[0])](z, sample)


# --- what servers send ---------------------------------------------------------------------------


def _x(rng: Rng) -> np.ndarray:
    return np.array([rng.uniform(-1.0, 1.0) for _ in range(D)], np.float32)


def _with_number(rng: Rng, value: float) -> np.ndarray:
    x = _x(rng).astype(np.float64)
    x[rng.randrange(D)] = value
    return x


BAD_MODELS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: None,
    lambda rng: [0.0] * D,
    lambda rng: "x",
    lambda rng: 0.0,
    lambda rng: HostileServer(),
    lambda rng: np.zeros(rng.choice((0, 1, D - 1, D + 1))),
    lambda rng: np.zeros((D, 1)),
    lambda rng: np.zeros((1, D)),
    lambda rng: np.matrix([0.0] * D),
    lambda rng: np.broadcast_to(np.float32(0), (10**9,)),
    lambda rng: np.zeros(()),
    lambda rng: np.zeros(D, complex),
    lambda rng: np.zeros(D, object),
    lambda rng: np.zeros(D, bool),
    lambda rng: np.zeros(D, "U3"),
    lambda rng: np.zeros(D, "datetime64[s]"),
    lambda rng: np.zeros(D, _PAIR),
    lambda rng: np.array([OwnArray] * D, object),
    lambda rng: _with_number(rng, rng.choice((np.nan, np.inf, -np.inf))),
    lambda rng: _with_number(rng, rng.choice((1.1e6, -1e30, 1e39, 1e300))),
    lambda rng: np.full(D, np.longdouble("1e4000")),
    lambda rng: np.full(D, 2**63, np.uint64),
    lambda rng: np.full(D, np.nan, np.float16),
)

ODD_MODELS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: np.ma.masked_array(_x(rng), mask=[1, 0, 1, 0, 0]),
    lambda rng: np.ma.masked_array(_with_number(rng, np.nan), mask=True),
    lambda rng: _x(rng).view(ServersArray),
    lambda rng: _x(rng).astype(">f8"),
    lambda rng: _x(rng).astype(np.float16),
    lambda rng: np.arange(D),
    lambda rng: np.full(D, 1e-45, np.float32),
    lambda rng: np.repeat(_x(rng), 2)[::2],
)
"""A learner may take these or refuse them; but what it takes, it stores as it uses it."""

BAD_ROUNDS: tuple[Callable[[Rng, int], Any], ...] = (
    lambda rng, r: r + rng.choice((1, 2, 100, 2**31, 2**63, 10**30)),
    lambda rng, r: 10**5000,
    lambda rng, r: -(10**5000),
    lambda rng, r: -1 - rng.randrange(3),
    lambda rng, r: r - 2 - rng.randrange(3),
    lambda rng, r: rng.choice((True, False)),
    lambda rng, r: float(r),
    lambda rng, r: rng.choice((np.nan, np.inf, None, "0", b"0", 1j, [0], (0,), {}, object)),
    lambda rng, r: np.float64(r),
    lambda rng, r: np.bool_(rng.random() < 0.5),
    lambda rng, r: np.array(r),
    lambda rng, r: np.array([r, r]),
    lambda rng, r: Fraction(r),
    lambda rng, r: HostileServer(),
)

BAD_ACKNOWLEDGEMENTS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: rng.choice((5, 0.0, "x", b"x", (), (0,), (0, "a", "b"), {}, {0: "a"}, object)),
    lambda rng: rng.choice(((None, "a"), ("a", 0), (True, "a"), (0.0, "a"), (0, b"a"), (0, None))),
    lambda rng: (rng.randrange(-3, 10**6), hashlib.sha256(rng.randbytes(4)).hexdigest()),
    lambda rng: [0, "ff" * 32],
    lambda rng: (10**5000, "ff" * 32),
    lambda rng: (0, "\ud800\0" * 50),
    lambda rng: (0, "f" * 100_000),
    lambda rng: np.zeros(2),
    lambda rng: (np.int64(0), "ff" * 32),
    lambda rng: (np.zeros(2), "ff" * 32),
    lambda rng: HostileServer(),
    lambda rng: (HostileServer(), HostileServer()),
    lambda rng: (0, HostileServer()),
)


def mutated(rng: Rng, payload: bytes) -> bytes:
    """Bytes that look more or less like a message."""
    form = rng.randrange(8)
    if form == 0:
        return rng.randbytes(rng.randrange(2 * len(payload)))
    if form == 1:
        return payload[: rng.randrange(len(payload))]
    if form == 2:
        return payload + rng.randbytes(rng.choice((1, 8, 100)))
    content = bytearray(payload)
    if form == 3:
        struct.pack_into("<I", content, 24, rng.choice((0, D + 1, 2**31, 2**32 - 1)))
    elif form == 4:
        grid = rng.choice((0.0, -1.0, np.nan, np.inf, 3.0, 5e-324, 2.0**-1022, 1.5))
        struct.pack_into("<d", content, 28, grid)
    elif form == 5:
        content[rng.randrange(8)] ^= 1 << rng.randrange(8)
    elif form == 6:
        return bytes(content[: HEADER_BYTES - rng.randrange(HEADER_BYTES + 1)])
    else:
        for _ in range(rng.randrange(1, 20)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)
