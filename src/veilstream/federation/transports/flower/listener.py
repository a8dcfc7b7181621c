"""What one thread hears of a Flower run: replies, who is there, and whether the run is alive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx

from veilstream.federation.protocol.transport import Failure
from veilstream.federation.transports.flower.envelope import unwrap
from veilstream.federation.transports.flower.run import FlowerRun, Online, Taken

__all__ = ["Listener"]

_LOOK_S = 0.3
_BEAT_S = 10.0
_ARRIVE_S = 180.0  # as long as Flower keeps a message whose content has not come


class Listener:
    """Asks, one question at a time; a reply whose bytes are on their way holds up no other."""

    def __init__(self, run: FlowerRun) -> None:
        self._run = run
        self._asked: list[str] | None = None
        self._arriving: dict[str, tuple[Taken, float]] = {}
        self._looked = self._beaten = 0.0
        self._woken = True
        self.alive = True

    def hear(self, messages: list[str]) -> Iterator[tuple[str, bytes | Failure]]:
        """What has come in answer to these; waits a little if nothing has."""
        here = {reply.answers for reply, _ in self._arriving.values()}  # Flower forgot them already
        open_ = [message for message in messages if message not in here]
        taken = self._run.pull(open_, wait=open_ == self._asked)
        self._asked = None if taken else open_
        now = time.monotonic()
        for reply in taken:
            self._arriving[reply.id] = reply, now
        self._woken = not taken
        for reply, since in list(self._arriving.values()):
            what = self._content(reply, since)
            if what is not None:
                del self._arriving[reply.id]
                yield reply.answers, what
                with contextlib.suppress(httpx.HTTPError):  # it is here; the rest is tidiness
                    self._run.confirm(reply.id)

    def _content(self, reply: Taken, since: float) -> bytes | Failure | None:
        if reply.record is None:
            return Failure(reply.error or "an empty reply")
        try:
            content = self._run.fetch(reply.record)
            if content is not None:
                return unwrap(content)
        except (KeyError, ValueError):
            return Failure("a reply that cannot be read")
        return Failure("half a reply") if time.monotonic() - since > _ARRIVE_S else None

    def look(self) -> dict[str, Online] | None:
        """Who is there, if it is time to look again; keeps the run alive on the way."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S and not self._woken:  # without a reply: someone came
            return None
        nodes = self._run.nodes()
        self._looked = now
        if now - self._beaten > _BEAT_S:
            self.alive, self._beaten = self._run.beat(), now
        return nodes

    def close(self) -> None:
        """Close the connection."""
        self._run.close()
