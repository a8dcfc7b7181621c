"""When a learner's reply to a round leaves: at a time that does not depend on its clients.

A learner with a live source waits for people. If it replied as soon as enough had come, the time of
its reply would tell the server, and anyone who sees packets, whether and how quickly they came: a
count of clients that no noise protects. So a reply leaves at a fixed time after its request, however
early the round was full. A reply that is not ready by then leaves at the next whole slot. The learner
logs that, since how late it is may depend on clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from veilstream.errors import InputError

SEAL_S = 1.0
"""Time to seal a round, after the time in which clients may call."""

_SLOT_S = 1.0


@dataclass(frozen=True)
class ReplyTimes:
    """Replies leave ``after_s`` after their request, or a whole number of slots later."""

    after_s: float
    clock: Callable[[], float] = time.monotonic

    def due(self, arrived: float, done: float) -> float:
        """When to reply to a request that came at ``arrived`` and was done at ``done``."""
        late = max(0, math.ceil((done - arrived - self.after_s) / _SLOT_S))
        return arrived + self.after_s + late * _SLOT_S


def reply_times(window_s: float | None, after_s: float | None) -> ReplyTimes | None:
    """The schedule of replies, by default at the window's end; None: a reply leaves when it is computed."""
    if after_s is None:
        return None if window_s is None else ReplyTimes(window_s + SEAL_S)
    least = window_s or 0.0
    if not least <= after_s < math.inf:
        rule = f">= {least:g} seconds, in which clients may call"
        raise InputError("--reply-after", after_s, rule, "federation.patience_s in the plan is how long they may")
    return ReplyTimes(after_s)
