"""How a learner is, for probes and for the person beside it: nothing of it leaves this machine.

`GET /healthz` needs no token, since probes have none: without one it says only whether the learner can go on,
which depends on disks and never on a record. Warnings and all numbers need the token.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veilstream.errors import MissingExtra
from veilstream.federation.direct.certificates import WARN_DAYS, days_left
from veilstream.federation.learner.daemon import Daemon

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass
class LearnerHealth:
    """What the process knows beside its daemon; each field is as of now."""

    certificate: Path | None = None
    """The certificate that the server is shown; None without one."""
    connected: Callable[[], bool | None] = lambda: None
    """Whether the server has let it in; None where someone else carries its messages."""
    warnings: Callable[[], Sequence[str]] = tuple
    """What the person beside the data should look at."""
    blocked: str = ""
    """Why nothing can be stored; empty while it can."""
    times_blocked: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def certificate_days(self) -> int | None:
        """Whole days until the certificate ends, negative afterwards."""
        return None if self.certificate is None else days_left(self.certificate)

    def as_dict(self, *, trusted: bool) -> dict[str, Any]:
        """The answer of ``/healthz``; warnings may tell of records, so only ``trusted`` callers get them."""
        status = "blocked" if self.blocked else "ok"
        if not trusted:
            return {"status": status}
        warnings, days = list(self.warnings()), self.certificate_days
        if days is not None and days < WARN_DAYS:
            warnings.append(f"the certificate ends in {days} days: `veilstream keys renew KEYS --learner NAME`")
        return {
            "status": status,
            "why": self.blocked,
            "degraded": bool(warnings),
            "warnings": warnings,
            "connected": self.connected(),
            "certificate_days": days,
        }


def metrics_text(daemon: Daemon, health: LearnerHealth, refusals: dict[str, int]) -> str:
    """Everything as numbers, in the text format of Prometheus; exact, so for this machine alone."""
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise MissingExtra("prometheus_client", "federation", "the metrics page") from error

    return generate_latest(_Families(daemon, health, refusals)).decode()


@dataclass(frozen=True)
class _Families:
    daemon: Daemon
    health: LearnerHealth
    refusals: dict[str, int]

    def collect(self) -> Iterator[Metric]:
        """Metric families, as a collector of prometheus_client yields them."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        health, learner, account = self.health, self.daemon.learner, self.daemon.account
        told = health.as_dict(trusted=True)
        for name, text, value in (
            ("healthy", "1 while everything can be stored, else 0.", not health.blocked),
            ("warnings", "Warnings for the person beside the data.", len(told["warnings"])),
            ("connected", "1 while the server has let this learner in, else 0.", told["connected"]),
            ("certificate_days", "Days until the certificate ends.", told["certificate_days"]),
            ("epoch", "Which epoch runs, from 0.", learner.epoch),
            ("rounds_sealed", "Rounds of this epoch that are sealed.", learner.round),
            ("rounds_planned", "Rounds of an epoch.", learner.terms.rounds),
            ("ledger_records", "Records of the ledger.", learner.ledger.chain.length),
            ("uptime_seconds", "Seconds since the learner's start.", time.monotonic() - health.began),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"veilstream_learner_{name}", text, value)
        room = GaugeMetricFamily("veilstream_learner_disk_free_bytes", "Room on the disk of a file.", labels=["file"])
        for name, path in (("store", learner.ledger.path), ("witness", learner.ledger.witness_path)):
            try:
                room.add_metric([name], shutil.disk_usage(path.parent).free)
            except OSError:
                continue  # the disk is gone: no number is better than a wrong one
        yield room
        yield CounterMetricFamily(
            "veilstream_learner_blocked", "Times that a disk could not be written.", health.times_blocked
        )
        refused = CounterMetricFamily(
            "veilstream_learner_requests_refused", "Requests that the API refused.", labels=["reason"]
        )
        for reason, count in self.refusals.items():
            refused.add_metric([reason], count)
        yield refused
        if account is not None:
            counts = account.counts
            records = CounterMetricFamily(
                "veilstream_learner_records", "Records by what became of them.", labels=["outcome"]
            )
            for outcome, count in (
                ("used", counts.used),
                ("refused with a step", counts.refused_steps),
                ("not again yet", counts.returning),
            ):
                records.add_metric([outcome], count)
            yield records
            yield CounterMetricFamily(
                "veilstream_learner_steps_without_client", "Steps that nobody took.", counts.empty_steps
            )
