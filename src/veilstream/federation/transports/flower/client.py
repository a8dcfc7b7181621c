"""Flower's HTTP clients without retries, proxies, exits and signals.

Flower's own connections send SIGINT to their process when the server answers 401, leave it with
`sys.exit` on a version they do not like, and retry without end. Here a call is one request: it
returns, or raises an error of httpx, and the caller decides.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

__all__ = ["RING", "WAIT", "Headers", "connect", "trust"]

_Client = TypeVar("_Client", bound=ProtobufClient)

RING = "x-veilstream-ring"
"""Asks access control to wake who waits for this message: a node's name, or "server"."""
WAIT = "x-veilstream-wait"
"""Asks access control to hold the answer until there is one, or for a few seconds."""


class Headers:
    """Adds headers to a client's requests; ``once`` are for the next request only."""

    def __init__(self, component: str, headers: Mapping[str, str] | None = None) -> None:
        version = RuntimeVersionMetadata.from_local_component(component).as_metadata()
        self._headers = dict(version) | dict(headers or {})
        self.once: dict[str, str] = {}

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """As Flower calls it."""
        once, self.once = self.once, {}
        context.request.headers.update(self._headers | once)
        response: httpx.Response = call_next(context)
        return response


def connect(
    kind: type[_Client],
    address: str,
    verify: ssl.SSLContext | None,
    interceptors: Sequence[Any],
    *,
    direct: bool,
    timeout_s: float = 30.0,
) -> _Client:
    """A client of one of Flower's APIs; without a context, plain HTTP.

    ``direct`` ignores HTTP_PROXY and the like: for addresses on this machine.
    """
    scheme = "http" if verify is None else "https"
    client: _Client = kind(
        f"{scheme}://{address}", interceptors=interceptors, verify=verify or False
    )
    client._client.close()
    client._client = httpx.Client(
        verify=verify or False, timeout=timeout_s, trust_env=not direct, follow_redirects=False
    )
    return client


def trust(ca: str, *, check_name: bool) -> ssl.SSLContext:
    """Trust one CA and nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = check_name
    context.load_verify_locations(cadata=ca)
    return context
