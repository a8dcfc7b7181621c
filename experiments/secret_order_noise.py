"""Noise in running sums under a secret order beside a known one, and how much room the accounting's bound has.

    python experiments/secret_order_noise.py FILE

Standard deviations (root of the mean variance over steps) at clip norm 1 and one client a step: banded noise with the
bands that the accounting chooses against buffered noise. Minutes on two cores, most of them for 500 steps.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import veilstream as vs
from veilstream.privacy.guarantee import Neighbours
from veilstream.privacy.secret_bands import banded_for_secret_order

SETTINGS = [
    (100, 0.5, 1e-3, "replace-one"),
    (100, 2.0, 1e-3, "replace-one"),
    (500, 0.5, 1e-3, "replace-one"),
    (500, 2.0, 1e-3, "replace-one"),
    (500, 2.0, 1e-3, "zero-out"),
    (100, 1.0, 1e-5, "replace-one"),
    (180, 1.0, 1e-5, "replace-one"),
    (100, 1.0, 1e-6, "replace-one"),
    (100, 2.0, 1e-9, "replace-one"),
]


def main(path: str) -> None:
    with Path(path).open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["steps", "epsilon", "delta", "neighbours", "bands", "secret", "known", "draws"])
        for steps, epsilon, delta, neighbours in SETTINGS:
            budget = vs.Budget(epsilon, delta)
            workload = vs.Workload(horizon=steps, local_steps=1)
            banded = banded_for_secret_order(budget, workload, Neighbours.of(neighbours))
            buffered = vs.mechanisms.buffered(steps)
            secret, promise = vs.calibrate(budget, banded, 1.0, neighbours=neighbours, order="secret")
            known, _ = vs.calibrate(budget, buffered, 1.0, neighbours=neighbours)
            assert promise.secret is not None
            noise = [
                std * math.sqrt(float(f.row_norms_squared().mean())) for std, f in ((secret, banded), (known, buffered))
            ]
            rows.writerow(
                [
                    steps,
                    epsilon,
                    delta,
                    neighbours,
                    banded.bandwidth,
                    *(f"{n:.4f}" for n in noise),
                    promise.secret.draws,
                ]
            )
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1])
