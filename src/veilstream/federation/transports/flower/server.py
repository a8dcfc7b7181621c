"""The server's side of Flower: the SuperLink as a child, and the `Transport` on top of it.

Two threads talk to the SuperLink, so that a request never waits for a reply: one sends, the other
listens. Neither repairs anything; what is broken is noted, and `supervise` mends it: a SuperLink
that has ended is started again, a run that is lost is submitted anew. Machines keep their names, so
the coordinator sees no more than a pause. Flower keeps its state in memory: all that must outlive a
process is in the coordinator's checkpoint and in the learners' ledgers, and an SQLite file would
double the SuperLink's work per message.

A message is in Flower's hands at most once. Where it may have been lost (its machine's relay was
started again, the SuperLink was, its run was), a `Failure` says so and the coordinator asks again;
a reply that comes after all is still taken.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from veilstream.errors import InputError
from veilstream.federation.addresses import check_loopback, wait_until_free
from veilstream.federation.processes import Child
from veilstream.federation.protocol.transport import Failure, Inbox
from veilstream.federation.transports.flower.environment import (
    address_of,
    environment,
    import_quietly,
    require_flwr,
)
from veilstream.federation.transports.flower.superlink import header_of
from veilstream.files import write_file

if TYPE_CHECKING:
    from veilstream.federation.transports.flower.listener import Listener
    from veilstream.federation.transports.flower.run import FlowerRun, Link, Online

__all__ = ["FlowerServer"]

_START_S = 60.0
_LOOK_S = 0.3
_FORGET_S = 120.0
_END_S = 0.5  # it has nothing to write down


@dataclass
class _Sent:
    """A request that is out."""

    node: str
    since: str
    at: float
    failed: bool = False


class FlowerServer:
    """A `Transport` with Flower's SuperLink under it."""

    def __init__(
        self, keys: Path, state: Path, address: tuple[str, int], *, insecure: bool = False
    ) -> None:
        require_flwr()
        self._keys, self._state, self._insecure = keys, state.absolute(), insecure
        self._host, self._port = address
        if insecure:
            check_loopback(self._host)
        self._child: Child | None = None
        self._link: Link | None = None
        self._run: FlowerRun | None = None
        self._nodes_known: dict[str, bytes] = {}
        self._nodes: dict[str, Online] = {}
        self._ready = False
        self._closing = threading.Event()
        self._outgoing: queue.Queue[tuple[str, bytes] | None] = queue.Queue()
        self._inbox = Inbox()
        self._sent: dict[str, _Sent] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    # --- the SuperLink ---------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Of the SuperLink."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the SuperLink; returns when machines may come."""
        wait_until_free(self._host, self._port)
        flower_run = import_quietly("run")
        client = import_quietly("client")
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._state.chmod(0o700)
        secret = secrets.token_hex(32)
        pubs = sorted((self._keys / "nodes").glob("*.pub"))
        self._nodes_known = {path.stem: flower_run.public_key(path) for path in pubs}
        nodes = {header_of(key): name for name, key in self._nodes_known.items()}
        access = self._state / "access.json"
        write_file(access, json.dumps({"secret": secret, "nodes": nodes}))  # mode 0600
        verify = None if self._insecure else client.trust(self._ca(), check_name=False)
        reach = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        self._link = flower_run.Link(address_of(reach, self._port), verify, secret)
        self._child = Child(
            [sys.executable, "-W", "ignore", "-m",
             "veilstream.federation.transports.flower.superlink", str(access), *self._arguments()],
            self._state / "superlink.log", environment(self._state), self._state,
        )  # fmt: skip
        self._child.start()
        self._await_start()
        for work in (self._send_all, self._listen):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _arguments(self) -> list[str]:
        keys = self._keys.absolute()
        secure = [
            "--ssl-ca-certfile", str(keys / "ca.pem"), "--ssl-certfile", str(keys / "tls.pem"),
            "--ssl-keyfile", str(keys / "tls.key"), "--enable-supernode-auth",
        ]  # fmt: skip
        return [
            "--isolation", "process", "--host", self._host, "--port", str(self._port),
            "--database", ":flwr-in-memory:",
            "--disable-runtime-dependency-installation",
            *(["--insecure"] if self._insecure else secure),
        ]  # fmt: skip

    def _ca(self) -> str:
        try:
            return (self._keys / "ca.pem").read_text()
        except OSError as error:
            raise InputError(
                "keys", str(self._keys), "a folder that `veilstream keys` made", str(error)
            ) from error

    def _await_start(self) -> None:
        assert self._child is not None
        until = time.monotonic() + _START_S
        while not self._settle():
            if not self._child.running or time.monotonic() > until:
                said = self._child.last_lines()
                self._child.end()
                raise InputError(
                    "server", f"{self._host}:{self._port}", "a SuperLink that starts",
                    f"it said: {said}",
                )  # fmt: skip
            time.sleep(0.1)

    def _settle(self) -> bool:
        """Register and admit machines, see to the run; False if the SuperLink is not there."""
        import httpx

        from veilstream.federation.transports.flower.run import FlowerRun

        assert self._link is not None
        try:
            self._link.register(self._nodes_known)
            run = self._run
            if run is None or not run.beat():
                self._adopt(FlowerRun.submit(self._link))
            self._link.open()
        except httpx.HTTPError:
            return False
        self._ready = True
        return True

    def _adopt(self, run: FlowerRun) -> None:
        """A new run: what the old one had under way will not come."""
        old, self._run = self._run, run
        if old is not None:
            old.close()
        self._fail_all("Flower's run was submitted again")
        with self._lock:
            self._sent.clear()

    def supervise(self) -> str | None:
        """Mend what is broken; a line to show if there was something."""
        child = self._child
        if child is None or self._closing.is_set():
            return None
        if child.keep_running():
            self._ready, self._nodes = False, {}
            return "Flower's SuperLink had ended; it was started again"
        if not self._ready and child.running:
            run = self._run
            if not self._settle():
                return None
            self._fail_all("Flower's SuperLink was started again")
            return "Flower's SuperLink is back" + ("" if run is self._run else ", with a new run")
        return None

    # --- the transport ---------------------------------------------------------------------------

    def nodes(self) -> set[str]:
        """Machines that are there, by the name of their learner."""
        return set(self._nodes) if self._ready else set()

    def send(self, node: str, request: bytes) -> None:
        """Hand over to the thread that sends."""
        self._outgoing.put((node, request))

    def receive(self, timeout_s: float) -> list[tuple[str, bytes | Failure]]:
        """Replies and failures since the last call."""
        return self._inbox.receive(timeout_s)

    def close(self) -> None:
        """End the run, then the SuperLink."""
        self._closing.set()
        self._outgoing.put(None)
        if self._run is not None:
            with contextlib.suppress(Exception):  # whatever state it is in, it ends now
                self._run.finish()
            self._run.close()
        if self._child is not None:
            self._child.end(_END_S)
        for thread in self._threads:
            thread.join(10.0)

    # --- sending ---------------------------------------------------------------------------------

    def _send_all(self) -> None:
        mine: tuple[FlowerRun, FlowerRun] | None = None
        while (item := self._outgoing.get()) is not None:
            node, request = item
            run = self._run
            if run is not None and (mine is None or mine[0] is not run):
                if mine:
                    mine[1].close()
                mine = run, run.twin()
            try:
                self._send_one(mine[1] if run and mine else None, node, request)
            except Exception as error:  # the coordinator asks again, whatever it was
                self._inbox.put(node, Failure(f"not sent ({_short(error)})"))
                self._suspect(run, error)
        if mine:
            mine[1].close()

    def _send_one(self, run: FlowerRun | None, node: str, request: bytes) -> None:
        there = self._nodes.get(node)
        if run is None or there is None or not self._ready:
            self._inbox.put(node, Failure("not there"))
            return
        sent = _Sent(node, there.since, time.monotonic())

        def announced(message: str) -> None:
            with self._lock:
                self._sent[message] = sent

        try:
            run.push(node, there, request, announced)
        except BaseException:
            sent.failed = True  # the caller says so
            raise

    def _suspect(self, run: FlowerRun | None, error: Exception) -> None:
        """Have `supervise` look at the run; a refusal means that it is lost."""
        response = getattr(error, "response", None)
        if run is self._run and response is not None and response.status_code in (401, 403, 404):
            self._ready = False

    def _fail_all(self, why: str) -> None:
        with self._lock:
            waiting = [sent for sent in self._sent.values() if not sent.failed]
            for sent in waiting:
                sent.failed = True
        for sent in waiting:
            self._inbox.put(sent.node, Failure(why))

    # --- listening -------------------------------------------------------------------------------

    def _listen(self) -> None:
        from veilstream.federation.transports.flower.listener import Listener

        mine: tuple[FlowerRun, Listener] | None = None
        while not self._closing.is_set():
            run = self._run
            if run is None:
                self._closing.wait(_LOOK_S)
                continue
            if mine is None or mine[0] is not run:
                if mine:
                    mine[1].close()
                mine = run, Listener(run.twin())
            try:
                self._listen_once(mine[1])
            except Exception as error:
                if self._closing.is_set():
                    break
                self._nodes = {}
                self._suspect(run, error)
                self._closing.wait(_LOOK_S)
        if mine:
            mine[1].close()

    def _listen_once(self, listener: Listener) -> None:
        with self._lock:
            messages = list(self._sent)
        for answers, what in listener.hear(messages):
            with self._lock:
                sent = self._sent.pop(answers, None)
            if sent is not None and not (sent.failed and isinstance(what, Failure)):
                self._inbox.put(sent.node, what)
        nodes = listener.look()
        if nodes is not None:
            self._nodes = nodes
            self._check_sent(nodes)
        if not listener.alive:
            self._ready = False

    def _check_sent(self, nodes: dict[str, Online]) -> None:
        """What was sent to a process that is gone is lost."""
        now = time.monotonic()
        lost: list[tuple[str, str]] = []
        with self._lock:
            for message, sent in list(self._sent.items()):
                there = nodes.get(sent.node)
                if sent.failed:
                    if now - sent.at > _FORGET_S:
                        del self._sent[message]
                elif there is None or there.since != sent.since:
                    sent.failed = True
                    lost.append((sent.node, "gone" if there is None else "its relay came anew"))
        for node, why in lost:
            self._inbox.put(node, Failure(why))


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
