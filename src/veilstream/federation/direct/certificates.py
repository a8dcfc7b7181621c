"""A certificate's validity in words, and why a TLS handshake fails."""

from __future__ import annotations

import datetime
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

WARN_DAYS = 30
_PROBE_S = 3.0
_NOT_YET, _EXPIRED, _WRONG_NAME = 9, 10, (62, 63, 64)  # X509_V_ERR_*


@dataclass(frozen=True)
class Trouble:
    """Why there is no connection."""

    what: str
    way_out: str
    lasting: bool = True
    """Whether waiting alone does not help: keys or certificates, not a server that is away."""


def load(path: Path) -> x509.Certificate:
    """A certificate from a PEM file."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def invalid(certificate: x509.Certificate, whose: str, now: datetime.datetime | None = None) -> Trouble | None:
    """Expired or not yet valid, with its dates; else None."""
    now = now or datetime.datetime.now(datetime.UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    dates = f"valid from {_day(begins)} to {_day(ends)}"
    if now > ends:
        return Trouble(f"{whose} certificate has expired ({dates})", "`veilstream keys renew`")
    if now < begins:
        return Trouble(
            f"{whose} certificate is not valid yet ({dates}; it is {_day(now)} here)", "check this machine's clock"
        )
    return None


def days_left(path: Path, now: datetime.datetime | None = None) -> int | None:
    """Whole days until a certificate ends, negative afterwards; None for a file that cannot be read now."""
    try:
        ends = load(path).not_valid_after_utc
    except (OSError, ValueError):
        return None
    return (ends - (now or datetime.datetime.now(datetime.UTC))).days


def expiring(certificate: x509.Certificate, whose: str, now: datetime.datetime | None = None) -> str:
    """A warning from 30 days before the end; else nothing."""
    now = now or datetime.datetime.now(datetime.UTC)
    ends = certificate.not_valid_after_utc
    left = (ends - now).days
    if left >= WARN_DAYS:
        return ""
    return f"{whose} certificate ends on {_day(ends)}, in {left} days (`veilstream keys renew`)"


def diagnose(address: tuple[str, int], ca: Path, certificate: Path, key: Path) -> Trouble | None:
    """Why TLS fails, from one more handshake with the standard library; None: TLS is fine. Blocks some seconds."""
    shown = f"{address[0]}:{address[1]}"
    mine = invalid(load(certificate), "this learner's")
    if mine is not None:
        return mine
    context = _context(ca)
    context.load_cert_chain(certificate, key)
    refused = Trouble(
        f"{shown} does not accept this learner's certificate",
        "both sides need keys that `veilstream keys` made together",
    )
    known = False
    try:
        with (
            socket.create_connection(address, _PROBE_S) as raw,
            context.wrap_socket(raw, server_hostname=address[0]) as connection,
        ):
            known = True
            # TLS 1.3: whether our certificate will do shows after the handshake.
            return None if connection.recv(1) else refused
    except ssl.SSLCertVerificationError as error:
        return _unverified(error, address, shown)
    except ssl.SSLEOFError:
        return Trouble(f"{shown} ends the connection in the handshake", "look at the server's log")
    except ssl.SSLError as error:
        if known or "ALERT" in (error.reason or ""):
            return refused
        return Trouble(f"{shown} does not speak TLS ({error.reason})", "check --server")
    except ConnectionResetError:
        if known:
            return refused
        return Trouble(f"{shown} resets the connection", "is the server running?", lasting=False)
    except TimeoutError:
        return Trouble(f"{shown} does not answer", "is the server running?", lasting=False)
    except OSError as error:
        why = error.strerror or str(error)
        return Trouble(f"{shown}: {why}", "is the server running there?", lasting=False)


def _unverified(error: ssl.SSLCertVerificationError, address: tuple[str, int], shown: str) -> Trouble:
    if error.verify_code in (_NOT_YET, _EXPIRED):
        seen = _shown_by(address)
        trouble = seen and invalid(seen, "the server's")
        if trouble:
            return trouble
    if error.verify_code in _WRONG_NAME:
        return Trouble(
            f"the server's certificate is not for {address[0]}",
            f"`veilstream keys renew --host {address[0]}`, or another name in --server",
        )
    return Trouble(
        f"{shown} shows a certificate that this learner's CA did not sign ({error.verify_message})",
        "both sides need keys that `veilstream keys` made together; or someone is in between",
    )


def _shown_by(address: tuple[str, int]) -> x509.Certificate | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to read its dates
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(address, _PROBE_S) as raw, context.wrap_socket(raw) as connection:
            der = connection.getpeercert(binary_form=True)
    except OSError:
        return None
    return x509.load_der_x509_certificate(der) if der else None


def _context(ca: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as gRPC does it
    context.set_alpn_protocols(["h2"])
    return context


def _day(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
