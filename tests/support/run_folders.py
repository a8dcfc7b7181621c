"""Run folders without a run: files as simulations and servers write them, with made-up numbers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.federation.keys.identity import PrivateKey
from veilstream.federation.protocol.fold import Seat
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.federation.server.checkpoint import MESSAGES, MessageFile, Position, Slots
from veilstream.federation.server.enrolments import ENROLMENTS, ENROLMENTS_HEADER, enrolment_line
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.privacy.gradient_types import Noised
from veilstream.runs.folder import versions
from veilstream.runs.tables import history_csv

FEDERATION = """
name = "clinics"
description = "three clinics"
[learning]
rounds = 6
learners = 3
[data]
dim = 4
[privacy]
epsilon = 1.0
delta = 1e-6
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.1
"""


def federation_folder(folder: Path, rounds: int = 6, third: str = "west", *, silent: bool = False) -> Path:
    """A finished federation of three learners; the third missed round 2, or all if it was ``silent``."""
    plan = Plan.parse(FEDERATION, {"learning.rounds": rounds})
    terms = Terms.of(plan, 4)
    guarantee = terms.guarantee.as_dict()
    names = ["east", "north", third]
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(plan.to_toml())
    _json(folder / "guarantee.json", guarantee)
    _json(folder / "versions.json", versions())
    messages = MessageFile(folder / MESSAGES, 4, create=True)
    closed, releases = (["round,seconds,answered,missing"], ["round,learner,epoch,learner_round,hash"])
    for r in range(rounds):
        missing = third if r == 2 or silent else ""
        closed.append(f"{r},{0.1 + 0.01 * r:.4f},{2 if missing else 3},{missing}")
        for i, n in enumerate(names):
            own = r - (n == third and r > 2)
            hashed = hashlib.sha256(last_message(terms, i, own)).hexdigest()
            releases += [f"{r},{n},0,{own},{hashed}"] if n != missing else []
    (folder / "rounds.csv").write_text("\n".join(closed) + "\n")
    (folder / "releases.csv").write_text("\n".join(releases) + "\n")
    summary = {
        "name": "clinics",
        "run": "clinics-1",
        "rounds": rounds,
        "guarantee": guarantee,
        "learners": {n: {"epoch": 0, "rounds": rounds - (n == third)} for n in names},
    }
    _json(folder / "summary.json", summary)
    seats, enrolled = {}, [ENROLMENTS_HEADER]
    for i, n in enumerate(names):
        last, slots = rounds - 1 - (n == third), Slots(messages, i)
        if silent and n == third:
            seats[n] = Seat(n, slots)
            continue
        slots.keep(last_message(terms, i, last))
        hashed = hashlib.sha256(last_message(terms, i, last)).hexdigest()
        seats[n] = Seat(n, slots, 0, last + 1, (last, hashed), "open")
        enrolled.append(enrolment(n, learner_key(i), terms))
    (folder / ENROLMENTS).write_text("".join(enrolled))
    Position("clinics-1", rounds, np.zeros(4), np.zeros(4), seats, messages, terms=terms.settings["digest"]).save(
        folder
    )
    return folder


SERVER_KEY = PrivateKey(bytes(range(32)))


def learner_key(index: int) -> PrivateKey:
    """Of `federation_folder`'s learners, in their order."""
    return PrivateKey(bytes([index] * 32))


def last_message(terms: Terms, index: int, round_: int) -> bytes:
    """A learner's message, with made-up numbers."""
    prefix = Noised(np.arange(terms.release_dim) + 100 * index)
    return encode(0, round_, (round_ + 1) * terms.local_steps, terms.grid.step, prefix)


def enrolment(name: str, key: PrivateKey, terms: Terms, run: str = "clinics-1", epoch: int = 0) -> str:
    """A line of enrolments.csv, signed as server and learner sign."""
    asked = Request("enrol", run, name, "00", settings=terms.settings).sign(SERVER_KEY)
    facts = {"epoch": epoch, "round": 0, "daemon": "d", "settings": terms.settings, "time": 0}
    return enrolment_line(name, epoch, asked, Reply("enrolled", name, digest(asked), facts).sign(key))


def simulated_folder(folder: Path, methods: int, seeds: int, rounds: int) -> Path:
    """A finished simulation with so many methods, seeds and rounds."""
    head = FEDERATION.split("[[methods]]")[0]
    listed = "".join(
        f'[[methods]]\nname = "method {i}"\nmechanism = "buffered"\nstep_size = 0.1\n' for i in range(methods)
    )
    plan = Plan.parse(head + listed, {"learning.rounds": rounds, "run.seeds": seeds})
    promise = prepare(plan, plan.methods[0]).guarantee
    assert promise is not None
    names, rng = [m.name for m in plan.methods], np.random.default_rng(5)
    shape = methods, seeds, rounds
    columns: dict[str, Any] = {
        "loss": 0.3 + rng.random(shape),
        "prequential_accuracy": rng.random(shape),
        "noise": 1.0 + rng.random(shape),
        "distance": rng.random(shape),
        "optimum": 0.1 * rng.random(shape),
    }
    folder.mkdir(parents=True)
    all_seeds, all_rounds = list(range(seeds)), list(range(rounds))
    (folder / "plan.toml").write_text(plan.to_toml())
    (folder / "history.csv").write_text(history_csv(names, all_seeds, columns, all_rounds))
    looked = list(range(0, rounds + 1, max(1, rounds // 100)))
    held = {"held_out_accuracy": rng.random((methods, seeds, len(looked)))}
    (folder / "accuracy.csv").write_text(history_csv(names, all_seeds, held, looked))
    noise = [f"{n},{r},{1 + r / rounds:.6g}" for n in names for r in all_rounds]
    (folder / "noise.csv").write_text("method,round,std\n" + "\n".join(noise) + "\n")
    figure = {"mean": 0.9, "std": 0.01, "seeds": [0.9] * seeds}
    final = {
        "held_out_accuracy": figure,
        "accuracy": figure,
        "average_loss": figure,
        "prequential_accuracy": figure,
        "dynamic_regret": figure,
    }
    each = {
        "kind": "ours",
        "mechanism": "buffered",
        "noise_std": promise.noise_std,
        "protects": "every client",
        "guarantee": promise.as_dict(),
        "simulated": True,
        "final": final,
    }
    _json(folder / "guarantee.json", {n: {"guarantee": promise.as_dict()} for n in names})
    _json(folder / "versions.json", versions())
    summary = {
        "name": "large",
        "simulated": True,
        "complete": True,
        "rounds": rounds,
        "seeds": all_seeds,
        "main_method": names[0],
        "final": final,
        "data": "made up",
        "comparators": {"separable_rounds": 0.0, "remarks": []},
        "methods": {n: dict(each) for n in names},
    }
    _json(folder / "summary.json", summary)
    return folder


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value) + "\n")
