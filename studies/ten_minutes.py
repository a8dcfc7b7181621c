"""The first ten minutes, timed: from a stranger's CSV to a private federation with a usable model.

`python -m studies.ten_minutes [OUT]` runs the commands of docs/your-data.md in the order of that page on a file with
quoted cells, dates such as 31.1.2026, missing cells and labels in any case, 29% of them yes. A person's part is one
edit: what anybody knows goes in the place of each "?". Counts what was refused on the way, and what each command took.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.strangers_tables import patients

KNOWN = {"labels": '["no", "yes"]', "Age": (0.0, 110.0), "Blood pressure": (50.0, 220.0)}
"""What anybody knows of the columns: a person's edit."""


@dataclass
class Walk:
    """What happened."""

    log: list[tuple[str, float, int]] = field(default_factory=list)  # command, seconds, exit code
    said: list[str] = field(default_factory=list)
    accuracy: float = 0.0
    majority: float = 0.0

    @property
    def refusals(self) -> int:
        """Commands that ended with an error."""
        return sum(code != 0 for _, _, code in self.log)

    @property
    def seconds(self) -> float:
        """All commands together."""
        return sum(seconds for _, seconds, _ in self.log)

    def run(self, folder: Path, *arguments: str) -> str:
        """A command as a person types it; goes on after a refusal."""
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "veilstream", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        self.log.append((" ".join(arguments[:2]), time.monotonic() - began, done.returncode))
        if done.returncode:
            self.said.append(done.stderr.strip())
        return done.stdout


def filled_in(plan: str) -> str:
    """The plan after the person's edit."""
    plan = plan.replace('labels = "?"', f"labels = {KNOWN['labels']}")
    head, *features = re.split(r"(?=\[\[data.features\]\])", plan)
    for i, table in enumerate(features):
        name = re.search(r'name = "(.*)"', table)
        assert name is not None
        if name[1] in KNOWN:
            low, high = KNOWN[name[1]]
            features[i] = table.replace('low = "?"', f"low = {low}").replace('high = "?"', f"high = {high}")
    return head + "".join(features)


def walk(folder: Path, rows: int = 12_000, changes: tuple[str, ...] = (), *, hasty: bool = False) -> Walk:
    """All commands; ``hasty``: `run` is tried before the edit, as many do."""
    patients(folder / "visits.csv", rows)
    done, plan = Walk(), folder / "visits.toml"
    done.run(
        folder, "data", "check", "visits.csv", "--label", "Came back", "--client", "Patient No", "--plan", plan.name
    )
    if hasty:
        done.run(folder, "run", plan.name)
    plan.write_text(filled_in(plan.read_text(encoding="utf-8")), encoding="utf-8")
    done.run(folder, "data", "check", "visits.csv", "--plan", plan.name)
    set_ = [word for change in changes for word in ("--set", change)]
    done.run(folder, "plan", plan.name, *set_)
    done.run(folder, "run", plan.name, "--out", "run", *set_)
    done.run(folder, "federation", "demo", "--plan", plan.name, "--out", "federation", *set_)
    done.run(folder, "predict", "federation/model.npz", "visits.csv", "--out", "predicted.csv")
    with (folder / "visits.csv").open(encoding="utf-8-sig") as file:
        told = [row["Came back"].lower() for row in csv.DictReader(file)]
    with (folder / "predicted.csv").open(encoding="utf-8") as file:
        predicted = [row["prediction"] for row in csv.DictReader(file)]
    done.accuracy = sum(a == b for a, b in zip(told, predicted, strict=True)) / len(told)
    done.majority = max(told.count(label) for label in set(told)) / len(told)
    return done


def main() -> None:
    """Print the log."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", type=Path, help="a file for the log as JSON")
    out: Path | None = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        done = walk(Path(folder), hasty=True)
    for command, seconds, code in done.log:
        print(f"{command:24} {seconds:6.1f} s{'' if code == 0 else f'   refused ({code})'}")
    print(f"{done.seconds:.0f} s of commands, {done.refusals} refused")
    print(
        f"the federation's model: accuracy {done.accuracy:.3f} on the file, always the commonest label "
        f"{done.majority:.3f}"
    )
    if out is not None:
        out.write_text(json.dumps(asdict(done), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
