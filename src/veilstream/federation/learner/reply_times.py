"""When a learner looks at its clients, and when its reply to a round leaves: at times that do not depend on them.

A learner with a live source waits for people. If it replied as soon as enough had come, the time of
its reply would tell the server, and anyone who sees packets, whether and how quickly they came: a
count of clients that no noise protects. So a reply leaves at a fixed time after its request was
taken up, however early the round was full. A reply that is not ready by then leaves at the next
whole slot. Where people call, the learner logs that, since how late it is may depend on clients.

A server may ask as often as it likes, and "absent" costs nothing. If every request were answered at
once, a server that polls would date the rows of a growing file to the millisecond. So time is cut
into slots of `SLOT_S`, by the learner's clock, file or not: a request waits for the start of the
next slot, only then is looked whether clients wait, and "absent" leaves at the start of a later slot,
as a release does. Requests are answered one at a time, so there is one look a slot at most.

Where the order of records is secret, how many a round has must not show. A round's work is filled up to the same
number of gradients (`veilstream.deployment.client_steps`), and its reply leaves after a time that is fixed before the
first round: several times what that work took on this machine with made-up records, and in windows what a full round's
arrivals took. A later reply is logged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from veilstream.errors import InputError

SEAL_S = 1.0
"""Time to seal a round, after the time in which clients may call."""

SLOT_S = 0.05
"""Length of a slot: a healthy round from a file waits for one start and ends at the next, 0.1 s at most."""

_LATE_SLOT_S = 1.0
_TIMES_THE_WORK = 3.0


@dataclass(frozen=True)
class ReplyTimes:
    """Replies leave ``after_s`` after the start of a slot, or a whole number of ``late_slot_s`` later."""

    after_s: float
    clock: Callable[[], float] = time.monotonic
    late_slot_s: float = _LATE_SLOT_S

    def start(self, arrived: float) -> float:
        """When to look at the clients for a request that came at ``arrived``: the next slot's start."""
        return math.ceil(arrived / SLOT_S) * SLOT_S

    def due(self, started: float, done: float) -> float:
        """When to reply to a request that was taken up at ``started`` and was done at ``done``."""
        late = max(0, math.ceil((done - started - self.after_s) / self.late_slot_s))
        return started + self.after_s + late * self.late_slot_s

    @property
    def tells_of_late_replies(self) -> bool:
        """Whether ``after_s`` is meant to be long enough for every round; one slot is not."""
        return self.late_slot_s > SLOT_S or self.after_s > SLOT_S


def secret_order_replies(work_s: float, waits_s: float = 0.0) -> ReplyTimes:
    """The schedule where the order of records is secret.

    ``work_s`` is how long a round's work takes, ``waits_s`` how long clients may call before it.
    """
    slots = math.ceil((waits_s + _TIMES_THE_WORK * work_s + SLOT_S) / SLOT_S)
    return ReplyTimes(slots * SLOT_S, late_slot_s=SLOT_S)


def reply_times(window_s: float | None, after_s: float | None) -> ReplyTimes:
    """The schedule of replies: by default at the end of the window, or of a slot where nobody calls."""
    if after_s is None:
        return ReplyTimes(SLOT_S, late_slot_s=SLOT_S) if window_s is None else ReplyTimes(window_s + SEAL_S)
    least = window_s or 0.0
    if not least <= after_s < math.inf:
        rule = f">= {least:g} seconds, in which clients may call"
        raise InputError("--reply-after", after_s, rule, "federation.patience_s in the plan is how long they may")
    return ReplyTimes(after_s)
