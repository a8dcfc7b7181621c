"""A plan that simulates either deploys, or says which key is in the way before anything is spent."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from tests.plans.test_experiments import SHIPPED
from veilstream.deployment.deployable import Deployable
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError
from veilstream.federation.demo import demo_plan
from veilstream.plans.experiments import experiment_path
from veilstream.plans.plan import Plan

DIM = 5


def shipped(name: str, **changes: object) -> Plan:
    small: dict[str, object] = {"learning.rounds": 12}
    if name == "streams_health":  # five visits must fit
        small["privacy.min_separation"] = 2
    return Plan.load(experiment_path(name), small | changes)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plan_gives_terms_or_says_why(name):
    plan = shipped(name)
    told = Deployable.of(plan)
    assert (told.method is None) != (told.why_not is None)
    if told.why_not is None:
        assert Terms.of(plan, DIM).method.name == told.method
    else:
        with pytest.raises(InputError, match=re.escape(told.why_not)):
            Terms.of(plan, DIM)


def test_the_mnist_preset_deploys_as_it_is():
    assert Deployable.of(shipped("mnist_private")).method == "buffered @ 2"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_private_method_of_a_shipped_plan_deploys_once_it_is_named(name):
    """The way out that the line names is one."""
    plan = shipped(name)
    for method in plan.methods:
        if method.method.private:
            named = shipped(name, **{"federation.method": method.name})
            told = Deployable.of(named)
            assert told.method == method.name, told.why_not
            if method is plan.methods[-1]:
                assert Terms.of(named, DIM).method.name == method.name


REFUSED = {
    "federation.method": {"federation.method": "another"},
    "clients_per_step = 257": {"learning.clients_per_step": 257},
    "learning.unbounded = True": {"learning.unbounded": True, "methods.ours.mechanism": "buffered"},
    "learning.task = 'custom'": {"learning.task": "custom"},
    r"methods = \['ours'\]: expected a private method": {
        "methods": [{"name": "ours", "kind": "noise-free", "step_size": 0.1}]
    },
}


@pytest.mark.parametrize("key", REFUSED)
def test_the_line_names_the_key_in_the_way(key):
    told = Deployable.of(demo_plan(2, 4, REFUSED[key]))
    assert told.method is None
    assert re.match(f"This plan cannot be deployed as it is: {key}", told.text())
    assert "expected" in told.text()


@pytest.mark.parametrize("key", ["missing", "late", "leaving"])
def test_simulated_absences_are_named_as_such_and_stop_nothing(key):
    told = Deployable.of(demo_plan(2, 4, {f"data.{key}": 0.25}))
    assert told.method == "ours"
    assert f"data.{key} = 0.25: only a simulation" in told.text()


def test_a_stream_of_python_says_how_learners_get_records():
    told = Deployable.of(demo_plan(2, 4, {"data.kind": "custom"}))
    assert told.method == "ours"
    assert "--data live or --data module:function" in told.text()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "veilstream", *arguments], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("clients", [1, 257])
def test_run_and_plan_say_the_same_true_sentence(clients, tmp_path):
    plan = demo_plan(2, 4, {"learning.clients_per_step": clients, "learning.local_steps": 1, "run.seeds": 1})
    (tmp_path / "plan.toml").write_text(dataclasses.replace(plan, name="it").to_toml())
    where, line = str(tmp_path / "plan.toml"), Deployable.of(plan).text()
    assert ("cannot be deployed" in line) == (clients > 256)
    ran = command("run", where, "--out", str(tmp_path / "run"))
    assert line in ran.stderr.splitlines()[0]
    assert line in " ".join(ran.stdout.split())
    told = Deployable.of(plan).as_dict()
    assert json.loads(command("run", where, "--json", "--out", str(tmp_path / "run2")).stdout)["deployed"] == told
    assert line in " ".join(command("plan", where).stdout.split())
    assert json.loads(command("plan", where, "--json").stdout)["deployed"] == told
