"""A network on Fashion-MNIST at equal ε, by four ways to make a PyTorch loop private, each tuned over as many settings.

    python experiments/training_loop.py --data FOLDER --epsilon 2 --out docs/results/training_loop.csv

One site, 20,000 records to train on, 10,000 to tune on, 10,000 to report on. ε is that of one record against a
record left out (Opacus's own neighbours), at δ = 1e-5:

- `correlated`, `independent`: `vs.torch.make_private`, noise over all steps; who is in which batch is known.
- `secret`: the same in one pass with `order="secret"`, tuned over two kinds of noise in place of passes.
- `opacus`: Opacus's DP-SGD, whose ε counts on nobody knowing who is in which batch (Poisson sampling).
- `local_dp_mod`: the rule of Flower's LocalDpMod: train freely for a round, clip the update, add independent
  Gaussian noise to it. Its rounds are composed exactly here, and the noise is set so that all of them together
  have the same ε.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import veilstream as vs
from veilstream.privacy.gaussian import mu_for

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/pytorch"))
from plain import accuracy, read

DELTA, BATCH, KEPT = 1e-5, 500, 20_000
RATES, PASSES, BOUNDS = (0.1, 0.3, 1.0), (1, 4), (0.01, 0.1, 1.0)
BANDS = (1, 16)
GRID = {name: list(itertools.product(RATES, PASSES)) for name in ("correlated", "independent", "opacus")}
GRID["secret"] = list(itertools.product(RATES, BANDS))
GRID["local_dp_mod"] = list(itertools.product(BOUNDS, PASSES))
_DATA: dict[str, TensorDataset] = {}


def network(seed: int, device: str) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = (
        *(nn.Conv2d(1, 16, 6, stride=3), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(288, 10)),
    )
    return nn.Sequential(*layers).to(device)


def ours(
    kind: str, records: Any, epsilon: float, setting: tuple[float, int], seed: int, device: str
) -> torch.nn.Module:
    """A veilstream loop."""
    rate, passes = setting
    mechanism: str | vs.Factorization = "buffered" if kind == "correlated" else "independent"
    if kind == "secret":
        mechanism, passes = vs.mechanisms.banded(-(-len(records) // BATCH), int(passes)), 1
    model = network(seed, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    with (
        tempfile.TemporaryDirectory() as folder,
        vs.torch.make_private(
            model,
            optimizer,
            DataLoader(records, batch_size=BATCH, shuffle=True),
            vs.Budget(epsilon, DELTA),
            loss=functional.cross_entropy,
            clip_norm=1.0,
            passes=passes,
            mechanism=mechanism,
            order="secret" if kind == "secret" else "known",
            neighbours="zero-out",
            state_steps=None,
            store=Path(folder) / "loop.db",
        ) as private,
    ):
        for _ in range(passes):
            for _ in private:
                optimizer.step()
    return model


def opacus(records: Any, epsilon: float, setting: tuple[float, int], seed: int, device: str) -> torch.nn.Module:
    """As its documentation has it."""
    from opacus import PrivacyEngine

    rate, passes = setting
    model = network(seed, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    loader = DataLoader(records, batch_size=BATCH, shuffle=True)
    private, moves, batches = PrivacyEngine(accountant="prv").make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=passes,
        max_grad_norm=1.0,
    )
    private.train()
    for _ in range(passes):
        for images, labels in batches:
            moves.zero_grad()
            functional.cross_entropy(private(images.to(device)), labels.to(device)).backward()
            moves.step()
    return model


def local_dp_mod(records: Any, epsilon: float, setting: tuple[float, int], seed: int, device: str) -> torch.nn.Module:
    """One round a pass. A record left out moves a clipped update by twice its bound at most."""
    bound, rounds = setting
    model = network(seed, device)
    std = 2.0 * bound * np.sqrt(rounds) / mu_for(epsilon, DELTA)
    for _ in range(rounds):
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for images, labels in DataLoader(records, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        update = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
        update *= min(1.0, bound / float(update.norm()))
        after = before + update + std * torch.randn_like(update)
        torch.nn.utils.vector_to_parameters(after, model.parameters())
    return model


def trial(given: tuple[str, tuple[float, int], float, int, str]) -> dict[str, Any]:
    """One setting, its accuracy on the records to tune on and on those to report on."""
    method, setting, epsilon, seed, folder = given
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for part in ("train", "t10k"):
        if part not in _DATA:
            _DATA[part] = read(Path(folder), part)
    train = TensorDataset(*(each[:KEPT] for each in _DATA["train"].tensors))
    tune = Subset(_DATA["train"], range(50_000, 60_000))
    begun = time.perf_counter()
    if method == "opacus":
        model = opacus(train, epsilon, setting, seed, device)
    elif method == "local_dp_mod":
        model = local_dp_mod(train, epsilon, setting, seed, device)
    else:
        model = ours(method, train, epsilon, setting, seed, device)
    seconds = time.perf_counter() - begun
    found = [accuracy(model, DataLoader(data, batch_size=1000), device) for data in (tune, _DATA["t10k"])]
    return {
        "method": method,
        "epsilon": epsilon,
        "setting": " ".join(f"{each:g}" for each in setting),
        "seed": seed,
        "tuning_accuracy": round(found[0], 4),
        "accuracy": round(found[1], 4),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--methods", nargs="+", choices=tuple(GRID), default=list(GRID))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder, epsilon = str(given.data), given.epsilon
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        first = [(method, setting, epsilon, 0, folder) for method in given.methods for setting in GRID[method]]
        first.sort(key=lambda each: -each[1][1])  # long ones first
        rows = []
        for row in pool.imap_unordered(trial, first):
            rows.append(row)
            print(row, flush=True)
        again = []
        for method in given.methods:
            best = max((r for r in rows if r["method"] == method), key=lambda r: r["tuning_accuracy"])
            setting = tuple(float(each) for each in best["setting"].split())
            again += [(method, (setting[0], int(setting[1])), epsilon, s, folder) for s in range(1, given.seeds)]
        rows += list(pool.imap_unordered(trial, again))
    rows.sort(key=lambda r: (r["method"], r["setting"], r["seed"]))
    with given.out.open("w", newline="") as out:
        table = csv.DictWriter(out, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    for method in given.methods:
        mine = [r for r in rows if r["method"] == method]
        best = max((r for r in mine if r["seed"] == 0), key=lambda r: r["tuning_accuracy"])
        found = [r["accuracy"] for r in mine if r["setting"] == best["setting"]]
        print(f"{method}: {np.mean(found):.4f} (seeds {found}) at {best['setting']}, {best['seconds']} s")


if __name__ == "__main__":
    main()
