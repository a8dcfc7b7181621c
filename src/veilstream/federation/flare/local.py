"""FLARE's processes on this machine, for a demo or a test: by its own scripts, each as an account.

Between machines nobody needs this: an operator starts a kit's `startup/start.sh`, or a unit does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from veilstream.errors import InputError
from veilstream.federation.processes import Child

_FIRST_ACCOUNT = 61284  # numbers that nobody is likely to have: FLARE's server, then a site each


class FlareProcess(Child):
    """A kit's own start script, in the foreground."""

    def __init__(self, kit: Path, home: Path, log: Path, environment: Mapping[str, str], account: int | None) -> None:
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


class LocalFlare:
    """FLARE's server and a site for each learner, around sockets that we serve."""

    def __init__(
        self,
        folder: Path,
        keys: Path,
        learners: Sequence[str],
        *,
        other_accounts: bool,
        first_account: int = _FIRST_ACCOUNT,
        environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        """Nothing is started yet; the folders of sockets are there.

        Args:
            folder: a new one, which every account must be able to reach.
            keys: with kits in them.
            learners: their names.
            other_accounts: give each process an account of its own; needs root.
            first_account: the number of the server's, those of the sites follow.
            environments: more variables for some, by name; "server" is FLARE's server.

        """
        names = ["server", *learners]
        self.accounts: dict[str, int | None] = {
            name: first_account + place if other_accounts else None for place, name in enumerate(names)
        }
        self._folder = folder.resolve()
        for part in ("", "sockets", "homes"):
            (self._folder / part).mkdir(parents=True)
            (self._folder / part).chmod(0o711)
        self.processes: dict[str, FlareProcess] = {}
        for name, account in self.accounts.items():
            _socket_folder(self.socket(name).parent, account)
            kit = keys / "flare" / ("server" if name == "server" else f"sites/{name}")
            variable = "VEILSTREAM_RELAY_SOCKET" if name == "server" else "VEILSTREAM_SOCKET"
            self.processes[name] = FlareProcess(
                kit,
                self.home(name),
                self._folder / f"{name}.log",
                {variable: str(self.socket(name)), **environments.get(name, {})},
                account,
            )

    def socket(self, name: str) -> Path:
        """Of a learner; or, for "server", of `veilstream server`."""
        return self._folder / "sockets" / name / "s"

    def home(self, name: str) -> Path:
        """Of an account; its kit is `kit` in there."""
        return self._folder / "homes" / name

    def start(self) -> None:
        """Start all."""
        for process in self.processes.values():
            process.start()

    def supervise(self) -> str | None:
        """As an init system would: what has ended is started again."""
        again = [name for name, process in self.processes.items() if process.keep_running()]
        return f"FLARE was started again: {', '.join(again)}" if again else None

    def close(self) -> None:
        """End all."""
        for process in self.processes.values():
            process.end()


def _socket_folder(path: Path, account: int | None) -> None:
    """A folder of ours that this account may enter: what is made there gets the account's group."""
    path.mkdir(mode=0o700)
    if account is not None:
        os.chown(path, -1, account)
        path.chmod(0o2750)


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
            "python",
            str(ours.resolve()),
            "an interpreter that other accounts may run",
            "install Python and veilstream outside a home directory",
        )
    return other, {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(packages)}


def _open_to_all(path: Path) -> bool:
    return all(place.stat().st_mode & 0o001 for place in [path, *path.parents])
