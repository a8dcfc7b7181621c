"""What the promise is worth, measured from what is sent: statistics, and runs for them."""

from typing import TYPE_CHECKING

from veilstream.lazy import names_from

if TYPE_CHECKING:
    from veilstream.audit.report import DEFAULT_PLAN, SHARES, UNSEEN, AuditReport, audit, auditable, ticks, unlike_each

__all__ = ["DEFAULT_PLAN", "SHARES", "UNSEEN", "AuditReport", "audit", "auditable", "ticks", "unlike_each"]

_LATER = {
    "AuditReport": "veilstream.audit.report",
    "DEFAULT_PLAN": "veilstream.audit.report",
    "SHARES": "veilstream.audit.report",
    "UNSEEN": "veilstream.audit.report",
    "audit": "veilstream.audit.report",
    "auditable": "veilstream.audit.report",
    "ticks": "veilstream.audit.report",
    "unlike_each": "veilstream.audit.report",
}

__getattr__ = names_from(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted(__all__)
