"""Log lines that a peer can cause at will: one a minute for each peer and reason, with a count.

A peer that sends ten thousand bad messages a second would otherwise fill the disk with lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_EVERY_S = 60.0
_MOST = 1000
"""Pairs of peer and reason that are told apart; further peers share one name."""


@dataclass
class _Said:
    at: float
    text: str
    more: int = 0


class RepeatedLines:
    """Which lines are due now; any thread may add. A reason is one of few words of ours, never a peer's text."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._said: dict[tuple[str, str], _Said] = {}

    def add(self, peer: str, reason: str, text: str) -> str | None:
        """The line to write now; None if this peer had one for this reason within the last minute."""
        with self._lock:
            key = (peer, reason)
            if key not in self._said and len(self._said) >= _MOST:
                key = ("further peers", reason)
            said = self._said.get(key)
            if said is None:
                self._said[key] = _Said(self._clock(), text)
                return text
            said.more, said.text = said.more + 1, text
            return None

    def due(self) -> list[str]:
        """Lines for what came since, once a minute; call it often."""
        now, lines = self._clock(), []
        with self._lock:
            for key, said in list(self._said.items()):
                passed_s = now - said.at
                if passed_s < _EVERY_S:
                    continue
                if not said.more:
                    del self._said[key]
                    continue
                lines.append(f"{said.text} ({said.more:,} times in the last {passed_s:.0f} s; {key[0]}, {key[1]})")
                said.at, said.more = now, 0
        return lines
