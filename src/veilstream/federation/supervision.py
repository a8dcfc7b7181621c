"""Supervision of a transport's processes while something else runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from veilstream.federation.protocol.transport import Transport

_log = logging.getLogger(__name__)

Address = tuple[str, int]


_SUPERVISE_S = 1.0


class ServerSide(Transport, Protocol):
    """The server's side of a transport."""

    def start(self) -> None:
        """Begin to carry."""

    def supervise(self) -> str | None:
        """Repair what has died; a line to show, if anything happened."""


class Node(Protocol):
    """A learner's side of a transport."""

    def start(self) -> None:
        """Connect; an error if the server refuses."""

    def supervise(self) -> str | None:
        """Repair what has died; a line to show, if anything happened."""

    def close(self) -> None:
        """Disconnect."""


@contextmanager
def supervised(sides: Sequence[ServerSide | Node]) -> Iterator[Callable[[], None]]:
    """Look after transports while something else runs.

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
