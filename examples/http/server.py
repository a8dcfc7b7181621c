"""The server of a run over plain HTTP: `python server.py PLAN KEYS OUT [PORT]`.

A site asks with GET /NAME what there is for it, and posts its reply to the same address.
"""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import veilstream as vs

plan_file, keys, out, *port = sys.argv[1:]
plan, state = vs.Plan.load(plan_file), Path(out) / "server.state"
state.parent.mkdir(parents=True, exist_ok=True)
server = vs.Server.from_bytes(plan, state.read_bytes(), keys) if state.exists() else vs.Server(plan, keys)


class Handler(BaseHTTPRequestHandler):
    """One request at a time, which is what `vs.Server` wants."""

    timeout = 60  # seconds: nobody who is connected and silent holds up the others for longer

    def do_GET(self) -> None:
        """What a site is to be sent; nothing (204) while others are waited for."""
        name = self.path.strip("/")
        request = server.request(name) if name in server.keys.learners else None
        self.send_response(204 if request is None else 200)
        self.end_headers()
        self.wfile.write(request or b"")

    def do_POST(self) -> None:
        """What a site replies; a message that must not be acted on changes nothing."""
        status = 200
        try:
            server.accept(self.rfile.read(min(int(self.headers["Content-Length"]), server.largest_reply)))
            if server.complete:
                server.close_round()
                server.released.save(Path(out) / "model.npz")
            state.with_suffix(".new").write_bytes(server.to_bytes())
            state.with_suffix(".new").replace(state)  # before the site is told that its reply was taken
        except vs.VeilstreamError as error:
            status = 400
            self.log_message("%s", error)
        self.send_response(status)
        self.end_headers()


if __name__ == "__main__":
    listening = HTTPServer(("127.0.0.1", int(port[0]) if port else 8400), Handler)
    while server.ended != set(server.keys.learners):
        listening.handle_request()
