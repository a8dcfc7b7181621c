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
        """``enrolled``: wait for a server that cannot be trusted now; ``run_over``: its leaving is no loss."""
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
        """Raise if the server refuses this learner; the client connects again, and logs, by itself."""
        refused = self._client.refused
        if refused is not None:
            raise ProtocolError(refused.what, refused.way_out)
        self._client.warn_of_expiry()
        self._client.say_repeated()
        return None

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
