"""What an audit found, in one picture: claimed and measured, by message and by guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from veilstream.audit import AuditReport
from veilstream.audit.statistics import OneRun
from veilstream.privacy.gaussian import GaussianCurve
from veilstream.research.error_figure import save_figure
from veilstream.research.learning_figure import new_figure

_CLAIMED, _MEASURED, _COUNTED = "black", "#0072B2", "#D55E00"


def draw_audit(report: AuditReport, folder: Path) -> list[Path]:
    """Save audit.png and audit.svg into a folder."""
    figure = new_figure(14.5, 4.4)
    trade_off, curve, steps = figure.subplots(1, 3)
    _draw_trade_off(trade_off, report)
    _draw_privacy_curve(curve, report)
    _draw_steps(steps, report.adaptive, "promised" if report.sums is None else "the floor")
    promise = report.guarantee
    state = "kept" if not report.alarms else "BROKEN"
    figure.suptitle(
        f"Audit of {promise.mechanism} noise, T = {promise.horizon}, "
        f"({promise.epsilon:g}, {promise.delta:g})-LDP: {state}",
        fontsize="medium",
        color="black" if not report.alarms else "#B00020",
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "audit.png", folder / "audit.svg"]
    for path in paths:
        save_figure(figure, path, dpi=110)
    return paths


def _draw_trade_off(axes: Any, report: AuditReport) -> None:
    many = report.many if report.sums is None else report.sums.together
    alpha = np.linspace(1e-4, 1.0 - 1e-4, 400)
    axes.plot(
        alpha,
        GaussianCurve(many.claim).trade_off(alpha),
        color=_CLAIMED,
        label=f"promised: no test below (mu = {many.claim:.3f})",
    )
    wrong, missed = np.array(many.roc).T
    axes.plot(
        wrong, missed, ".", color=_COUNTED, markersize=3, label=f"best of {many.runs - many.fitted:,} counted runs"
    )
    if 0.0 < many.mu_lower < np.inf:
        axes.plot(
            alpha,
            GaussianCurve(many.mu_lower).trade_off(alpha),
            color=_COUNTED,
            linewidth=1,
            label=f"bound at {many.confidence:.0%} (mu >= {many.mu_lower:.3f})",
        )
    axes.plot([0, 1], [1, 0], ":", color="0.6", label="knows nothing")
    _label(axes, "false-alarm rate", "miss rate", "Telling the canary's two records apart")


def _draw_privacy_curve(axes: Any, report: AuditReport) -> None:
    epsilons = np.linspace(0.0, 2.0 * report.guarantee.epsilon, 120)
    sums, counted = report.sums, report.many
    lines = [("promised", report.claim, _CLAIMED)]
    found = max(report.fixed.mu_lower, report.adaptive.mu_lower)
    if sums is None:
        lines += [("one run: at least", found, _MEASURED)]
    else:
        counted = sums.together
        lines += [("the floor", report.fixed.claim, "0.6"), ("the floor, one run: at least", found, _MEASURED)]
    lines += [("many runs: at least", counted.mu_lower, _COUNTED)]
    for label, mu, colour in lines:
        if 0.0 < mu < np.inf:
            deltas = [GaussianCurve(mu).delta(float(e)) for e in epsilons]
            axes.plot(epsilons, deltas, color=colour, label=f"{label} (mu = {mu:.3f})")
    delta = report.guarantee.delta
    axes.plot(report.guarantee.epsilon, delta, "o", color=_CLAIMED, markerfacecolor="none", label="the promise")
    axes.plot(counted.epsilon_lower, delta, "<", color=_COUNTED, label="counted, without assumptions")
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(delta * 1e-3, 1e-12))
    _label(axes, "ε", "δ(ε)", "Privacy curve, claimed and measured")


def _draw_steps(axes: Any, run: OneRun, promised: str) -> None:
    steps = np.arange(1, len(run.measured) + 1)
    finite = np.isfinite(run.measured)
    axes.fill_between(
        steps[finite],
        run.lower[finite],
        run.upper[finite],
        color=_MEASURED,
        alpha=0.3,
        lw=0,
        label=f"measured, all steps at {run.confidence:.0%}",
    )
    if run.expected is not None:
        axes.plot(steps, run.expected, color=_MEASURED, linewidth=1, label="expected in messages")
    axes.axhline(run.claim, color=_CLAIMED, label=promised)
    axes.margins(y=0.25)
    title = f"One run, {run.coordinates:,} coordinates"
    _label(axes, "step at which the client comes", "d' = μ of that client", title, loc="upper right")


def _label(axes: Any, x: str, y: str, title: str, **legend: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize="small")
    axes.legend(fontsize="x-small", **legend)
    axes.grid(visible=True, alpha=0.2)
