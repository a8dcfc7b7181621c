"""A file of records before a learner reads on in it: where it stands, and what its next records look like.

Only the file's form can stop a start: its columns, whether it can be read, whose rows it holds. What the
records say never does, since the server sees whether a learner starts. That is told to the person beside the
data, in the log, before round 0; `veilstream data check` says more.
"""

from __future__ import annotations

import logging

from veilstream.errors import InputError
from veilstream.plans.plan import Plan
from veilstream.records.schema import EACH_ROW, REASONS
from veilstream.streams.intake import SourceBookmark
from veilstream.streams.table_source import LookAhead, TableSource, check_not_read_before, order_of_rows

_log = logging.getLogger(__name__)

FIRST_RECORDS = 200
_COPIES = (
    "%s is new, but other files were read before. Records of those files that stand here among changed, missing or "
    "inserted rows cannot be recognised and would count as further visits: give new records only"
)
_FEW_OF_ONE_CLASS = 20  # fewer of one class may be chance
_MANY_CLAMPED = 0.05  # share of cells outside the plan's range that is worth a line


def resume_file(source: TableSource, plan: Plan, marks: list[SourceBookmark], *, learner: str) -> None:
    """Go on where the file was left, and tell what its next records look like before anything is spent."""
    assert source.reopen is not None
    copies = check_not_read_before(source.reopen(), marks)
    if copies and (plan.participation.times > 1 or source.schema.client == EACH_ROW):
        _log.warning(_COPIES, source.table.name)
    source.resume(marks)
    for notice in source.table.notices:
        _log.info("%s", notice)
    check_first_records(source, learner=learner)
    if not marks and source.schema.time is not None:  # a file that was read from can no longer be sorted
        order, rows = order_of_rows(source.reopen(), source.schema, learner)
        for remark in order.remark_on_zones(source.schema.time):
            _log.warning("%s: %s", source.table.name, remark)
        if order.unordered:
            _log.warning(
                "%s: %d of %d rows come after a row with a later %s. A learner takes rows in the file's order, a "
                "simulation sorts them: if the order matters, stop and sort the file now",
                source.table.name,
                order.unordered,
                rows,
                source.schema.time,
            )


def look_at_whole(source: TableSource, plan: Plan, marks: list[SourceBookmark], *, learner: str) -> None:
    """The same where all records are taken at once, in an order that the file has no part in: nothing is read on."""
    assert source.reopen is not None
    copies = check_not_read_before(source.reopen(), marks)
    if copies and source.schema.client == EACH_ROW:
        _log.warning(_COPIES, source.table.name)
    source.resume(marks)
    for notice in source.table.notices:
        _log.info("%s", notice)
    check_first_records(source, learner=learner)


def check_first_records(source: TableSource, *, learner: str, rows: int = FIRST_RECORDS) -> LookAhead:
    """Log what is odd about the next records; refuse a file without a row of this learner."""
    seen = source.look_ahead(rows)
    counts, check = seen.counts, f"`veilstream data check {source.table.name} --plan PLAN` shows each column"
    if not counts.rows and counts.other_learners and seen.whole:
        raise InputError(
            "data",
            source.table.name,
            f"records of learner {learner!r} in column {source.schema.learner}",
            f"all {counts.other_learners} rows are other learners'; is the name spelled as in its keys? {check}",
        )
    if not counts.rows:
        _log.info("%s has no records to read yet", source.table.name)
        return seen
    refused = sum(counts.refused.values())
    by_reason = "; ".join(
        f"{count}{f' in {refusal.column}' if refusal.column else ''}: {REASONS[refusal.reason]}"
        for refusal, count in counts.refused.most_common(8)
    )
    if refused:
        labels = ""
        if source.schema.label.classes is not None:
            each = (f"{label} {seen.labels[label]}" for label in source.schema.label.classes)
            labels = f"; labels of the plan among the others: {', '.join(each)}"
        _log.warning(
            "of the next %d records %d cannot be used (%s%s). Such a record takes its client's step and teaches "
            "nothing: if these are too many, stop now, before their steps are spent, and mend the file or the plan; %s",
            counts.rows,
            refused,
            by_reason,
            labels,
            check,
        )
    for column, count in counts.clamped.most_common():
        if count > _MANY_CLAMPED * counts.rows:
            _log.warning(
                "%d of the next %d records have a cell in %s outside the plan's range or vocabulary",
                count,
                counts.rows,
                column,
            )
    if len(seen.labels) == 1 and counts.rows - refused >= _FEW_OF_ONE_CLASS:
        _log.warning(
            "all of the next %d usable records have one label, and a model learns nothing from one class; %s",
            counts.rows - refused,
            check,
        )
    return seen
