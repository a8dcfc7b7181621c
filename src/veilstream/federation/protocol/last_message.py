"""Where a server keeps the last message that it accepted from a learner."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import decode
from veilstream.federation.protocol.messages import Buffer


class LastMessage(Protocol):
    """Where the last accepted message of one learner is kept."""

    @property
    def held(self) -> bool:
        """Whether there is one."""

    def prefix(self) -> NDArray[np.int64]:
        """The message's; zeros without one."""

    def keep(self, payload: Buffer) -> None:
        """Take this message for the last one."""

    def increment(self) -> NDArray[np.int64]:
        """What the last message has added to the one before it, also if it is forgotten since."""

    def forget(self) -> None:
        """There is none any more."""


class InMemory:
    """A `LastMessage` in memory: for studies, the audit and tests."""

    def __init__(self, dim: int) -> None:
        self._prefix = self._newest = self._before = self._nothing = np.zeros(dim, np.int64)

    @property
    def held(self) -> bool:
        """Whether there is one."""
        return self._prefix is not self._nothing

    def prefix(self) -> NDArray[np.int64]:
        """The message's; zeros without one."""
        return self._prefix

    def keep(self, payload: Buffer) -> None:
        """Take this message for the last one."""
        self._before, self._prefix = self._prefix, decode(payload).prefix
        self._newest = self._prefix

    def increment(self) -> NDArray[np.int64]:
        """What the last message has added to the one before it."""
        return self._newest - self._before

    def forget(self) -> None:
        """There is none any more."""
        self._prefix = self._nothing
