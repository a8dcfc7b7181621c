"""Tables of training-loop.md."""

from __future__ import annotations

from tables.cells import Table, mean, read_csv, read_json

_WAYS = {
    "correlated": ("`make_private`", "anyone may know the batches"),
    "secret": ('`make_private(order="secret")`, one pass', "nobody outside knows the batches"),
    "independent": ('`make_private(mechanism="independent")`', "anyone may know the batches"),
    "opacus": ("Opacus 1.6", "nobody outside knows the batches"),
    "local_dp_mod": ("the rule of Flower's LocalDpMod", "anyone may know the batches"),
}


def accuracy() -> Table:
    """Each way at the setting that did best on records held out for tuning."""
    rows = read_csv("training_loop.csv")
    made = []
    for method, (name, rests) in _WAYS.items():
        mine = [row for row in rows if row["method"] == method]
        tuned = [row for row in mine if row["seed"] == "0"]
        best = max(tuned, key=lambda row: float(row["tuning_accuracy"]))["setting"]
        found = [float(row["accuracy"]) for row in mine if row["setting"] == best]
        made.append([name, rests, mean(found), str(len(found)), best])
    return Table(("way", "its ε holds though", "accuracy", "seeds", "setting"), "llrrl", made)


def steps() -> Table:
    """A private step beside a plain one."""
    made = []
    for row in read_json("training_step.json"):
        seconds = [f"{row[key]:.3f}" for key in ("plain_s", "private_s")]
        memory = [f"{row[key]:,.0f}" for key in ("plain_mb", "private_mb")]
        ratio, noise, ledger = f"{row['ratio']:.1f}x", f"{row['noise_s']:.3f}", f"{row['ledger_s']:.3f}"
        made.append([row["name"], str(row["batch"]), *seconds, ratio, noise, ledger, *memory])
    header = ("device", "batch", "plain, s", "private, s", "ratio", "noise, s", "ledger, s", "plain, MB", "private, MB")
    return Table(header, "lrrrrrrrr", made)
