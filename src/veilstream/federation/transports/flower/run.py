"""One Flower run, held by this process as its ServerApp.

Flower would start a process for the ServerApp and give it a token. Here the server submits a run,
takes the task itself and keeps it alive. The app that a run must come with is a name and nothing
else: nobody installs or runs it.
"""

from __future__ import annotations

import hashlib
import io
import ssl
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient

from veilstream.federation.transports.flower.client import RING, WAIT, Headers, connect
from veilstream.federation.transports.flower.envelope import Envelope, record_of
from veilstream.federation.transports.flower.superlink import OPEN, SECRET

__all__ = ["FlowerRun", "Link", "Online", "Taken", "public_key"]

_APP = """\
[project]
name = "veilstream"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "veilstream"

[tool.flwr.app.components]
serverapp = "veilstream_runs_no_app:server"
clientapp = "veilstream_runs_no_app:client"
"""
_PATIENCE_S = 10.0
_SERVERAPP = "flwr-serverapp"


@dataclass(frozen=True)
class Online:
    """A machine that is there."""

    id: int
    since: str
    """When it came: another time means another process, and what the first had in hand is lost."""


@dataclass(frozen=True)
class Taken:
    """A reply that Flower has handed over; its bytes may still be on their way."""

    id: str
    answers: str
    record: str | None
    """Where the bytes are; None for an error."""
    error: str


class Link:
    """The server's access to its own SuperLink: direct, with the secret."""

    def __init__(self, address: str, verify: ssl.SSLContext | None, secret: str) -> None:
        self._address, self._verify, self._secret = address, verify, secret

    def control(self) -> ControlHttpClient:
        """Flower's administration."""
        headers = Headers("flwr CLI", {SECRET: self._secret})
        return self._connect(ControlHttpClient, headers)

    def runtime(self, token: str = "") -> tuple[RuntimeHttpClient, Headers]:
        """What a ServerApp may do; one client a thread."""
        more = {TASK_TOKEN_HEADER: token} if token else {}
        headers = Headers("flwr-serverapp", {SECRET: self._secret} | more)
        return self._connect(RuntimeHttpClient, headers), headers

    def open(self) -> None:
        """Let machines in."""
        with httpx.Client(verify=self._verify or False, trust_env=False) as client:
            scheme = "http" if self._verify is None else "https"
            url = f"{scheme}://{self._address}{OPEN}"
            client.post(url, headers={SECRET: self._secret}).raise_for_status()

    def register(self, nodes: Mapping[str, bytes]) -> None:
        """Have the SuperLink know these public keys; those it knows are left alone."""
        with self.control() as control:
            for name, key in nodes.items():
                try:
                    control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                except httpx.HTTPStatusError as error:
                    if error.response.status_code != httpx.codes.PRECONDITION_FAILED:
                        raise

    def _connect(self, kind: Any, headers: Headers) -> Any:
        return connect(
            kind, self._address, self._verify, [headers], direct=True, timeout_s=_PATIENCE_S
        )


class FlowerRun:
    """A run, from one thread; `twin` is the same run for another."""

    def __init__(self, link: Link, run_id: int, task_id: int, token: str) -> None:
        self._link, self._run, self._task, self._token = link, run_id, task_id, token
        self._client, self._headers = link.runtime(token)
        self._node = Node(node_id=SUPERLINK_NODE_ID)

    @classmethod
    def submit(cls, link: Link) -> FlowerRun:
        """A new run, and its task in our hands."""
        content = _app()
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
        with link.control() as control:
            run_id = control.StartRun(StartRunRequest(fab=fab)).run_id
        client, _ = link.runtime()
        with client:
            until = time.monotonic() + _PATIENCE_S
            while True:
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[_SERVERAPP]))
                if found.HasField("task") and found.task.run_id == run_id:
                    break  # any other is left over from an earlier run and expires
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("Flower does not hand out the run's task")
                if not found.HasField("task"):
                    time.sleep(0.05)
        run = cls(link, run_id, found.task.task_id, found.token)
        run._client.PullTaskInput(PullTaskInputRequest())
        return run

    def twin(self) -> FlowerRun:
        """For another thread."""
        return FlowerRun(self._link, self._run, self._task, self._token)

    def nodes(self) -> dict[str, Online]:
        """Who is there."""
        found = self._client.GetNodes(GetNodesRequest()).nodes
        return {n.name or str(n.node_id): Online(n.node_id, n.last_activated_at) for n in found}

    def push(self, name: str, node: Online, data: bytes, announced: Callable[[str], None]) -> None:
        """Send bytes to a machine.

        The message's name is announced before its content goes: the reply may be here before this
        returns, and rings but once.
        """
        letter = Envelope.to(node.id, self._run, self._task, data)
        said = self._client.PushMessages(
            PushAppMessagesRequest(
                messages_list=[letter.announcement], message_object_trees=[letter.tree]
            )
        )
        if not said.message_ids or said.message_ids[0] != letter.id:
            raise ValueError("Flower did not take the message")
        announced(letter.id)

        def put(object_id: str, content: bytes, last: bool) -> None:
            if last:
                self._headers.once = {RING: name}
            stored = self._client.PushObject(
                PushObjectRequest(
                    node=self._node, run_id=self._run, object_id=object_id,
                    object_content=content, session_id=said.session_id,
                )
            ).stored  # fmt: skip
            if not stored:
                raise ValueError("Flower did not take the message's content")

        letter.push(set(said.objects_to_push), put)

    def pull(self, messages: list[str], *, wait: bool) -> list[Taken]:
        """Replies to these messages; each is handed over once."""
        if wait:
            self._headers.once = {WAIT: "1"}
        found = self._client.PullMessages(PullAppMessagesRequest(message_ids=messages))
        return [
            Taken(
                message.metadata.message_id, message.metadata.reply_to_message_id,
                None if message.HasField("error") else record_of(tree),
                message.error.reason if message.HasField("error") else "",
            )
            for message, tree in zip(
                found.messages_list, found.message_object_trees, strict=True
            )
        ]  # fmt: skip

    def fetch(self, object_id: str) -> bytes | None:
        """Content of an object; None while it is on its way, KeyError if it will not come."""
        found = self._client.PullObject(
            PullObjectRequest(node=self._node, run_id=self._run, object_id=object_id)
        )
        if not found.object_found:
            raise KeyError(object_id)
        return bytes(found.object_content) if found.object_available else None

    def confirm(self, message: str) -> None:
        """Have the SuperLink forget a message."""
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._node, run_id=self._run, message_object_id=message
            )
        )

    def beat(self) -> bool:
        """Keep the task; whether it is still ours."""
        try:
            return bool(self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403, 404):
                return False
            raise

    def finish(self) -> None:
        """End the run, and wake who listens to it."""
        self._headers.once = {RING: "server"}
        self._client.PushTaskOutput(
            PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details="")
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def public_key(path: Path) -> bytes:
    """A node's public key as Flower keeps it (PEM), from the OpenSSH file."""
    return bytes(public_key_to_bytes(load_ssh_public_key(path.read_bytes())))


def _app() -> bytes:
    """A Flower app bundle without code; the same bytes every time."""
    digest = hashlib.sha256(_APP.encode()).hexdigest()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in [
            ("pyproject.toml", _APP),
            (".info/CONTENT", f"pyproject.toml,{digest},{len(_APP) * 8}\n"),
        ]:
            bundle.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
    return buffer.getvalue()
