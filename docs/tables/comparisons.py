"""Tables of the comparisons that experiments/protocol makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean, stdev

from scipy.stats import t as student

from tables.cells import Table, bold, read_csv

STREAMS = ("electricity", "covertype", "flights", "health")
RULES = ("majority", "learner's share", "last label")
NOISES = {"independent": "independent", "tree": "tree", "buffered": "buffered", "optimal": "optimised"}
SHOWN = {
    "majority": "majority",
    "learner's share": "each learner's label share",
    "last label": "the label before",
    "noisy count": "noisy count",
    "noise-free": "noise-free",
    **NOISES,
}
PROTECTS_NOBODY = (*RULES, "noise-free")
AT_1000 = "clients=2"
Key = tuple[str, str, str, str]
"""Study, method, ε and what is held."""
Runs = Mapping[Key, Mapping[str, Mapping[int, float]]]


def runs() -> Runs:
    """By seed, each figure of each method."""
    found: dict[Key, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_csv("comparisons.csv"):
        key = row["study"], row["method"], row["epsilon"], row["held"]
        for figure in ("loss", "accuracy", "held_out", "releases"):
            if row[figure]:
                found[key][figure][int(row["seed"])] = float(row[figure])
    return found


def _figure(found: Runs, key: Key, figure: str, digits: int = 3) -> str:
    values = found[key][figure].values() if key in found and found[key].get(figure) else ()
    return f"{fmean(values):.{digits}f}" if values else ""


def _spread(found: Runs, key: Key, figure: str, digits: int = 3) -> str:
    values = list(found[key][figure].values()) if key in found and found[key].get(figure) else []
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}" if values else ""


def _releases(found: Runs, key: Key) -> str:
    return f"{next(iter(found[key]['releases'].values())):.0f}"


def _difference(found: Runs, ours: Key, other: Key, figure: str = "loss", scale: float = 1.0, digits: int = 3) -> str:
    """Paired, with a 95% interval of Student's t; an unpaired seed is an error."""
    apart = [scale * (value - found[other][figure][seed]) for seed, value in found[ours][figure].items()]
    half = float(student.ppf(0.975, len(apart) - 1)) * stdev(apart) / len(apart) ** 0.5
    return f"{fmean(apart):+.{digits}f} ± {half:.{digits}f}"


def _streams(figure: str) -> Table:
    found, budgets = runs(), ("0.5", "2", "8")
    rows = []
    for method, shown in SHOWN.items():
        cells = []
        for study in STREAMS:
            each = ("",) if method in PROTECTS_NOBODY else budgets
            cells.append(", ".join(_figure(found, (study, method, epsilon, ""), figure) for epsilon in each))
        rows.append([shown, *cells])
    return Table(("", *(f"{study}: ε = 0.5, 2, 8" for study in STREAMS)), "lrrrr", rows)


def streams_accuracy() -> Table:
    """Prequential accuracy on real streams."""
    return _streams("accuracy")


def streams_loss() -> Table:
    """Prequential loss on real streams."""
    return _streams("loss")


def streams_paired() -> Table:
    """Buffered noise against what it must beat, seed by seed."""
    found = runs()
    rows = []
    for study in STREAMS:
        for epsilon in ("0.5", "2", "8"):
            ours, independent, count, tree = (
                (study, method, epsilon, "") for method in ("buffered", "independent", "noisy count", "tree")
            )
            rows.append(
                [
                    study,
                    epsilon,
                    _releases(found, ours),
                    _releases(found, independent),
                    _difference(found, ours, independent),
                    _difference(found, ours, independent, "accuracy", 100.0, 1),
                    _difference(found, tree, independent),
                    _difference(found, ours, count),
                ]
            )
    header = (
        "stream",
        "ε",
        "releases",
        "releases, independent",
        "loss to independent",
        "accuracy, points",
        "loss, tree to independent",
        "loss to the noisy count",
    )
    return Table(header, "lrrrrrrr", rows)


def logistic() -> Table:
    """The paper's task, each method at its best, at 1,000 releases and free."""
    found, study = runs(), "logistic"

    def line(method: str, epsilon: str) -> list[str]:
        free, held = (study, method, epsilon, ""), (study, method, epsilon, AT_1000)
        cells = [SHOWN[method], epsilon]
        for key, figure in ((held, "held"), (free, "free")):
            plain = study, "independent", epsilon, key[3]
            cells.append(_figure(found, key, "loss"))
            cells.append(_difference(found, key, plain) if epsilon and key in found and key != plain else "")
            if figure == "free":
                cells.append(_releases(found, key) if found[key]["releases"] else "")
        return [*cells, _figure(found, free, "accuracy"), _figure(found, free, "held_out")]

    rows = [line(method, "") for method in ("majority", "learner's share", "noise-free")]
    rows += [line(method, epsilon) for epsilon in ("2", "0.5") for method in ("noisy count", *NOISES)]
    header = (
        "",
        "ε",
        "loss, 1000 releases",
        "to independent",
        "loss, free",
        "to independent",
        "releases",
        "prequential accuracy",
        "held-out accuracy",
    )
    return Table(header, "lrrrrrrrr", rows)


def mnist() -> Table:
    """Accuracy on the test images, edge features and the paper's CNN."""
    found = runs()
    columns = (("edge", "2"), ("edge", "0.5"), ("cnn", "2"))
    rows = [["always the commonest digit", *(_figure(found, (s, "majority", "", ""), "held_out") for s, _ in columns)]]
    for method in ("noise-free", *NOISES):
        cells = []
        for study, epsilon in columns:
            key = study, method, "" if method == "noise-free" else epsilon, ""
            cells.append(f"{_spread(found, key, 'held_out')} ({_releases(found, key)})" if key in found else "")
        rows.append([SHOWN[method], *cells])
    plain = [(study, "independent", epsilon, "") for study, epsilon in columns]
    ours = [(study, "buffered", epsilon, "") for study, epsilon in columns]
    apart = [_difference(found, a, b, "held_out", 100.0, 1) for a, b in zip(ours, plain, strict=True)]
    rows.append(["buffered to independent, points", *apart])
    return Table(("", "edge features, ε = 2", "edge features, ε = 0.5", "the paper's CNN, ε = 2"), "lrrr", rows)


