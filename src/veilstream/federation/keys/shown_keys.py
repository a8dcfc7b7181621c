"""What a folder of keys holds, without its secrets: whose they are, and how long certificates last."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from veilstream.errors import InputError
from veilstream.federation.keys.identity import known_learners, read_text


@dataclass(frozen=True)
class ShownCertificate:
    """One certificate."""

    whose: str
    """"server", "CA" or "learner NAME"."""
    path: str
    ends: str
    """As an ISO date and time in UTC."""
    days_left: int
    """Whole days, negative once it has ended."""
    names: tuple[str, ...]
    """Hosts of a server, or the identity that a learner's certificate names."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def certificates_in(folder: Path, now: datetime.datetime | None = None) -> list[ShownCertificate]:
    """Those of a folder of all keys, of the server's folder or of a learner's."""
    now = now or datetime.datetime.now(datetime.UTC)
    if (folder / "learners.json").exists():
        return [_shown("server", folder / "tls.pem", now), _shown("CA", folder / "ca.pem", now)]
    if (folder / "name").exists():
        whose = f"learner {read_text(folder / 'name').strip()}"
        return [_shown(whose, folder / "tls.pem", now), _shown("CA", folder / "ca.pem", now)]
    if not (folder / "server/learners.json").exists():
        rule = "a folder of keys: all of them, the server's or a learner's"
        raise InputError("keys", str(folder), rule, "`veilstream keys make` makes one")
    found = [_shown("server", folder / "server/tls.pem", now)]
    for name in sorted(known_learners(folder / "server")):
        path = folder / "learners" / name / "tls.pem"
        if path.exists():  # it may have been moved to the learner's machine
            found.append(_shown(f"learner {name}", path, now))
    return [*found, _shown("CA", folder / "server/ca.pem", now)]


def _shown(whose: str, path: Path, now: datetime.datetime) -> ShownCertificate:
    try:
        certificate = x509.load_pem_x509_certificate(read_text(path).encode())
    except ValueError as error:
        raise InputError("keys", str(path), "a certificate that `veilstream keys` made", str(error)) from None
    names: tuple[str, ...] = ()
    try:
        stated = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = tuple(str(name.value) for name in stated.value)
    except x509.ExtensionNotFound:
        pass
    ends = certificate.not_valid_after_utc
    return ShownCertificate(whose, str(path), f"{ends:%Y-%m-%dT%H:%M:%SZ}", (ends - now).days, names)
