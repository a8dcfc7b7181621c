"""A learner's first start at the command line: a store only when asked for, notices on stderr."""

from __future__ import annotations

import pytest

from tests.cli.test_plan import veilstream
from tests.deployment.test_learner import Still, plan_of
from tests.support.federation import options
from veilstream.errors import InputError
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.process import LearnerService


@pytest.fixture
def place(tmp_path):
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["north"])
    (tmp_path / "plan.toml").write_text(plan_of().to_toml())
    return tmp_path


def test_without_new_store_a_missing_store_is_an_error_with_its_way_out(place):
    done = veilstream(
        "learner",
        *options(plan="plan.toml", keys="keys/learners/north", data="plan:0"),
        *options(server="127.0.0.1:1", store="unmounted/north.db"),
        cwd=place,
    )
    assert done.returncode == 2  # a unit does not try again
    assert "unmounted/north.db" in done.stderr
    assert "--new-store" in done.stderr
    assert not (place / "unmounted").exists()


def test_the_service_makes_a_store_when_asked_and_says_what_a_person_should_know(place, monkeypatch, caplog):
    class Reached(Exception):
        pass

    def no_server(*_, **__):
        raise Reached

    monkeypatch.setattr(LearnerService, "_node", no_server)
    keys, store = place / "keys/learners/north", place / "north.db"

    def start(**more):
        caplog.clear()
        learner = LearnerService(plan_of(), keys, store, "plan:0", ("127.0.0.1", 1), task=Still(), **more)
        try:
            learner.run()
        except Reached:
            return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        raise AssertionError("no server was called")

    with pytest.raises(InputError, match="a store that exists"):
        start()
    for more in ({"new_store": True}, {}, {"new_store": True}):
        said = start(**more)
        assert any(line.startswith("the witness") for line in said), said
