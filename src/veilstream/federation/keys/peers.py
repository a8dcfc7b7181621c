"""Other learners' identities, from certificates that the CA signed: a server cannot put keys of its own in place.

Whoever holds the CA's key can. So where only sums are to be seen, it belongs to the learners together, or to
somebody whom they trust, and never to the server.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from veilstream.errors import ProtocolError
from veilstream.federation.keys.identity import read_text

_URI = re.compile(r"urn:veilstream:learner:([A-Za-z0-9_-]{1,63}):([0-9a-f]{64})")


def own_certificate(keys: Path) -> bytes:
    """A learner's certificate, as others are shown it."""
    return x509.load_pem_x509_certificate(read_text(keys / "tls.pem").encode()).public_bytes(Encoding.DER)


class PeerCertificates:
    """What a learner's folder of keys lets it recognise others by."""

    def __init__(self, keys: Path) -> None:
        self._ca = x509.load_pem_x509_certificate(read_text(keys / "ca.pem").encode())

    def identities(self, certificates: Iterable[bytes], now: datetime.datetime | None = None) -> dict[str, bytes]:
        """Ed25519 keys of the learners with these certificates, by name.

        Raises:
            ProtocolError: one was not signed by the CA, has expired, or is no learner's.

        """
        found: dict[str, bytes] = {}
        for content in certificates:
            name, identity = self._checked(bytes(content), now or datetime.datetime.now(datetime.UTC))
            if found.setdefault(name, identity) != identity:
                raise ProtocolError(f"two certificates of learner {name!r}", "the server shows an old one as well")
        return found

    def _checked(self, content: bytes, now: datetime.datetime) -> tuple[str, bytes]:
        try:
            certificate = x509.load_der_x509_certificate(content)
            certificate.verify_directly_issued_by(self._ca)
            stated = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            raise ProtocolError(
                "a learner's certificate that this learner's CA did not sign",
                "all learners need keys that `veilstream keys` made together; or the server shows keys of its own",
            ) from None
        names = stated.get_values_for_type(x509.UniformResourceIdentifier)
        said = _URI.fullmatch(names[0]) if len(names) == 1 else None
        if said is None or not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise ProtocolError(
                "a certificate that is no learner's, or not valid now", "`veilstream keys renew --learner NAME`"
            )
        return said[1], bytes.fromhex(said[2])
