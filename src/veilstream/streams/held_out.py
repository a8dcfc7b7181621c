"""Which of a table's records are measured on and never learned from; nobody is on both sides.

    people    a hash of who it is decides: as many people, at any time
    time      the last records of each learner, by its column of times: what a model meets once it is deployed.
              Where people return, whoever has been learned from is left out of the held-out part

Simulation, `data check` and `federation demo` all ask here. A deployed learner holds nobody out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from veilstream.wording import counted

_HELD_OUT_OF = 1 << 20
_LEAST = 0.1  # share of the last records that must be of people who were not learned from


class HasClient(Protocol):
    """A record of which only the person matters here."""

    @property
    def client(self) -> str:
        """Who it is."""


R = TypeVar("R", bound=HasClient)


@dataclass(frozen=True)
class Parts(Generic[R]):
    """Each learner's records, in order: those to learn from, and those to measure on."""

    learned: dict[str, list[R]]
    held_out: dict[str, list[R]]
    by: str  # "time" or "people"
    notices: tuple[str, ...] = ()


def parted(by_learner: Mapping[str, Sequence[R]], share: float, by: str) -> Parts[R]:
    """Part records that are in each learner's order; ``by`` is "time" or "people"."""
    if by == "people" or share == 0.0:
        return _by_people(by_learner, share)
    learned = {name: list(own[: _first_of_last(len(own), share)]) for name, own in by_learner.items()}
    known = {record.client for own in learned.values() for record in own}
    last = {name: list(own[len(learned[name]) :]) for name, own in by_learner.items()}
    held = {name: [record for record in own if record.client not in known] for name, own in last.items()}
    wanted, left = (sum(map(len, part.values())) for part in (last, held))
    if left < _LEAST * wanted:
        why = (
            f"held out by people, not by time: of the {counted(wanted, 'record')} at the end, {wanted - left} are of "
            "people who were learned from before"
        )
        fallback = _by_people(by_learner, share)
        return Parts(fallback.learned, fallback.held_out, "people", (why,))
    notices: tuple[str, ...] = ()
    if left < wanted:
        notices = (
            f"held out are the last records of each learner; {wanted - left} of those {wanted} are of people who were "
            "learned from before, and are in neither part",
        )
    return Parts(learned, held, "time", notices)


def _by_people(by_learner: Mapping[str, Sequence[R]], share: float) -> Parts[R]:
    learned = {name: [r for r in own if not is_held_out(r.client, share)] for name, own in by_learner.items()}
    held = {name: [r for r in own if is_held_out(r.client, share)] for name, own in by_learner.items()}
    return Parts(learned, held, "people")


def _first_of_last(count: int, share: float) -> int:
    """Place of the first record that is held out; one record at least is learned from."""
    return max(min(1, count), count - round(share * count))


def is_held_out(client: str, share: float) -> bool:
    """Whether a person is measured on, where people are held out: a hash of the tag decides."""
    hashed = hashlib.blake2b(client.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(hashed, "little") % _HELD_OUT_OF < share * _HELD_OUT_OF
