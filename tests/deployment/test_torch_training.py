"""`vs.torch`: a training loop's steps are those of a learner, and what would break the promise is refused."""

from __future__ import annotations

import copy
import hashlib
from functools import partial

import numpy as np
import pytest

import veilstream as vs
from tests.support.known_secrets import NamedLearner
from tests.support.pages import blocks_in
from tests.test_package import SMALL_PLAN
from veilstream.deployment.local_rounds import NoisySum
from veilstream.deployment.private_steps import PrivateSteps
from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms.keystream import Row

torch = pytest.importorskip("torch")
nn = torch.nn

BUDGET = vs.Budget(2.0, 1e-4)


class NamedSum(NoisySum):
    """The draws of `known_secrets.NamedLearner`."""

    def row(self, step: int, secret: bytes) -> Row:
        return Row(hashlib.sha256(f"same/0/{step}".encode()).digest(), step)


def small_model(seed: int = 0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def images(count: int = 20):
    numbers = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(count, 1, 6, 6, generator=numbers), torch.randint(0, 3, (count,), generator=numbers)
    )


def loader_of(data=None, **more):
    return torch.utils.data.DataLoader(data or images(), **{"batch_size": 8, "shuffle": True} | more)


def private_of(store, model=None, loader=None, optimizer=None, **more):
    model = model or small_model()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"loss": nn.functional.cross_entropy, "clip_norm": 1.0, "passes": 2} | more
    private = vs.torch.make_private(model, optimizer, loader or loader_of(), BUDGET, store=store, **options)
    return model, optimizer, private


@pytest.fixture
def store(tmp_path):
    return tmp_path / "loop.db"


