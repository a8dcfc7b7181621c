"""One TLS handshake before FLARE's own: it retries for ever, and never says what is wrong."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

from veilstream.errors import ProtocolError

__all__ = ["check_server"]

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # how HTTP/2 begins
_RENEW = "both sides need kits that `veilstream keys` made together"


def check_server(kit: Path, server: tuple[str, int], timeout_s: float = 5.0) -> str | None:
    """None if both accept each other, a line if nobody is there, an error if one refuses."""
    host, port = server
    for _ in range(2):
        try:
            return _knock(kit, host, port, timeout_s)
        except _HungUpError:
            time.sleep(0.5)  # a server that is just ending is gone by then
    raise ProtocolError(f"the server at {host}:{port} does not accept our certificate", _RENEW)


class _HungUpError(Exception):
    """After the handshake, in which we had accepted the server: how gRPC refuses a certificate."""


def _knock(kit: Path, host: str, port: int, timeout_s: float) -> str | None:
    where, startup = f"{host}:{port}", kit / "startup"
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            # In TLS 1.3 the server judges our certificate after the handshake.
            secure.settimeout(timeout_s)
            try:
                secure.sendall(_HELLO)
                heard = secure.recv(1)
            except (ConnectionError, ssl.SSLEOFError):
                heard = b""
            if not heard:
                raise _HungUpError
            return None
    except ssl.SSLCertVerificationError as error:
        if "mismatch" in error.verify_message or "not valid for" in error.verify_message:
            raise ProtocolError(
                f"the server at {where} has a certificate for another name",
                f"connect by a name it has, or add one: `veilstream keys` with --host {host}",
            ) from None
        raise ProtocolError(
            f"the server at {where} has a certificate that our CA did not sign, or that has ended "
            f"({error.verify_message})",
            _RENEW,
        ) from None
    except ssl.SSLError as error:
        if "ALERT" not in str(error.reason) and "alert" not in str(error):
            raise ProtocolError(
                f"what listens at {where} is not FLARE over TLS ({error.reason})",
                "check the address, and that the server runs with --engine flare",
            ) from None
        raise ProtocolError(
            f"the server at {where} does not accept our certificate ({error.reason})", _RENEW
        ) from None
    except OSError as error:
        return f"{where} cannot be reached ({error}); trying again"
