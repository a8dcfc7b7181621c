"""A stream that does not fit the plan or the task is refused before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest

import veilstream as vs
from veilstream.errors import InputError

N, TAU, DIM = 3, 2, 5


@dataclass(frozen=True)
class Clients:
    """A stream with one thing wrong, from some round on."""

    learners: int = N
    per_round: int = TAU
    dim: int = DIM
    labels: tuple[float, float] = (-1.0, 1.0)
    wrong_from: int = 0
    wrong_held_out: bool = False
    present: bool = False

    provenance = "made up"

    def _draw(self, shape: tuple[int, ...], seed: int) -> vs.Sample:
        features = np.random.default_rng(seed).standard_normal((*shape, self.dim))
        target = np.where(features[..., 0] > 0, self.labels[1], self.labels[0])
        return vs.Sample(features.astype(np.float32), target.astype(np.float32))

    def round(self, seed: int, round_: int) -> vs.Sample:
        own = self if round_ >= self.wrong_from else Clients()
        drawn = own._draw((own.learners, own.per_round), seed + round_)
        if not self.present:
            return drawn
        drawn.target[:, 0] = 0.0  # nobody is there
        here = np.ones(drawn.target.shape, np.float32)
        here[:, 0] = 0.0
        return drawn._replace(present=here)

    def held_out(self, seed: int, count: int, round_: int) -> vs.Sample:
        own = self if self.wrong_held_out else Clients()
        return own._draw((count,), seed)


def plan_of(task: str = "logistic", **learning) -> vs.Plan:
    return vs.Plan(
        learning={"rounds": 6, "local_steps": TAU, "learners": N, "task": task} | learning,
        data={"kind": "custom", "dim": DIM, "held_out": 20},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        run={"seeds": 1},
        methods=[{"name": "tree", "mechanism": "tree", "step_size": 0.1}],
    )


def refused(tmp_path, stream, *, plan=None, task=None, match: str) -> InputError:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=match) as caught:
        vs.run(plan or plan_of(), out, stream=stream, task=task)
    assert not out.exists()  # nothing was begun
    return caught.value


def test_a_stream_that_fits_runs(tmp_path):
    assert vs.run(plan_of(), tmp_path / "out", stream=Clients()).summary["complete"]


def test_labels_that_the_loss_is_not_written_for_are_refused(tmp_path):
    error = refused(tmp_path, Clients(labels=(0.0, 1.0)), match=r"labels -1, 1")
    assert error.field == "stream.round(0, 0).target"
    assert error.value == "0"


def test_an_empty_place_has_no_label(tmp_path):
    done = vs.run(plan_of(), tmp_path / "out", stream=Clients(present=True))
    assert done.summary["complete"]


def test_held_out_labels_are_checked_before_training(tmp_path):
    stream = Clients(labels=(0.0, 1.0), wrong_from=100, wrong_held_out=True)
    refused(tmp_path, stream, match=r"held_out.*target = '0'")


def test_labels_that_change_on_the_way_are_refused_in_their_round(tmp_path):
    with pytest.raises(InputError, match=r"stream\.round\(0, 4\)\.target"):
        vs.run(plan_of(), tmp_path / "out", stream=Clients(labels=(0.0, 1.0), wrong_from=4))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"dim": 7}, r"features = 'shape \(7,\) for one client': .*features_shape \(5,\)"),
        ({"learners": 4}, r"shape \(4, 2, 5\)': expected \(3, 2\) first: 3 learners, 2 steps"),
        ({"per_round": 3}, r"shape \(3, 3, 5\)': expected \(3, 2\) first"),
    ],
)
def test_another_shape_is_refused_by_name(wrong, match, tmp_path):
    refused(tmp_path, Clients(**wrong), match=match)


def test_clients_of_a_step_count_in_a_round(tmp_path):
    plan = plan_of(clients_per_step=3)
    refused(tmp_path, Clients(), plan=plan, match=r"\(3, 6\) first: .* 2 steps a round of 3 client")
    done = vs.run(plan, tmp_path / "out", stream=Clients(per_round=6))
    assert done.summary["complete"]


def pool(**changes) -> vs.streams.PoolStream:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((60, DIM)).astype(np.float32)
    targets = np.where(features[:, 0] > 0, 1.0, -1.0).astype(np.float32)
    good = vs.streams.PoolStream(
        learners=N,
        rounds=6,
        per_round=TAU,
        features=features,
        targets=targets,
        held_features=features[:9],
        held_targets=targets[:9],
        split=vs.streams.EvenSplit(),
        provenance="made up",
    )
    return replace(good, **changes)


def test_a_pool_that_fits_runs(tmp_path):
    assert vs.run(plan_of(), tmp_path / "out", stream=pool()).summary["complete"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"learners": 4}, "stream.learners"),
        ({"per_round": 4}, "stream.per_round"),
        ({"rounds": 5}, "stream.rounds"),
        ({"targets": np.tile([0.0, 1.0], 30)}, "stream.target"),
        ({"held_targets": np.zeros(9)}, "stream.held_out.target"),
        ({"features": np.ones((60, 2)), "held_features": np.ones((9, 2))}, "stream.features"),
    ],
)
def test_a_pool_for_another_plan_is_refused(changes, field, tmp_path):
    assert refused(tmp_path, pool(**changes), match="expected").field == field


def linear(**options) -> vs.models.PytreeTask:
    def loss(params, features, target):
        return jnp.logaddexp(0.0, -target * (features.ravel() @ params["w"]))

    def predict(params, features):
        return jnp.where(features.reshape(len(features), -1) @ params["w"] >= 0, 1.0, -1.0)

    start = {"w": np.zeros(DIM, np.float32)}
    return vs.models.PytreeTask(loss, start, predict, classifies=True, **options)


def test_a_task_without_an_example_is_traced_on_the_streams_records(tmp_path):
    plan = plan_of("custom")
    error = refused(tmp_path, Clients(dim=7), plan=plan, task=linear(), match="JAX says")
    assert error.field == "task.loss"
    done = vs.run(plan, tmp_path / "out", stream=Clients(), task=linear())
    assert done.summary["complete"]


def test_a_tasks_own_labels_count(tmp_path):
    plan, task = plan_of("custom"), linear(labels=(-1, 1))
    refused(tmp_path, Clients(labels=(0.0, 1.0)), plan=plan, task=task, match="labels -1, 1")


def test_features_in_another_shape_of_the_examples_size_are_taken(tmp_path):
    example = vs.Sample(np.zeros((1, DIM), np.float32), 1.0)
    plan, task = plan_of("custom"), linear(example=example)
    assert vs.run(plan, tmp_path / "done", stream=Clients(), task=task).summary["complete"]
    refused(tmp_path, Clients(dim=7), plan=plan, task=task, match=r"features_shape \(1, 5\)")


class Column(vs.tasks.Logistic):
    """Predictions of shape (samples, 1) would be compared with every sample's target."""

    def predict(self, params, features):
        return super().predict(params, features)[:, None]


def test_predictions_of_another_shape_are_refused(tmp_path):
    error = refused(tmp_path, Clients(), plan=plan_of("custom"), task=Column(DIM), match=r"shape \(3, 1\)")
    assert error.field == "task.predict"


def test_what_is_not_a_task_is_refused_by_what_it_lacks(tmp_path):
    class Half:
        dim, classifies = DIM, False

        def loss(self, params, sample):
            return 0.0

    refused(tmp_path, Clients(), plan=plan_of("custom"), task=Half(), match="lacks init, gradient, predict")
