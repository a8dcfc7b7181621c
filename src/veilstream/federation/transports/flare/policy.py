"""When a job is submitted, and when a running one is given up. Decisions only; no FLARE here.

FLARE's jobs do not heal: a worker that is killed fails the whole job, a site that comes back is not
let in again. So a job that is short of a site that could take part is ended and another submitted,
which takes some seconds; but not for every site that trickles in while a federation starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Job", "Seen", "abort_why", "doubles", "sites_to_start"]

GRACE_S = 10.0  # for the rest, when some are there
SETTLE_S = 15.0  # a job is left alone at first, unless everyone can be had
START_S = 150.0  # from submission to a relay that has connected
LOST_S = 4.0  # without a relay
DOUBLE_S = 15.0  # in which the worker of a site that was killed ends, and is missed


@dataclass(frozen=True)
class Job:
    """One that was submitted."""

    id: str
    sites: frozenset[str]
    at: float


@dataclass
class Seen:
    """What the job manager knows; the relay socket's side is told to it by our server process."""

    known: frozenset[str]
    """All learners that have keys."""
    registered: frozenset[str] = frozenset()
    """Sites that FLARE lists; one that has died is among them for a while."""
    reached: frozenset[str] = frozenset()
    """Sites that answer through the running job."""
    connected: float | None = None
    """Since when the job's relay is connected to the relay socket."""
    lost: float | None = None
    """Since when it no longer is."""
    some: float | None = None
    """Since when, with no job, a site has been waiting for one."""
    doubted: dict[str, float] = field(default_factory=dict)
    """Sites that left FLARE's list, or registered anew, and when."""
    notes: list[str] = field(default_factory=list)


def sites_to_start(seen: Seen, idle: frozenset[str], now: float) -> frozenset[str]:
    """For a new job: everyone, or after a while those who could begin; empty to wait on."""
    if not idle:
        seen.some = None
        return frozenset()
    if seen.some is None:
        seen.some = now
    return idle if idle == seen.known or now - seen.some > GRACE_S else frozenset()


def doubles(seen: Seen, now: float) -> frozenset[str]:
    """Names in dispute: gone or registered anew, though the first still answers. Each once.

    FLARE lets two sites with one kit push each other out for ever, and tells nobody.
    """
    for site in [site for site in seen.doubted if site not in seen.reached]:
        del seen.doubted[site]  # it was started again
    found = frozenset(site for site, at in seen.doubted.items() if now - at > DOUBLE_S)
    for site in found:
        del seen.doubted[site]
    return found


def abort_why(
    seen: Seen, job: Job, now: float, idle: Callable[[frozenset[str]], frozenset[str]]
) -> str | None:
    """Why the running job must end, if it must. ``idle`` asks sites which of them run no job."""
    if seen.connected is None:
        if seen.lost is not None and seen.lost >= job.at:
            return "its relay was lost" if now - seen.lost > LOST_S else None
        return "it did not start" if now - job.at > START_S else None
    outside = (seen.registered & seen.known) - seen.reached
    if not outside:
        return None
    could_join = idle(outside)
    everyone = seen.reached | could_join >= seen.known
    if could_join and (everyone or now - max(job.at, seen.connected) > SETTLE_S):
        return f"{', '.join(sorted(could_join))} can take part again"
    return None
