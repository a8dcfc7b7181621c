"""The table: `python -m studies.mutations`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time

from studies.mutations import (
    data_bugs,
    law_bugs,
    noise_bugs,
    order_bugs,
    outside_bugs,
    path_bugs,
    server_bugs,
    sum_bugs,
    telemetry_bugs,
)
from studies.mutations.path_bugs import small_plan, whole_audit
from veilstream.progress import progress

ALL = (
    *noise_bugs.BUGS,
    *law_bugs.BUGS,
    *data_bugs.BUGS,
    *server_bugs.BUGS,
    *telemetry_bugs.BUGS,
    *path_bugs.BUGS,
    *outside_bugs.BUGS,
    *order_bugs.BUGS,
    *sum_bugs.BUGS,
)


MECHANISMS = (
    "independent",
    "tree",
    "tree_online",
    "tree_full",
    "optimal",
    "toeplitz",
    "toeplitz_normalised",
    "buffered",
    "banded",
)


def false_alarms(audits: int) -> int:
    """Audit correct code, with every mechanism and form of step in turn, in an order of chance for each audit."""
    forms = ({}, {"clients_per_step": 4}, {"local_steps": 4})
    kinds = itertools.product(MECHANISMS, forms, (False, True))
    alarms, least, began = 0, 1.0, time.monotonic()
    for k, (mechanism, form, telemetry) in zip(range(audits), itertools.cycle(kinds), strict=False):
        plan = small_plan(telemetry, mechanism)
        plan = dataclasses.replace(plan, learning=dataclasses.replace(plan.learning, **form))
        report = whole_audit(plan, seed=1000 + k)
        alarms += bool(report.alarms)
        least = min(least, min(check.p for check in report.checks))
        said = "; ".join(report.alarms) or "none"
        print(
            f"{k + 1}: {mechanism} {form} telemetry {telemetry}: {len(report.checks)} checks, alarms: {said}",
            flush=True,
        )
    seconds = time.monotonic() - began
    print(f"{alarms} of {audits} audits of correct code alarmed; smallest p {least:.2g}; {seconds:.0f} s")
    return alarms


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant every known bug, and see it caught.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--correct", type=int, metavar="N", help="plant nothing: count alarms in N audits of that size")
    options = parser.parse_args()
    if options.correct:
        raise SystemExit(false_alarms(options.correct) > 0)
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
