"""A certificate and its key as files that `veilstream keys renew` may replace while a server runs."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

_log = logging.getLogger(__name__)


class CertificateFiles:
    """A PEM certificate and its key; two files, so for a moment they may not belong together."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate, self.key = certificate, key
        self._seen, self._looking = self._state(), threading.Lock()

    def renewed(self) -> ssl.SSLContext | None:
        """The new pair, once, when both files have been replaced by one that fits; call it for each connection."""
        with self._looking:
            if (now := self._state()) == self._seen or now is None:
                return None
            try:
                context = self.context()
            except (OSError, ssl.SSLError):
                return None  # one of the two is still the old one
            self._seen = now
        _log.info("%s was renewed: new connections are shown the new certificate", self.certificate)
        return context

    def context(self) -> ssl.SSLContext:
        """For a server of the standard library; raises `OSError` or `ssl.SSLError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context

    def _state(self) -> tuple[int, ...] | None:
        try:
            return tuple(n for path in (self.certificate, self.key) for n in _identity(path))
        except OSError:
            return None


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
