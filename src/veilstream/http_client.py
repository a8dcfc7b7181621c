"""One HTTP request: TLS is verified, plain HTTP stays on this machine, nothing is followed elsewhere."""

from __future__ import annotations

import http.client
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from veilstream.errors import InputError, ProtocolError, VeilstreamError


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]  # by lower-case name
    body: bytes


def is_loopback(host: str) -> bool:
    """Whether the address is this machine's own, so that no other machine sees the traffic."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def send_request(
    url: str,
    *,
    most_bytes: int,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    ca: Path | str | None = None,
    timeout_s: float = 60.0,
) -> Answer:
    """Send one request and read the answer. Proxies and redirects are not followed."""
    host, port, secure = server_of(url)
    connection: http.client.HTTPConnection
    if secure:
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_trust(ca))
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request(method, urlsplit(url)._replace(scheme="", netloc="").geturl() or "/", headers=headers or {})
        answer = connection.getresponse()
        body = answer.read(most_bytes + 1)
    except ssl.SSLCertVerificationError as error:
        raise ProtocolError(
            f"the certificate of {host}:{port} (certificate verify failed: {error.verify_message})",
            "--ca names the authority to trust: keys/server/ca.pem of the server's keys",
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise VeilstreamError(f"{url}: {error or type(error).__name__} (is the server running?)") from None
    finally:
        connection.close()
    if len(body) > most_bytes:
        raise ProtocolError(f"an answer of {host}:{port} with more than {most_bytes} bytes", "check the address")
    return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)


def server_of(url: str) -> tuple[str, int, bool]:
    """Host, port, and whether the connection uses TLS."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in ("https", "http") or parts.username is not None:
        raise InputError("URL", url, "https://HOST:PORT", "try https://fl.example.org:8480")
    secure = parts.scheme == "https"
    if not secure and not is_loopback(host):
        raise InputError("URL", url, "https, except to this machine", "others could change the answer on its way")
    return host, port or (443 if secure else 80), secure


def _trust(ca: Path | str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            "--ca", str(ca), "a file with a certificate (PEM)", f"{error}; keys/server/ca.pem is one"
        ) from None
