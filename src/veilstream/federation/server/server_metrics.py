"""What a server counts while it runs, as Prometheus text.

Everything here the server knows anyway: numbers of learners, messages, bytes and seconds. No
learner is named, and nothing depends on a client's data beyond the releases themselves.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

from veilstream.federation.protocol.transport import Failure, Transport
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.open_round import Standing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_RECENT = 1000  # rounds whose seconds the quantiles are of
_QUANTILES = (0.5, 0.9, 0.99)


class ServerMetrics:
    """Counts of one server process, from its start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
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
        with self._lock:
            counts, seconds = Counter(self._counts), list(self._seconds)
            rounds, total_s = self._rounds, self._total_s
        fold, refused = coordinator.fold, dict(coordinator.messages_refused)
        page = _Page()
        page.one("rounds_done", "gauge", "Rounds that are closed.", coordinator.round)
        page.one("rounds_planned", "gauge", "Rounds of the plan.", coordinator.terms.rounds)
        page.one("learners_planned", "gauge", "Learners of the plan.", coordinator.terms.learners)
        page.one("learners_seated", "gauge", "Learners enrolled.", len(coordinator.seated))
        answered = "Learners whose message counts in the open round."
        page.one("learners_answered", "gauge", answered, len(fold.answered))
        page.one("learners_refused", "gauge", "Learners that cannot take part.", len(coordinator.refused))
        page.many(
            "messages_refused_total",
            "counter",
            "Messages of learners that were not acted on.",
            (({"reason": reason}, count) for reason, count in sorted(refused.items())),
        )
        for name, text in _COUNTERS.items():
            page.one(f"{name}_total", "counter", text, counts[name])
        page.summary("round_seconds", "Seconds of a round.", seconds, rounds, total_s)
        up = self._clock() - self._began
        page.one("uptime_seconds", "gauge", "Seconds since the server's start.", up)
        page.one("resident_memory_bytes", "gauge", "Memory of this process.", _memory_bytes())
        return page.text()


_COUNTERS = {
    "messages_sent": "Messages to learners.",
    "messages_received": "Messages from learners.",
    "message_sent_bytes": "Bytes of messages to learners.",
    "message_received_bytes": "Bytes of messages from learners.",
    "deliveries_failed": "Messages that the transport reported as not delivered or not answered.",
    "model_requests": "Requests for models that were answered with one.",
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

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
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


class _Page:
    """Lines of the text format, a family after the other."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def one(self, name: str, kind: str, text: str, value: float) -> None:
        self.many(name, kind, text, [({}, value)])

    def many(self, name: str, kind: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        full = self._head(name, kind, text)
        self._lines += [f"{full}{_labels(labels)} {_number(value)}" for labels, value in samples]

    def summary(self, name: str, text: str, values: list[float], count: int, total: float) -> None:
        """Quantiles are of recent values, as Prometheus has it; NaN before the first."""
        full = self._head(name, "summary", text)
        for q in _QUANTILES:
            value = float(np.quantile(values, q)) if values else float("nan")
            self._lines.append(f"{full}{_labels({'quantile': str(q)})} {_number(value)}")
        self._lines += [f"{full}_sum {_number(total)}", f"{full}_count {count}"]

    def _head(self, name: str, kind: str, text: str) -> str:
        full = f"veilstream_{name}"
        self._lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        return full

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _number(value: float) -> str:
    return "NaN" if value != value else repr(value)


def _memory_bytes() -> int:
    """Now where psutil is installed, else the most that there ever was."""
    try:
        import psutil
    except ImportError:
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
    return int(psutil.Process().memory_info().rss)
