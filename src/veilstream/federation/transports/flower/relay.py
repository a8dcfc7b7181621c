"""What runs at a learner beside its daemon: bytes from Flower to a Unix socket, and back.

The relay has a machine's key and no state of the learner; it runs no app and asks for none. It says
nothing of its own to the server: the time that an answer took is given as zero, and a daemon that
cannot be reached is always the same words.

What it is doing stands in `relay.status` (JSON: state, note, way_out), for the process that started
it. It ends with `REFUSED` when the server will not have it; a server that is not there is awaited.

    python -m veilstream.federation.transports.flower.relay FOLDER  (settings in FOLDER/relay.json)
"""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from veilstream.federation.protocol import frames
from veilstream.federation.transports.flower.client import RING, WAIT, Headers, connect, trust
from veilstream.federation.transports.flower.envelope import Envelope, record_of, unwrap

__all__ = ["REFUSED", "Refused", "Relay"]

REFUSED = 77
_UNKNOWN = "x-veilstream-unknown"
_HEARTBEAT_S = 10.0  # the shortest that Flower takes; gone after twice this
_TWICE_S = 22.0
_CONTENT_S = 5.0  # the server and its SuperLink are one machine
_CALM_S = 0.2


class Refused(Exception):
    """The server is there and says no."""

    def __init__(self, what: str, way_out: str) -> None:
        self.what, self.way_out = what, way_out
        super().__init__(what)


class _Anew(Exception):
    """A message may have been lost, or the server does not know this session: come anew."""


class Relay:
    """One machine's connection."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "relay.json").read_text())
        self._folder, self._socket = folder, settings["socket"]
        self._address, self._direct = settings["address"], settings["direct"]
        self._ca = settings["ca"]
        key = _private_key(Path(settings["key"]).read_bytes())
        self._keys = key, key.public_key()
        self._client, self._headers = self._connect()
        self._node = Node(node_id=0)
        self._online = threading.Event()

    def _connect(self) -> tuple[FleetHttpClient, Headers]:
        headers = Headers("SuperNode")
        verify = trust(self._ca, check_name=True) if self._ca else None
        signed = NodeAuthHttpInterceptor(*self._keys)
        client = connect(
            FleetHttpClient, self._address, verify, [headers, signed], direct=self._direct
        )
        return client, headers

    def run(self) -> None:
        """Until refused or told to end."""
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            while True:
                self._join()
                with contextlib.suppress(_Anew):
                    self._serve()
                self._online.clear()
                time.sleep(_CALM_S)
        finally:
            with contextlib.suppress(httpx.HTTPError):
                self._leave()

    # --- coming and going ------------------------------------------------------------------------

    def _join(self) -> None:
        """Be online, first ending a session that a process of ours may have left behind."""
        twice_since: float | None = None
        for pause in _pauses():
            try:
                self._leave()
                self._headers.once = {RING: "server"}
                said = self._client.ActivateNode(
                    ActivateNodeRequest(
                        public_key=public_key_to_bytes(self._keys[1]),
                        heartbeat_interval=_HEARTBEAT_S,
                    )
                )
                break
            except httpx.TransportError as error:
                _check_tls(error)
                self._tell("waiting", f"no answer from {self._address}; trying again")
            except httpx.HTTPStatusError as error:
                self._check_status(error.response)
                if error.response.status_code == httpx.codes.PRECONDITION_FAILED:
                    twice_since = twice_since or time.monotonic()
                    _check_twice(twice_since)
                    self._tell("waiting", "another relay with this key is online; trying again")
                else:
                    self._tell("waiting", f"{self._address} is not ready; trying again")
            time.sleep(pause)
        self._node = Node(node_id=said.node_id)
        (self._folder / "node").write_text(str(said.node_id))
        self._online.set()
        self._tell("online", f"connected to {self._address}")

    def _leave(self) -> None:
        try:
            last = int((self._folder / "node").read_text())
        except (OSError, ValueError):
            return
        with contextlib.suppress(httpx.HTTPStatusError):
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=last))

    def _check_status(self, response: httpx.Response) -> None:
        if response.headers.get(_UNKNOWN):
            raise Refused(
                f"{self._address} does not know this learner's node key",
                "give the server the keys that `veilstream keys` made with this learner's, "
                "and start it again",
            )
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise Refused(
                f"{self._address} does not accept this learner's signature",
                "set both clocks: they may differ by at most five minutes",
            )

    def _beat(self) -> None:
        client, _ = self._connect()
        while self._online.wait():
            with contextlib.suppress(httpx.HTTPError, RuntimeError):  # the other thread notices
                request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=_HEARTBEAT_S)
                client.SendNodeHeartbeat(request)
            time.sleep(_HEARTBEAT_S * 0.4)

    # --- messages --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer all there is, then wait for more, until something may have been lost.

        Nothing is tried again here: one that comes anew is asked anew, and the daemon gives the
        same bytes for the same round.
        """
        wait = False
        while True:
            if wait:
                self._headers.once = {WAIT: "1"}
            try:
                found = self._client.PullMessages(PullMessagesRequest(node=self._node))
                wait = not found.messages_list
                for announcement, tree in zip(
                    found.messages_list, found.message_object_trees, strict=True
                ):
                    self._answer(announcement, tree)
            except (httpx.HTTPError, LookupError, ValueError) as error:
                response = getattr(error, "response", None)
                if response is None or response.status_code != httpx.codes.FORBIDDEN:
                    raise _Anew from error
                self._check_status(response)  # else: a message of a run that has ended

    def _answer(self, announcement: Any, tree: Any) -> None:
        run, message = announcement.metadata.run_id, announcement.metadata.message_id
        request = self._content(run, record_of(tree))
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=message)
        )
        try:
            reply: bytes | None = frames.ask(self._socket, request)
        except OSError:
            reply = None
        self._push(run, Envelope.answer(announcement, reply))

    def _content(self, run: int, record: str | None) -> bytes:
        until = time.monotonic() + _CONTENT_S
        while record is not None and time.monotonic() < until:
            found = self._client.PullObject(
                PullObjectRequest(node=self._node, run_id=run, object_id=record)
            )
            if not found.object_found:
                break
            if found.object_available:
                return unwrap(found.object_content)
            time.sleep(0.02)
        raise LookupError("the content of a message did not come")

    def _push(self, run: int, letter: Envelope) -> None:
        said = self._client.PushMessages(
            PushMessagesRequest(
                node=self._node, messages_list=[letter.announcement],
                message_object_trees=[letter.tree], clientapp_runtime_list=[0.0],
            )
        )  # fmt: skip

        def put(object_id: str, content: bytes, last: bool) -> None:
            if last:
                self._headers.once = {RING: "server"}
            stored = self._client.PushObject(
                PushObjectRequest(
                    node=self._node, run_id=run, object_id=object_id, object_content=content,
                    session_id=said.session_id,
                )
            ).stored  # fmt: skip
            if not stored:
                raise LookupError(object_id)

        letter.push(set(said.objects_to_push), put)

    def _tell(self, state: str, note: str, way_out: str = "") -> None:
        tell(self._folder, state, note, way_out)


