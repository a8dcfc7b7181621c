"""Tables of workloads.md: noise matched to what is published, people who return, drift, dropouts."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, stdev

from tables.cells import Table, bold, mean, mean_error, read_csv, read_json

Seeds = dict[str, float]


def _by(name: str, value: str, *keys: str) -> dict[tuple[str, ...], Seeds]:
    """A column of a file, seed by seed, for each combination of the keys."""
    found: dict[tuple[str, ...], Seeds] = defaultdict(dict)
    for line in read_csv(name):
        found[tuple(line[key] for key in keys)][line["seed"]] = float(line[value])
    return found


def _difference(ours: Seeds, other: Seeds) -> list[float]:
    """Seed by seed; both have the same seeds."""
    if ours.keys() != other.keys():
        raise ValueError("paired differences need the same seeds")
    return [ours[seed] - other[seed] for seed in ours]


def _four_digits(number: str) -> str:
    """Four digits, or all whole ones; nothing where nothing was computed."""
    if not number:
        return ""
    return f"{float(number):.0f}" if float(number) >= 1000 else f"{float(number):.4g}"


def returning() -> Table:
    """Mean variance of a running sum for people who return."""
    rows = []
    for line in read_csv("returning.csv"):
        shown = {name: _four_digits(line[name]) for name in ("usual", "banded", "inverse", "buffered", "optimal")}
        best = min((n for n in shown if shown[n]), key=lambda name: float(line[name]))
        cells = {name: bold(text, name == best) for name, text in shown.items()}
        cells["banded"] += f" ({line['bands']})"
        rows.append([line["horizon"], f"{line['visits']}, {line['separation']}", *cells.values()])
    return Table(
        (
            "T",
            "k, b",
            "`banded`, 16 bands, made for once",
            "`banded` for them (bands)",
            "`banded_inverse`, 8 bands",
            "`buffered`, 5 buffers",
            "`optimal` with b bands",
        ),
        "rlrrrrr",
        rows,
    )


def matched() -> Table:
    """Loss of `optimal` made for what is published, minus that of `optimal` made for running sums."""
    losses = _by("matched.csv", "loss", "task", "mechanism", "noise for", "step")
    own = {
        (line["task"], line["noise for"]): line["step"]
        for line in read_csv("matched.csv")
        if line["mechanism"] == "optimal" and line["own best step"] == "True"
    }
    tasks = {
        "logistic": ("logistic, (0.5, 1e-3)", "`averaging = 3.0`"),
        "covertype": ("covertype, (2, 1e-5)", "`newest_weight = 0.05`"),
        "electricity": ("electricity, (2, 1e-5)", "`newest_weight = 0.05`"),
        "least squares": ("least squares, seasonal drift, (2, 1e-3)", "`forgetting = 0.99`"),
        "logistic, forgetting": ("logistic, seasonal drift, (2, 1e-3)", "`forgetting = 0.99`"),
    }
    rows = []
    for task, shown in tasks.items():
        prefix_step = own[task, "running sums"]
        prefix = losses[task, "optimal", "running sums", prefix_step]
        cells = []
        for interior, step in (("0.1", prefix_step), ("1", own[task, "published, interior 1"])):
            found = _difference(losses[task, "optimal", f"published, interior {interior}", step], prefix)
            gain = all(each < 0 for each in found)
            cells.append(bold(mean_error(found), gain))
        rows.append([*shown, mean(prefix.values()), *cells])
    return Table(
        (
            "task",
            "what is published",
            "loss with prefix noise",
            "`interior_weight = 0.1`: loss, same step",
            "`interior_weight = 1`: loss, own steps",
        ),
        "llrrr",
        rows,
    )


def drift() -> Table:
    """Four ways to follow a drift at ε = 2: figure of a constant step, and paired differences to it."""
    figures = _by("drift.csv", "figure", "world", "way", "budget")
    steps = {(line["world"], line["way"], line["budget"]): float(line["step"]) for line in read_csv("drift.csv")}
    budget, usual = "ε = 2", "constant step"
    ways = ("new noise, 3 epochs", "from the start, 3 epochs", "forgetting 0.999")
    rows = []
    for world in ("abrupt", "gradual", "seasonal", "electricity", "covertype"):
        constant = figures[world, usual, budget]
        cells = [f"{mean(constant.values())} ({steps[world, usual, budget]:g})"]
        for way in ways:
            paired = mean_error(_difference(figures[world, way, budget], constant))
            cells.append(f"{paired} ({steps[world, way, budget]:g})")
        rows.append([world, budget, *cells])
    return Table(("world", "budget", usual, *ways), "llrrrr", rows)


WORLDS = {
    ("0", "0"): "nothing changes",
    ("4", "0"): "4 changes",
    ("16", "0"): "16 changes",
    ("4", "20"): "4 changes, labels 20 late",
}


def freshness() -> Table:
    """Share of right decisions by number of releases; each noise at its best."""
    found = _by("freshness.csv", "accuracy", "changes", "late", "epsilon", "noise", "releases")
    rows = []
    releases = ("1000", "200", "50", "20")
    for epsilon in ("2.0", "8.0", "0.0"):
        for (changes, late), name in WORLDS.items():
            cells = [name, f"{float(epsilon):g}" if epsilon != "0.0" else "no noise"]
            kinds = ("buffered", "independent") if epsilon != "0.0" else ("none",)
            cells += [", ".join(mean(found[changes, late, epsilon, n, r].values()) for r in releases) for n in kinds]
            if epsilon == "0.0":
                fresh, stale = (found[changes, late, epsilon, "none", r] for r in ("1000", "50"))
                cells.append("")
            else:
                fresh = found[changes, late, epsilon, "buffered", "1000"]
                stale = found[changes, late, epsilon, "independent", "50"]
            rows.append([*cells, _interval(_difference(fresh, stale))])
    return Table(
        (
            "world",
            "ε",
            "correlated: 1000, 200, 50, 20 releases",
            "independent: the same",
            "1000 correlated minus 50 independent (no noise: minus 50)",
        ),
        "lrrrr",
        rows,
    )


def _interval(differences: list[float]) -> str:
    """Mean of paired differences with its 95% interval by Student's t, for ten seeds."""
    if len(differences) != 10:
        raise ValueError("Student's factor is that of ten seeds")
    half = 2.262 * stdev(differences) / len(differences) ** 0.5
    return f"{fmean(differences):+.3f} ± {half:.3f}"


def gains() -> Table:
    """Mean variance of what is published, with noise made for running sums and for it."""
    names = {
        "averaging": "`averaging = 3.0`",
        "newest_weight": "`newest_weight = 0.05`",
        "forgetting": "`forgetting = {}`",
        "step_decay": "`step_decay = 0.5`",
        "local_steps": "round ends, τ = 4",
    }
    rows = []
    for row in read_json("workload_gains.json")["rows"]:
        ((key, value),) = ((k, v) for k, v in row["setting"].items() if k != "horizon")
        errors = [f"{row[name]:.2f}" for name in ("prefix", "toeplitz_normalised", "buffered")]
        rows.append([str(row["setting"]["horizon"]), names[key].format(value), *errors, f"**{row['optimal']:.2f}**"])
    return Table(
        (
            "T",
            "what is published",
            "made for running sums",
            "`toeplitz_normalised`",
            "`buffered` for it",
            "`optimal` for it",
        ),
        "rlrrrr",
        rows,
    )
