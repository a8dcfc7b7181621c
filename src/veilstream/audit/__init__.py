"""What the promise is worth, measured from what is sent: statistics, and runs for them."""

from typing import TYPE_CHECKING

from veilstream.lazy import names_from

if TYPE_CHECKING:
    from veilstream.audit.report import DEFAULT_PLAN, SHARES, UNSEEN, AuditReport, audit, auditable, ticks, unlike_each

__all__ = ["DEFAULT_PLAN", "SHARES", "UNSEEN", "AuditReport", "audit", "auditable", "ticks", "unlike_each"]

__getattr__ = names_from(__name__, dict.fromkeys(__all__, "veilstream.audit.report"))


def __dir__() -> list[str]:
    return sorted(__all__)
