"""`PrivateModel`: the simulation's numbers, river's conventions, a deployed learner's promise."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import veilstream as vs

TEXT = """
[learning]
task = "custom"
rounds = {rounds}
local_steps = 3
clip_norm = 0.4
[data]
kind = "custom"
[privacy]
epsilon = 8.0
delta = 1e-5
participations = 2
min_separation = 4
[run]
seeds = 1
first_seed = 5
noise = "host"
regret = false
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.3
server_step_size = 0.8
step_decay = 0.3
averaging = 2.0
forgetting = 0.9
objective = "published"
"""
TABLE = """
[learning]
task = "{task}"
rounds = 4
[data]
kind = "table"
client = "who"
label = "answered"
{label}
[[data.features]]
name = "hour"
low = 0.0
high = 24.0
[privacy]
epsilon = 4.0
delta = 1e-5
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.5
"""


def plan_of(rounds=6):
    return vs.Plan.parse(TEXT.format(rounds=rounds))


def test_a_simulated_model_is_the_simulations(tmp_path):
    """`vs.run` with one learner and the same seed, to float32 rounding."""
    plan, task = plan_of(), vs.models.DictLogistic(dim=6, feature_norm=None)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(40, 6)).astype(np.float32)
    ys = np.where(rng.random(40) < 0.5, -1.0, 1.0).astype(np.float32)
    stream = vs.streams.PoolStream(
        learners=1,
        rounds=6,
        per_round=3,
        features=xs[:18],
        targets=ys[:18],
        held_features=xs[18:],
        held_targets=ys[18:],
        split=vs.streams.EvenSplit(),
        provenance="made up",
    )
    expected = vs.run(plan, out=tmp_path / "run", task=task, stream=stream).model("ours")
    model = vs.PrivateModel.simulated(plan, task, seed=5)
    for place in stream.indices(5, 0, 6).ravel():
        assert model.learner.observe(None, vs.Sample(xs[place], ys[place])) is vs.Answer.TAKEN
    np.testing.assert_allclose(model.learner.model, expected, atol=2e-6)
    assert np.abs(expected).max() > 0.1
    with pytest.raises(vs.errors.HorizonExhausted):
        model.learn_one({"a": 1.0}, True)


def test_a_copy_goes_on_as_the_model_itself():
    plan, task = plan_of(), vs.models.DictLogistic(dim=6)
    whole, cut = (vs.PrivateModel.simulated(plan, task, seed=1) for _ in range(2))
    for step in range(18):
        if step == 7:
            cut = pickle.loads(pickle.dumps(cut))
        for model in (whole, cut):
            model.learn_one({"a": step % 3}, step % 2 == 0)
    np.testing.assert_array_equal(whole.learner.model, cut.learner.model)
    other = vs.PrivateModel.simulated(plan, task, seed=2)
    assert not np.array_equal(whole.learner.model, other.learner.model)


def test_people_come_as_often_as_the_promise_allows():
    model = vs.PrivateModel.simulated(plan_of(), vs.models.DictLogistic(dim=4))
    for who in ("ann", "ann", "bob", "cid", "dan", "ann", "eve", "fay", "gus", "hal", "ann"):
        assert model.learn_one({"a": 1.0}, True, client=who) is vs.Answer.TAKEN
    assert model.learner.steps == 9  # ann's second came too soon, her fourth too often


def test_what_cannot_be_used_is_refused_and_counted_without_its_value():
    model = vs.PrivateModel.simulated(plan_of(), vs.models.DictLogistic(dim=4))
    assert model.learn_one({"a": float("nan")}, True) is vs.Answer.REFUSED
    assert model.learn_one({"a": 1.0}, 17) is vs.Answer.REFUSED
    assert sum(model.refused.values()) == 2
    assert model.predict_one({"a": float("nan")}) is None
    assert "17" not in repr(model.refused)
    assert model.learner.steps == 2  # a named client takes a step whatever the record says


def test_a_simulation_says_that_it_protects_no_one():
    model = vs.PrivateModel.simulated(plan_of(), vs.models.DictLogistic(dim=4))
    assert "protects no one" in repr(model)
    assert "protects no one" in repr(model.learner)
    assert not model.protects
    for text in (vs.PrivateModel.__doc__, vs.PrivateModel.simulated.__doc__):
        assert "protects no one" in text


def test_plans_that_cannot_be_simulated_record_by_record_are_refused():
    task = vs.models.DictLogistic(dim=4)
    for key, value in (("learners", 2), ("clients_per_step", 2)):
        plan = vs.Plan.parse(TEXT.format(rounds=6), {f"learning.{key}": value})
        with pytest.raises(vs.errors.InputError, match=f"learning.{key} = 2"):
            vs.PrivateModel.simulated(plan, task)
    with pytest.raises(vs.errors.InputError, match="encodes dictionaries"):
        vs.PrivateModel.simulated(plan_of(), vs.tasks.Logistic(4))


@pytest.mark.parametrize(
    ("task", "label", "told", "expected"),
    [
        ("logistic", 'labels = ["no", "yes"]', "no", {"no", "yes"}),
        ("softmax", 'labels = ["no", "yes", "perhaps"]', "perhaps", {"no", "yes", "perhaps"}),
        ("least_squares", "label_range = [100.0, 200.0]", 130.0, None),
    ],
)
def test_predictions_are_in_the_tables_own_words(task, label, told, expected):
    plan = vs.Plan.parse(TABLE.format(task=task, label=label))
    model = vs.PrivateModel.simulated(plan)
    assert model.learn_one({"hour": 8.0}, told, client="ann") is vs.Answer.TAKEN
    said = model.predict_one({"hour": "9"})
    if expected is None:
        assert isinstance(said, float)
        assert vs.PrivateModel.simulated(plan).predict_one({"hour": 9}) == 150.0
    else:
        assert said in expected
    assert model.predict_one({"minute": 9}) is None
    assert model.learn_one({"hour": 8.0}, "who knows", client="bob") is vs.Answer.REFUSED
    if task == "logistic":
        chances = model.predict_proba_one({"hour": 9.0})
        assert sum(chances.values()) == pytest.approx(1.0)
        assert max(chances, key=chances.get) == said
    else:
        with pytest.raises(NotImplementedError):
            model.predict_proba_one({"hour": 9.0})


def test_a_deployed_model_learns_through_its_ledger(tmp_path: Path):
    plan = vs.Plan.parse(TABLE.format(task="logistic", label='labels = ["no", "yes"]'))
    task = vs.tasks.Logistic(2)
    with vs.Learner(plan, tmp_path / "a.db", task, create=True) as learner:
        model = vs.PrivateModel(learner)
        assert model.protects
        assert "deployed" in repr(model)
        assert str(learner.guarantee) in repr(model)
        assert model.predict_one({"hour": 9.0}) is None
        assert model.predict_proba_one({"hour": 9.0}) == {}
        with pytest.raises(vs.errors.InputError, match="a round that has been begun"):
            model.learn_one({"hour": 9.0}, "yes", client="ann")
        learner.begin_round(0, np.array([3.0, 0.0], np.float32))
        with pytest.raises(vs.errors.InputError, match="who this record is of"):
            model.learn_one({"hour": 9.0}, "yes")
        assert (model.predict_one({"hour": 20}), model.predict_one({"hour": 2})) == ("yes", "no")
        assert model.learn_one({"hour": ""}, "yes", client="ann") is vs.Answer.REFUSED
        assert model.refused == {"hour: missing": 1}
        assert model.learn_one({"hour": 9.0}, "yes", client="ann") is vs.Answer.TAKEN
        assert learner.clients_wanted == 0
        learner.finish_round()
        learner.begin_round(1, np.zeros(2, np.float32))
        assert model.learn_one({"hour": 9.0}, "yes", client="ann") is vs.Answer.TAKEN
        assert learner.clients_wanted == 1  # she has had her turn: answered, not used
        with pytest.raises(TypeError, match="cannot be copied"):
            pickle.dumps(model)


# Every check that river has for such models runs on the simulated one. Around a deployed learner
# those that copy or pickle a model do not apply: two copies would answer for one ledger, so copying
# is refused (above). Nor do those that expect two runs to agree: its noise is nobody's to repeat.


@pytest.fixture
def checks(monkeypatch):
    """River's; they import scikit-learn for data of models with several outputs, unlike ours."""
    found = pytest.importorskip("river.checks", reason="river is not installed (group `check`)")
    if importlib.util.find_spec("sklearn") is None:
        stand_in = types.ModuleType("sklearn")
        stand_in.datasets = None
        monkeypatch.setitem(sys.modules, "sklearn", stand_in)
    return found