def test_a_linear_model_takes_the_same_grid_numbers_as_a_learner(tmp_path, monkeypatch):
    """A plan's learner with the same module, records, batches and draws: models equal to the bit, round by round."""
    rounds, batch, rate = 6, 4, 0.25
    data = np.random.default_rng(0)
    features = data.standard_normal((rounds * batch, 5)).astype(np.float32)
    targets = data.standard_normal(rounds * batch).astype(np.float32)
    module = nn.Linear(5, 1)

    def loss(outputs, target):
        return (outputs.squeeze(-1) - target).square().mean()

    plan = vs.Plan.parse(
        SMALL_PLAN,
        {
            "data.dim": 6,
            "learning.task": "custom",
            "learning.learners": 1,
            "learning.rounds": rounds,
            "learning.local_steps": 1,
            "learning.clients_per_step": batch,
            "privacy.epsilon": BUDGET.epsilon,
            "privacy.delta": BUDGET.delta,
        },
    )
    example = vs.Sample(features[0], targets[0])
    task = vs.models.TorchTask(module, loss, example=example)
    learner = NamedLearner(plan, tmp_path / "learner.db", task, create=True)
    clip_norm, kind = learner.grid.clip_norm, learner.terms.mechanism.name

    monkeypatch.setattr("veilstream.deployment.torch_training.PrivateSteps", partial(PrivateSteps, noisy_sum=NamedSum))
    model = copy.deepcopy(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    given = torch.utils.data.TensorDataset(torch.from_numpy(features), torch.from_numpy(targets))
    _, _, private = private_of(
        tmp_path / "loop.db",
        model,
        loader_of(given, batch_size=batch, shuffle=False),
        optimizer,
        loss=loss,
        clip_norm=clip_norm,
        passes=1,
        mechanism=learner.terms.mechanism,
    )
    assert (private.noise_std, private.guarantee) == (learner.noise_std, learner.guarantee), kind
    prefix = np.zeros(6)
    with learner, private:
        for r, _ in enumerate(private):
            x = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
            optimizer.step()
            some = slice(r * batch, (r + 1) * batch)
            people = [(b"%d" % k, vs.Sample(features[k], targets[k])) for k in range(some.start, some.stop)]
            sent = vs.decode(learner.learn_round(r, x, people).payload)
            noisy = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
            np.testing.assert_array_equal(noisy, ((sent.prefix - prefix) * sent.grid).astype(np.float32))
            prefix = sent.prefix


def test_the_scripts_own_backward_is_dropped(store, tmp_path):
    """The model moves by the handed-out gradient alone, whatever lies in .grad."""
    model, optimizer, private = private_of(store, optimizer=None)
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    with private:
        for x, y in private:
            before = [p.detach().clone() for p in model.parameters()]
            (1e9 * nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
            for p, old in zip(model.parameters(), before, strict=True):
                torch.testing.assert_close(p.detach(), old - 0.1 * p.grad)
                assert float(p.grad.abs().max()) < 1e3


def test_microbatches_and_single_records_give_the_same_sums(store, tmp_path, monkeypatch):
    monkeypatch.setattr("veilstream.deployment.torch_training.PrivateSteps", partial(PrivateSteps, noisy_sum=NamedSum))
    found = []
    for size in (None, 3, 1):
        model, optimizer, private = private_of(
            tmp_path / f"{size}.db", loader=loader_of(shuffle=False), microbatch=size
        )
        with private:
            for _ in private:
                optimizer.step()
        found.append(torch.cat([p.detach().ravel() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-5)


def test_a_script_stops_at_the_horizon(store):
    model, optimizer, private = private_of(store)
    with private:
        assert (private.horizon, private.passes_left, len(private)) == (6, 2, 3)
        for _ in range(private.passes_left):
            for _ in private:
                optimizer.step()
        after = copy.deepcopy(model.state_dict())
        with pytest.raises(HorizonExhausted, match="past the horizon of 6 steps: nothing was released"):
            next(iter(private))
        with pytest.raises(HorizonExhausted):
            optimizer.step()
        assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())


def test_a_restart_resumes_model_optimizer_and_batches_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("veilstream.deployment.torch_training.PrivateSteps", partial(PrivateSteps, noisy_sum=NamedSum))

    def trained(store, most: int, seed: int):
        model, optimizer, private = private_of(
            store, small_model(seed), loader_of(shuffle=False), passes=4, state_steps=4
        )
        seen = []
        with private:
            private.resume()
            scheduler_rate = 0.1
            while not private._steps.over and len(seen) < most:
                for x, _ in private:
                    optimizer.param_groups[0]["lr"] = scheduler_rate / (1 + private.step)
                    seen.append(x)
                    optimizer.step()
                    if len(seen) == most:
                        break
        return model, seen

    whole, batches = trained(tmp_path / "whole.db", 99, 0)
    seen: list[torch.Tensor] = []
    for start in range(3):
        part, some = trained(tmp_path / "parts.db", (7, 3, 99)[start], seed=0 if start == 0 else 5 + start)
        seen += some
    assert len(seen) == len(batches) == 12
    assert all(torch.equal(a, b) for a, b in zip(seen, batches, strict=True))
    for ours, theirs in zip(part.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class WithRegister(nn.Module):
    """Carries records along in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(36, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.detach().mean()
        return self.linear(x.flatten(1))


class Remembers(nn.Module):
    """Carries records along in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(36, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x.flatten(1)) * (1.0 + self.calls)


def normalised():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3))


def one_pass(store, model) -> None:
    _, optimizer, private = private_of(store, model)
    with private:
        for _ in private:
            try:
                optimizer.step()
            finally:
                assert private.step == 0  # of the first batch, which none of these gets past


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (normalised, "BatchNorm1d in train mode.*GroupNorm"),
        (WithRegister, "a buffer that a forward pass changes"),
        (Remembers, "remembers nothing"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double(), "finite float32"),
    ],
)
def test_models_that_mix_or_remember_records_are_refused_before_anything_is_spent(store, model, why):
    with pytest.raises(InputError, match=why):
        one_pass(store, model())


