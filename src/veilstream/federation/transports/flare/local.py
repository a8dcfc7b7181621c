"""FLARE's processes on this machine, for a demo or a test: by its own scripts, each as an account.

Between machines nobody needs this: an operator starts a kit's `startup/start.sh`, or a unit does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from veilstream.errors import InputError
from veilstream.federation.processes import Child

__all__ = ["FIRST_ACCOUNT", "FlareProcess", "account_folder", "interpreter"]

FIRST_ACCOUNT = 61284
"""Numbers from here on that nobody is likely to have: FLARE's server, then a site each."""


class FlareProcess(Child):
    """A kit's own start script, in the foreground."""

    def __init__(
        self, kit: Path, home: Path, log: Path, environment: Mapping[str, str], account: int | None
    ) -> None:
        """A process that is not started yet.

        Args:
            kit: as `provision` made it; copied to ``home``, where FLARE works.
            home: a new folder; it becomes the account's.
            log: what the process prints.
            environment: the socket, by its variable in `veilstream_relay`.
            account: its number; None for this process's own.

        """
        shutil.copytree(kit, home / "kit")
        for path in [home, *home.rglob("*")] if account is not None else []:
            os.chown(path, int(account or 0), int(account or 0))
        script = ["bash", str(home / "kit/startup/sub_start.sh"), "--once"]
        python, needed = interpreter(account)
        environment = {"HOME": str(home)} | needed | dict(environment)
        super().__init__(script, log, environment, home, account, str(python))

    def end(self, patience_s: float = 3.0) -> None:
        """With all that it has started, which FLARE puts in sessions of their own."""
        workers = self.workers()
        super().end(patience_s)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def workers(self) -> list[int]:
        """Its children, theirs, and so on."""
        import psutil  # nvflare brings it

        if self.pid is None:
            return []
        try:
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        except psutil.Error:
            return []


def account_folder(path: Path, account: int | None) -> Path:
    """A folder of ours that this account may enter: what is made there gets the account's group."""
    path.mkdir(parents=True)
    if account is not None:
        os.chown(path, -1, account)
    path.chmod(0o2750 if account is not None else 0o700)
    return path


def interpreter(account: int | None) -> tuple[Path, dict[str, str]]:
    """A Python with FLARE in it that this account may run, and the environment it needs.

    Raises:
        InputError: neither ours nor the system's of the same version can be used.

    """
    ours = Path(sys.executable)
    if account is None or _open_to_all(ours.resolve()):
        return ours, {"PATH": f"{ours.parent}:{os.environ['PATH']}"}
    other = Path(f"/usr/bin/python3.{sys.version_info.minor}")
    packages = [path for path in sys.path if path.endswith("-packages")]
    if not other.exists() or not all(_open_to_all(Path(path)) for path in packages):
        raise InputError(
            "python", str(ours.resolve()), "an interpreter that other accounts may run",
            "install Python and veilstream outside a home directory",
        )  # fmt: skip
    return other, {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(packages)}


def _open_to_all(path: Path) -> bool:
    return all(place.stat().st_mode & 0o001 for place in [path, *path.parents])
