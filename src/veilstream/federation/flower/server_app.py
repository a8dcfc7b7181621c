"""What a SuperLink runs: the federation's server, with Flower's grid as its transport."""

from __future__ import annotations

import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from veilstream.errors import InputError
from veilstream.federation.flower.grid_transport import GridTransport
from veilstream.federation.logs import Format, Level, configure_logs
from veilstream.federation.server.process import ServerService
from veilstream.plans.plan import Plan
from veilstream.plans.tasks import task_of

_SPARE_S = 60.0  # for Flower to start a process on a busy machine, and for its queues

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run to the end of the horizon."""
    configure_logs(Level.INFO, Format.TEXT)
    path = _path(context, "plan")
    sys.path.append(str(path.parent))  # where modules that the plan names may lie
    plan = Plan.load(path)
    task = task_of(plan)
    transport = GridTransport(grid, dim=task.dim, answer_within_s=plan.federation.patience_s + _SPARE_S)
    ServerService(
        plan,
        _path(context, "keys"),
        _path(context, "out"),
        ("localhost", 0),
        task=task,
        exit_when_done=True,
        transport=transport,
    ).run()


def _path(context: Context, name: str) -> Path:
    """A path of the run's configuration; it must not depend on where the SuperLink was started."""
    path = Path(str(context.run_config.get(name, "")))
    if not path.is_absolute():
        raise InputError(
            name,
            str(path),
            "an absolute path on the SuperLink's machine",
            f"set it in the app's pyproject.toml, or `flwr run --run-config '{name}=\"/...\"'`",
        )
    return path