WORLDS = (
    ("logistic", 0.1, 1, 0.0),
    ("sweep-a0.1-s1-c1", 0.1, 1, 1.0),
    ("sweep-a0.1-s4-c0", 0.1, 4, 0.0),
    ("sweep-a0.1-s4-c0.5", 0.1, 4, 0.5),
    ("sweep-a0.1-s4-c1", 0.1, 4, 1.0),
    ("sweep-a0.1-s16-c0", 0.1, 16, 0.0),
    ("sweep-a0.1-s16-c0.5", 0.1, 16, 0.5),
    ("sweep-a0.1-s16-c1", 0.1, 16, 1.0),
    ("sweep-a1-s1-c0", 1.0, 1, 0.0),
    ("sweep-a1-s16-c0.5", 1.0, 16, 0.5),
    ("sweep-a1-s16-c1", 1.0, 16, 1.0),
)
"""Study, α = β, `data.spread` and `data.shared`."""


def sweep() -> Table:
    """Where private federated learning pays: losses in made-up worlds, and the difference to the noisy count."""
    found = runs()
    rows = []
    for study, alpha, spread, shared in WORLDS:
        row = [f"{alpha:g}", f"{spread}", f"{shared:g}"]
        row += [_figure(found, (study, method, "", ""), "loss") for method in ("learner's share", "noise-free")]
        for epsilon in ("2", "0.5"):
            count, plain, ours = ((study, m, epsilon, "") for m in ("noisy count", "independent", "buffered"))
            pays = fmean(found[ours]["loss"].values()) < fmean(found[count]["loss"].values())
            row += [_figure(found, key, "loss") for key in (count, plain)]
            row += [bold(_figure(found, ours, "loss"), pays), _difference(found, ours, count)]
        rows.append(row)
    each = ("noisy count", "independent", "buffered", "to the count")
    header = (
        "α = β",
        "spread",
        "shared",
        "label share",
        "noise-free",
        *(f"ε = {e}: {n}" for e in (2, 0.5) for n in each),
    )
    return Table(header, "r" * len(header), rows)


def readme() -> Table:
    """The first page's: a real stream and MNIST."""
    found = runs()
    columns = (
        ("covertype", "0.5", "accuracy"),
        ("covertype", "2", "accuracy"),
        ("edge", "0.5", "held_out"),
        ("edge", "2", "held_out"),
    )
    rows = []
    for method in ("majority", "learner's share", "noisy count", "noise-free", "independent", "tree", "buffered"):
        cells = []
        for study, epsilon, figure in columns:
            key = study, method, "" if method in PROTECTS_NOBODY else epsilon, ""
            cells.append(_figure(found, key, figure))
        rows.append([SHOWN[method], *cells])
    header = ("", "covertype, ε = 0.5", "covertype, ε = 2", "MNIST, ε = 0.5", "MNIST, ε = 2")
    return Table(header, "lrrrr", rows)


def index() -> Table:
    """The start page's: MNIST at (2, 1e-3), ours and the paper's picture."""
    found = runs()
    loose = [
        float(r["accuracy"])
        for r in read_csv("mnist.csv")
        if (r["run"], r["method"]) == ("clip", "toeplitz, NOT PRIVATE")
    ]
    paper = [
        float(r["accuracy"]) for r in read_csv("mnist.csv") if (r["run"], r["method"]) == ("cnn/tau-1", "toeplitz")
    ]
    rows = [
        ["the paper's CNN, Toeplitz noise, gradients *not clipped*", f"{fmean(loose):.3f}", "no one"],
        ["the same, clipped as the promise needs", f"{fmean(paper):.3f}", "every client"],
        [
            "the CNN, independent noise at its best",
            _figure(found, ("cnn", "independent", "2", ""), "held_out"),
            "every client",
        ],
        [
            "the CNN, buffered noise at its best",
            _figure(found, ("cnn", "buffered", "2", ""), "held_out"),
            "every client",
        ],
        [
            "fixed edge features, independent noise at its best",
            _figure(found, ("edge", "independent", "2", ""), "held_out"),
            "every client",
        ],
        [
            "fixed edge features, buffered noise at its best",
            bold(_figure(found, ("edge", "buffered", "2", ""), "held_out")),
            "every client",
        ],
    ]
    return Table(("", "accuracy", "protects"), "lrl", rows)


def log() -> Table:
    """What each comparison cost, and on how many edges its choices lie."""
    rows: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in read_csv("comparisons-log.csv"):
        rows["sweep, 10 worlds" if row["study"].startswith("sweep") else row["study"]].append(row)

    def total(these: Iterable[Mapping[str, str]], name: str) -> str:
        return f"{sum(int(row[name]) for row in these):,}"

    order = (*STREAMS, "logistic", "sweep, 10 worlds", "edge", "cnn")
    cells = []
    for study in order:
        these = rows[study]
        edges = sum(row["edges"] != "none" for row in these)
        cells.append(
            [study, str(len(these)), total(these, "settings"), total(these, "runs"), str(edges) if edges else "none"]
        )
    return Table(("comparison", "methods and budgets", "settings tried", "runs", "choices on an edge"), "lrrrr", cells)
