"""Your PyTorch model: the same gradients as JAX, inside everything that the simulation nests."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from veilstream.errors import InputError
from veilstream.learning.models.torch_model import TorchTask
from veilstream.learning.tasks import Sample

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

VECTOR = Sample(np.zeros(4, np.float32), 0)


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make()


def mlp():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def mlp_task(**changes):
    settings = {"classifies": True, "example": VECTOR, **changes}
    return TorchTask(mlp(), F.cross_entropy, **settings)


def batch(shape, classes, count=6, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((count, *shape)).astype(np.float32)
    return Sample(features, rng.integers(0, classes, count).astype(np.int32))


def cross_entropy(scores, target):
    return jax.nn.logsumexp(scores) - scores[target]


def jax_mlp(flat, sample):
    w1, b1, w2, b2 = jnp.split(flat, [20, 25, 40])
    hidden = jnp.tanh(w1.reshape(5, 4) @ sample.features + b1)
    return cross_entropy(w2.reshape(3, 5) @ hidden + b2, sample.target)


def jax_convolutions(flat, sample):
    kernel, bias, weights, offset = jnp.split(flat, [18, 20, 20 + 3 * 8])
    image = sample.features.reshape(1, 1, 6, 6)
    maps = jax.lax.conv(image, kernel.reshape(2, 1, 3, 3), (1, 1), "VALID")[0]
    maps = jax.nn.relu(maps + bias[:, None, None])
    pooled = maps.reshape(2, 2, 2, 2, 2).mean(axis=(2, 4))
    return cross_entropy(weights.reshape(3, 8) @ pooled.reshape(-1) + offset, sample.target)


def convolutions():
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    )


@pytest.mark.parametrize(
    ("module", "reference", "shape"),
    [(mlp, jax_mlp, (4,)), (convolutions, jax_convolutions, (1, 6, 6))],
    ids=["mlp", "convolutions"],
)
def test_loss_and_gradient_equal_those_of_the_same_network_in_jax(module, reference, shape):
    example = Sample(np.zeros(shape, np.float32), 0)
    task = TorchTask(module(), F.cross_entropy, classifies=True, example=example)
    samples, x = batch(shape, 3), task.init()
    for ours, theirs in ((task.loss, reference), (task.gradient, jax.grad(reference))):
        mine = jax.jit(jax.vmap(ours, in_axes=(None, 0)))(x, samples)
        same = jax.vmap(theirs, in_axes=(None, 0))(x, samples)
        np.testing.assert_allclose(mine, same, rtol=1e-5, atol=1e-6)


def test_gradient_equals_finite_differences_of_the_module_in_float64():
    """The slope from PyTorch's own forward pass in double precision, entry by entry."""
    task, sample = mlp_task(), batch((4,), 3, count=1)
    x = np.asarray(task.init())
    gradient = task.gradient(x, Sample(sample.features[0], sample.target[0]))
    features = torch.from_numpy(sample.features).double()
    target = torch.from_numpy(sample.target).long()

    def loss(flat):
        module = mlp().double()
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.from_numpy(flat), module.parameters())
            return float(F.cross_entropy(module(features), target))

    for i in range(task.dim):
        step = 1e-6 * np.eye(task.dim)[i]
        slope = (loss(x + step) - loss(x - step)) / 2e-6
        assert float(gradient[i]) == pytest.approx(slope, abs=1e-6)


def test_the_vector_is_the_module():
    task, module = mlp_task(), mlp()
    assert task.dim == 43
    np.testing.assert_array_equal(task.init(), task.init(seed=5))
    flat = nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    np.testing.assert_array_equal(task.init(), flat)
    moved = np.arange(task.dim, dtype=np.float32)
    back = nn.utils.parameters_to_vector(task.to_module(moved).parameters())
    np.testing.assert_array_equal(back.detach().numpy(), moved)
    with pytest.raises(InputError, match=r"shape \(2, 43\)"):
        task.to_module(np.zeros((2, 43)))


