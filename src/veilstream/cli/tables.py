"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich import markup
from rich.console import Console
from rich.table import Table

from veilstream.wording import counted, shown_lines

if TYPE_CHECKING:
    from veilstream.plans.comparison import Comparison, OnlySums, OtherOrder
    from veilstream.privacy.guarantee import SumTrust


def print_json(value: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json_text(value))


def json_text(value: dict[str, Any]) -> str:
    """One JSON document."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def escape(text: str) -> str:
    """A file's or a peer's text on a console: neither markup nor a movement of the cursor."""
    return markup.escape(shown_lines(text))


def table_console() -> Console:
    """A console on stdout; a table that goes to a file is 140 columns wide."""
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else 140, soft_wrap=not terminal, highlight=False)


def print_comparison(comparison: Comparison, deployed: str) -> None:
    """The comparison as a table on stdout, guarantee first, whether it can be deployed last."""
    console = table_console()
    best = comparison.recommended
    console.print(f"[bold]Guarantee with the recommended noise[/bold]  {best.guarantee}")
    for remark in best.guarantee.remarks:
        console.print(f"  note: {remark}")
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "left")
    for row in comparison.rows:
        cells = (
            row.title,
            f"{row.sensitivity:.4g}",
            f"{row.noise_std:.4g}",
            f"{row.error_max:.4g}",
            f"{row.error_mean:.4g}",
            f"{row.error_round_ends:.4g}",
            f"{row.error_published:.4g}",
            f"{row.relative_to_independent:.3g}x",
            _bytes(row.state_bytes),
            _time(row.seconds_per_step),
        )
        table.add_row(*cells, style="bold green" if row is best else None)
    console.print(table)
    console.print(
        "[dim]V: standard deviation of the iid noise that a learner correlates. std max, mean, "
        "rounds: standard deviation of the noise, per coordinate, in the learners' averaged prefix "
        "sums (at worst, over all steps, at round ends); published: in what is published, at step "
        "size one. In Python, max_error() and mean_error() "
        "are variances. The last two columns are per learner.[/dim]"
    )
    if comparison.left_out:
        console.print(
            f"[dim]Left out at this horizon, since they take long: {', '.join(comparison.left_out)}. One that the "
            "plan's method names is compared all the same.[/dim]"
        )
    console.print()
    console.print(f"[bold]Recommended[/bold]  {best.title}: {comparison.reason}.")
    if best.objective is not None:
        console.print(f'  in a plan: mechanism = "{best.mechanism}", objective = "{best.objective}"')
    if (own := comparison.own_in_words()) is not None:
        console.print(f"[bold]This plan[/bold]  {escape(own)}")
    if comparison.setting.unbounded and best.mechanism != "independent":
        console.print("  in a plan: unbounded = true, and no mechanism")
    if comparison.other_order is not None:
        console.print(f"[bold]Order[/bold]  {_other_order(comparison, comparison.other_order)}")
    setting = comparison.setting
    if comparison.without_window is not None:
        times = comparison.without_window.error_published / comparison.recommended.error_published
        console.print(
            f"[bold]Window[/bold]  a record is used in one of the {setting.window} steps of the next window. The first "
            f"window uses nobody, so {setting.horizon - setting.steps_with_people} of {setting.horizon} steps are "
            f"noise alone, and the last takes nobody: at most {setting.people_needed} people are used. "
            "For records that are all there before an epoch begins, a secret order without a window would "
            f"leave about {times:.2f} times this noise."
        )
    if (sums := comparison.in_sums) is not None:
        console.print(f"[bold]Sums[/bold]  {_only_sums(comparison, sums)}")
    _print_model(console, comparison)
    for way, relative in comparison.without_end.items():
        console.print(
            f"[bold]Without an end[/bold]  {way}: at round {comparison.setting.rounds} "
            f"{relative:.2f}x the most noise of one that knew it to be the last."
        )
    using = "" if setting.window is None else " that use people"
    console.print(
        f"[bold]People[/bold]  {setting.steps_with_people} steps{using}, with everyone taking part "
        f"{setting.participation}, need at least {setting.people_needed} people a learner."
    )
    console.print(f"[bold]Deployed[/bold]  {escape(deployed)}")


def _other_order(comparison: Comparison, other: OtherOrder) -> str:
    """What the other order would give, in words."""
    ratio = other.error_published / comparison.recommended.error_published
    noise = other.mechanism if other.bands is None else f"{other.mechanism}, {counted(other.bands, 'band')}"
    if other.order.value == "known":
        return (
            f"this promise rests on the secret of each record's step. With a known order, {noise} noise has "
            f"{other.error_published:.4g} in what is published: {ratio:.2f}x the recommended."
        )
    return (
        f'privacy.order = "secret" would leave about {other.error_published:.3g} in what is published ({noise}): '
        f"{ratio:.2f}x the recommended. It is for records that lie there before an epoch begins, and the promise then "
        "rests on a secret, too."
    )


def _only_sums(comparison: Comparison, sums: OnlySums) -> str:
    """What it gives that the server sees only sums over learners, in words."""
    delta = comparison.setting.budget.delta
    floor = f"whoever trusts no other learner has the floor, ({sums.floor_epsilon:.4g}, {delta:g})"
    if comparison.setting.trust is not None:
        return (
            f"this promise counts on {counted(sums.honest, 'honest learner')} in every round, of which each adds "
            f"1/√{sums.honest} of the noise; {floor}.{_graph(comparison.setting.trust)}"
        )
    ratio = sums.error_published / comparison.recommended.error_published
    return (
        f'privacy.trust = "sum" with honest = {sums.honest} would leave {sums.error_published:.3g} in what is '
        f"published: {ratio:.2f}x the recommended. It then counts on {sums.honest} learners; {floor}."
    )


def _graph(trust: SumTrust) -> str:
    """With whom learners share masks, where that is not everybody."""
    from veilstream.mask_graph import mask_graph

    graph = mask_graph(trust.learners, trust.colluding)
    if graph is None:
        return ""
    failure = trust.graph_failure
    runs = "" if trust.runs == 1 else f" in any of {trust.runs} runs (federation.epochs)"
    fails = (
        f"; that it does not keep sums together{runs} has probability {failure:.1g} at most, counted in delta"
        if failure
        else ""
    )
    return (
        f" Each learner shares masks with {graph.degree} others, in a graph that all draw{fails}. Rounds need "
        f"{graph.least_set} learners."
    )


def _print_model(console: Console, comparison: Comparison) -> None:
    best, reach = comparison.recommended, comparison.model_reach
    if best.model_noise is not None and reach is not None:
        console.print(
            f"[bold]Model[/bold]  noise of norm {best.model_noise:.3g} in what is published (step "
            f"size x std x root of d). With features of norm 1, a model of norm {_CONFIDENT:g} "
            f"is sure of itself (98%); this one can go at most {reach:.3g} from its start."
        )
    for change, error in comparison.offers.items():
        share = error / best.error_published
        if share <= _WORTH_SAYING:
            console.print(f"[dim]With {change} the noise in what is published would be {share:.2f}x.[/dim]")


_WORTH_SAYING = 0.97
_CONFIDENT = 4.0
"""Log odds of 98%: where a logistic model with features of norm one is sure of itself."""


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("mechanism", "left"),
    ("sensitivity", "right"),
    ("noise std V", "right"),
    ("std max", "right"),
    ("std mean", "right"),
    ("std rounds", "right"),
    ("published", "right"),
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
