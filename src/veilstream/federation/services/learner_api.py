"""The learner API, for people beside it: give a record, or ask for a prediction.

    POST /observe  {"tag": "...", "features": [...], "target": 1}     -> {"answer": "taken"}
    POST /predict  {"features": [...]}                                -> {"prediction": ...}

It listens on this machine alone. An answer is "taken", "refused" or, when no
round is open, 503 with Retry-After; it says nothing of what became of the data.
"""

from __future__ import annotations

import json
import threading
from typing import Any, ClassVar

import numpy as np

from veilstream.errors import InputError
from veilstream.federation.addresses import is_loopback
from veilstream.federation.services.daemon import Daemon
from veilstream.federation.services.http_server import HttpPage, HttpServer
from veilstream.learning.tasks import Sample
from veilstream.streams.intake import LiveSource

__all__ = ["LearnerApi"]

_LARGEST = 16 << 20


class LearnerApi:
    """Serves one daemon until `close`."""

    def __init__(self, daemon: Daemon, source: LiveSource | None, address: tuple[str, int]) -> None:
        page = type("DeskPage", (_LearnerApiPage,), {"daemon": daemon, "source": source})
        if not is_loopback(address[0]):
            raise InputError(
                "--learner-api", address[0], "a loopback address, since people's records come here",
                "put a proxy with TLS in front of it",
            )  # fmt: skip
        self._server = HttpServer(address, page)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _LearnerApiPage(HttpPage):
    daemon: ClassVar[Daemon]
    source: ClassVar[LiveSource | None]

    def do_POST(self) -> None:
        said = self._said()
        if said is None:
            self.say(400, {"answer": "refused"})
        elif self.path == "/observe" and self.source is not None:
            self._observe(said)
        elif self.path == "/predict":
            self._predict(said)
        else:
            self.say(404, {"error": "try /observe or /predict"})

    def _said(self) -> dict[str, Any] | None:
        try:
            length = int(self.headers.get("Content-Length", "-1"))
            if not 0 <= length <= _LARGEST:
                self.close_connection = True
                return None
            said = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError):
            return None
        return said if isinstance(said, dict) else None

    def _observe(self, said: dict[str, Any]) -> None:
        assert self.source is not None
        sample = Sample(said.get("features"), said.get("target"))
        answer = self.source.offer(said.get("tag", ""), sample)
        if answer is None:
            self.say(503, {"answer": "wait"}, headers={"Retry-After": "1"})
        else:
            self.say(200, {"answer": answer.value})

    def _predict(self, said: dict[str, Any]) -> None:
        try:
            features = np.asarray(said.get("features"), np.float32)
            prediction = self.daemon.predict(features)
        except (ValueError, TypeError):
            prediction = None
        if prediction is None:
            self.say(400, {"error": "no model yet, or features of another shape"})
        else:
            self.say(200, {"prediction": prediction})
