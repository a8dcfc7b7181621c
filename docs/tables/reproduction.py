"""Tables of reproduction.md: local steps, and MNIST."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from tables.cells import Table, bold, mean, mean_std, read_csv, signed

Accuracies = Mapping[tuple[str, str], Sequence[float]]


def logistic() -> Table:
    """The paper's first figure; differences to noise-free are paired, with standard deviations."""
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    rights: dict[str, dict[str, float]] = defaultdict(dict)
    for line in read_csv("logistic.csv"):
        losses[line["method"]][line["seed"]] = float(line["loss"])
        rights[line["method"]][line["seed"]] = float(line["accuracy"])

    def row(shown: str, accounting: str, method: str) -> list[str]:
        cells = [shown, accounting]
        for own in (rights, losses):
            base = own["noise-free"]
            paired = [own[method][seed] - base[seed] for seed in base]
            apart = f"{signed(fmean(paired))} ± {stdev(paired):.4f}" if method != "noise-free" else ""
            cells += [mean(own[method].values(), 4), apart]
        return cells

    rows = [row("each learner's label share", "", "learner's share")]
    rows += [row("noise-free", "", "noise-free"), row("noise-free, own step (3.2)", "", "noise-free, own step")]
    usual = {"independent": "independent", "tree (MF i)": "tree", "optimised (MF ii)": "optimal"}
    exact = {"independent": "independent", "optimised": "optimal", "Toeplitz, normalised": "toeplitz_normalised"}
    for epsilon in ("2", "0.5"):
        rows.append([f"**({epsilon}, 1e-3)**", "", "", "", "", ""])
        paper = usual | {"Toeplitz (MF iii)": "toeplitz"}
        rows += [row(shown, "the paper's", f"{name} @ {epsilon}") for shown, name in paper.items()]
        rows += [row(shown, "exact", f"{name} @ {epsilon} exact") for shown, name in exact.items()]
        rows.append(row("noisy label count", "exact", f"noisy count @ {epsilon}"))
    return Table(("method", "accounting", "accuracy of x^R", "to noise-free", "loss", "to noise-free"), "llrrrr", rows)


def local_steps() -> Table:
    """Average prequential loss by the number of local steps, each method with its own best step."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for line in read_csv("local_steps.csv"):
        if line["choice"] == "own":
            found[line["local_steps"], line["method"], line["server_step"]].append(float(line["loss"]))
    columns = {
        "mini-batch, no noise": ("mini-batch", "sqrt(n)"),
        "noise-free, η_g = √n": ("noise-free", "sqrt(n)"),
        "ε = 2, √n": ("epsilon 2", "sqrt(n)"),
        "ε = 0.5, √n": ("epsilon 0.5", "sqrt(n)"),
        "ε = 2, 1": ("epsilon 2", "1"),
        "ε = 0.5, 1": ("epsilon 0.5", "1"),
    }
    steps = sorted({int(steps) for steps, _, _ in found})
    return Table(
        ("τ", *columns),
        "r" * (1 + len(columns)),
        [[str(tau), *(mean(found[str(tau), *key], 4) for key in columns.values())] for tau in steps],
    )


def _accuracies() -> Accuracies:
    """Of each run and method of the MNIST runs, one number a seed; the preset's on seeds that chose nothing."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    figures = [line for line in read_csv("mnist.csv") if line["run"] != "mnist_private"]
    for line in (*figures, *read_csv("mnist_private.csv")):
        found[line["run"], line["method"]].append(float(line["accuracy"]))
    return found


def cnn() -> Table:
    """The paper's second figure."""
    found = _accuracies()
    rows = [
        ("noise-free", "", "shared, 0.01", "noise-free"),
        ("independent", "the paper's", "shared", "independent"),
        ("Toeplitz (MF iii)", "the paper's", "shared", "toeplitz"),
        ("optimised (MF ii)", "the paper's", "shared", "optimal"),
        ("noise-free", "", "own, 1", "noise-free @ own step"),
        ("independent", "the paper's", "own, 0.001", "independent @ own step"),
        ("Toeplitz", "the paper's", "own, 0.005", "toeplitz @ own step"),
        ("optimised", "the paper's", "own, 0.01", "optimal @ own step"),
        ("independent", "exact", "own, 0.001", "independent @ own step, exact"),
        ("Toeplitz", "exact", "own, 0.01", "toeplitz @ own step, exact"),
        ("optimised", "exact", "own, 0.02", "optimal @ own step, exact"),
    ]
    return Table(
        ("method", "accounting", "step", "τ = 1", "τ = 2", "τ = 4"),
        "lllrrr",
        [[*shown, *(mean_std(found[f"cnn/tau-{tau}", name]) for tau in (1, 2, 4))] for *shown, name in rows],
    )


def not_private() -> Table:
    """Noise calibrated for clipped gradients that are not clipped: the paper's picture."""
    found = _accuracies()
    names = {
        "noise-free": "noise-free, not clipped",
        "optimised": "optimal, NOT PRIVATE",
        "Toeplitz": "toeplitz, NOT PRIVATE",
        "independent": "independent, NOT PRIVATE",
    }
    return Table(
        ("noise", "accuracy, not clipped"), "lr", [[shown, mean_std(found["clip", n])] for shown, n in names.items()]
    )


def beyond() -> Table:
    """What reaches 0.9 with the promise kept."""
    found = _accuracies()
    cnn, thirty, random, edge = (f"beyond/beyond_{name}" for name in ("cnn", "cnn_30", "random", "edge"))
    ten, preset = "beyond/mnist_private", "mnist_private"
    usual, averaged = "toeplitz_normalised", "toeplitz_normalised, averaged"
    chosen = "**edge features** (`mnist_private`, 100 releases)"
    normalised, paper = "Toeplitz, normalised", "the paper's CNN"
    rows = [
        (paper, "1", "Toeplitz", "the paper's accounting", cnn, "toeplitz"),
        (paper, "1", normalised, "exact accounting", cnn, usual),
        (paper, "1", normalised, "+ averaged models", cnn, averaged),
        (paper, "1", "optimised", "exact, averaged", cnn, "optimal, averaged"),
        (paper, "30", normalised, "exact, averaged", thirty, averaged),
        ("random features", "1", normalised, "exact", random, usual),
        ("random features", "1", normalised, "exact, averaged", random, averaged),
        ("edge features", "1", normalised, "exact", edge, usual),
        ("edge features", "1", normalised, "exact, averaged", edge, averaged),
        ("edge features (600 releases)", "10", normalised, "exact, averaged, clip 0.3", ten, usual),
        (chosen, "60", "buffered", "exact, averaged, clip 0.003", preset, "buffered"),
        ("edge features (600 releases)", "10", "independent", "exact, averaged, clip 0.3", ten, "independent"),
    ]
    made = []
    for *shown, run, method in rows:
        cells = [found.get((run, f"{method} @ {epsilon}"), ()) for epsilon in (2, 8)]
        made.append([*shown, *(bold(mean_std(c), run == preset and method == "buffered") if c else "" for c in cells)])
    return Table(("model", "clients a step", "noise", "what else", "(2, 1e-3)", "(8, 1e-3)"), "lrllrr", made)


def early_rounds() -> Table:
    """Accuracy at round 500 of τ = 1: mean and range of three seeds."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in read_csv("early_rounds.csv"):
        found[line["method"]].append(float(line["accuracy"]))
    return Table(
        ("method", "mean", "least", "most"),
        "lrrr",
        [[name, f"{fmean(v):.3f}", f"{min(v):.3f}", f"{max(v):.3f}"] for name, v in found.items()],
    )