def tell(folder: Path, state: str, note: str, way_out: str = "") -> None:
    """Leave word for the process that started this one."""
    partial = folder / ".relay.status"
    partial.write_text(json.dumps({"state": state, "note": note, "way_out": way_out}))
    partial.replace(folder / "relay.status")


def _pauses() -> Iterator[float]:
    pause = 0.2
    while True:
        yield pause
        pause = min(pause * 1.5, 1.0)


def _check_tls(error: BaseException | None) -> None:
    """A server that cannot be trusted will not become so by waiting."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Refused(
                f"the server's certificate is not one that this learner trusts "
                f"({error.verify_message})",
                "both sides need keys that `veilstream keys` made together, and the server's "
                "certificate must name the address that learners use",
            )
        if isinstance(error, ssl.SSLError) and error.reason in (
            "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST",
        ):  # fmt: skip
            raise Refused("the server does not speak TLS", "start it without --insecure")
        error = error.__cause__ or error.__context__


def _check_twice(since: float) -> None:
    if time.monotonic() - since > _TWICE_S:
        raise Refused(
            "another machine is online with this learner's key",
            "each learner needs keys of its own; if it moved, stop the first",
        )


def _private_key(content: bytes) -> Any:
    """OpenSSH, as Flower has it, or PKCS8."""
    if b"OPENSSH" in content:
        return load_ssh_private_key(content, None)
    return load_pem_private_key(content, None)


def main(folder: Path) -> int:
    """Run until told to end."""

    def stop(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        Relay(folder).run()
    except Refused as no:
        tell(folder, "refused", no.what, no.way_out)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
