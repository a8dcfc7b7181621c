"""What tests ask a ledger."""

from __future__ import annotations

from veilstream.deployment.ledger.store import Ledger
from veilstream.records.participation import PastVisits


def past_of(ledger: Ledger, client: bytes) -> PastVisits | None:
    """One client's visits so far; None for a new one."""
    tag = ledger.keyed(client)
    return ledger.past_visits([tag]).get(tag)
