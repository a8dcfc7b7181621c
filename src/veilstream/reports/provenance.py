"""Where a run's page comes from: versions, the command that repeats it, the plan, the last audit."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from veilstream.errors import InputError
from veilstream.runs.folder import Run
from veilstream.runs.released_model import plan_digest


def audit_of(run: Run) -> dict[str, Any] | None:
    """What a page or a statement says of a run's audit (audit.json, or audit/audit.json).

    Returns:
        ``kept``, ``verdict``, ``claimed``, ``bounds``, ``confidence``, ``cannot_see``, ``runs``;
        ``made`` (a date) and ``plan_sha256``, None in files of before they were written; and
        ``of_this_plan``, true only where the file says that it is. None where no audit is there.

    Raises:
        InputError: for a file that `veilstream audit` did not write.

    """
    path = _path(run.path)
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        one, many, claim = found["one_run"], found["many_run"], found["claimed"]
        bounds = [
            {"label": f"one run, {name} server", "mu": one[name]["mu_lower"], "epsilon": one[name]["epsilon_lower"]}
            for name in ("fixed", "adaptive")
        ]
        bounds.append(
            {"label": f"{many['runs']:,} runs with a canary", "mu": many["mu_lower"], "epsilon": many["epsilon_via_mu"]}
        )
        audited = found.get("plan_sha256")
        return {
            "kept": found["kept"],
            "verdict": found["verdict"],
            "claimed": claim,
            "bounds": bounds,
            "confidence": many["confidence"],
            "runs": many["runs"],
            "cannot_see": list(found["cannot_see"]),
            "made": found.get("made"),
            "plan_sha256": audited,
            "of_this_plan": audited == plan_digest(run.plan),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "audit",
            str(path),
            "what `veilstream audit --out` wrote",
            f"{type(error).__name__} {error}; audit again, or remove it",
        ) from error


def audit_digest(run: Run) -> str:
    """SHA-256 of the file that `audit_of` reads, which must be there."""
    path = _path(run.path)
    assert path is not None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _path(folder: Path) -> Path | None:
    places = (folder / "audit.json", folder / "audit" / "audit.json")
    return next((path for path in places if path.exists()), None)


def provenance_of(run: Run) -> dict[str, Any]:
    """Facts, the command that repeats the run, and its plan."""
    versions = run.versions
    facts = [["Folder", run.path.resolve().name], *([key, str(said)] for key, said in versions.items())]
    return {"facts": facts, "command": _command(run), "plan": run.plan.to_toml()}


def _command(run: Run) -> str:
    """What repeats the run, from where the folder's parent is; a page names no path above it."""
    plan, folder = run.plan, run.path.resolve().name
    stored, again = f"{folder}/plan.toml", f"{folder}-again"
    if run.is_federation:
        words = ["--plan", stored, "--keys", "keys/server", "--out", again]
        return shlex.join(["veilstream", "server", *words])
    if "custom" in (plan.learning.task, plan.data.kind):
        own = [w for w, k in (("task", plan.learning.task), ("stream", plan.data.kind)) if k == "custom"]
        given = "".join(f", {word}={word}" for word in own)
        return f"veilstream.run({stored!r}, out={again!r}{given})"
    return shlex.join(["veilstream", "run", stored, "--out", again])
