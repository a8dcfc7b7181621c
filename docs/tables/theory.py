"""Tables of theory.md: bounds beside the regret that they bound."""

from __future__ import annotations

import re
from typing import Any

import veilstream as vs
from tables.cells import RESULTS, Table, read_json


def _rows() -> list[dict[str, Any]]:
    return list(read_json("bounds.json")["rows"])


def methods() -> Table:
    """The six rows of the paper's table, from the block of code above them."""
    page = (RESULTS.parent / "theory.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "TableSetting" in block)
    names: dict[str, Any] = {"vs": vs, "print": lambda *_: None}
    exec(code, names)
    shown = {
        "ours, correlated": "dynamic | asm-noncvx",
        "ours, independent": "dynamic | asm-noncvx",
        "liu2023: independent, mini-batch": "static | convex",
        "denisov2022: correlated, one machine": "static | convex",
        "cdc2021: no noise, local steps": "static | convex",
        "gao2018: no noise, normalised steps": "dynamic | weakly pseudo-convex",
    }
    rows = []
    for (name, what), method in zip(shown.items(), vs.theory.COMPARED_METHODS.values(), strict=True):
        regret, losses = what.split(" | ")
        if not method.regret.startswith(regret):
            raise ValueError(f"{name} has {method.regret} regret")
        rate, bound = method.rate(names["setting"]), method.bound(names["setting"])
        figures = (rate.noise, rate.total, bound.noise, bound.total)
        rows.append([name, regret, losses, *(f"{figure:.3g}" for figure in figures)])
    return Table(("row", "regret", "losses", "rate: noise", "rate", "bound: noise", "bound"), "lllrrrr", rows)


def _digits(value: float, digits: int = 3) -> str:
    """So many digits, without an exponent."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def bounds() -> Table:
    """Exact regret, simulated runs, and how many times as large the bounds are."""
    rows = []
    for row in _rows():
        thm_up = _digits(row["thm_up_to_exact"]) if "thm_up_to_exact" in row else ""
        iid = f" (lem-u-IID: {_digits(row['lem_u_iid_to_exact'])})" if "lem_u_iid_to_exact" in row else ""
        seen = f"{row['simulated']:.4f} ± {row['simulated_std']:.4f}"
        times = _digits(row["lem_u_to_exact"]) + iid
        rows.append([row["noise"], str(row["local_steps"]), row["world"], f"{row['exact']:.4f}", seen, times, thm_up])
    header = ("noise", "τ", "run", "exact regret", "simulated", "lem-u is larger by", "thm-up by")
    return Table(header, "lrlrrrr", rows)


def steps() -> Table:
    """How many times as large as the exact regret lem-u still is with its proof undone up to a step."""
    chosen = [row for row in _rows() if (row["noise"], row["local_steps"]) in [("toeplitz", 4), ("none", 4)]]
    chosen += [row for row in _rows() if (row["noise"], row["local_steps"]) == ("toeplitz", 1)]
    header = [
        "undone, one after the other",
        *(f"{row['noise']}, τ = {row['local_steps']}, {row['world']}" for row in chosen),
    ]
    names = [each["step"] for each in chosen[0]["steps"]]
    rows = [[name, *(_digits(row["steps"][k]["to_exact"]) for row in chosen)] for k, name in enumerate(names)]
    last = [_digits(row["noise_where_it_falls"] / row["exact"]) if row["noise"] != "none" else "" for row in chosen]
    rows.append(["*the loss of the noise alone, ½·E(nᵀHn)*", *last])
    return Table(header, "l" + "r" * len(chosen), rows)
