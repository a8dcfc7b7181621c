"""Every error that veilstream raises on purpose.

    VeilstreamError                    exit 1
    ├── InputError (ValueError)        exit 2   a field has a value that the rules exclude
    │   └── UnknownName                exit 2   a name that does not exist; the nearest is suggested
    ├── MissingExtra (ImportError)     exit 3   a package is not installed
    ├── PrivacyError                   exit 4   going on would break the promise
    │   ├── HorizonExhausted           exit 4   the mechanism has no noise left
    │   └── LedgerError                exit 4   a learner's ledger is damaged, or older than it was
    │       └── StorageError           exit 8   a disk cannot be written: it is full, read-only or failing
    ├── ProtocolError                  exit 7   a message that server or learner must not act on
    ├── StoreBusy                      exit 6   another process is the ledger's one writer
    ├── RunBusy                        exit 6   another server writes to the run's folder
    └── SolverError                    exit 5   an optimisation did not reach its tolerance

Exit 130 means that the user interrupted (Ctrl-C). Exit codes are part of the public interface.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

__all__ = [
    "HorizonExhausted",
    "InputError",
    "LedgerError",
    "MissingExtra",
    "PrivacyError",
    "ProtocolError",
    "RunBusy",
    "SolverError",
    "StorageError",
    "StoreBusy",
    "UnknownName",
    "VeilstreamError",
    "among",
]


def among(value: str, known: Iterable[str]) -> tuple[str, str]:
    """Rule and way out for a name that should be one of these: the nearest is suggested."""
    names = list(known)
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else "take one of these"
    return "one of " + ", ".join(names), hint


class VeilstreamError(Exception):
    """Root of the tree; ``except VeilstreamError`` catches all that is deliberate."""

    exit_code: ClassVar[int] = 1
    _given: tuple[Any, ...]
    _named: dict[str, Any]

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Remember what it is made of, so that it can be pickled."""
        made = super().__new__(cls, *given, **named)
        made._given, made._named = given, named
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._named), self._given


class InputError(VeilstreamError, ValueError):
    """A field has a value that the rules exclude; the message has four parts: field, value, rule, way out."""

    exit_code: ClassVar[int] = 2

    further: tuple[InputError, ...] = ()
    """Others that were found with it, in the order of the message's lines."""

    def __init__(
        self, field: str, value: object, rule: str, way_out: str, *, file: str = "", further: Sequence[InputError] = ()
    ) -> None:
        self.field, self.value, self.rule, self.way_out = field, value, rule, way_out
        self.file, self.further = file, tuple(further)
        first = f"{file}: " if file else ""
        first += f"{field} = {value!r}: expected {rule} ({way_out})"
        super().__init__("\n".join([first, *map(str, further)]))

    @property
    def together(self) -> list[InputError]:
        """All that were found, each alone."""
        if not self.further:
            return [self]
        alone = type(self)(self.field, self.value, self.rule, self.way_out, file=self.file)
        return [alone, *self.further]


class UnknownName(InputError):
    """A name that does not exist, with the nearest one that does."""

    def __init__(self, field: str, value: str, known: Iterable[str]) -> None:
        self.known = tuple(known)
        super().__init__(field, value, *among(value, self.known))
        self._given, self._named = (field, value, self.known), {}  # what was given may be used up


class MissingExtra(VeilstreamError, ImportError):
    """A package is not installed; ``extra`` is the group that brings it, None for one that veilstream itself brings."""

    exit_code: ClassVar[int] = 3

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        what = "veilstream" if extra is None else f"'veilstream[{extra}]'"
        verb = "are" if " and " in package else "is"
        super().__init__(f"{purpose} needs {package}, which {verb} not installed: pip install {what}")


class PrivacyError(VeilstreamError):
    """Going on would break the privacy promise."""

    exit_code: ClassVar[int] = 4


class HorizonExhausted(PrivacyError):
    """All noise of the horizon has been used; nothing more may be released."""

    def __init__(self, horizon: int, requested: int) -> None:
        self.horizon, self.requested = horizon, requested
        super().__init__(
            f"step {requested} is past the horizon of {horizon} steps: nothing was released "
            f"(plan a longer horizon, or start a new epoch with new clients)"
        )


class LedgerError(PrivacyError):
    """A learner's ledger cannot be trusted to hold all that happened: nothing more is released."""

    def __init__(self, what: str, way_out: str) -> None:
        self.what, self.way_out = what, way_out
        super().__init__(f"{what}: nothing was released ({way_out})")


class StorageError(LedgerError):
    """A disk cannot be written now: nothing more is released until it can, and nothing is lost by waiting."""

    exit_code: ClassVar[int] = 8


class ProtocolError(VeilstreamError):
    """A message between server and learner that must not be acted on."""

    exit_code: ClassVar[int] = 7

    def __init__(self, what: str, way_out: str) -> None:
        self.what, self.way_out = what, way_out
        super().__init__(f"{what}: refused ({way_out})")


class StoreBusy(VeilstreamError):
    """Another process writes to this ledger."""

    exit_code: ClassVar[int] = 6

    def __init__(self, path: str, holder: str) -> None:
        self.path, self.holder = path, holder
        super().__init__(f"{path} is held by process {holder}: a ledger has one writer (stop that learner first)")


class RunBusy(VeilstreamError):
    """Another server writes to this run's folder."""

    exit_code: ClassVar[int] = 6

    def __init__(self, path: str, holder: str) -> None:
        self.path, self.holder = path, holder
        super().__init__(
            f"{path} is held by process {holder}: a run has one server (stop that one first, or "
            "name another folder with --out)"
        )


class SolverError(VeilstreamError):
    """An optimisation did not reach its tolerance."""

    exit_code: ClassVar[int] = 5