def test_predictions_are_the_modules():
    task, samples = mlp_task(), batch((4,), 3, count=20)
    with torch.no_grad():
        best = mlp()(torch.from_numpy(samples.features)).argmax(1).numpy()
    np.testing.assert_array_equal(task.predict(task.init(), samples.features), best)
    values = mlp_task(classifies=False)
    assert values.predict(task.init(), samples.features).shape == (20, 3)


def test_the_task_keeps_its_own_copy():
    module = mlp()
    task = TorchTask(module, F.cross_entropy, classifies=True, example=VECTOR)
    before = np.asarray(task.init())
    with torch.no_grad():
        module[0].weight.zero_()
    np.testing.assert_array_equal(task.init(), before)


def test_tasks_reach_other_processes():
    task, samples = mlp_task(), batch((4,), 3)
    copied = pickle.loads(pickle.dumps(task))
    np.testing.assert_array_equal(copied.init(), task.init())
    answers = task.predict(task.init(), samples.features)
    np.testing.assert_array_equal(copied.predict(copied.init(), samples.features), answers)


def test_all_nestings_call_torch_once():
    """As the simulation nests them: methods, seeds, learners, clients; some share x or clients."""
    task, calls = mlp_task(), []
    inner = task._gradients

    def counted(params, features, target):
        calls.append((params.shape, features.shape))
        return inner(params, features, target)

    task._gradients = counted
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, task.dim)).astype(np.float32)
    features = rng.standard_normal((3, 5, 2, 4)).astype(np.float32)
    target = rng.integers(0, 3, (3, 5, 2)).astype(np.int32)
    clients = jax.vmap(task.gradient, in_axes=(None, 0))
    learners = jax.vmap(clients, in_axes=(None, 0))
    seeds = jax.vmap(learners, in_axes=(0, 0))
    methods = jax.vmap(seeds, in_axes=(0, None))
    found = np.asarray(jax.jit(methods)(x, Sample(features, target)))
    assert calls == [((2, 3, 1, 1, task.dim), (1, 3, 5, 2, 4))]
    one = jax.jit(jax.grad(jax_mlp))
    for m, s, i, c in np.ndindex(2, 3, 5, 2):
        expected = one(x[m, s], Sample(features[s, i, c], target[s, i, c]))
        np.testing.assert_allclose(found[m, s, i, c], expected, rtol=1e-4, atol=1e-5)


def test_gradients_descend_inside_a_compiled_scan():
    task, samples = mlp_task(), batch((4,), 3, count=50)
    samples = Sample(samples.features, (samples.features[:, 0] > 0).astype(np.int32))

    @jax.jit
    def descend(x):
        def step(x, sample):
            return x - 0.3 * task.gradient(x, sample), task.loss(x, sample)

        return jax.lax.scan(step, x, samples)

    x, _ = descend(task.init())
    x, losses = descend(x)
    assert losses.mean() < 0.35
    assert (np.asarray(task.predict(x, samples.features)) == samples.target).mean() > 0.9


