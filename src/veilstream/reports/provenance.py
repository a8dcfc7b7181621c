"""Where a run's page comes from: versions, the command that repeats it, the plan, the last audit."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any, TypedDict

from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.reports.page_kit import Provenance, facts
from veilstream.runs.folder import Run
from veilstream.runs.released_model import plan_digest, rest_digest


class Audit(TypedDict):
    """What a page or a statement says about an audit."""

    kept: bool
    verdict: str
    claimed: dict[str, float]  # mu, epsilon and delta
    bounds: list[dict[str, Any]]  # each with label, mu and epsilon
    confidence: float
    runs: int
    cannot_see: list[str]
    made: str  # a date; empty where the file does not say
    plan_sha256: str
    of_this_plan: bool
    reduction: str  # how many of the plan's rounds were audited, in words; empty if all were
    file_sha256: str


def audit_of(run: Run) -> Audit | None:
    """The audit in a run's folder (audit.json, or audit/audit.json); None where there is none."""
    places = (run.path / "audit.json", run.path / "audit" / "audit.json")
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return None
    try:
        content = path.read_bytes()
        return _audit(content, run.plan)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "audit",
            str(path),
            "a file that `veilstream audit --out` wrote",
            f"{type(error).__name__} {error}; audit again, or remove it",
        ) from error


def _audit(content: bytes, plan: Plan) -> Audit:
    found = json.loads(content)
    one, many = found["one_run"], found["many_run"]
    bounds = [
        {"label": f"one run, {name} server", "mu": one[name]["mu_lower"], "epsilon": one[name]["epsilon_lower"]}
        for name in ("fixed", "adaptive")
    ]
    bounds.append(
        {"label": f"{many['runs']:,} runs with a canary", "mu": many["mu_lower"], "epsilon": many["epsilon_via_mu"]}
    )
    audited = str(found.get("plan_sha256") or "")
    same, rounds, own = audited == plan_digest(plan), int(found.get("rounds") or 0), plan.learning.rounds
    # A plan and its reduction differ in their rounds and in nothing else.
    fewer = 0 < rounds < own and found.get("rest_sha256") == rest_digest(plan)
    return {
        "kept": bool(found["kept"]),
        "verdict": str(found["verdict"]),
        "claimed": found["claimed"],
        "bounds": bounds,
        "confidence": float(many["confidence"]),
        "runs": int(many["runs"]),
        "cannot_see": list(found["cannot_see"]),
        "made": str(found.get("made") or ""),
        "plan_sha256": audited,
        "of_this_plan": (same and rounds in (0, own)) or fewer,
        "reduction": f", with {rounds:,} of its {own:,} rounds and all else the same" if fewer else "",
        "file_sha256": hashlib.sha256(content).hexdigest(),
    }


def provenance_of(run: Run) -> Provenance:
    """Versions, the command that repeats the run, and its plan."""
    pairs = [("folder", run.path.resolve().name), *run.versions.items()]
    return {"facts": facts(pairs), "command": _command(run), "plan": run.plan.to_toml()}


def _command(run: Run) -> str:
    """The command, to be run in the folder above: a page names no path further up."""
    plan, folder = run.plan, Path(run.path.resolve().name)
    stored, again = f"{folder}/plan.toml", f"{folder}-again"
    if run.is_federation:
        return shlex.join(["veilstream", "server", "--plan", stored, "--keys", "keys/server", "--out", again])
    kinds = {"task": plan.learning.task, "stream": plan.data.kind}
    own = "".join(f", {word}={word}" for word, kind in kinds.items() if kind == "custom")
    if own:
        return f"veilstream.run({stored!r}, out={again!r}{own})"
    return shlex.join(["veilstream", "run", stored, "--out", again])
