"""A `Server` as bytes, also in the middle of a round: for drivers that keep it in one file, object or row.

    8 bytes   VEILSRV1
    8 bytes   length of the head, little-endian
    head      JSON
    8·d       x, float64; the same again for the published average; 4·d the first model, float32
    8·D       what this round's releases add up to so far, int64 (D: numbers of a release)
    24·D      for each seat: its last accepted prefix, that of its newest message, and the one before, int64
    32 bytes  SHA-256 of all before

`veilstream server` keeps a folder instead (`checkpoint`), which writes little at every round.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.protocol.fold import FoldState, InFlight, InMemory, Seat, ServerFold
from veilstream.federation.server.run_start import server_keys
from veilstream.learning.tasks import Task
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of

if TYPE_CHECKING:
    from veilstream.federation.server.server import Server

    S = TypeVar("S", bound=Server)

_MAGIC = b"VEILSRV1"
_HEAD = struct.Struct("<8sQ")
_HASH_BYTES = 32


def pack(server: Server) -> bytes:
    """See `Server.to_bytes`."""
    fold, flight = server.fold, server.fold.in_flight
    seats = list(fold.seats.values())
    head = {
        "run": server.run,
        "follows": server.follows,
        "signed": server.keys.signed,
        "terms": server.terms.settings["digest"],
        "round": fold.round,
        "seats": [[s.name, s.epoch, s.round, s.accepted, s.state, s.why] for s in seats],
        "counted": flight.counted,
        "seated": sorted(server.seated),
        "absent": sorted(server.absent),
        "ended": sorted(server.ended),
        "senders": server.senders,
        "refused": server.refused,
        "refusals": server.refusals,
        "outstanding": {name: sorted(hashes) for name, hashes in server._outstanding.items()},
        "asked": {
            peer: [[hashed, a.kind, a.learner, base64.b64encode(a.sent).decode()] for hashed, a in asked.items()]
            for peer, asked in server._asked.items()
        },
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    pieces = [_HEAD.pack(_MAGIC, len(text)), text, fold.x.astype("<f8").tobytes(), fold.average.astype("<f8").tobytes()]
    pieces += [fold.state.start.astype("<f4").tobytes(), flight.total.astype("<i8").tobytes()]
    for seat in seats:
        assert isinstance(seat.kept, InMemory)
        pieces += [numbers.astype("<i8").tobytes() for numbers in seat.kept.numbers]
    content = b"".join(pieces)
    return content + hashlib.sha256(content).digest()


def unpack(
    kind: type[S],
    plan: Plan,
    state: bytes,
    keys: ServerKeys | Path | str | None,
    task: Task | None,
    clock: Callable[[], float],
) -> S:
    """See `Server.from_bytes`."""
    from veilstream.federation.server.server import AskedPeer

    head, numbers = _read(state)
    task = task_of(plan) if task is None else task
    terms = Terms.of(plan, task.dim, task)
    names = [seat[0] for seat in head["seats"]]
    if terms.settings["digest"] != head["terms"]:
        raise InputError(
            "state", head["terms"][:16], f"that of this plan ({terms.settings['digest'][:16]})", "use the run's plan"
        )
    if head["signed"] != (keys is not None):
        rule = "with the server's keys" if head["signed"] else "without keys"
        raise InputError("keys", "none" if keys is None else "<given>", f"as the run was begun: {rule}", "check them")
    known = server_keys(plan, keys, None if head["signed"] else names)
    if set(known.learners) != set(names):
        raise InputError("keys", sorted(known.learners), f"the learners of this run: {names}", "use the run's keys")
    d, release = terms.dim, terms.release_dim
    if len(numbers) != 20 * d + 8 * release * (1 + 3 * len(names)):
        raise _damaged(f"{len(numbers)} bytes of numbers")
    x, average = np.frombuffer(numbers, "<f8", 2 * d).astype(np.float64).reshape(2, d)
    start = np.frombuffer(numbers, "<f4", d, 16 * d).astype(np.float32)
    whole = np.frombuffer(numbers, "<i8", offset=20 * d).astype(np.int64).reshape(-1, release)
    seats = {}
    for index, (name, epoch, round_, accepted, standing, why) in enumerate(head["seats"]):
        kept = InMemory.of(*whole[1 + 3 * index : 4 + 3 * index])
        seats[name] = Seat(name, kept, epoch, round_, accepted and tuple(accepted), standing, why)
    fold = ServerFold.resumed(terms, FoldState(head["round"], x, average, start), seats)
    fold.go_on(InFlight(whole[0], head["counted"]))
    server = kind.over(plan, terms, fold, known, head["run"], tuple(head["follows"]), clock)
    for field in ("seated", "absent", "ended"):
        setattr(server, field, set(head[field]))
    server.senders = dict(head["senders"])
    server.refused, server.refusals = dict(head["refused"]), Counter(head["refusals"])
    server._outstanding = {name: set(hashes) for name, hashes in head["outstanding"].items()}
    server._asked = {
        peer: {hashed: AskedPeer(kind, who, base64.b64decode(sent)) for hashed, kind, who, sent in asked}
        for peer, asked in head["asked"].items()
    }
    return server


def _read(state: bytes) -> tuple[dict[str, Any], memoryview]:
    whole = memoryview(state)[:-_HASH_BYTES]
    if state[:8] != _MAGIC or hashlib.sha256(whole).digest() != state[-_HASH_BYTES:]:
        raise _damaged("bytes that are cut, changed, or something else")
    end = _HEAD.size + _HEAD.unpack_from(state)[1]
    return json.loads(bytes(whole[_HEAD.size : end])), whole[end:]


def _damaged(what: str) -> InputError:
    return InputError("state", what, "what Server.to_bytes made", "take the last whole copy")