def test_calls_from_several_threads_do_not_meet():
    """functional_call swaps parameters while it runs: two at once would see each other's."""
    task, samples = mlp_task(), batch((4,), 3, count=1)
    sample = Sample(samples.features[0], samples.target[0])
    models = np.random.default_rng(0).standard_normal((8, task.dim)).astype(np.float32)
    expected = [np.asarray(jax.grad(jax_mlp)(x, sample)) for x in models]
    wrong: list[int] = []

    def work(i):
        for _ in range(40):
            found = task._gradients(models[i], sample.features, np.asarray(sample.target))
            if not np.allclose(found, expected[i], rtol=1e-3, atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


STUCK = """
import os
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax, jax.numpy as jnp, numpy as np, torch
from veilstream.learning.algorithm import StepRule, local_round
from veilstream.learning.tasks import Sample
from veilstream.learning.models.torch_model import TorchTask

nn = torch.nn
torch.set_num_threads(2)
module = nn.Sequential(nn.Linear(100, 900), nn.ReLU(), nn.Linear(900, 10))
example = Sample(np.zeros(100, np.float32), 0)
task = TorchTask(module, nn.functional.cross_entropy, classifies=True, example=example)
rounds, steps, learners = 3, 3, 10
features = np.random.default_rng(0).standard_normal((rounds, learners, steps, 1, 100))
clients = Sample(features.astype(np.float32), np.zeros((rounds, learners, steps, 1), np.int32))
noise = np.zeros((rounds, steps, learners, task.dim), np.float32)

def one_round(x, now):
    clients, noise = now
    met = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), clients)
    loss = jax.vmap(task.loss, in_axes=(None, 0))(x, met).mean()
    right = (task.predict(x, met.features) == met.target).mean()
    learner = lambda x, clients, noise: local_round(task, StepRule(1.0), x, clients, noise, 0.1)
    releases = jax.vmap(learner, in_axes=(None, 0, 1))(x, clients, noise)
    return x - 0.1 * releases.mean(axis=0), (loss, right)

run = jax.jit(lambda x, clients, noise: jax.lax.scan(one_round, x, (clients, noise)))
done = run(task.init(), clients, noise)
meanwhile = [jnp.ones((300, 300)) @ jnp.ones((300, 300)) for _ in range(10)]
jax.block_until_ready((done, meanwhile))
print(task.dim)
"""


def test_a_large_model_on_one_core_does_not_get_stuck():
    """With jax.pure_callback in its place, this waits for ever."""
    code = textwrap.dedent(STUCK)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "99910"


class Functional(nn.Module):
    """Batch normalisation where no layer shows it."""

    def __init__(self, training=True):
        super().__init__()
        self.linear, self.training_norm = nn.Linear(4, 3), training

    def forward(self, x):
        x = self.linear(x)
        if not self.training_norm:
            return x
        return F.batch_norm(x, None, None, training=True)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        return self.linear(x)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return F.dropout(self.linear(x), 0.5, training=True)


def refused(module, message, **changes):
    settings = {"classifies": True, "example": VECTOR, **changes}
    with pytest.raises(InputError, match=message):
        TorchTask(module, settings.pop("loss", F.cross_entropy), **settings)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.SyncBatchNorm(4),
        nn.LazyBatchNorm1d(),
        nn.BatchNorm1d(4).eval(),
        nn.BatchNorm1d(4, track_running_stats=False),
    ],
    ids=["batch", "sync", "lazy", "eval", "untracked"],
)
def test_batch_normalisation_is_refused_with_the_reason(layer):
    refused(
        nn.Sequential(nn.Sequential(layer), nn.Linear(4, 3)),
        r"module\.0\.0 = '\w*BatchNorm\w*'.*clip norm would not bound",
    )


def test_statistics_that_are_kept_are_refused():
    image = Sample(np.zeros((2, 3, 3), np.float32), 0)
    tracking = nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten(), nn.Linear(18, 3))
    refused(tracking, "InstanceNorm2d", example=image)
    refused(Counting(), r"module\.seen = 'changed by a call'")
    spectral = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    refused(spectral, r"module\.0\.parametrizations\.weight\.0\._u = 'changed by a call'")


def test_mixing_without_a_layer_for_it_is_found_by_trying():
    refused(Functional(), "Expected more than 1 value per channel|depend on that sample alone")
    TorchTask(Functional(training=False), F.cross_entropy, classifies=True, example=VECTOR)

    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(dim=0))

    refused(Centred(4, 3), r"changes with the other samples of the batch.*clip norm")


def test_randomness_is_refused():
    dropout = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    refused(dropout, r"module\.0 = 'Dropout in train mode'.*module\.eval\(\)")
    refused(Noisy(), "another output for the same input")
    TorchTask(dropout.eval(), F.cross_entropy, classifies=True, example=VECTOR)
    never = nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3))
    TorchTask(never, F.cross_entropy, classifies=True, example=VECTOR)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_parameters_are_float32_or_refused(dtype):
    refused(nn.Linear(4, 3, dtype=dtype), r"module\.weight = 'torch\.\w+ on cpu'.*float32")


