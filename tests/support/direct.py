"""A small federation over the direct transport: real TLS on loopback, learners in this process."""

from __future__ import annotations

import datetime
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.federation import DIM, Plain, World
from veilstream.deployment.learner import Learner
from veilstream.errors import ProtocolError
from veilstream.federation.direct import DirectNode, DirectServer, wire
from veilstream.federation.learner.daemon import Daemon
from veilstream.plans.data_source import PlanSource
from veilstream.plans.plan import Plan


class DirectWorld(World):
    """Learners hold streams to the newest server, at one port."""

    def __init__(self, root: Path, plan: Plan, names: tuple[str, ...] = ("a", "b", "c")) -> None:
        super().__init__(root, plan, names)
        self.nodes: dict[str, DirectNode] = {}
        self.server: DirectServer | None = None
        self.port = 0

    def transport(self, **options) -> DirectServer:
        server = DirectServer(self.root / "keys/server", ("127.0.0.1", self.port), dim=DIM, **options)
        server.start()
        self.server, self.port = server, server.port
        return server

    def start(self, name: str, plan: Plan | None = None, source=None) -> Daemon:
        plan = self.plan if plan is None else plan
        learner = Learner(plan, self.store(name), Plain(), create=True)
        source = PlanSource(plan, self.names.index(name)) if source is None else source
        daemon = self.daemons[name] = Daemon(learner, self.keys_of(name), source, replies="when done")
        self.connect(name, daemon.handle)
        return daemon

    def connect(self, name: str, handle, **options) -> DirectNode:
        """A learner's node with any function behind it."""
        node = self.node(name, handle, **options)
        self.nodes[name] = node
        node.start()
        return node

    def node(self, name: str, handle, keys: Path | None = None, **options) -> DirectNode:
        keys = keys or self.root / "keys/learners" / name
        return DirectNode(keys, handle, ("127.0.0.1", self.port), dim=DIM, **options)

    def stop(self, name: str) -> None:
        if name in self.nodes:
            self.nodes.pop(name).close()
        if name in self.daemons:
            self.daemons.pop(name).close()

    def close(self) -> None:
        for name in list(self.names):
            self.stop(name)
        if self.server is not None:
            self.server.close()


def refusal(node: DirectNode, seconds: float = 10.0) -> ProtocolError:
    """What `supervise` raises, if it does within so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            node.supervise()
        except ProtocolError as error:
            return error
        time.sleep(0.02)
    raise AssertionError("it was not refused")


class RawStream:
    """A peer with a learner's certificate that says whatever a test wants."""

    def __init__(self, world: DirectWorld, keys: str, learner: str, instance: str = "i") -> None:
        import grpc

        folder = world.root / "keys/learners" / keys
        credentials = grpc.ssl_channel_credentials(
            *((folder / name).read_bytes() for name in ("ca.pem", "tls.key", "tls.pem"))
        )
        self._channel = grpc.secure_channel(f"127.0.0.1:{world.port}", credentials)
        self._outgoing: list[bytes] = []
        self._ready = threading.Condition()
        self._ended = False
        metadata = ((wire.LEARNER, learner), (wire.INSTANCE, instance))
        self.call = self._channel.stream_stream(wire.PATH)(self._frames(), metadata=metadata)

    def _frames(self):
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._outgoing or self._ended)
                if self._ended:
                    return
                frame = self._outgoing.pop(0)
            yield frame

    def send(self, frame: bytes) -> None:
        with self._ready:
            self._outgoing.append(frame)
            self._ready.notify()

    def read(self) -> bytes:
        return next(self.call)

    def status(self):
        """How the server ended it."""
        import grpc

        try:
            while True:
                next(self.call)
        except StopIteration:
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            return error.code()

    def close(self) -> None:
        with self._ready:
            self._ended = True
            self._ready.notify()
        self.call.cancel()
        self._channel.close()

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dated_certificate(folder: Path, begins_days: float, ends_days: float) -> None:
    """Give KEYS/server a certificate with these dates, relative to now, from the same CA."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    now = datetime.datetime.now(datetime.UTC)
    old = x509.load_pem_x509_certificate((folder / "server/tls.pem").read_bytes())
    ca_key = load_pem_private_key((folder / "ca/ca.key").read_bytes(), None)
    builder = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        old.public_key(),
        old.serial_number,
        now + datetime.timedelta(days=begins_days),
        now + datetime.timedelta(days=ends_days),
        list(old.extensions),
    )
    new = builder.sign(ca_key, hashes.SHA256())
    (folder / "server/tls.pem").write_bytes(new.public_bytes(Encoding.PEM))


@contextmanager
def tls_listener(keys: Path):
    """Something with the server's certificate that shakes hands and says nothing."""
    import socket
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server/tls.pem", keys / "server/tls.key")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    with context.wrap_socket(connection, server_side=True) as secure:
                        secure.recv(1)
                except ssl.SSLError:
                    continue
                except OSError:
                    if listener.fileno() < 0:
                        return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
