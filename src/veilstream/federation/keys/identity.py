"""Identities: one folder for the server, one for each learner, made together by `veilstream keys`.

    KEYS/ca/            ca.pem ca.key             keep offline; needed to add or renew
    KEYS/server/        ca.pem tls.pem tls.key identity.key learners.json nodes/NAME.pub
    KEYS/learners/NAME/ ca.pem tls.pem tls.key identity.key name server.pub node.key node.pub

`identity.key` (Ed25519) signs messages; it is who a learner is, whatever the transport calls the
machine. `tls.*` (ECDSA P-256) is a certificate. A learner's certificate names its identity
(`learner_uri`), so that a learner that was removed and added again cannot use its old one. `node.*`
(ECDSA P-384) lets a machine into Flower. A machine needs its own folder and nothing else; secret
files have mode 0600.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from veilstream.errors import InputError


class PublicKey:
    """Verifies what its private key signed."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._key = Ed25519PublicKey.from_public_bytes(raw)

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether this is the signature of these data."""
        try:
            self._key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


class PrivateKey:
    """Signs. Its text form does not show the key."""

    def __init__(self, raw: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(raw)
        self.public = PublicKey(self._key.public_key().public_bytes_raw())

    @classmethod
    def load(cls, path: Path) -> PrivateKey:
        """Read a file that `make_keys` wrote."""
        check_private(path)
        return cls(_hex(path))

    def sign(self, data: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self._key.sign(data)


class _NoPublicKey(PublicKey):
    """Where the transport alone says who sends: takes 64 zeros for a signature, which no real key makes."""

    def __init__(self) -> None:
        self.raw = bytes(32)

    def verifies(self, signature: bytes, data: bytes) -> bool:
        return signature == bytes(64)


class _NoPrivateKey(PrivateKey):
    """Its other half: no real key verifies what it signs."""

    def __init__(self) -> None:
        self.public = _NoPublicKey()

    def sign(self, data: bytes) -> bytes:
        return bytes(64)


_UNSIGNED = _NoPrivateKey()


def check_private(path: Path) -> None:
    """Refuse a secret file that others than its owner can read; a missing file passes."""
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


@dataclass(frozen=True)
class ServerKeys:
    """The server's folder."""

    path: Path | None
    """None where messages are not signed."""
    identity: PrivateKey
    learners: dict[str, PublicKey]

    @property
    def signed(self) -> bool:
        """Whether messages are signed; where they are not, the transport has to say who sends."""
        return self.path is not None

    @classmethod
    def unsigned(cls, learners: Iterable[str]) -> ServerKeys:
        """For these learners over a transport that authenticates them itself."""
        return cls(None, _UNSIGNED, {checked_name(name): _UNSIGNED.public for name in learners})

    @classmethod
    def load(cls, path: Path) -> ServerKeys:
        """Read KEYS/server."""
        if not (path / "learners.json").exists() or (path / "server.pub").exists():
            rule = "the server's folder of keys (identity.key, learners.json)"
            raise InputError("keys", str(path), rule, "it is KEYS/server, as `veilstream keys make KEYS` made it")
        learners = {name: PublicKey(bytes.fromhex(key)) for name, key in known_learners(path).items()}
        return cls(path, PrivateKey.load(path / "identity.key"), learners)


@dataclass(frozen=True)
class LearnerKeys:
    """A learner's folder."""

    path: Path | None
    """None where messages are not signed."""
    name: str
    identity: PrivateKey
    server: PublicKey

    @classmethod
    def unsigned(cls, name: str) -> LearnerKeys:
        """For a learner over a transport that authenticates the server itself."""
        return cls(None, checked_name(name), _UNSIGNED, _UNSIGNED.public)

    @classmethod
    def load(cls, path: Path) -> LearnerKeys:
        """Read KEYS/learners/NAME."""
        if not (path / "server.pub").exists() and path.is_dir():
            around = (path, path / "learners", path.parent / "learners")
            found = sorted(str(own.parent) for folder in around for own in folder.glob("*/server.pub"))
            server = (
                "these are the server's keys, which no learner may hold" if (path / "learners.json").exists() else ""
            )
            there = (
                f"--keys {found[0]}" if found else "it is KEYS/learners/NAME, as `veilstream keys make KEYS` made it"
            )
            rule = "a learner's folder of keys (identity.key, server.pub)"
            raise InputError("keys", str(path), rule, "; ".join(filter(None, [server, there])))
        identity = PrivateKey.load(path / "identity.key")
        name = read_text(path / "name").strip()
        if path.resolve().name != name:
            raise InputError("keys", str(path), f"a folder called {name}", "rename it")
        return cls(path, name, identity, PublicKey(_hex(path / "server.pub")))


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def checked_name(name: str) -> str:
    """A learner's name, which stands in messages, files and logs."""
    if not _NAME.fullmatch(name):
        raise InputError("learner", name, "at most 63 letters, digits, - and _", "rename it")
    return name


def learner_uri(name: str, identity: PublicKey) -> str:
    """How a learner's certificate names it: its name, and the key that signs its messages."""
    return f"urn:veilstream:learner:{name}:{identity.raw.hex()}"


def known_learners(server: Path) -> dict[str, str]:
    """Identities of the learners that a server's folder knows, by name."""
    text = read_text(server / "learners.json")
    try:
        return {str(name): str(key) for name, key in json.loads(text).items()}
    except (ValueError, AttributeError):
        raise _not_ours(server / "learners.json", "it is damaged") from None


def _hex(path: Path) -> bytes:
    text = read_text(path)
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InputError("keys", str(path), "64 hexadecimal digits", "make keys again") from None


def read_text(path: Path) -> str:
    """A file of a folder of keys."""
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise _not_ours(path, str(error)) from error


def _not_ours(path: Path, why: str) -> InputError:
    return InputError("keys", str(path), "a file that `veilstream keys` made", why)
