"""Runs to be audited: the deployed learner through its ledger, the simulation, twins, canaries.

The statistics are in `veilstream.privacy.audit`.
"""

from veilstream.engines.audit.report import AuditReport, audit

__all__ = ["AuditReport", "audit"]
