"""Every released model, for whoever wants the service.

    GET /model/latest     the newest
    GET /model/17         the one after 17 rounds
    GET /status           run, rounds done, guarantee

Answers are JSON with the model as a list and its guarantee; with `Accept: application/octet-stream`
the model is raw little-endian float32 and the rest stands in headers.
"""

from __future__ import annotations

import json
import ssl
import threading
from pathlib import Path
from typing import Any, ClassVar

from veilstream.errors import InputError
from veilstream.federation.services.coordinator import Coordinator
from veilstream.federation.services.http_server import HttpPage, HttpServer

__all__ = ["ModelApi"]


class ModelApi:
    """Serves a coordinator's models until `close`."""

    def __init__(
        self, coordinator: Coordinator, address: tuple[str, int],
        tls: tuple[Path, Path] | None = None,
    ) -> None:  # fmt: skip
        page = type("ModelPage", (_ModelApiPage,), {"coordinator": coordinator})
        self._server = HttpServer(address, page)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _ModelApiPage(HttpPage):
    coordinator: ClassVar[Coordinator]

    def do_GET(self) -> None:
        coordinator = self.coordinator
        facts = {
            "run": coordinator.run,
            "round": coordinator.round,
            "rounds": coordinator.terms.rounds,
            "guarantee": coordinator.terms.guarantee.as_dict(),
        }
        match self.path.strip("/").split("/"):
            case ["status"]:
                self.say(200, facts)
            case ["model", "latest"]:
                self._model(facts, coordinator.round)
            case ["model", number] if number.isdecimal() and len(number) < 10:
                self._model(facts, int(number))
            case _:
                self.say(404, {"error": "try /model/latest, /model/ROUND or /status"})

    def _model(self, facts: dict[str, Any], round_: int) -> None:
        if round_ > facts["round"]:
            self.say(404, {"error": f"round {round_} is not done; the last is {facts['round']}"})
            return
        try:
            model = self.coordinator.models.read(round_)
        except InputError as error:
            self.say(404, {"error": str(error)})
            return
        facts = {**facts, "round": round_, "dim": len(model)}
        if "application/octet-stream" in self.headers.get("Accept", ""):
            headers = {
                "Veilstream-Run": facts["run"], "Veilstream-Round": str(round_),
                "Veilstream-Guarantee": json.dumps(facts["guarantee"]),
            }  # fmt: skip
            self.say(200, model.tobytes(), "application/octet-stream", headers)
        else:
            self.say(200, {**facts, "model": model.tolist()})
