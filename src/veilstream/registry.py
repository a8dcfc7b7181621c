"""Parts by name: ours, and those that installed packages add through entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from veilstream.errors import InputError, UnknownName

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Named parts; a name of ours cannot be replaced, and others are imported when first asked for."""

    def __init__(self, group: str, noun: str, ours: Mapping[str, T], fits: Callable[[object], bool]) -> None:
        self.group, self.noun = group, noun
        self._ours, self._fits = dict(ours), fits
        self._loaded: dict[str, T] = {}

    def _added(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self._ours}

    def __iter__(self) -> Iterator[str]:
        yield from self._ours
        yield from self._added()

    def __len__(self) -> int:
        return len(self._ours) + len(self._added())

    def __contains__(self, name: object) -> bool:
        return name in self._ours or name in self._loaded or name in self._added()

    def __getitem__(self, name: str) -> T:
        """The part of this name."""
        if name in self._ours:
            return self._ours[name]
        if name not in self._loaded:
            added = self._added()
            if name not in added:
                raise UnknownName(self.noun, name, self)
            self._loaded[name] = self._load(added[name])
        return self._loaded[name]

    def _load(self, point: EntryPoint) -> T:
        rule = f"a {self.noun} from the entry point {point.value} ({self.group})"
        try:
            found: T = point.load()
        except Exception as error:  # another package's code
            raise InputError(
                self.noun, point.name, rule, f"it raised {type(error).__name__}: {error}; repair that package"
            ) from error
        if not self._fits(found):
            raise InputError(self.noun, point.name, rule, f"it is a {type(found).__name__}; repair that package")
        return found
