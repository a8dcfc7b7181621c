"""The long form of the cell test: up to 10¹⁰ numbers of a learner's first and tenth message.

    python -m studies.cells --draws 1e10 --mechanism buffered --keep counts/ --noise-only

Learners are the deployed ones, in one process for each worker; about 10⁶ draws of both messages a
second and worker pair. With ``--noise-only`` their noise objects (`GridNoise`) are driven directly,
without ledger and wire: some four times as fast. Counts are kept after every part and added to when
the study is started again, so it may be stopped at any time. Printed: η² ± its standard
error (exact if the law is the claimed one), by single cells and pooled, and how much of float32's
lattice is in them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from studies.mutations.findings import both
from veilstream.audit.cells import cell_std, later_message, learner_cells
from veilstream.audit.statistics.cells import CellCounts, cell_fit, power
from veilstream.audit.statistics.lattice import lattice_fit
from veilstream.deployment.terms import Terms
from veilstream.mechanisms.keystream import Row, fresh_secret
from veilstream.privacy.grid_noise import GridNoise
from veilstream.progress import progress

PART = 1 << 22


@dataclass(frozen=True)
class Study:
    """Whose messages."""

    mechanism: str = "buffered"
    rounds: int = 64
    local_steps: int = 1
    noise_only: bool = False

    def parts(self):
        return both(1, self.mechanism, rounds=self.rounds, local_steps=self.local_steps)

    @property
    def messages(self) -> tuple[int, ...]:
        return tuple(sorted({0, later_message(self.rounds)}))

    def empty(self) -> dict[int, CellCounts]:
        _, terms = self.parts()
        return {message: CellCounts(cell_std(terms, message)) for message in self.messages}

    def path(self, folder: Path, message: int) -> Path:
        name = f"{self.mechanism}-{self.rounds}-{self.local_steps}-message-{message + 1}.npz"
        return folder / name


def one_part(task: tuple[Study, int]) -> dict[int, np.ndarray]:
    """Counts of some draws, in a process of its own."""
    study, draws = task
    plan, terms = study.parts()
    if study.noise_only:
        return {m: seen.counts for m, seen in noise_cells(study, terms, draws).items()}
    counts = learner_cells(plan, terms, draws, messages=study.messages, workers=1)
    return {message: seen.counts for message, seen in counts.items()}


def noise_cells(study: Study, terms: Terms, draws: int) -> dict[int, CellCounts]:
    """Rounded prefixes of the noise that a learner adds, before any gradient."""
    counts, dim = study.empty(), min(draws, 1 << 17)
    last = max(study.messages)
    for _ in range(-(-draws // dim)):
        noise = GridNoise(terms.mechanism.program, std=terms.noise_std, grid=terms.grid, dim=dim)
        for message in range(last + 1):
            for _ in range(study.local_steps):
                noise.step(Row(fresh_secret(), noise.position))
            if message in counts:
                counts[message].add(noise.cells)
    return counts


def load(study: Study, folder: Path | None) -> dict[int, CellCounts]:
    """What was counted before; refused if it is of another law."""
    counts = study.empty()
    for message, seen in counts.items():
        if folder is not None and study.path(folder, message).exists():
            with np.load(study.path(folder, message)) as kept:
                if float(kept["std"]) != seen.law.std or len(kept["counts"]) != len(seen.counts):
                    raise SystemExit(f"{study.path(folder, message)} is of another law")
                seen.counts += kept["counts"]
    return counts


def save(study: Study, folder: Path, counts: dict[int, CellCounts]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for message, seen in counts.items():
        path = study.path(folder, message)
        half_done = path.with_suffix(".part.npz")
        np.savez(half_done, std=seen.law.std, counts=seen.counts)
        half_done.replace(path)


def run(
    study: Study, draws: int, *, workers: int, folder: Path | None = None, save_every_s: float = 60.0
) -> dict[int, CellCounts]:
    """Draw until there are enough of each message."""
    counts = load(study, folder)
    left = draws - min(seen.draws for seen in counts.values())
    tasks = [(study, min(PART, left - done)) for done in range(0, max(left, 0), PART)]
    saved = time.monotonic()
    with progress("drawing", max(left, 0)) as tick:
        for found in _results(tasks, workers):
            for message, more in found.items():
                counts[message].counts += more
            tick(PART)
            if folder is not None and time.monotonic() - saved > save_every_s:
                save(study, folder, counts)
                saved = time.monotonic()
    if folder is not None:
        save(study, folder, counts)
    return counts


def _results(tasks: list[tuple[Study, int]], workers: int) -> Iterator[dict[int, np.ndarray]]:
    if workers == 1:
        yield from map(one_part, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(one_part, tasks)


def judged(study: Study, counts: dict[int, CellCounts]) -> list[dict[str, object]]:
    """A row for each message."""
    _, terms = study.parts()
    factor = float(terms.mechanism.noising_matrix()[0, 0])
    rows: list[dict[str, object]] = []
    for message, seen in counts.items():
        fit, lattice = cell_fit(seen), lattice_fit(seen, factor)
        rows.append(
            {
                "mechanism": study.mechanism,
                "message": message + 1,
                "draws": fit.draws,
                "eta_squared": fit.eta_squared,
                "standard_error": fit.standard_error,
                "p": fit.p,
                "scales": [dataclasses.asdict(scale) for scale in fit.scales],
                "found_in_99_percent": least_found(fit.draws, fit.std),
                "lattice_share": None if lattice is None else lattice.share,
                "lattice_error": None if lattice is None else lattice.share_error,
            }
        )
    return rows


def least_found(draws: int, std: float) -> float:
    """The η² that single cells find in 99% of audits with so many draws."""
    low, high = 1e-15, 1.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if power(draws, middle, std=std) > 0.99 else (middle, high)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description="Are released cells a rounded Gaussian's?")
    parser.add_argument("--draws", type=float, default=1e8)
    parser.add_argument("--mechanism", default="buffered")
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--local-steps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--noise-only", action="store_true", help="no ledger, no wire")
    parser.add_argument("--keep", type=Path, default=None, help="folder for counts, to go on from")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    study = Study(options.mechanism, options.rounds, options.local_steps, options.noise_only)
    counts = run(study, int(options.draws), workers=options.workers, folder=options.keep)
    rows = judged(study, counts)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['mechanism']}, message {row['message']}: {row['draws']:.3g} draws, "
            f"eta^2 = {row['eta_squared']:.2e} +- {row['standard_error']:.1e} (p = {row['p']:.2g}; "
            f"99% power from {row['found_in_99_percent']:.1e}), "
            f"float32 lattice: {row['lattice_share']:.3f} +- {row['lattice_error']:.3f}"
        )


if __name__ == "__main__":
    main()
