"""`veilstream ledger`, as an operator runs it."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_plan import veilstream
from tests.deployment.test_learner import D, Still, client, model, plan_of, run_round
from veilstream.deployment.learner import Learner


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "s.db"
    with Learner(plan_of(), path, Still(), create=True) as learner:
        release = run_round(learner, 0)
        learner.begin_round(1, model(1), acknowledged=(0, release.hash))
        learner.observe("someone", client(1, 0))
    return path


def test_status_and_verify_say_where_a_learner_stands(store):
    done = veilstream("ledger", "status", str(store), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["epoch"], found["round"], found["rounds"], found["pinned"]) == (0, 1, 4, True)
    assert (found["clients"], found["steps"], found["acknowledged"]) == (4, 4, 0)
    assert found["verified"] is False
    done = veilstream("ledger", "verify", str(store))
    assert done.returncode == 0, done.stderr
    assert "Guarantee     (4, 0.001)" in done.stdout
    assert "1 of 4 rounds sealed, one begun" in done.stdout
    assert "every entry of the witness" in done.stdout


def test_status_may_be_asked_while_the_learner_runs(store):
    import os

    with Learner(plan_of(), store, Still(), create=True):
        done = veilstream("ledger", "verify", str(store), "--json")
        assert json.loads(done.stdout)["holder"] == str(os.getpid())
        done = veilstream("ledger", "epoch", str(store), "--abandon")
    assert done.returncode == 6
    assert f"process {os.getpid()}" in done.stderr


def test_damage_has_an_exit_code_and_a_way_out(store):
    content = bytearray(store.read_bytes())
    at = content.rindex(b'"epoch":0')
    content[at + 8] ^= 1
    store.write_bytes(bytes(content))
    done = veilstream("ledger", "verify", str(store))
    assert done.returncode == 4
    assert "damaged (record" in done.stderr
    assert "veilstream ledger epoch --lost" in done.stderr
    done = veilstream("ledger", "epoch", str(store), "--lost", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["carried_clients"] == 4
    done = veilstream("ledger", "verify", str(store), "--json")
    assert json.loads(done.stdout)["clients"] == 4


def test_an_epoch_with_rounds_left_is_kept_unless_it_is_abandoned(store):
    done = veilstream("ledger", "epoch", str(store))
    assert done.returncode == 2
    assert "3 rounds are left" in done.stderr
    done = veilstream("ledger", "epoch", str(store), "--abandon")
    assert done.returncode == 0, done.stderr
    assert "begins epoch 1" in done.stdout
    assert "over, secrets destroyed" in veilstream("ledger", "status", str(store)).stdout


def test_a_lost_witness_is_named_and_renewed_on_demand(store):
    store.with_suffix(".witness").unlink()
    done = veilstream("ledger", "verify", str(store))
    assert done.returncode == 4
    assert "--renew-witness" in done.stderr
    done = veilstream("ledger", "verify", str(store), "--renew-witness")
    assert done.returncode == 0, done.stderr
    with Learner(plan_of(), store, Still(), create=True) as learner:
        assert learner.round == 1
        assert learner.task.dim == D