def river_models():
    from river import base

    class Private:
        """A simulated `PrivateModel` with river's constructor; protects no one."""

        make = None

        def __init__(self, dim: int = 64, epsilon: float = 8.0, seed: int = 0):
            self.dim, self.epsilon, self.seed = dim, epsilon, seed
            once = {"privacy.participations": 1, "privacy.min_separation": 1}
            plan = vs.Plan.parse(TEXT.format(rounds=700), {"privacy.epsilon": epsilon} | once)
            self._model = vs.PrivateModel.simulated(plan, self.make(dim), seed)

        def learn_one(self, x, y):
            self._model.learn_one(x, y)

        def predict_one(self, x):
            return self._model.predict_one(x)

    class PrivateClassifier(Private, base.Classifier):
        """Logistic regression; protects no one."""

        make = vs.models.DictLogistic
        _multiclass = False

        def predict_proba_one(self, x):
            return self._model.predict_proba_one(x)

    class PrivateRegressor(Private, base.Regressor):
        """Least squares; protects no one."""

        make = vs.models.DictRegression

    found = {"classifier": PrivateClassifier, "regressor": PrivateRegressor}
    for made in found.values():  # so that pickle finds them
        made.__qualname__ = made.__name__
        globals()[made.__name__] = made
    return found


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_rivers_own_checks_pass(kind, checks):
    model = river_models()[kind]()
    ran = 0
    for check in checks.yield_checks(model):
        check(model.clone())
        ran += 1
    assert ran >= 25


def test_rivers_checks_can_fail(checks):
    """A model that keeps its input fails river's check of that."""
    classifier = river_models()["classifier"]

    class Keeps(classifier):
        """Keeps what it was given."""

        def learn_one(self, x, y):
            self.last = x
            super().learn_one(x, y)

    Keeps.__qualname__ = "Keeps"
    globals()["Keeps"] = Keeps
    named = {check.__name__: check for check in checks.yield_checks(Keeps())}
    with pytest.raises(AssertionError, match="stored a reference"):
        named["check_no_state_aliasing_with_input"](Keeps())
