"""What an honest learner does and refuses to do: values and rules alone, without keys or masks.

A `Standing` is all that decides. Each function takes one, and what was asked, checked as far as signatures go, and
returns the next; the caller keeps that durably before anything leaves. `rules` says why this is enough;
`studies/masking_search.py` goes through every state that can be reached in small cases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from veilstream.errors import PrivacyError
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.statements import Refused

Set = frozenset[int]


class OldCopy(PrivacyError):
    """Others have agreed on a set with this learner for which its store knows no shares."""

    def __init__(self, round_: int) -> None:
        super().__init__(
            f"others agreed on a set of round {round_} with this learner that its store does not know: the store is an "
            "old copy, or the server lies; nothing was sent (put the newest one back; if it is lost, begin another "
            "store, with other clients only)"
        )


@dataclass(frozen=True)
class Standing:
    """Where a learner stands in its run."""

    me: int
    core: Set
    """Learners of every set that was opened."""
    round: int = 0
    """The first round of which it has no proof that a sum was opened."""
    masked: int = 0
    """The newest attempt of this round that it masked; 0 for none."""
    signed: Set | None = None
    """The set that it sealed for in that attempt."""
    opened: tuple[int, Set] | None = None
    """Attempt and set on which it agreed."""
    voided: int = 0
    """It will agree on no attempt of this round up to this one."""


def moved_on(now: Standing, rules: Rules, round_: int, attempt: int, core: Set, members: Set) -> tuple[Standing, bool]:
    """After proof that this set was opened in this round; and whether this learner's increment was part of it."""
    if round_ < now.round:
        return now, False
    mine = now.me in members
    if round_ == now.round:
        if core != now.core or not _has_sealed(now, attempt, members):
            raise OldCopy(round_)
    elif now.masked:
        raise Refused(f"proof of round {round_} at a learner that waits for that of round {now.round}")
    elif mine:
        raise OldCopy(round_)
    return Standing(now.me, core & members, round_ + 1), mine


def mask(now: Standing, rules: Rules, round_: int, attempt: int, proved_void: int) -> Standing:
    """Before a message of this attempt; ``proved_void``: attempts up to this have a certificate.

    The same standing says that the message was made before: the same bytes are sent again.
    """
    _check_round(now, round_)
    if not rules.enough_core(len(now.core)):
        raise Refused(
            f"a further round with {len(now.core)} learners left that took part in all before, where "
            f"{rules.honest + rules.colluding} are needed",
            "the epoch is over; the next run begins with all of them",
        )
    if attempt == now.masked and attempt > now.voided:
        return now
    if attempt <= max(now.masked, now.voided) or attempt < 1:
        raise Refused(f"attempt {attempt} of round {round_} again")
    if attempt > 1 and proved_void < attempt - 1:
        raise Refused(f"attempt {attempt} of round {round_} without proof that those before are void")
    if now.opened is not None and now.opened[0] > proved_void:
        raise Refused(f"attempt {attempt} of round {round_}, of which this learner has opened another")
    return replace(now, masked=attempt, signed=None, opened=None, voided=max(now.voided, attempt - 1))


def sign(now: Standing, rules: Rules, round_: int, attempt: int, core: Set, members: Set) -> Standing:
    """Before it seals for a set."""
    _check_open(now, round_, attempt)
    _check_set(now, rules, core, members)
    if attempt != now.masked or now.me not in members:
        raise Refused(f"a set of attempt {attempt} of round {round_}, in which this learner does not take part")
    if now.signed not in (None, members):
        raise Refused(f"a second set of attempt {attempt} of round {round_}")
    if now.opened not in (None, (attempt, members)):
        raise Refused(f"a set of round {round_}, of which this learner has opened another")
    return replace(now, signed=members)


def share(now: Standing, rules: Rules, round_: int, attempt: int, core: Set, members: Set) -> Standing:
    """Before it agrees that a set is opened."""
    _check_open(now, round_, attempt)
    if now.opened == (attempt, members):
        return now  # the same answer again
    _check_set(now, rules, core, members)
    if not _has_sealed(now, attempt, members):
        raise Refused(f"a set of round {round_} for which this learner has not sealed")
    if now.opened not in (None, (attempt, members)):
        raise Refused(f"a second set of round {round_}")
    return replace(now, opened=(attempt, members))


def tell(now: Standing, rules: Rules, round_: int, attempt: int, core: Set, members: Set, agreed: int) -> Standing:
    """Before it tells pads for a set on which so many agreed.

    With t of them no other set can ever be opened, whatever this learner has signed.
    """
    _check_round(now, round_)
    if agreed < rules.threshold:
        raise Refused(f"a set of round {round_} on which {agreed} learners agreed, where it takes {rules.threshold}")
    _check_set(now, rules, core, members)
    if not _has_sealed(now, attempt, members):
        raise OldCopy(round_)
    return replace(now, opened=(attempt, members))


def void(now: Standing, round_: int, attempt: int, proved_void: int = 0) -> Standing:
    """Before the promise never to agree on an attempt of this round up to this one."""
    _check_round(now, round_)
    if now.opened is not None and proved_void < now.opened[0] <= attempt:
        raise Refused(f"a void of round {round_}, of which this learner has opened attempt {now.opened[0]}")
    return replace(now, voided=max(now.voided, attempt))


def _check_round(now: Standing, round_: int) -> None:
    if round_ < now.round:
        raise Refused(f"round {round_}, which was opened and is over")
    if round_ > now.round:
        raise Refused(f"round {round_} without proof that round {now.round} was opened")


def _check_open(now: Standing, round_: int, attempt: int) -> None:
    _check_round(now, round_)
    if attempt <= now.voided:
        raise Refused(f"attempt {attempt} of round {round_}, which is void")


def _check_set(now: Standing, rules: Rules, core: Set, members: Set) -> None:
    if core != now.core:
        raise Refused("a set that says otherwise which learners took part in all rounds")
    if len(members) < rules.least:
        raise Refused(f"a set of {len(members)} learners, where {rules.least} are needed")
    if not rules.enough_core(len(core & members)):
        raise Refused(
            f"a set with {len(core & members)} learners that took part in all rounds before, where "
            f"{rules.honest + rules.colluding} are needed"
        )
    if not rules.joined(members):
        raise Refused("a set with learners that have too few neighbours in it")


def _has_sealed(now: Standing, attempt: int, members: Set) -> bool:
    return now.me not in members or (now.masked, now.signed) == (attempt, members)
