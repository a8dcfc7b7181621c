"""A data source and its learner, before rounds begin: where it goes on, and how many clients must wait."""

from __future__ import annotations

import logging

from veilstream.deployment.learner import Learner
from veilstream.federation.learner.file_start import look_at_whole, resume_file
from veilstream.federation.learner.reply_times import SEAL_S
from veilstream.learning.tasks import admission_of
from veilstream.plans.plan import Plan
from veilstream.plans.records import schema_of
from veilstream.streams.intake import ClientSource, WholeSource
from veilstream.streams.iterator_source import IteratorSource
from veilstream.streams.table_source import TableSource
from veilstream.streams.waiting_source import LiveSource, WaitingSource

_log = logging.getLogger(__name__)


def resume_source(source: ClientSource, learner: Learner, name: str) -> None:
    """Go on where this learner left the source."""
    plan = learner.plan
    if learner.takes_whole_sources:
        if isinstance(source, TableSource) and not learner.clients_written_down:
            look_at_whole(source, plan, learner.bookmarks(), learner=name)
        if isinstance(source, WholeSource) and not learner.over:
            learner.use_records(source)
    elif isinstance(source, TableSource):
        resume_file(source, plan, learner.bookmarks(), learner=name)
    elif isinstance(source, IteratorSource):
        source.resume(learner.bookmarks())
        source.admission = admission_of(learner.task)
        source.schema = schema_of(plan) if plan.data.kind == "table" else None


def fit_source(source: ClientSource, learner: Learner) -> None:
    """Tell a source how many clients a step takes together, and how often one may come in a round."""
    if isinstance(source, WaitingSource):
        source.together = learner.terms.clients_per_step
    if isinstance(source, WaitingSource | TableSource):
        often = learner.plan.participation
        source.visits_a_round = min(often.times, 1 + (learner.terms.local_steps - 1) // often.min_separation)


def least_clients(plan: Plan, learner: Learner, source: ClientSource) -> int:
    """How many clients must wait for a round to begin; says what waiting costs."""
    a_round = learner.terms.local_steps * learner.terms.clients_per_step
    if isinstance(source, LiveSource):
        seconds = source.window_s + SEAL_S
        _log.info(
            "a round takes at most %d clients in %g s (federation.patience_s and a second to reply): %.3g clients a "
            "second. More local_steps or clients_per_step, or less patience, take more",
            a_round,
            seconds,
            a_round / seconds,
        )
    given = plan.federation.min_clients
    if learner.takes_whole_sources:  # they are all there
        return 1
    if given is not None:
        return given
    if not isinstance(source, TableSource | IteratorSource):
        return 1
    source.least_at_last = 1
    if isinstance(source, IteratorSource):
        source.hold(a_round)
    if a_round > 1:
        _log.info(
            "a round begins when %d records of people who may take part wait, which is all of it: no noise is spent on "
            "nobody, and a round takes as long as that. federation.min_clients = 1 begins with whoever is there",
            a_round,
        )
    return a_round
