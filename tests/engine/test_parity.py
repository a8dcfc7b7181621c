"""A federation's models are the simulation's, under the same draws, whatever carries the messages.

Those over plain HTTP, Flower and FLARE are in `test_frameworks.py`.

`studies.parity` gives the learners their draws; no deployed daemon has the parts to join with them.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from studies.parity import SEED, GivenNoise, parity_plan, simulate

from veilstream.federation.direct import DirectNode, DirectServer
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.loopback import Loopback
from veilstream.federation.server.coordinator import Coordinator
from veilstream.plans.data_source import PlanSource
from veilstream.plans.tasks import task_of

ROUNDS, TAU = 12, 3
NAMES = ("a", "b")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    plan = parity_plan(["buffered"], TAU, ROUNDS)
    return plan, simulate(plan, tmp_path_factory.mktemp("parity") / "run")["buffered"]


def start_daemons(root: Path, plan, stack: ExitStack) -> dict[str, Daemon]:
    daemons = {}
    for place, name in enumerate(NAMES):
        learner = GivenNoise.at(place)(plan, root / name / "s.db", task_of(plan), create=True)
        keys = LearnerKeys.load(root / "keys/learners" / name)
        daemon = daemons[name] = Daemon(learner, keys, PlanSource(plan, place), parts=learner.parts)
        stack.callback(daemon.close)
    return daemons


@pytest.mark.parametrize("carried_by", ["loopback", "direct"])
def test_released_models_equal_the_simulations(carried_by, simulated, tmp_path):
    plan, expected = simulated
    make_keys(tmp_path / "keys", ["127.0.0.1", "localhost"], list(NAMES))
    with ExitStack() as stack:
        daemons = start_daemons(tmp_path, plan, stack)
        x0 = np.asarray(task_of(plan).init(SEED), np.float32)
        keys = ServerKeys.load(tmp_path / "keys/server")
        coordinator = Coordinator(plan, x0, keys, tmp_path / "run")
        transport = Loopback({name: daemon.handle for name, daemon in daemons.items()})
        if carried_by == "direct":
            transport = streams_between(tmp_path, daemons, len(x0), stack)
        coordinator.go(transport)
        models = np.array([coordinator.models.read(r) for r in range(ROUNDS + 1)])
    # A gradient is rounded towards zero, so a prefix is at most one unit a step off, and half a
    # unit for its noise; learning follows these differences with a Lipschitz constant of 1/4.
    unit = coordinator.terms.grid.step
    method = plan.methods[0]
    allowed = 2 * unit * method.step_size * method.server_step_size * ROUNDS * TAU + 1e-6
    np.testing.assert_allclose(models, expected.models, atol=allowed)
    assert np.abs(models[-1]).max() > 100 * allowed


def streams_between(root: Path, daemons: dict[str, Daemon], dim: int, stack: ExitStack):
    """The direct transport's server, and the daemons on its streams."""
    server = DirectServer(root / "keys/server", ("127.0.0.1", 0), dim=dim)
    stack.callback(server.close)
    server.start()
    for name, daemon in daemons.items():
        keys = root / "keys/learners" / name
        node = DirectNode(keys, daemon.handle, ("127.0.0.1", server.port), dim=dim)
        stack.callback(node.close)
        node.start()
    return server
