"""What the world of the SIGKILL study was told, compared with what the ledger holds."""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
import zlib
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from studies.kill_lives import DIM, TAU, _sha
from studies.kill_world import World
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.local_rounds import pack_step
from veilstream.deployment.release import decode
from veilstream.errors import VeilstreamError

# --- the accounts compared ------------------------------------------------------------------------

VIOLATIONS = (
    "rounds with two payloads",
    "noise rows with two gradients",
    "clients used twice",
    "lost acknowledgements",
    "rounds with two models",
    "wrong chains or prefixes",
    "learners that gave up",
)
Records = list[tuple[str, dict[str, Any]]]


def check(store: Path, diary: Path, world: World, totals: Counter[str]) -> Counter[str]:
    """Everything that is not as promised, counted; adds how much was looked at to ``totals``."""
    records, tag_key = _read(store)
    pairings = [json.loads(line) for line in diary.read_text().splitlines()]
    for kind, body in records:
        totals[f"records: {kind}"] += 1
        totals["steps stored"] += body.get("steps", 1) if kind in ("step", "steps") else 0
    totals["pairings of noise and gradient"] += len(pairings)
    used = _used(records)
    told = {_keyed(tag_key, name): step for name, step in world.taken.items()}
    return Counter(
        {
            "rounds with two payloads": _two_payloads(records, world),
            "noise rows with two gradients": _two_gradients(pairings),
            "clients used twice": sum(len(steps) > 1 for steps in used.values()),
            "lost acknowledgements": _lost(records, world) + _lost_clients(used, told),
            "rounds with two models": _two_models(records, world),
            "wrong chains or prefixes": _wrong_chain(store) + _wrong_prefixes(records, pairings, world),
        }
    )


def _read(store: Path) -> tuple[Records, bytes]:
    with closing(sqlite3.connect(store)) as db:
        rows = []
        for (content,) in db.execute("SELECT content FROM segments ORDER BY first"):
            lines = zlib.decompress(content).decode().splitlines()
            rows += [line.split("\t")[::2] for line in lines]
        rows += db.execute("SELECT kind, body FROM records ORDER BY number").fetchall()
        (key,) = db.execute("SELECT value FROM meta WHERE name = 'tag_key'").fetchone()
    return [(kind, json.loads(body)) for kind, body in rows], key


def _used(records: Records) -> dict[str, list[tuple[int, int]]]:
    """The steps that each client (as keyed) took part in."""
    used: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for kind, body in records:
        if kind == "step" and "tag" in body:
            used[body["tag"]].append((body["epoch"], body["step"]))
        if kind == "steps":
            tags = body.get("tags", "")
            for i, tag in enumerate(tags[at : at + 64] for at in range(0, len(tags), 64)):
                if int(tag, 16):
                    used[tag].append((body["epoch"], body["step"] + i))
    return used


def _two_payloads(records: Records, world: World) -> int:
    """Of all that was received or is on record."""
    hashes = defaultdict(set)
    for place, payloads in world.payloads.items():
        hashes[place] |= {_sha(payload) for payload in payloads}
    for kind, body in records:
        if kind == "message":
            hashes[body["epoch"], body["round"]].add(body["hash"])
    return sum(len(different) > 1 for different in hashes.values())


def _two_gradients(pairings: list[Any]) -> int:
    gradients = defaultdict(set)
    for secret, gradient, *_ in pairings:
        gradients[secret].add(gradient)
    return sum(len(different) > 1 for different in gradients.values())


def _lost_clients(used: dict[str, list[tuple[int, int]]], told: dict[str, tuple[int, int] | None]) -> int:
    """Clients who were told that they were taken, and have no step, or not the one they had."""
    return sum(not used.get(tag) or (step is not None and step not in used[tag]) for tag, step in told.items())


def _lost(records: Records, world: World) -> int:
    """Messages that left, and acknowledgements that were confirmed, but are not on record."""
    sent, noted = set(), set()
    epoch_of = {}
    for kind, body in records:
        if kind == "message":
            sent.add((body["epoch"], body["round"], body["hash"]))
            epoch_of[body["hash"]] = body["epoch"]
        elif kind == "ack":
            noted.add((body["epoch"], body["round"], body["hash"]))
        elif kind == "pin" and "acknowledged" in body:
            r, digest = body["acknowledged"]
            noted.add((epoch_of.get(digest, -1), r, digest))
    received = {(*place, _sha(payload)) for place, payloads in world.payloads.items() for payload in payloads}
    return len(received - sent) + len(world.noted - noted) + len(world.forgotten)


def _two_models(records: Records, world: World) -> int:
    """Rounds that answered another model than the one they were begun with."""
    models = defaultdict(set, {place: set(digests) for place, digests in world.models.items()})
    for kind, body in records:
        if kind in ("pin", "message"):
            models[body["epoch"], body["round"]].add(body["x"])
    return sum(len(different) > 1 for different in models.values())


def _wrong_chain(store: Path) -> int:
    try:
        verify(store)
    except VeilstreamError:
        return 1
    return 0


def _wrong_prefixes(records: Records, pairings: list[Any], world: World) -> int:
    """Messages that are not the sum of the noisy steps on record.

    The record has hashes only: of the secrets that the noise of its steps was drawn from, and for a
    single step of that step. Its content is what the diary has with these hashes.
    """
    content = {}
    for at, (secret, _, (epoch, step), noisy) in enumerate(pairings):
        units = np.array(noisy, np.int64)
        one = {_sha(bytes.fromhex(secret)), _sha(pack_step(units))}
        content[epoch, step, frozenset(one)] = units
        secrets = bytes.fromhex(secret)
        for i, (more, _, place, further) in enumerate(pairings[at + 1 : at + TAU], 1):
            if place != [epoch, step + i]:
                break
            secrets += bytes.fromhex(more)
            units = units + np.array(further, np.int64)
            content[epoch, step, _sha(secrets)] = units
    wrong, prefix = 0, np.zeros(DIM, np.int64)
    for kind, body in records:
        if kind == "epoch":
            prefix = np.zeros(DIM, np.int64)
        elif kind in ("step", "steps"):
            stored: Any = frozenset(body["kept"].values())
            if kind == "steps":
                (stored,) = (h for name, h in body["kept"].items() if name.startswith("seed/"))
            found = content.get((body["epoch"], body["step"], stored))
            wrong += found is None
            prefix = prefix + (0 if found is None else found)
        elif kind == "message":
            for payload in world.payloads.get((body["epoch"], body["round"]), ()):
                wrong += not np.array_equal(decode(payload).prefix, prefix)
    return wrong


def _keyed(tag_key: bytes, name: str) -> str:
    return hmac.new(tag_key, name.encode(), hashlib.sha256).hexdigest()
