"""A deployed learner's data source by its name on the command line."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from veilstream.errors import InputError
from veilstream.plans.clients import SQLITE_PREFIX, planned_table, stream_of
from veilstream.plans.own_code import load_function
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.records.sample import Sample
from veilstream.streams.folder_table import names_many
from veilstream.streams.intake import AlwaysReady, ClientSource, Observe, Offered, SomeRecords, SourceBookmark, Wanted
from veilstream.streams.iterator_source import IteratorSource
from veilstream.streams.table_source import TableSource
from veilstream.streams.waiting_source import LiveSource

_FUNCTION = re.compile(r"[\w.]+:\w+", re.ASCII)


class PlanSource(AlwaysReady):
    """The plan's own stream, as one learner of the simulation sees it: for demonstrations."""

    def __init__(self, plan: Plan, index: int) -> None:
        if not 0 <= index < plan.learning.learners:
            raise InputError(
                "data", f"plan:{index}", f"a learner from 0 to {plan.learning.learners - 1}", "plan:0 is the first"
            )
        self._stream, self._index, self._seed = stream_of(plan), index, plan.run.first_seed
        self._rounds = plan.learning.rounds
        self.name = f"plan:{index}"

    def serve(self, round_: int, observe: Observe, wanted: Wanted) -> None:
        """Offer the clients of this round."""
        observe(self._clients(round_))

    def read_whole(self, since: Sequence[SourceBookmark]) -> Iterator[SomeRecords]:
        """The clients of all rounds."""
        for round_ in range(self._rounds):
            yield SomeRecords([(tag, sample) for tag, sample, _ in self._clients(round_)])

    def files_now(self) -> str:
        """A plan's stream is the same whenever it is asked."""
        return self.name

    def _clients(self, round_: int) -> Iterator[Offered]:
        batch = self._stream.round(self._seed, round_)
        for t in range(batch.features.shape[1]):
            if batch.present is None or batch.present[self._index, t]:
                sample = Sample(batch.features[self._index, t], batch.target[self._index, t])
                yield Offered(f"{self._seed}/{self._index}/{round_}/{t}", sample)


def open_source(
    text: str,
    plan: Plan,
    learner: str | None = None,
    *,
    whole: bool = False,
    query: str | None = None,
    key: str | None = None,
) -> ClientSource:
    """``live``, ``plan:INDEX``, ``module:function``, or a file of records; ``query`` and ``key`` are for SQLite."""
    source: ClientSource | None = None
    if text == "live":
        source = LiveSource(plan.federation.patience_s)
    elif text.startswith("plan:") and text[5:].isdigit():
        source = PlanSource(plan, int(text[5:]))
    elif not Path(text).is_file() and _FUNCTION.fullmatch(text):
        make = load_function("--data", text)
        source = IteratorSource(make, name=text, patience_s=plan.federation.patience_s)
    if source is None:
        return open_file(Path(text.removeprefix(SQLITE_PREFIX)), plan, learner, whole=whole, query=query, key=key)
    for field, given in (("--query", query), ("--key", key)):
        if given is not None:
            raise InputError(field, given, f"nothing for --data {text}, which is no SQLite file", "leave it out")
    return source


def open_file(
    path: Path,
    plan: Plan,
    learner: str | None = None,
    *,
    whole: bool = False,
    query: str | None = None,
    key: str | None = None,
) -> TableSource:
    """A file of records by the plan's schema; for arguments and errors see `open_source`."""
    if not os.path.lexists(path) and not names_many(path):
        raise InputError(
            "data", str(path), "a file or folder, `live`, `plan:INDEX` or `module:function`", "check the path"
        )
    if plan.data.kind != "table":
        raise InputError(
            "data.kind",
            plan.data.kind,
            f'"table", so that columns of {path.name} have a meaning',
            f"`veilstream data check {path.name} --write --plan PLAN` proposes a [data] table",
        )
    reopen = partial(planned_table, path, plan, whole=whole, query=query, key=key)
    return TableSource(reopen(), schema_of(plan), learner, whole=whole, reopen=reopen, path=path)
