"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from veilstream.reports.comparison import Comparison

__all__ = ["as_json", "print_comparison", "print_json"]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that the table shows, and more."""
    s = comparison.setting
    return {
        "setting": {
            "epsilon": s.budget.epsilon,
            "delta": s.budget.delta,
            "rounds": s.rounds,
            "local_steps": s.local_steps,
            "horizon": s.horizon,
            "clip_norm": s.clip_norm,
            "learners": s.learners,
            "dim": s.dim,
            "neighbours": s.neighbours.value,
            "participation": [s.participation.times, s.participation.min_separation],
            "accounting": s.accounting.value,
        },
        "recommended": comparison.recommended.mechanism,
        "reason": comparison.reason,
        "left_out": list(comparison.left_out),
        "mechanisms": [row.as_dict() for row in comparison.rows],
    }


def print_json(value: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_comparison(comparison: Comparison) -> None:
    """The comparison as a table on stdout, guarantee first."""
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 120, soft_wrap=not terminal, highlight=False)
    best = comparison.recommended
    console.print(f"[bold]Guarantee[/bold]  {best.guarantee}")
    for remark in best.guarantee.remarks:
        console.print(f"  note: {remark}")
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, overflow="fold")
    for row in comparison.rows:
        cells = (
            row.mechanism,
            f"{row.sensitivity:.4g}",
            f"{row.noise_std:.4g}",
            f"{row.error_max:.4g}",
            f"{row.error_mean:.4g}",
            f"{row.error_round_ends:.4g}",
            f"{row.relative_to_independent:.3g}x",
            _bytes(row.state_bytes),
            _time(row.seconds_per_step),
        )
        table.add_row(*cells, style="bold green" if row is best else None)
    console.print(table)
    console.print(
        "[dim]V: standard deviation of the iid noise that a learner correlates. std max, mean, "
        "rounds: standard deviation of the noise, per coordinate, in the learners' averaged prefix "
        "sums (at worst, over all steps, at round ends). In Python, max_error() and mean_error() "
        "are variances. The last two columns are per learner.[/dim]"
    )
    if comparison.left_out:
        console.print(
            f"[dim]Left out at this horizon: {', '.join(comparison.left_out)} "
            "(ask for one with --mechanism).[/dim]"
        )
    console.print()
    console.print(f"[bold]Recommended[/bold]  {best.mechanism}: {comparison.reason}.")


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("mechanism", "left"),
    ("sensitivity", "right"),
    ("noise std V", "right"),
    ("std max", "right"),
    ("std mean", "right"),
    ("std rounds", "right"),
    ("vs independent", "right"),
    ("state", "right"),
    ("time/step", "right"),
)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
