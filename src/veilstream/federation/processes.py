"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

# Runs in the child before the command: the kernel kills the child when the parent is gone.
_LEASH = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)
# The kernel's parent is the *thread* that started a child: one that lasts as long as we do.
_STARTER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="start")


class Child:
    """A command as a process, and its log."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        account: int | None = None,
        python: str = sys.executable,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """``log``: None for our own stderr.

        ``account`` (user and group, no other groups) needs root, and must be able to start ``python``.
        """
        self.command, self.log = list(command), log
        self._environment = os.environ | dict(environment or {})
        self._directory, self._account, self._python = directory, account, python
        self._pass_fds = tuple(pass_fds)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Number of the running process."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last process, once it has ended."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, in a process group of its own, so that everything it starts can be ended with it."""
        leash: list[str] = []
        if sys.platform == "linux":
            leash = [self._python, "-I", "-S", "-c", _LEASH, str(os.getpid())]
        with contextlib.ExitStack() as stack:
            out = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(_open_log(self.log))
            self._process = _STARTER.submit(
                subprocess.Popen,
                [*leash, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment,
                cwd=self._directory,
                start_new_session=True,
                user=self._account,
                group=self._account,
                extra_groups=None if self._account is None else [],
                pass_fds=self._pass_fds,
            ).result()

    def end(self, patience_s: float = 3.0) -> None:
        """Ask it to end; then kill it, with everything it started."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def last_lines(self, count: int = 5) -> str:
        """The end of its log, for an error message."""
        if self.log is None:
            return ""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""


def _open_log(path: Path) -> BinaryIO:
    """For its owner alone, whatever the umask: a learner's log has exact counts of its clients."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(handle, 0o600)
    return os.fdopen(handle, "ab")
