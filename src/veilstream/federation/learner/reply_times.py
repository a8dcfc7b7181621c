"""When a learner's reply to a round leaves: at a time that does not depend on its clients.

A learner with a live source waits for people. If it answered as soon as enough had come, the time
of its reply would tell the server, and whoever sees packets, whether and how quickly they came: a
count of clients that no noise protects. So a reply leaves at a fixed time after its request came
in, however early the round was full. Work that is not done by then leaves at the next whole slot
after it; the learner says so in its own log, since how late it is may depend on clients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from veilstream.errors import InputError

SEAL_S = 1.0
"""Added to the time in which clients may call: to seal the round, whoever came."""

_SLOT_S = 1.0

WHEN_FULL = (
    "replies leave as soon as a round is full: the server, and whoever sees packets, can tell from "
    "their time whether clients came, and how quickly; no noise protects that"
)


@dataclass(frozen=True)
class ReplyTimes:
    """Replies leave ``after_s`` after their request, or a whole number of slots later."""

    after_s: float
    clock: Callable[[], float] = time.monotonic

    def due(self, arrived: float, done: float) -> float:
        """When the reply leaves to a request that came at ``arrived`` and was done at ``done``."""
        late = max(0, math.ceil((done - arrived - self.after_s) / _SLOT_S))
        return arrived + self.after_s + late * _SLOT_S


def reply_times(window_s: float | None, after_s: float | None, *, when_full: bool) -> ReplyTimes | None:
    """What a learner keeps to; None where replies leave as soon as their work is done.

    ``window_s`` is how long clients may call, None for a source that nobody calls (a file), where a
    reply leaves when it is computed unless ``after_s`` is given. With a window the default is its
    end; ``when_full`` gives that up.
    """
    if when_full and window_s is None:
        raise InputError("--reply-when-full", True, "a live source", "leave it out, or --data live")
    if when_full and after_s is not None:
        raise InputError("--reply-after", after_s, "nothing beside --reply-when-full", "leave one out")
    if when_full:
        return None
    least = 0.0 if window_s is None else window_s
    if after_s is not None and not least <= after_s < math.inf:
        raise InputError(
            "--reply-after",
            after_s,
            f">= {least:g} seconds, in which clients may call",
            "federation.patience_s in the plan is how long they may",
        )
    if after_s is None:
        return None if window_s is None else ReplyTimes(window_s + SEAL_S)
    return ReplyTimes(after_s)
