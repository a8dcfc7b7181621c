"""A learner's data source by its name on the command line: a file, `live`, or the plan's stream."""

from __future__ import annotations

from pathlib import Path

from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.streams.intake import ClientSource, FileSource, LiveSource, Observe, Wanted

__all__ = ["PlanSource", "open_source"]


class PlanSource:
    """The plan's own stream, as one learner of the simulation sees it: for demonstrations."""

    def __init__(self, plan: Plan, index: int, seed: int | None = None) -> None:
        if not 0 <= index < plan.learning.learners:
            raise InputError(
                "data", f"plan:{index}", f"a learner from 0 to {plan.learning.learners - 1}",
                "plan:0 is the first",
            )  # fmt: skip
        self._stream, self._index = stream_of(plan), index
        self._seed = plan.run.first_seed if seed is None else seed

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """The τ clients of this round."""
        batch = self._stream.round(self._seed, round_)
        for t in range(batch.features.shape[1]):
            if not wanted():
                return
            present = batch.present is None or bool(batch.present[self._index, t])
            if present:
                sample = Sample(batch.features[self._index, t], batch.target[self._index, t])
                observe(f"{self._seed}/{self._index}/{round_}/{t}", sample)


def open_source(text: str, plan: Plan) -> ClientSource:
    """``live``, ``plan:INDEX``, or a file."""
    if text == "live":
        return LiveSource(plan.federation.patience_s)
    if text.startswith("plan:") and text[5:].isdigit():
        return PlanSource(plan, int(text[5:]))
    return FileSource(Path(text))
