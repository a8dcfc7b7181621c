"""Supervision of a transport's processes while something else runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from veilstream.errors import InputError
from veilstream.federation.protocol.transport import Transport

__all__ = ["ENGINES", "TRUST_NEEDED", "Address", "Engine", "Node", "check_trusted", "supervised"]


_log = logging.getLogger(__name__)

Address = tuple[str, int]


ENGINES = ("direct", "flower", "flare")


TRUST_NEEDED = {
    "flare": "FLARE's site process runs under the learner's account and takes orders: the server, "
    "another learner and any local account can read the learner's files through it (records, "
    "store, seeds), which no noise protects"
}
"""Engines that see more than messages, and what that means."""


_SUPERVISE_S = 1.0


def check_trusted(engine: str, *, trusted: bool) -> None:
    """Refuse an engine that can read a learner's files, unless someone says that it is trusted."""
    if why := "" if trusted else TRUST_NEEDED.get(engine, ""):
        raise InputError(
            "--engine", engine, f"--trust-engine beside it, since {why}",
            "use --engine direct; or, if all of these are trusted, add --trust-engine",
        )  # fmt: skip


class Engine(Transport, Protocol):
    """The server's side of an engine."""

    def start(self) -> None:
        """Begin to carry."""

    def supervise(self) -> str | None:
        """Repair what has died; a line to show, if anything happened."""


class Node(Protocol):
    """A learner's side of an engine."""

    def start(self) -> None:
        """Connect; an error if the server refuses."""

    def supervise(self) -> str | None:
        """Repair what has died; a line to show, if anything happened."""

    def close(self) -> None:
        """Disconnect."""


@contextmanager
def supervised(sides: Sequence[Engine | Node]) -> Iterator[Callable[[], None]]:
    """Look after engines while something else runs.

    Yields a function that raises what could not be repaired; repairs are logged.
    """
    ended = threading.Event()
    problems: list[Exception] = []

    def look() -> None:
        while not ended.wait(_SUPERVISE_S):
            for side in sides:
                try:
                    note = side.supervise()
                except Exception as error:  # for whoever asks, not for a thread's last words
                    problems.append(error)
                    return
                if note:
                    _log.warning("%s", note)

    def check() -> None:
        if problems:
            raise problems[0]

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield check
    finally:
        ended.set()
        thread.join(10.0)