def test_batch_normalisation_with_public_statistics_may_stay_in_eval_mode(store):
    model = normalised().eval()
    _, optimizer, private = private_of(store, model)
    with private:
        batches = iter(private)
        next(batches)
        optimizer.step()
        model.train()  # as scripts do before each epoch
        next(batches)
        with pytest.raises(InputError, match="BatchNorm1d in train mode"):
            optimizer.step()
        assert private.step == 1


class Same(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([0] * 20)

    def __len__(self):
        return 20


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: loader_of(drop_last=True), "drops the last 4 records"),
        (lambda: loader_of(shuffle=False, sampler=Same()), "Same.*every record once a pass"),
        (
            lambda: loader_of(shuffle=False, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 20, 20)),
            "WeightedRandomSampler.*every record once",
        ),
        (
            lambda: loader_of(shuffle=False, sampler=torch.utils.data.RandomSampler(range(20), replacement=True)),
            "draws records again",
        ),
        (lambda: [1, 2, 3], "a torch.utils.data.DataLoader"),
    ],
)
def test_loaders_that_drop_or_repeat_records_are_refused(store, loader, why):
    with pytest.raises(InputError, match=why):
        private_of(store, loader=loader())
    assert not store.exists()


def test_every_batch_has_one_step(store):
    _, optimizer, private = private_of(store)
    with private:
        batches = iter(private)
        with pytest.raises(InputError, match="no batch, or a second step for one"):
            optimizer.step()
        next(batches)
        with pytest.raises(InputError, match="closure"):
            optimizer.step(lambda: None)
        optimizer.step()
        with pytest.raises(InputError, match="a second step for one"):
            optimizer.step()
        next(batches)
        with pytest.raises(InputError, match="not called for the last batch"):
            next(batches)
        assert private.step == 1


