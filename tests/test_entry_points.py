"""A stranger's package adds a task, a mechanism and a transport by entry points alone."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from veilstream.errors import InputError, UnknownName
from veilstream.federation.server.process import ServerService
from veilstream.federation.transports import TRANSPORTS
from veilstream.learning.task_registry import TASKS
from veilstream.mechanisms import MECHANISMS, build
from veilstream.plans.comparison import Setting, compare
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of

CODE = """
import numpy as np

from veilstream.learning.task_kind import Target, TaskKind
from veilstream.learning.tasks import LeastSquares
from veilstream.mechanisms import from_strategy_matrix


class Mean(LeastSquares):
    pass


MEAN = TaskKind(
    name="mean",
    make=lambda setting: Mean(setting.features),
    data=("synthetic",),
    target=Target.NUMBER,
)


def halves(horizon):
    return from_strategy_matrix("halves", np.eye(horizon) + np.diag(np.full(horizon - 1, 0.5), -1))


def short(horizon):
    return halves(4)


def fails(horizon):
    raise ValueError("no such noise")


NEITHER = 3


class Carrier:
    def __init__(self, setting):
        self.setting = setting
"""

POINTS = """
[veilstream.tasks]
mean = stranger:MEAN
logistic = stranger:MEAN
broken = stranger:nothing
number = stranger:NEITHER

[veilstream.mechanisms]
halves = stranger:halves
short = stranger:short
fails = stranger:fails

[veilstream.transports]
pigeon = stranger:Carrier
"""

PLAN = """
[learning]
rounds = 8
task = "mean"
[data]
dim = 3
[privacy]
epsilon = 1.0
delta = 1e-5
[[methods]]
name = "a"
mechanism = "halves"
step_size = 0.1
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A distribution that is installed for this test."""
    (tmp_path / "stranger.py").write_text(CODE)
    about = tmp_path / "stranger-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("stranger", None)  # another test's own code may have that name
    yield
    sys.modules.pop("stranger", None)
    for registry in (TASKS, MECHANISMS, TRANSPORTS):
        registry._loaded.clear()


@pytest.mark.usefixtures("stranger")
def test_a_plan_runs_a_strangers_task_with_a_strangers_mechanism():
    plan = Plan.parse(PLAN)
    task = task_of(plan)
    assert (type(task).__name__, task.dim) == ("Mean", 3)
    prepared = prepare(plan, plan.methods[0])
    assert prepared.guarantee.mechanism == "halves"
    # The largest column of C is (1, 1/2): a factor of √1.25 beside independent noise.
    alone = prepare(plan, Plan.parse(PLAN.replace("halves", "independent")).methods[0])
    assert prepared.noise_std / alone.noise_std == pytest.approx(np.sqrt(1.25), rel=1e-6)
    assert {"mean", "logistic"} <= set(TASKS)
    assert "halves" in MECHANISMS


@pytest.mark.usefixtures("stranger")
def test_rules_of_a_strangers_task_are_its_own():
    with pytest.raises(InputError, match=r'data\.kind .*expected "synthetic" or "custom"'):
        Plan.parse(PLAN.replace("dim = 3", 'kind = "mnist"'))
    with pytest.raises(InputError, match=r"learning\.ridge.*0 for mean"):
        Plan.parse(PLAN, {"learning.ridge": 0.1})


@pytest.mark.usefixtures("stranger")
def test_a_strangers_package_cannot_replace_ours_and_its_faults_are_named():
    assert TASKS["logistic"].data == ("synthetic", "table")
    with pytest.raises(InputError, match=r"broken.*stranger:nothing.*AttributeError"):
        TASKS["broken"]
    with pytest.raises(InputError, match=r"number.*it is a int"):
        TASKS["number"]


@pytest.mark.usefixtures("stranger")
def test_a_server_takes_a_strangers_transport_by_name(tmp_path):
    plan = Plan.parse(PLAN.replace("halves", "independent").replace("mean", "logistic"))
    service = ServerService(plan, tmp_path, tmp_path / "run", ("127.0.0.1", 0), transport="pigeon")
    carrier = service._carrying(3)
    assert type(carrier).__name__ == "Carrier"
    assert (carrier.setting.dim, carrier.setting.answer_within_s) == (3, 60.0)
    with pytest.raises(UnknownName, match="did you mean 'pigeon'"):
        ServerService(plan, tmp_path, tmp_path / "run", ("127.0.0.1", 0), transport="pigeons")


def test_without_the_package_its_names_are_unknown():
    assert "mean" not in TASKS
    with pytest.raises(UnknownName, match="halves"):
        build("halves", 4)


@pytest.mark.usefixtures("stranger")
def test_noise_of_another_horizon_is_refused():
    with pytest.raises(InputError, match=r"a Factorization of 8 steps .its factorization has 4 steps"):
        build("short", 8)


@pytest.mark.usefixtures("stranger")
def test_an_error_of_the_strangers_function_names_its_mechanism():
    with pytest.raises(InputError, match=r"'fails'.*it raised ValueError: no such noise"):
        build("fails", 8)


@pytest.mark.usefixtures("stranger")
def test_a_strangers_mechanism_that_fails_is_left_out_of_a_comparison_with_a_warning():
    plan = PLAN.replace('task = "mean"', 'task = "logistic"')
    with pytest.warns(UserWarning, match="is left out") as told:
        comparison = compare(Setting.of(Plan.parse(plan)))
    assert {name for name in ("fails", "short") if any(name in str(w.message) for w in told)} == {"fails", "short"}
    names = {row.mechanism for row in comparison.rows}
    assert "halves" in names
    assert not names & {"fails", "short"}
