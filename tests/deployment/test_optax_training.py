"""`vs.optax`: the same numbers as the core, inside an Optax chain."""

from __future__ import annotations

import numpy as np
import pytest

import veilstream as vs
from tests.deployment.test_private_steps import NamedSum
from tests.support.pages import blocks_in
from veilstream.deployment.private_steps import PrivateSteps
from veilstream.errors import HorizonExhausted, InputError
from veilstream.privacy.gradient_types import RawGradient, clip_onto_grid

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

PARAMS = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
BUDGET = vs.Budget(2.0, 1e-4)


def private_of(store, **more):
    options = {"steps": 6, "batch_size": 4, "clip_norm": 1.0, "participation": (2, 3)} | more
    return vs.optax.make_private(PARAMS, BUDGET, store=store, **options)


def gradients(step: int, count: int = 4):
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal((count, *p.shape)).astype(np.float32) for name, p in PARAMS.items()}


def clients(step: int) -> list[int]:
    return [4 * (step % 3) + k for k in range(4)]


def test_a_chain_moves_parameters_by_what_the_core_hands_out(tmp_path, monkeypatch):
    made = []

    def named(*given, **more):
        made.append(PrivateSteps(*given, noisy_sum=NamedSum, **more))
        return made[-1]

    monkeypatch.setattr("veilstream.deployment.optax_training.PrivateSteps", named)
    with private_of(tmp_path / "a.db") as private:
        tx = optax.chain(private.transformation, optax.sgd(0.5))
        params, state = jax.tree.map(jax.numpy.asarray, PARAMS), tx.init(PARAMS)
        for step in range(6):
            updates, state = tx.update(gradients(step), state, params, clients=clients(step))
            params = optax.apply_updates(params, updates)
        terms = made[0].terms
    total = np.zeros(8)
    with PrivateSteps(terms, tmp_path / "b.db", noisy_sum=NamedSum) as steps:
        for step in range(6):
            rows = np.concatenate([gradients(step)[name].reshape(4, -1) for name in ("b", "w")], axis=1)
            names = [b"record %d" % k for k in clients(step)]
            total += steps.take(names, lambda rows=rows: clip_onto_grid(RawGradient(rows), steps.grid, None, 4))
    got = np.concatenate([np.asarray(params[name]).ravel() for name in ("b", "w")])
    np.testing.assert_allclose(got, -0.5 * total, rtol=1e-5, atol=1e-6)


def test_a_restart_goes_on_and_the_horizon_ends_it(tmp_path):
    for first in (0, 4):
        with private_of(tmp_path / "a.db") as private:
            assert private.step == first
            for step in range(first, min(first + 4, 6)):
                private.transformation.update(gradients(step), (), clients=clients(step))
    with private_of(tmp_path / "a.db") as private, pytest.raises(HorizonExhausted):
        private.transformation.update(gradients(0), (), clients=clients(0))
    assert "taking part at most 2 times, at least 3 steps apart, over 6 steps" in str(private.guarantee)


@pytest.mark.parametrize(
    ("given", "who", "why"),
    [
        (gradients(0), None, "clients = None"),
        (gradients(0), [0, 1, 2], "a float32 row for each of 3 clients"),
        ({"w": gradients(0)["w"]}, [0, 1, 2, 3], "a float32 row for each of 4 clients"),
        (gradients(0), [0, 1, 2, 2.5], "numbers, text or bytes"),
        (gradients(0, 5), [0, 1, 2, 3, 4], "at most 4 records"),
    ],
)
def test_bad_input_spends_nothing(tmp_path, given, who, why):
    with private_of(tmp_path / "a.db") as private:
        with pytest.raises(InputError, match=why):
            private.transformation.update(given, (), clients=who)
        assert private.step == 0


def test_a_compiled_update_is_refused(tmp_path):
    with private_of(tmp_path / "a.db") as private:
        compiled = jax.jit(lambda g: private.transformation.update(g, (), clients=[0, 1, 2, 3]))
        with pytest.raises(InputError, match=r"a call outside it"):
            compiled(gradients(0))


def test_a_store_of_another_model_is_refused(tmp_path):
    private_of(tmp_path / "a.db").close()
    with pytest.raises(InputError, match=r"store = .*parameters.*begun with"):
        vs.optax.make_private(
            {"w": np.zeros((3, 3), np.float32)},
            BUDGET,
            store=tmp_path / "a.db",
            steps=6,
            batch_size=4,
            clip_norm=1.0,
            participation=(2, 3),
        )


def test_the_documented_loop_runs(tmp_path, monkeypatch, capsys):
    (block,) = [b for b in blocks_in("docs/training-loop.md", "python") if "optax" in b]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/training-loop.md", "exec"), {})
    assert "over 8 steps" in capsys.readouterr().out
