"""The learner's side of the direct transport: a stream's client and the learner's keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.addresses import check_loopback
from veilstream.federation.direct import require_grpc
from veilstream.federation.keys.identity import check_private


class DirectNode:
    """Keeps a stream between a server and a learner's `handle`, in this process."""

    def __init__(
        self,
        keys: Path,
        handle: Callable[[bytes], bytes],
        server: tuple[str, int],
        *,
        dim: int,
        enrolled: bool = False,
        insecure: bool = False,
        run_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """A learner's side.

        Args:
            keys: the learner's folder.
            handle: answers a request; called for one at a time.
            server: host and port.
            dim: of the model; limits the size of messages.
            enrolled: whether this learner has taken part before. If so, it waits for a server that
                it cannot trust now rather than give up.
            insecure: without TLS, on loopback only.
            run_over: whether the server has said that the run is over: if it then goes away, that
                is not logged as a loss.

        Raises:
            MissingExtra: without grpcio.
            InputError: keys that are not there, or ``insecure`` beyond loopback.

        """
        require_grpc()
        from veilstream.federation.direct.client import StreamClient, TlsFiles

        tls = None
        if insecure:
            check_loopback(server[0])
        else:
            tls = TlsFiles(keys / "ca.pem", keys / "tls.pem", keys / "tls.key")
            for path in (tls.ca, tls.certificate, tls.key):
                if not path.is_file():
                    raise InputError(
                        "keys",
                        str(path),
                        "a file that `veilstream keys` made",
                        f"`veilstream keys renew KEYS --learner {keys.name}` makes it",
                    )
            check_private(tls.key)
        name = keys.resolve().name
        self._client = StreamClient(server, name, handle, tls, dim=dim, enrolled=enrolled, run_over=run_over)

    @property
    def online(self) -> bool:
        """Whether the server has let it in."""
        return self._client.connected

    def start(self) -> None:
        """Begin to connect; whether the server will have it, `supervise` says."""
        self._client.start()

    def supervise(self) -> str | None:
        """See whether the server refuses; the client connects again, and logs, by itself.

        Raises:
            ProtocolError: the server refuses this learner.

        """
        refused = self._client.refused
        if refused is not None:
            raise ProtocolError(refused.what, refused.way_out)
        self._client.warn_of_expiry()
        return None

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