def test_modules_without_parameters_or_shapes_or_tensors_are_refused():
    refused(nn.Flatten(), "no trainable parameter")
    refused(nn.LazyLinear(3), r"module\.weight = 'not yet shaped'")
    refused(nn.LSTM(4, 3, batch_first=True), "one tensor", example=Sample(np.zeros((2, 4)), 0))
    refused(object(), r"a torch\.nn\.Module")
    broken = mlp()
    with torch.no_grad():
        broken[0].weight.fill_(float("nan"))
    refused(broken, "not finite")


def test_examples_and_losses_that_do_not_fit_are_refused_with_torchs_own_words():
    refused(mlp(), r"features of shape \(5,\).*cannot be multiplied", example=Sample(np.zeros(5), 0))
    refused(mlp(), "a Sample", example=np.zeros(4))
    refused(mlp(), "torch.func says", loss=lambda out, y: out)
    refused(mlp(), "a finite gradient", loss=lambda out, y: (out * 0.0).sum().sqrt())
    refused(nn.Linear(4, 1), "one score a class", loss=lambda out, y: out.sum())
    refused(mlp(), "labels", predict=lambda outputs: outputs)


def test_one_output_takes_a_rule():
    task = TorchTask(
        nn.Linear(4, 1),
        lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y),
        classifies=True,
        predict=lambda outputs: outputs[:, 0] > 0,
        example=Sample(np.zeros(4, np.float32), 0.0),
    )
    samples = batch((4,), 2)
    assert task.predict(task.init(), samples.features).dtype == bool
    assert task.loss(task.init(), Sample(samples.features[0], samples.target[0])) > 0


def test_frozen_parameters_stay_out_and_tied_ones_count_once():
    module = mlp()
    module[0].requires_grad_(False)
    frozen = TorchTask(module, F.cross_entropy, classifies=True, example=VECTOR)
    assert frozen.dim == 18
    samples, whole = batch((4,), 3), mlp_task()
    sample = Sample(samples.features[0], samples.target[0])
    part = np.asarray(whole.gradient(whole.init(), sample))[25:]
    np.testing.assert_allclose(frozen.gradient(frozen.init(), sample), part, rtol=1e-5)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    tied = TorchTask(seeded(Tied), F.cross_entropy, classifies=True, example=VECTOR)
    assert tied.dim == 16

    def reference(flat, sample):
        w = flat.reshape(4, 4)
        return cross_entropy(w @ jnp.tanh(w @ sample.features), sample.target)

    expected = jax.grad(reference)(tied.init(), sample)
    np.testing.assert_allclose(tied.gradient(tied.init(), sample), expected, rtol=1e-4, atol=1e-6)


def test_integer_features_reach_an_embedding():
    module = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 2))
    example = Sample(np.array([0, 1, 5, 6]), 0)
    task = TorchTask(seeded(lambda: module), F.cross_entropy, classifies=True, example=example)
    words = np.array([[6, 6, 0, 1], [2, 3, 4, 5]], np.float32)  # a stream may hold floats
    assert task.predict(task.init(), words).shape == (2,)
    gradient = np.asarray(task.gradient(task.init(), Sample(words[0], 1)))[:21].reshape(7, 3)
    assert (np.abs(gradient).sum(axis=1) > 0).tolist() == [True, True, *[False] * 4, True]


def test_a_layer_that_writes_in_place_does_not_change_the_samples():
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2.0))

    module = nn.Sequential(nn.ReLU(inplace=True), Doubling(4, 3))
    task = TorchTask(module, F.cross_entropy, classifies=True, example=VECTOR)
    samples = batch((4,), 3)
    kept = jnp.asarray(samples.features)
    before = np.array(kept)
    for predict in (task.predict, jax.jit(task.predict)):
        jax.block_until_ready(predict(task.init(), kept))
        np.testing.assert_array_equal(kept, before)
