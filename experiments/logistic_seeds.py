"""The first figure's table, seed by seed, from the folder of its run.

    ./run reproduce logistic --out FOLDER
    python experiments/logistic_seeds.py FOLDER docs/results/logistic.csv

Average prequential loss over the run, and held-out accuracy of the last model; of labels alone the share
of clients that they were right about.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean


def main(folder: Path, out: Path) -> None:
    """Write a line for each method and seed."""
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    with (folder / "history.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            losses[line["method"], int(line["seed"])].append(float(line["loss"]))
    last: dict[tuple[str, int], tuple[int, str]] = {}
    with (folder / "accuracy.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            at = line["method"], int(line["seed"])
            last[at] = max(last.get(at, (-1, "")), (int(line["round"]), line["held_out_accuracy"]))
    rules: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with (folder / "baselines.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            found = float(line["loss"]), float(line["prequential_accuracy"])
            rules[line["method"], int(line["seed"])].append(found)
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "seed", "loss", "accuracy"))
        for (method, seed), lost in losses.items():
            writer.writerow((method, seed, f"{fmean(lost):.6f}", last[method, seed][1]))
        for (rule, seed), each in rules.items():
            writer.writerow((rule, seed, *(f"{fmean(column):.6f}" for column in zip(*each, strict=True))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
