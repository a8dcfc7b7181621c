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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from veilstream.engines.federation.coordinator import Coordinator
from veilstream.errors import InputError

__all__ = ["Page", "Publisher", "Server"]


class Page(BaseHTTPRequestHandler):
    """What publisher and learner pages have in common."""

    server_version, sys_version = "veilstream", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def say(
        self, status: int, body: Any, kind: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """An answer, whole."""
        data = body if isinstance(body, bytes) else (json.dumps(body) + "\n").encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nobody's requests are written down."""


class Server(ThreadingHTTPServer):
    """A thread for each caller, and not more of them than slots: others are turned away."""

    daemon_threads = True
    request_queue_size = 32
    slots = 64

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(self.slots)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer, if there is a slot."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Give the slot back in any case."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """A caller who hangs up in the middle is nobody's concern."""


class Publisher:
    """Serves a coordinator's models until `close`."""

    def __init__(
        self, coordinator: Coordinator, address: tuple[str, int],
        tls: tuple[Path, Path] | None = None,
    ) -> None:  # fmt: skip
        page = type("ModelPage", (_ModelPage,), {"coordinator": coordinator})
        self._server = Server(address, page)
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


class _ModelPage(Page):
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
