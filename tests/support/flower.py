"""Flower for tests: an interpreter that other accounts can start, and a grid in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from tests.support.federation import DIM, World

ACCOUNT = 61184
_SCRIPT = """#!{python}
import sys
from {module} import {function}
sys.argv[0] = {name!r}
sys.exit({function}())
"""


def as_account(command: list[str], account: int = ACCOUNT, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, user=account, group=account, extra_groups=[], capture_output=True, text=True, timeout=60, **more
    )


def starts(python: Path | str) -> bool:
    try:
        return as_account([str(python), "-c", "import flwr, veilstream"]).returncode == 0
    except OSError:
        return False


@contextmanager
def open_folder() -> Iterator[Path]:
    """One that every account can enter: pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="vs-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def reachable_python(folder: Path) -> Path | None:
    """This interpreter, or the system's with the same packages, as other accounts can start it."""
    if os.geteuid() != 0:
        return None
    if starts(sys.executable):
        return Path(sys.executable)
    system = "/usr/bin/python3"
    code = "import sys; print(sys.version_info[:2])"
    try:
        version = subprocess.run([system, "-c", code], capture_output=True, text=True).stdout
    except OSError:
        return None
    if version.strip() != str(sys.version_info[:2]):
        return None
    venv = folder / "venv"
    subprocess.run([system, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text("\n".join(path for path in sys.path if Path(path).is_dir()))
    from importlib.metadata import entry_points

    for script in entry_points(group="console_scripts"):
        if script.name.startswith(("flwr", "flower")):
            module, _, function = script.value.partition(":")
            path = venv / "bin" / script.name
            path.write_text(
                _SCRIPT.format(python=venv / "bin/python", module=module, function=function, name=script.name)
            )
            path.chmod(0o755)
    python = venv / "bin/python"
    return python if starts(python) else None


class LocalGrid:
    """A grid whose nodes run the ClientApp in threads of this process, on a world's sockets."""

    def __init__(self, world: World) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        # Flower sets these where it starts an app; a message cannot be made without.
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self._world, self._numbers = world, {name: i + 1 for i, name in enumerate(world.names)}
        self._replies: dict[str, object] = {}
        self._lock = threading.Lock()
        self._next = 0

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=number, last_activated_at="")
            for name, number in self._numbers.items()
            if self._world.socket(name).exists()
        ]

    def push_messages(self, messages):
        names = []
        for message in messages:
            self._next += 1
            name = f"message-{self._next}"
            message.metadata.__dict__["_message_id"] = name
            threading.Thread(target=self._run, args=(name, message), daemon=True).start()
            names.append(name)
        return names

    def _run(self, name, message):
        from flwr.app import Context, RecordDict

        from veilstream.federation.flower.client_app import app

        (learner,) = [n for n, i in self._numbers.items() if i == message.metadata.dst_node_id]
        context = Context(
            1, message.metadata.dst_node_id, {"socket": str(self._world.socket(learner))}, RecordDict(), {}
        )
        reply = app(message=message, context=context)
        with self._lock:
            self._replies[name] = reply

    def pull_messages(self, message_ids):
        with self._lock:
            return [self._replies.pop(name) for name in message_ids if name in self._replies]


class GridWorld(World):
    """A world whose messages go through a grid and the ClientApp."""

    def transport(self, **_):
        from veilstream.federation.flower.grid_transport import GridTransport

        return GridTransport(LocalGrid(self), dim=DIM, answer_within_s=20.0)
