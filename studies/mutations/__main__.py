"""The table: `python -m studies.mutations`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from studies.mutations import data_bugs, law_bugs, noise_bugs, outside_bugs, path_bugs, server_bugs, telemetry_bugs
from veilstream.progress import progress

ALL = (
    *noise_bugs.BUGS,
    *law_bugs.BUGS,
    *data_bugs.BUGS,
    *server_bugs.BUGS,
    *telemetry_bugs.BUGS,
    *path_bugs.BUGS,
    *outside_bugs.BUGS,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant every known bug, and see it caught.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with progress("planting bugs", len(ALL)) as tick:
        findings = []
        for bug in ALL:
            findings.append(bug())
            tick(1)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print("| bug | caught | by | figure | guard in front |\n| --- | --- | --- | --- | --- |")
        for f in findings:
            caught = "yes" if f.caught else "NO"
            print(f"| {f.bug} | {caught} | {f.caught_by} | {f.figure} | {f.guard or 'none'} |")
    caught = sum(f.caught for f in findings)
    print(f"{caught} of {len(findings)} caught") if not options.json else None
    raise SystemExit(caught < len(findings))


if __name__ == "__main__":
    main()
