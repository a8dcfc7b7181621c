"""What the promise is worth, measured from what is sent: statistics, and runs for them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veilstream.audit.report import (
        DEFAULT_PLAN,
        SHARES,
        UNSEEN,
        AuditReport,
        audit,
        auditable,
        ticks,
        unlike_each,
    )

__all__ = [
    "DEFAULT_PLAN",
    "SHARES",
    "UNSEEN",
    "AuditReport",
    "audit",
    "auditable",
    "ticks",
    "unlike_each",
]

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


def __getattr__(name: str) -> Any:
    """Load a module when one of its names is asked for."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
