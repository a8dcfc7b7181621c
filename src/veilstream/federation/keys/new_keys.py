"""Making keys: a CA, the server's folder and the learners' (`identity` reads them)."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from veilstream.errors import InputError
from veilstream.federation.keys.identity import (
    PrivateKey,
    check_private,
    checked_name,
    known_learners,
    learner_uri,
    read_text,
)
from veilstream.files import write_file

DAYS = 825

_CA_NAME = "veilstream CA"
_CA_DAYS = 3650


def make_keys(folder: Path | str, hosts: list[str], learners: list[str], days: int = DAYS) -> None:
    """Make a CA, the server's keys and the learners' keys, in a new or empty folder: what `veilstream keys make` does.

    Args:
        folder: gets `server` and `learners/NAME`; each machine needs its own of these and nothing else.
        hosts: names and addresses of the server, for its TLS certificate.
        learners: a name for each.
        days: how long certificates are valid.

    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError("keys", str(folder), "a new or empty folder", "name another, or add to it")
    for name in learners:
        checked_name(name)
    if len(set(learners)) < len(learners):
        raise InputError("learners", learners, "a different name for each", "rename one")
    if not hosts:
        raise InputError("host", hosts, "at least one name or address", "try --host 127.0.0.1")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = (
        _certificate(_CA_NAME, ca_key, max(days, _CA_DAYS), ca_key)
        .issuer_name(_common_name(_CA_NAME))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    _write_secret(folder / "ca/ca.key", _pem(ca_key))
    write_file(folder / "ca/ca.pem", ca)
    write_file(folder / "server/ca.pem", ca)
    _write_secret(folder / "server/identity.key", os.urandom(32).hex().encode())
    write_file(folder / "server/learners.json", "{}\n")
    renew_server(folder, hosts, days)
    for name in learners:
        add_learner(folder, name, days)


def renew_server(folder: Path, hosts: list[str], days: int = DAYS) -> None:
    """Make a new TLS key and certificate for the server; without hosts, for those of the old one."""
    where = folder / "server"
    names = [_subject_name(host) for host in hosts]
    if not names:
        old = x509.load_pem_x509_certificate(read_text(where / "tls.pem").encode())
        names = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    _write_certificate(folder, where, "veilstream server", x509.SubjectAlternativeName(names), days)


def renew_learner(folder: Path, name: str, days: int = DAYS) -> None:
    """Make a new TLS key and certificate for a learner; its identity stays."""
    where = folder / "learners" / name
    uri = learner_uri(name, PrivateKey.load(where / "identity.key").public)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    _write_certificate(folder, where, f"veilstream learner {name}"[:64], names, days, client_only=True)


def add_learner(folder: Path, name: str, days: int = DAYS) -> Path:
    """Make keys for one more learner; returns its folder, which goes to its machine."""
    checked_name(name)
    where = folder / "learners" / name
    if where.exists():
        raise InputError("learner", name, "a learner without keys", "remove it first, or choose another name")
    server = PrivateKey.load(folder / "server/identity.key")
    raw = os.urandom(32)
    _write_secret(where / "identity.key", raw.hex().encode())
    write_file(where / "name", f"{name}\n")
    write_file(where / "server.pub", server.public.raw.hex())
    write_file(where / "ca.pem", read_text(folder / "ca/ca.pem"))
    node = ec.generate_private_key(ec.SECP384R1())
    _write_secret(where / "node.key", _pem(node, PrivateFormat.OpenSSH))
    ssh = node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    write_file(where / "node.pub", ssh)
    renew_learner(folder, name, days)
    known = known_learners(folder / "server") | {name: PrivateKey(raw).public.raw.hex()}
    write_file(folder / "server/learners.json", json.dumps(known, indent=2) + "\n")
    write_file(folder / "server/nodes" / f"{name}.pub", ssh)
    return where


def remove_learner(folder: Path, name: str) -> None:
    """Make the server forget a learner. Its folder is put aside, so its name can be added again."""
    known = known_learners(folder / "server")
    if known.pop(name, None) is None:
        raise InputError("learner", name, "one of " + ", ".join(known), "check the name")
    write_file(folder / "server/learners.json", json.dumps(known, indent=2) + "\n")
    (folder / "server/nodes" / f"{name}.pub").unlink(missing_ok=True)
    number = 1
    while (aside := folder / "removed" / f"{name}-{number}").exists():
        number += 1
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    if (folder / "learners" / name).exists():
        (folder / "learners" / name).rename(aside)


def _write_certificate(
    folder: Path, where: Path, name: str, names: x509.SubjectAlternativeName, days: int, *, client_only: bool = False
) -> None:
    check_private(folder / "ca/ca.key")
    ca_key = load_pem_private_key(read_text(folder / "ca/ca.key").encode(), None)
    ca = x509.load_pem_x509_certificate(read_text(folder / "ca/ca.pem").encode())
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    left = (ca.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    if left < days:
        raise InputError("days", days, f"at most {left}, which the CA has left", "make a new CA and all keys")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _certificate(name, key, days, ca_key)
        .issuer_name(ca.subject)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    if client_only:  # a learner must not be able to pass for the server
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=True)
    _write_secret(where / "tls.key", _pem(key))
    write_file(where / "tls.pem", builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM))


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, days: int, issuer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(issuer_id, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _subject_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(path, content)
    path.chmod(0o600)
