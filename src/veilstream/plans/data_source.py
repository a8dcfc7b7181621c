"""A learner's data source by its name on the command line: a file, `live`, or the plan's stream."""

from __future__ import annotations

import os.path
from pathlib import Path

from veilstream.errors import InputError
from veilstream.learning.tasks import Sample
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.streams.intake import AlwaysReady, ClientSource, LiveSource, Observe, Wanted
from veilstream.streams.table_source import TableSource
from veilstream.streams.tables import open_table

__all__ = ["PlanSource", "open_file", "open_source"]


class PlanSource(AlwaysReady):
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


def open_source(
    text: str, plan: Plan, learner: str | None = None, *, whole: bool = False
) -> ClientSource:
    """``live``, ``plan:INDEX``, or a file of records.

    Args:
        text: as on the command line.
        plan: what a record is.
        learner: this learner's name, where a column says at which learner a record is.
        whole: whether a file is complete (`open_table`).

    Raises:
        InputError: for a file that is missing, or lacks the plan's columns; for a plan that does
            not say what a record of a file is.

    """
    if text == "live":
        return LiveSource(plan.federation.patience_s)
    if text.startswith("plan:") and text[5:].isdigit():
        return PlanSource(plan, int(text[5:]))
    return open_file(Path(text), plan, learner, whole=whole)


def open_file(
    path: Path, plan: Plan, learner: str | None = None, *, whole: bool = False
) -> TableSource:
    """A file of records by the plan's schema; for arguments and errors see `open_source`."""
    if not os.path.lexists(path):
        raise InputError("data", str(path), "a file, `live`, or `plan:INDEX`", "check the path")
    if plan.data.kind != "table":
        raise InputError(
            "data.kind", plan.data.kind, f'"table", so that columns of {path.name} have a meaning',
            f"`veilstream data check {path.name} --write --plan PLAN` proposes a [data] table",
        )  # fmt: skip
    table = open_table(path, whole=whole, query=plan.data.query)
    return TableSource(table, schema_of(plan), learner)
