"""A look at a file's first records before a learner spends anything on them."""

from __future__ import annotations

import logging
from pathlib import Path

from veilstream.errors import InputError
from veilstream.records.schema import REASONS
from veilstream.streams.table_source import LookAhead, TableSource

_log = logging.getLogger(__name__)

FIRST_RECORDS = 200
_FEW_OF_ONE_CLASS = 20  # so many of one class may be chance


def check_first_records(
    source: TableSource, path: Path, *, accept: float, learner: str, rows: int = FIRST_RECORDS
) -> LookAhead:
    """Refuse to start on records that cannot be used; what is only odd is logged.

    Args:
        source: which stands where the learner goes on.
        path: its file, for the way out.
        accept: the share that may be refused.
        learner: its name, as a column of learners would have it.
        rows: how many records are looked at.

    Returns:
        What was seen.

    Raises:
        InputError: more than the share is refused, with counts by reason and column; or every row
            is another learner's.

    """
    seen = source.look_ahead(rows)
    counts, check = seen.counts, f"`veilstream data check {path} --plan PLAN` shows each column"
    if not counts.rows and counts.other_learners and seen.whole:
        raise InputError(
            "data",
            path.name,
            f"records of learner {learner!r} in column {source.schema.learner}",
            f"all {counts.other_learners} rows are of others: is it spelled as in --id? {check}",
        )
    if not counts.rows:
        _log.info("%s has no records to read yet", path.name)
        return seen
    refused = sum(counts.refused.values())
    by_reason = "; ".join(
        f"{count} in {refusal.column}: {REASONS[refusal.reason]}"
        if refusal.column
        else f"{count}: {REASONS[refusal.reason]}"
        for refusal, count in counts.refused.most_common(8)
    )
    if seen.refused_share > accept:
        labels = ""
        if source.schema.label.classes is not None:
            each = (f"{label} {seen.labels[label]}" for label in source.schema.label.classes)
            labels = f"; labels of the plan among the others: {', '.join(each)}"
        raise InputError(
            "data",
            path.name,
            f"at most {100 * accept:g}% of the next {counts.rows} records refused, and {refused} "
            f"are ({by_reason}{labels})",
            f"nothing was spent; {check}; --accept-refusals {_rounded_up(seen.refused_share)} goes on without them",
        )
    if refused:
        _log.warning("of the next %d records %d are refused: %s", counts.rows, refused, by_reason)
    for column, count in counts.clamped.most_common():
        if count > accept * counts.rows:
            _log.warning(
                "of the next %d records %d have a cell in %s outside the plan's range or vocabulary",
                counts.rows,
                count,
                column,
            )
    if len(seen.labels) == 1 and counts.rows - refused >= _FEW_OF_ONE_CLASS:
        _log.warning(
            "all of the next %d usable records have one label: a model learns nothing from one class; %s",
            counts.rows - refused,
            check,
        )
    return seen


def _rounded_up(share: float) -> str:
    return f"{min(1.0, int(share * 100 + 1) / 100):g}"
