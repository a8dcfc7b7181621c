"""What the model API and the learner API have in common over HTTP."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["HttpPage", "HttpServer"]


class HttpPage(BaseHTTPRequestHandler):
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


class HttpServer(ThreadingHTTPServer):
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
