"""One served model everywhere: a learner predicts with the model that the server publishes, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import veilstream as vs
from tests.federation.test_learner_api import Served
from tests.support.federation import DIM, FEATURES, World, plan_of, rows_of, source_of, table_plan_of
from veilstream.deployment.learner import Learner
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.learner.local_account import LocalAccount
from veilstream.federation.learner.published_model import PublishedModel, published_path
from veilstream.federation.protocol.fold import FoldState
from veilstream.federation.protocol.messages import Reply, Request
from veilstream.federation.protocol.sizes import request_limit
from veilstream.learning.linear_tasks import LeastSquares
from veilstream.learning.tasks import Sample
from veilstream.records.admission import Answer

AVERAGED = {"averaging": 3.0}
ROUNDS = 5


@pytest.fixture
def world(tmp_path):
    with World(tmp_path, plan_of(rounds=ROUNDS, method=AVERAGED)) as made:
        yield made


def start(world: World, name: str):
    """A learner as the command starts it: its published model is kept beside its store."""
    daemon = world.start(name)
    daemon.published = PublishedModel(daemon.learner, published_path(world.store(name)))
    return daemon


def test_learners_predict_with_what_is_published_and_not_with_x(world):
    for name in world.names:
        start(world, name)
    coordinator, transport = world.coordinator(), world.transport()
    for r in range(1, ROUNDS):
        coordinator.go(transport, r + 1)
        for daemon in world.daemons.values():
            model = daemon.published.model
            assert (model.round, model.run) == (r, coordinator.run)  # as it stood when the last round began
            np.testing.assert_array_equal(model.parameters, coordinator.models.read(r))
            assert r == 1 or np.abs(daemon.learner.model - model.parameters).max() > 1e-3  # x^r is another
    assert coordinator.end_all(transport, within_s=20.0) == ()
    for name, daemon in world.daemons.items():
        assert daemon.published.model.round == ROUNDS  # the last one comes with the end
        np.testing.assert_array_equal(daemon.published.model.parameters, coordinator.models.read(ROUNDS))
        kept = vs.load(published_path(world.store(name)))  # in the format of every model's file
        assert kept.sha256 == vs.load(world.root / "run").sha256
        assert kept.guarantee == daemon.learner.guarantee
        again = PublishedModel(daemon.learner, published_path(world.store(name)))  # after a restart
        assert again.model.sha256 == kept.sha256


def test_where_nothing_is_averaged_x_is_sent_once(tmp_path):
    with World(tmp_path, plan_of(rounds=3)).start_all() as world:
        coordinator = world.coordinator()
        bodies = []
        transport = world.transport()
        send = transport.send
        transport.send = lambda node, head, body=b"": bodies.append(head + body) or send(node, head, body)
        coordinator.go(transport)
        key = ServerKeys.load(tmp_path / "keys/server").identity.public
        sent = {(len(r.body), r.published) for r in (Request.read(body, key) for body in bodies) if r.kind == "round"}
        assert sent == {(4 * DIM, r) for r in range(3)}
        np.testing.assert_array_equal(world.daemons["a"].published.model.parameters, coordinator.models.read(2))


def test_an_average_is_sent_a_hundred_times_in_a_long_run(tmp_path):
    world = World(tmp_path, plan_of(rounds=400, method=AVERAGED))
    coordinator = world.coordinator()
    x = np.arange(DIM, dtype=float)
    sent = []
    for r in range(400):
        coordinator.fold.state = FoldState(r, x, 0.5 * x, np.zeros(DIM, np.float32))
        _, body, _, published = coordinator.server._round()
        assert len(body) <= request_limit(DIM) - request_limit(0)
        np.testing.assert_array_equal(np.frombuffer(body, "<f4")[:DIM], x)
        if published is not None:
            assert published == r
            np.testing.assert_array_equal(np.frombuffer(body, "<f4")[DIM:], 0.5 * x)
        sent.append(published is not None)
    assert sum(sent) == 100
    world.close()


def ask(world: World, daemon, **fields) -> Reply:
    keys = ServerKeys.load(world.root / "keys/server")
    request = Request(**({"learner": "a", "nonce": "n", "run": "run"} | fields))
    return Reply.read(daemon.handle(request.sign(keys.identity)), keys.learners["a"])


def test_an_old_request_that_comes_again_moves_nothing_and_numbers_beyond_the_cap_are_refused(world):
    daemon = start(world, "a")
    settings = daemon.learner.settings
    assert ask(world, daemon, kind="enrol", settings=settings).kind == "enrolled"
    x, average = np.zeros(DIM, "<f4"), np.full(DIM, 0.25, "<f4")
    body = x.tobytes() + average.tobytes()
    assert ask(world, daemon, kind="round", body=body, published=7).kind == "release"
    np.testing.assert_array_equal(daemon.learner.model, x)  # rounds begin at x
    np.testing.assert_array_equal(daemon.published.model.parameters, average)
    older = x.tobytes() + (2 * average).tobytes()
    ask(world, daemon, kind="round", body=older, published=6)
    assert daemon.published.model.round == 7
    for wrong in (np.nan, 1e30):
        bad = x.tobytes() + np.full(DIM, wrong, "<f4").tobytes()
        refused = ask(world, daemon, kind="round", round=1, body=bad, published=8)
        assert refused.kind == "refusal"
        assert "model_norm_cap" in refused.facts["why"]
    np.testing.assert_array_equal(daemon.published.model.parameters, average)
    without = ask(world, daemon, kind="round", round=1, body=x.tobytes(), acknowledged=None)
    assert without.kind == "release"  # a round without a published model keeps the one that is there
    assert daemon.published.model.round == 7


def test_a_file_of_another_plan_is_not_served(world, tmp_path):
    daemon, path = start(world, "a"), tmp_path / "kept.npz"
    daemon.published.take(np.full(DIM, 0.5, np.float32), 2, "run")
    released = daemon.published.model.released
    dataclasses.replace(released, plan_toml=plan_of(rounds=9).to_toml()).save(path)
    assert PublishedModel(daemon.learner, path).model is None
    path.write_bytes(b"damaged")
    assert PublishedModel(daemon.learner, path).model is None
    released.save(path)
    assert PublishedModel(daemon.learner, path).model.round == 2


def test_predict_answers_what_the_fetched_model_says(tmp_path):
    plan = table_plan_of(rounds=3, learners=1, method=AVERAGED)
    here = Served(tmp_path, plan=plan)
    try:
        rows = rows_of([f"p{i}" for i in range(6)])
        for r in range(3):
            here.open_round()
            for row in rows[2 * r : 2 * r + 2]:
                body = {"client": row["person"], "record": {k: v for k, v in row.items() if k != "person"}}
                assert here.post("/observe", body)[0] == 200
            here._going.join(10)
        coordinator = here._coordinator
        assert coordinator.end_all(here.world.transport(), within_s=20.0) == ()
        fetched = vs.load(here.world.root / "run")
        told = dict.fromkeys(FEATURES, 0.5)
        status, answer = here.post("/predict", {"record": told})
        assert status == 200
        assert answer["model"] == {"round": 3, "run": coordinator.run, "sha256": fetched.sha256}
        assert answer["label"] == fetched.predict(told)
    finally:
        here.close()


def test_the_score_is_of_the_published_model_within_the_labels_range(world):
    data = {"labels": None, "label_range": (0.0, 10.0)}
    plan = table_plan_of(method=AVERAGED, learning={"task": "least_squares"}, data=data)
    rows = rows_of([f"p{i}" for i in range(40)], label=lambda i: i % 11)
    source = source_of(rows)
    with Learner(plan, world.store("a"), LeastSquares(DIM), create=True) as learner:
        account = LocalAccount(learner, source, unit=5.0)
        account.published = PublishedModel(learner)
        average = np.full(DIM, 3.0, np.float32)
        account.published.take(average, 4, "run")
        learner.begin_round(0, np.full(DIM, -3.0, np.float32))
        model = account.published.model
        features = np.stack([model.schema.features_of(row) for row in rows])
        targets = [model.schema.label.read(row["y"], decimal_comma=False)[0] for row in rows]
        for one, target in zip(features, targets, strict=True):
            account.observed(Sample(one, np.float32(target)), Answer.TAKEN, used=True)
        account.round_ends()
        shown = account.as_dict()["score"]
        assert shown["published"] == {"round": 4, "run": "run", "sha256": model.sha256}
        raw = features.astype(float) @ average.astype(float)
        assert np.abs(raw).max() > 1.0  # some lie beyond the range
        wrong = np.clip(raw, -1, 1) - np.array(targets)
        assert shown["records"] == 40
        assert account.score.model == pytest.approx(float((wrong**2).sum()), rel=1e-5)
