"""What a server counts while it runs, for Prometheus.

Everything here the server knows anyway: numbers of learners, messages, bytes and seconds. No
learner is named, and nothing depends on a client's data beyond the releases themselves.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from veilstream.errors import MissingExtra
from veilstream.federation.direct.certificates import days_left
from veilstream.federation.protocol.transport import Failure, Received, Transport
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.open_round import Standing

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_RECENT = 1000  # rounds whose seconds the quantiles are of
_QUANTILES = (0.5, 0.9, 0.99)


class ServerMetrics:
    """Counts of one server process, from its start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, certificate: Path | None = None) -> None:
        """``certificate``: the server's, whose days are shown; None without one."""
        self._certificate = certificate
        self._lock, self._clock = threading.Lock(), clock
        self._counts: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._rounds, self._total_s = 0, 0.0
        self._round: int | None = None
        self._round_began = self._began = clock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += amount

    def refuse(self, reason: str) -> None:
        """Count a connection that was cut."""
        self.add(f"connections cut: {reason}")

    def counted(self, name: str) -> int:
        """How often, since the start."""
        with self._lock:
            return self._counts[name]

    def standing(self, now: Standing) -> None:
        """The coordinator moved; a round that it has closed is timed."""
        moment = self._clock()
        with self._lock:
            if self._round is not None and now.round > self._round:
                seconds = moment - self._round_began
                self._seconds.append(seconds)
                self._rounds += 1
                self._total_s += seconds
            if self._round is None or now.round != self._round:
                self._round, self._round_began = now.round, moment

    def text(self, coordinator: Coordinator) -> str:
        """All of it, in the text format of Prometheus."""
        try:
            from prometheus_client import generate_latest
        except ImportError as error:
            raise MissingExtra("prometheus_client", "federation", "the metrics page") from error

        return generate_latest(_Families(self, coordinator)).decode()

    def families(self, coordinator: Coordinator) -> Iterator[Metric]:
        """Metric families, as a collector of prometheus_client yields them."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        with self._lock:
            counts, seconds = Counter(self._counts), list(self._seconds)
            rounds, total_s = self._rounds, self._total_s
        for name, text, value in (
            ("rounds_done", "Rounds that are closed.", coordinator.round),
            ("rounds_planned", "Rounds of the plan.", coordinator.terms.rounds),
            ("learners_planned", "Learners of the plan.", coordinator.terms.learners),
            ("learners_seated", "Learners enrolled.", len(coordinator.seated)),
            ("learners_answered", "Learners whose message counts in the open round.", coordinator.fold.answered_count),
            ("learners_refused", "Learners that cannot take part.", len(coordinator.refused)),
            ("uptime_seconds", "Seconds since the server's start.", self._clock() - self._began),
            ("resident_memory_bytes", "Memory of this process.", _memory_bytes()),
        ):
            yield GaugeMetricFamily(f"veilstream_{name}", text, value)
        days = None if self._certificate is None else days_left(self._certificate)
        if days is not None:
            text = "Days until the server's certificate ends."
            yield GaugeMetricFamily("veilstream_certificate_days", text, days)
        refused = CounterMetricFamily(
            "veilstream_messages_refused", "Messages of learners that were not acted on.", labels=["reason"]
        )
        for reason, count in sorted(coordinator.messages_refused.items()):
            refused.add_metric([reason], count)
        yield refused
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"veilstream_{name}", text, counts[name])
        timed = SummaryMetricFamily("veilstream_round_seconds", "Seconds of a round.", rounds, total_s)
        for q in _QUANTILES:  # of recent rounds; NaN before the first
            value = float(np.quantile(seconds, q)) if seconds else float("nan")
            timed.add_sample(timed.name, {"quantile": str(q)}, value)
        yield timed


@dataclass(frozen=True)
class _Families:
    metrics: ServerMetrics
    coordinator: Coordinator

    def collect(self) -> Iterator[Metric]:
        return self.metrics.families(self.coordinator)


_COUNTERS = {
    "messages_sent": "Messages to learners.",
    "messages_received": "Messages from learners.",
    "message_sent_bytes": "Bytes of messages to learners.",
    "message_received_bytes": "Bytes of messages from learners.",
    "deliveries_failed": "Messages that the transport reported as not delivered or not answered.",
}


class CountedTransport:
    """A transport whose messages are counted."""

    def __init__(self, transport: Transport, metrics: ServerMetrics) -> None:
        self._transport, self._metrics = transport, metrics

    def nodes(self) -> set[str]:
        """Who can be reached now."""
        return self._transport.nodes()

    def send(self, node: str, head: bytes, body: bytes = b"") -> None:
        """Deliver a request."""
        self._metrics.add("messages_sent")
        self._metrics.add("message_sent_bytes", len(head) + len(body))
        self._transport.send(node, head, body)

    def receive(self, timeout_s: float) -> list[tuple[str, Received]]:
        """Replies and failures since the last call."""
        found = self._transport.receive(timeout_s)
        for _, what in found:
            if isinstance(what, Failure):
                self._metrics.add("deliveries_failed")
            else:
                self._metrics.add("messages_received")
                self._metrics.add("message_received_bytes", len(what))
        return found

    def close(self) -> None:
        """End the transport's run."""
        self._transport.close()


def _memory_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