def test_an_optimizer_of_other_parameters_is_refused(store):
    model = small_model()
    with pytest.raises(InputError, match="parameters of the model"):
        private_of(store, model, optimizer=torch.optim.SGD(small_model().parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    _, _, private = private_of(store, model, optimizer=optimizer)
    with private:
        next(iter(private))
        optimizer.add_param_group({"params": model[4].parameters()})
        with pytest.raises(PrivacyError, match="moves other parameters now"):
            optimizer.step()


def test_a_store_of_another_model_or_loader_is_refused(store):
    private_of(store)[2].close()
    with pytest.raises(InputError, match="parameters"):
        private_of(store, nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    with pytest.raises(InputError, match="'records': 21"):
        private_of(store, loader=loader_of(images(21)))
    with pytest.raises(InputError, match="passes"):
        private_of(store, passes=3)


def test_a_closed_loop_moves_nothing(store):
    _, optimizer, private = private_of(store)
    next(iter(private))
    private.close()
    with pytest.raises(InputError, match="no batch"):
        optimizer.step()


class TestSecretOrder:
    def test_every_record_is_used_once_at_the_step_that_it_chose_and_nothing_written_says_which(self, store):
        data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None].expand(40, 3).clone(), torch.zeros(40, 1))
        model = nn.Linear(3, 1)
        options = {"loss": nn.functional.mse_loss, "passes": 1, "order": "secret", "mechanism": "independent"}
        _, optimizer, private = private_of(store, model, loader_of(data), **options)
        seen, sizes, lengths = [], [], []
        with private:
            assert private.horizon == 5
            ledger = private._steps.ledger
            assert [r.kind for r in ledger.records()] == ["epoch", "clients", "ordered"]
            for x, _ in private:
                own = private._batches.batch(private.step)
                seen += x[: len(own), 0].int().tolist()
                sizes.append(len(x))
                optimizer.step()
                lengths.append(len(list(ledger.records())[-1].visits))
            assert sorted(seen) == list(range(40))
            assert set(sizes) == {private._batches.width}
            assert set(lengths) == {0}
            assert not ledger.names("order/")
        assert "it rests on a secret, too" in str(private.guarantee)
        with private_of(store, model, loader_of(data), **options)[2] as again, pytest.raises(HorizonExhausted):
            next(iter(again))

    def test_dropped_records_add_nothing(self, store, monkeypatch):
        """The first step's whole number sum is that of its own records, with the noise taken off."""
        monkeypatch.setattr(
            "veilstream.deployment.torch_training.PrivateSteps", partial(PrivateSteps, noisy_sum=NamedSum)
        )
        data = torch.utils.data.TensorDataset(torch.eye(40), torch.full((40, 1), -50.0))
        model = nn.Linear(40, 1, bias=False)
        nn.init.zeros_(model.weight)
        options = {"loss": nn.functional.mse_loss, "passes": 1, "order": "secret", "mechanism": "independent"}
        _, optimizer, private = private_of(store, model, loader_of(data), **options)
        with private:
            own = private._batches.batch(0)
            next(iter(private))
            optimizer.step()
            spare = NamedSum(
                private._steps.terms.noise.mechanism.program, std=private.noise_std, grid=private._steps.grid, dim=40
            )
            spare.replay(b"")
            left = model.weight.grad.numpy()[0] - spare.noise.cells * private._steps.grid.step
        # Each record's clipped gradient is one in its own coordinate, divided by the public 8.
        expected = np.zeros(40)
        expected[own] = 1.0 / 8
        np.testing.assert_allclose(left, expected, atol=1e-5)

    def test_several_passes_have_no_price(self, store):
        with pytest.raises(InputError, match="one pass"):
            private_of(store, order="secret")


def test_the_documented_loop_runs(tmp_path, monkeypatch, capsys):
    (block,) = [b for b in blocks_in("docs/training-loop.md", "python") if "vs.torch" in b]
    monkeypatch.chdir(tmp_path)
    given = torch.utils.data.TensorDataset(torch.randn(256, 28, 28), torch.randint(0, 10, (256,)))
    exec(compile(block, "docs/training-loop.md", "exec"), {"images_and_labels": given})
    assert "at most 10 times, at least 2 steps apart, over 20 steps" in capsys.readouterr().out


class TestClipping:
    @pytest.mark.parametrize("dim", [1, 5, 3000, 70_000])
    @pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e18])
    def test_it_gives_the_whole_numbers_of_the_rule_for_arrays(self, dim, size):
        """Sums in another order move a factor by 1e-13 at most: below 1e-7 for any of these numbers to differ."""
        from veilstream.privacy.gradient_types import RawGradient, clip_onto_grid
        from veilstream.privacy.grid import grid_for
        from veilstream.privacy.tensor_clipping import TensorSum

        rows = (size * np.random.default_rng(dim).standard_normal((6, dim))).astype(np.float32)
        rows[1, 0], rows[2, dim // 2], rows[3] = np.nan, np.inf, 0.0
        for clients in (6, 100):
            grid = grid_for(1.0, 0.3, clients)
            total = TensorSum(grid, clients, dim)
            total.add(torch.from_numpy(rows[:4]))
            total.add(torch.from_numpy(rows[4:]))
            expected = clip_onto_grid(RawGradient(rows), grid, None, clients).reveal()
            np.testing.assert_array_equal(total.gradient().reveal(), expected)

    def test_no_share_is_ever_longer_than_the_bound(self):
        """In exact arithmetic, for rows at, just below and just above the bound."""
        from fractions import Fraction

        from veilstream.privacy.grid import grid_for
        from veilstream.privacy.tensor_clipping import TensorSum

        grid, draws = grid_for(1.0, 0.3, 3), np.random.default_rng(0)
        bound = Fraction(1) / (Fraction(grid.step) * 3)
        for _ in range(200):
            row = draws.standard_normal((1, 50))
            row *= (1.0 + draws.choice([-1e-7, 0.0, 1e-7, 3.0])) / np.linalg.norm(row)
            total = TensorSum(grid, 3, 50)
            total.add(torch.from_numpy(row.astype(np.float32)))
            assert sum(int(u) ** 2 for u in total.gradient().reveal()) <= bound**2
