"""The live page of a simulation: curves of every method and seed, as blocks of rounds are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.plans.plan import Plan
from veilstream.plans.prepare import Prepared, main_method
from veilstream.reports.charts import held_out_chart, loss_chart, running_mean
from veilstream.reports.live_state import LiveState
from veilstream.reports.page_kit import Chart, Headline, facts, measure, page_state
from veilstream.reports.promise import promise_of
from veilstream.reports.quality import named
from veilstream.reports.report import legend_entry, report_state
from veilstream.runs.folder import Run
from veilstream.simulation.engine import evaluated_rounds
from veilstream.simulation.seed_batches import Measured, RunProgress

_EVERY_S = 1.0
_MOST_CELLS = 1 << 22  # losses held for the page: 16 MiB; beyond that, fewer seeds
_NOTICE = (
    "Simulation, still running: its noise comes from seeds and protects no one. The promise below is what "
    "deployed learners keep that run its method."
)


class LiveSimulation(LiveState):
    """The page of a running simulation."""

    def __init__(self, plan: Plan, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._clock, self._told_at = plan, clock, -_EVERY_S
        self._began, self._solved = clock(), 0
        self._names: list[str] = []
        self._main = ""
        self._known: list[tuple[str, float]] = []
        first = plan.run.first_seed
        self._seeds = list(range(first, first + plan.run.seeds))
        self._looks = evaluated_rounds(plan)
        empty = np.empty((0, 0, 0), np.float32)
        self._loss: NDArray[np.float32] = empty
        self._held_out: NDArray[np.float32] = empty
        state = page_state(
            "simulation",
            plan.name,
            self._headline(0, 0),
            subtitle=plan.description,
            notices=[_NOTICE],
            seeds=self._seeds,
            provenance={"facts": [], "command": "", "plan": plan.to_toml()},
        )
        super().__init__(state, path)

    def prepared(self, methods: list[Prepared]) -> None:
        """Take the calibrated methods: legend and promise."""
        self._names = [p.plan.name for p in methods]
        rounds = self._plan.learning.rounds
        fits = max(1, min(len(self._seeds), _MOST_CELLS // max(1, len(methods) * rounds)))
        self._seeds = self._seeds[:fits]
        self._loss = np.full((len(methods), fits, rounds), np.nan, np.float32)
        self._held_out = np.full((len(methods), fits, len(self._looks)), np.nan, np.float32)
        main = methods[main_method(methods)]
        self._main = main.plan.name
        self.change(
            {
                "methods": [
                    legend_entry(p.plan.name, p.plan.mechanism_name if p.factorization else None, p.guarantee)
                    for p in methods
                ],
                "main": main.plan.name,
                "promise": promise_of(main.guarantee, simulated=True),
            }
        )

    def compared(self, baselines: Mapping[str, Any]) -> None:
        """Take what predictions without a model have, as summary.json names it."""
        self._known = [(named(name, told), told["accuracy"]) for name, told in baselines.items() if "accuracy" in told]

    def progressed(self, progress: RunProgress) -> None:
        """A block of rounds is done; readers hear at most once a second, and of the last block."""
        if progress.measured is not None:
            self._take(progress.measured)
        moment = self._clock()
        if moment - self._told_at < _EVERY_S and progress.done < progress.total:
            return
        self._told_at = moment
        headline = self._headline(progress.done, progress.total)
        self.change({"headline": headline, "charts": {"learning": self._charts()}})

    def solved(self, seeds: int) -> None:
        """The regret of so many more seeds is known, after the last round."""
        self._solved += seeds
        told = f"All rounds are done; regret is known for {self._solved} of {self._plan.run.seeds} seeds."
        self.change({"notices": [_NOTICE, told]})

    def written(self, run: Run) -> None:
        """The folder is complete, or as complete as an interrupted run leaves it."""
        self.change(dict(report_state(run)))
        self.feed.end()

    def _take(self, news: Measured) -> None:
        there = [(i, self._seeds.index(s)) for i, s in enumerate(news.seeds) if s in self._seeds]
        span = slice(news.first, news.first + news.loss.shape[-1])
        columns = [self._looks.index(r) for r in news.looked_at]
        for own, seed in there:
            self._loss[:, seed, span] = news.loss[:, own]
            self._held_out[:, seed, columns] = news.held_out_accuracy[:, own]

    def _charts(self) -> list[Chart]:
        charts = []
        looked = np.flatnonzero(np.isfinite(self._held_out).any(axis=(0, 1)))
        if looked.size:
            at = np.array(self._looks)[looked]
            charts.append(held_out_chart(at, self._by_name(self._held_out[..., looked]), self._known))
        done = np.flatnonzero(~np.isnan(self._loss).all(axis=(0, 1)))
        if done.size:
            so_far = self._loss[..., : done[-1] + 1]
            # Seeds that have not come so far end where they are.
            means = np.where(np.isnan(so_far), np.nan, running_mean(so_far))
            charts.append(loss_chart(self._by_name(means)))
        return charts

    def _by_name(self, values: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return dict(zip(self._names, values, strict=True))

    def _headline(self, done: int, total: int) -> Headline:
        share = done / total if total else 0.0
        rounds = self._plan.learning.rounds
        beside = [("done", f"{100 * share:.0f} %"), ("rounds, all seeds", f"{done:,} of {total:,}")] if total else []
        if done:
            seconds = (self._clock() - self._began) * (1 - share) / share
            beside.append(("time left, about", f"{seconds:.0f} s"))
        beside.append(("seeds", str(len(self._seeds))))
        told = self._so_far()
        if told is None:
            sentence = f"How good the model is, is not known before the first of {rounds:,} rounds."
            return {"sentence": sentence, "better": None, "figures": [], "beside": facts(beside)}
        round_, accuracy = told
        said = [f"{name} has {value:.3f}" for name, value in self._known]
        compared = [(name, f"{value:.3f}") for name, value in self._known]
        label = f"held-out accuracy of {self._main} after {round_:,} rounds"
        return {
            "sentence": "; ".join([f"Held-out accuracy {accuracy:.3f} so far", *said]) + ".",
            "better": None,
            "figures": [measure(f"{accuracy:.3f}", label, compared)],
            "beside": facts(beside),
        }

    def _so_far(self) -> tuple[int, float] | None:
        """The newest round at which the recommended method's held-out accuracy is known, and its mean over seeds."""
        if self._main not in self._names:
            return None
        own = self._held_out[self._names.index(self._main)]
        looked = np.flatnonzero(np.isfinite(own).any(axis=0))
        return (self._looks[looked[-1]], float(np.nanmean(own[:, looked[-1]]))) if looked.size else None
