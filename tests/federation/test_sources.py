"""Sources of clients: the plan's stream, files, people who call."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from tests.support.federation import DIM, World, plan_of, table_plan_of
from veilstream.errors import InputError
from veilstream.plans.data_source import PlanSource, open_source
from veilstream.records.admission import Answer
from veilstream.streams.intake import AlwaysReady


def taken(source, round_: int, wanted: int) -> list:
    got: list = []

    def observe(clients):
        before = len(got)
        got.extend((tag, sample) for tag, sample, *_ in islice(clients, wanted - before))
        return [Answer.TAKEN] * (len(got) - before)

    source.serve(round_, observe, lambda: wanted - len(got))
    return got


def test_a_plans_stream_is_the_simulations(tmp_path):
    from veilstream.plans.clients import stream_of

    plan = plan_of()
    batch = stream_of(plan).round(0, 4)
    got = taken(PlanSource(plan, 1), 4, 2)
    assert [tag for tag, _ in got] == ["0/1/4/0", "0/1/4/1"]
    for t, (_, sample) in enumerate(got):
        np.testing.assert_array_equal(sample.features, batch.features[1, t])
        assert sample.target == batch.target[1, t]


def test_a_file_of_a_plan_without_columns_leads_to_the_check(tmp_path):
    """The order of columns means nothing: a plan says what they are."""
    (tmp_path / "d.csv").write_text("tag,target,x,y\na,1,0.5,2\n")
    with pytest.raises(InputError, match=r"data\.kind = 'synthetic': expected \"table\".*data check"):
        open_source(str(tmp_path / "d.csv"), plan_of())


def test_a_source_that_fails_does_not_show_outside(tmp_path, caplog):
    """The release has the size of any other, and the next round is as usual."""

    class Failing(AlwaysReady):
        def serve(self, round_, observe, wanted):
            if round_ == 1:
                raise RuntimeError("1234.5")

    from veilstream.federation.keys.identity import ServerKeys
    from veilstream.federation.protocol.messages import Reply, Request

    with World(tmp_path, plan_of(learners=1), names=("a",)) as world:
        daemon = world.start("a", source=Failing())
        keys = ServerKeys.load(world.root / "keys/server")
        x = np.zeros(DIM, "<f4").tobytes()
        replies = [
            daemon.handle(Request("round", "r", "a", "n", r, None, body=x).sign(keys.identity)) for r in range(3)
        ]
        public = world.keys_of("a").identity.public
        assert [Reply.read(reply, public).kind for reply in replies] == ["release"] * 3
        assert len({len(reply) for reply in replies}) == 1
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
            ("ERROR", "the data source failed (RuntimeError); the round goes on without it")
        ]


def test_sources_that_cannot_be(tmp_path):
    with pytest.raises(InputError, match="a file or folder, `live`"):
        open_source(str(tmp_path / "none.csv"), plan_of())
    (tmp_path / "d.csv").write_text("person,y\na,yes\n")
    with pytest.raises(InputError, match=r"columns x0, x1, .*it has 2 columns, and 2 of the 8"):
        open_source(str(tmp_path / "d.csv"), table_plan_of())
    with pytest.raises(InputError, match="a learner from 0 to 2"):
        open_source("plan:7", plan_of())
