"""Identities: one folder for the server, one for each learner, made together by `veilstream keys`.

    KEYS/ca/            ca.pem ca.key             keep offline; needed to add or renew
    KEYS/server/        ca.pem tls.pem tls.key identity.key learners.json
    KEYS/learners/NAME/ ca.pem tls.pem tls.key identity.key name server.pub node.key node.pub

`identity.key` (Ed25519) signs what is said; it is who a learner is, whatever the engine calls the
machine. `tls.*` (ECDSA P-256) is the certificate of a server or a learner; a learner's names its
identity (`learner_uri`), so that one that was removed and added anew has no use for its old one.
`node.*` (ECDSA P-384) lets a machine into Flower. A folder is all that its machine needs; secret
files have mode 0600.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veilstream.errors import InputError
from veilstream.files import write_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def check_private(path: Path) -> None:
    """Refuse a secret file that others than its owner can read; one that is missing is not ours."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o077:
        raise InputError(
            "keys",
            f"{path}, mode {mode:04o}",
            "a private key that only its owner can read",
            f"chmod 600 {path}; if others may have read it, make new keys",
        )


class PublicKey:
    """Verifies what the other half signed."""

    def __init__(self, raw: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        self.raw = raw
        self._key = Ed25519PublicKey.from_public_bytes(raw)

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether this is the signature of these data."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


class PrivateKey:
    """Signs; prints as nothing."""

    def __init__(self, raw: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(raw)
        self.public = PublicKey(self._key.public_key().public_bytes_raw())

    @classmethod
    def load(cls, path: Path) -> PrivateKey:
        """From a file that `make_keys` wrote.

        Raises:
            InputError: it is not there, is no key, or others than its owner can read it.

        """
        check_private(path)
        return cls(_raw(path))

    def sign(self, data: bytes) -> bytes:
        """64 bytes."""
        return self._key.sign(data)


@dataclass(frozen=True)
class ServerKeys:
    """The server's folder, read."""

    path: Path
    identity: PrivateKey
    learners: dict[str, PublicKey]
    """Who may take part."""

    @classmethod
    def load(cls, path: Path) -> ServerKeys:
        """Read KEYS/server."""
        known = json.loads(_text(path / "learners.json"))
        learners = {name: PublicKey(bytes.fromhex(key)) for name, key in known.items()}
        return cls(path, PrivateKey.load(path / "identity.key"), learners)

    @classmethod
    def load_signing(cls, path: Path) -> ServerKeys:
        """Read KEYS/server, and no folder of another, to sign what only the server may say.

        Raises:
            InputError: it is a learner's folder, or none at all.

        """
        own = [path / "identity.key", path / "learners.json"]
        if not all(file.exists() for file in own) or (path / "server.pub").exists():
            raise InputError(
                "keys",
                str(path),
                "the server's folder of keys (identity.key, learners.json)",
                "KEYS/server is it; a learner cannot speak for the server",
            )
        return cls.load(path)


@dataclass(frozen=True)
class LearnerKeys:
    """A learner's folder, read."""

    path: Path
    name: str
    identity: PrivateKey
    server: PublicKey

    @classmethod
    def load(cls, path: Path) -> LearnerKeys:
        """Read KEYS/learners/NAME."""
        identity = PrivateKey.load(path / "identity.key")
        name = _text(path / "name").strip()
        if path.resolve().name != name:
            raise InputError("keys", str(path), f"a folder that is called {name}", "rename it")
        return cls(path, name, identity, PublicKey(_raw(path / "server.pub")))


def make_keys(folder: Path, hosts: list[str], learners: list[str], days: int = 825) -> None:
    """A new CA, a server and its learners. Nothing that exists is overwritten."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError("keys", str(folder), "a new or empty folder", "name another, or add to it")
    for name in learners:
        _checked(name)
    if len(set(learners)) < len(learners):
        raise InputError("learners", learners, "a name of its own for each", "rename one")
    if not hosts:
        raise InputError("host", hosts, "at least one name or address", "try --host 127.0.0.1")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    ca_key = _new_key("P-256")
    ca = _signed(_builder("veilstream CA", ca_key, max(days, 3650)).add_extension(*_authority()), ca_key, None, None)
    _secret(folder / "ca/ca.key", _pem_key(ca_key))
    write_file(folder / "ca/ca.pem", _pem(ca))
    write_file(folder / "server/ca.pem", _pem(ca))
    _secret(folder / "server/identity.key", os.urandom(32).hex().encode())
    write_file(folder / "server/learners.json", "{}\n")
    renew_server(folder, hosts, days)
    for name in learners:
        add_learner(folder, name, days)


def learner_uri(name: str, identity: PublicKey) -> str:
    """As a learner's certificate names it: its name, and the key that signs its messages."""
    return f"urn:veilstream:learner:{name}:{identity.raw.hex()}"


def renew_server(folder: Path, hosts: list[str], days: int = 825) -> None:
    """A new TLS key and certificate for the server, from the same CA.

    Without hosts, for those of the old one.
    """
    from cryptography import x509

    ca, ca_key = _load_ca(folder, days)
    key = _new_key("P-256")
    names: list[Any] = [_subject_name(host) for host in hosts]
    if not names:
        old = x509.load_pem_x509_certificate(_text(folder / "server/tls.pem").encode())
        names = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    builder = _builder("veilstream server", key, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    _secret(folder / "server/tls.key", _pem_key(key))
    write_file(folder / "server/tls.pem", _pem(_signed(builder, ca_key, ca, key)))


def renew_learner(folder: Path, name: str, days: int = 825) -> None:
    """A new TLS key and certificate for a learner, from the same CA; its identity stays."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca, ca_key = _load_ca(folder, days)
    where = folder / "learners" / name
    identity = PrivateKey.load(where / "identity.key").public
    key = _new_key("P-256")
    uri = x509.UniformResourceIdentifier(learner_uri(name, identity))
    builder = (
        _builder(f"veilstream learner {name}"[:64], key, days)
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        # A learner must not be able to pass for the server.
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
    )
    _secret(where / "tls.key", _pem_key(key))
    write_file(where / "tls.pem", _pem(_signed(builder, ca_key, ca, key)))


def _load_ca(folder: Path, days: int) -> tuple[Certificate, Any]:
    """The CA and its key; an error if it does not last as long."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    check_private(folder / "ca/ca.key")
    ca_key = load_pem_private_key(_text(folder / "ca/ca.key").encode(), None)
    ca = x509.load_pem_x509_certificate(_text(folder / "ca/ca.pem").encode())
    left = (ca.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if left < days:
        raise InputError("days", days, f"at most {left}, which the CA has left", "make a new CA and all keys")
    return ca, ca_key


def add_learner(folder: Path, name: str, days: int = 825) -> Path:
    """Keys for one more learner; returns its folder, which goes to its machine."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    _checked(name)
    where = folder / "learners" / name
    if where.exists():
        raise InputError("learner", name, "a learner that has no keys yet", "remove it first")
    server = PrivateKey.load(folder / "server/identity.key")
    raw = os.urandom(32)
    _secret(where / "identity.key", raw.hex().encode())
    write_file(where / "name", f"{name}\n")
    write_file(where / "server.pub", server.public.raw.hex())
    write_file(where / "ca.pem", _text(folder / "ca/ca.pem"))
    node = _new_key("P-384")
    _secret(where / "node.key", _pem_key(node, "OpenSSH"))
    ssh = node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_file(where / "node.pub", ssh + b"\n")
    renew_learner(folder, name, days)
    _know(folder, lambda known: known | {name: PrivateKey(raw).public.raw.hex()})
    write_file(folder / "server" / "nodes" / f"{name}.pub", ssh + b"\n")
    return where


def remove_learner(folder: Path, name: str) -> None:
    """Have the server no longer know a learner; put aside, its name can be added anew."""

    def without(known: dict[str, str]) -> dict[str, str]:
        if name not in known:
            raise InputError("learner", name, "one of " + ", ".join(known), "check the name")
        return {other: key for other, key in known.items() if other != name}

    _know(folder, without)
    (folder / "server" / "nodes" / f"{name}.pub").unlink(missing_ok=True)
    where, number = folder / "learners" / name, 1
    while (aside := folder / "removed" / f"{name}-{number}").exists():
        number += 1
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    if where.exists():
        where.rename(aside)


def _know(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Change which learners the server knows."""
    path = folder / "server/learners.json"
    write_file(path, json.dumps(change(json.loads(_text(path))), indent=2) + "\n")


def _checked(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InputError("learner", name, "at most 63 letters, digits, - and _", "rename it")


def _subject_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key(curve: str) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1() if curve == "P-256" else ec.SECP384R1())


def _authority() -> tuple[Any, bool]:
    from cryptography import x509

    return x509.BasicConstraints(ca=True, path_length=0), True


def _builder(name: str, key: EllipticCurvePrivateKey, days: int) -> CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _signed(builder: CertificateBuilder, ca_key: Any, ca: Certificate | None, key: Any) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "veilstream CA")])
    issued = builder.issuer_name(own if ca is None else ca.subject)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    subject = x509.SubjectKeyIdentifier.from_public_key((key or ca_key).public_key())
    issued = issued.add_extension(issuer, critical=False).add_extension(subject, critical=False)
    return issued.sign(ca_key, hashes.SHA256())


def _pem(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _pem_key(key: EllipticCurvePrivateKey, form: str = "PKCS8") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, getattr(PrivateFormat, form), NoEncryption())


def _secret(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(path, content)  # made by mkstemp, hence with mode 0600
    path.chmod(0o600)


def _raw(path: Path) -> bytes:
    text = _text(path)
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InputError("keys", str(path), "64 hexadecimal digits", "make keys again") from None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise InputError("keys", str(path), "a file that `veilstream keys` made", str(error)) from error
