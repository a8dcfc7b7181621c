"""Whether one person took part: for that person, or whoever answers for them, at the learner.

The ledger holds keyed hashes of tags and nothing else of anyone, so the question can only be asked
with the person's tag, in any spelling that the learner itself would know (`tags`). Reads the store
beside a learner that writes to it, and changes nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from veilstream.deployment.ledger.chain import tag_key
from veilstream.deployment.ledger.inspect import reading
from veilstream.deployment.ledger.tags import checked_tag, keyed_tag, tag_forms
from veilstream.deployment.ledger.visits import visits_of


@dataclass(frozen=True)
class PersonsPart:
    """What a ledger says of one person."""

    used: bool
    times: int
    """Steps that were made of this person's records, in all epochs."""
    last_epoch: int | None
    carried_over: bool
    """Whether it is only known from a store that was lost that this person took part."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def part_of_person(store: Path, client: object) -> PersonsPart:
    """Look a person up under every form of their tag.

    Args:
        store: the learner's ledger.
        client: the tag, as it was or would be given with a record.

    Raises:
        InputError: for what is no tag; the error does not show it.
        LedgerError: for a store that cannot be read.

    """
    checked_tag(client)
    with reading(store) as db:
        key = tag_key(db)
        visits = [v for form in tag_forms(client) for v in visits_of(db, keyed_tag(key, form))]
    steps = [(epoch, step) for epoch, step in visits if step >= 0]
    return PersonsPart(
        used=bool(visits),
        times=len(steps),
        last_epoch=max((epoch for epoch, _ in visits), default=None),
        carried_over=bool(visits) and not steps,
    )
