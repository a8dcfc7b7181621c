"""What server and learners say to each other: signed, and bound to what it answers.

    4 bytes   VSM1
    4 bytes   length of the head, little-endian
    head      JSON
    body      bytes: a model (float32), or a release (`veilstream.deployment.release`)
    64 bytes  Ed25519 signature over the SHA-256 of all before (Ed25519 itself would read it twice)

A *request* goes from the server to one learner, a *reply* back. A reply names the hash of its
request, so an old one proves nothing; a request names run, learner and round, so one that is sent
again gets the same bytes. Engines carry these messages without looking inside.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from veilstream.errors import ProtocolError
from veilstream.federation.identity import PrivateKey, PublicKey

__all__ = ["Reply", "Request", "digest"]

_MAGIC = b"VSM1"
_SIGNATURE_BYTES = 64
_HEAD = struct.Struct("<4sI")
_LONGEST_HEAD = 1 << 20


@dataclass(frozen=True)
class Request:
    """From the server to one learner."""

    kind: str
    """"enrol" or "round"."""
    run: str
    learner: str
    """To whom; "" in an enrolment, where the server does not know yet."""
    nonce: str
    round: int = 0
    """The learner's own round: it counts those it took part in."""
    acknowledged: tuple[int, str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """The server's terms, in an enrolment."""
    body: bytes = b""

    def sign(self, key: PrivateKey) -> bytes:
        """As it is sent."""
        return _seal(
            {
                "kind": self.kind, "run": self.run, "learner": self.learner, "nonce": self.nonce,
                "round": self.round, "acknowledged": self.acknowledged, "settings": self.settings,
            },
            self.body, key,
        )  # fmt: skip

    @classmethod
    def read(cls, data: bytes, key: PublicKey) -> Request:
        """Check the signature, then the form."""
        head, body = _open(data, key, "the server")
        try:
            said = head["acknowledged"]
            acknowledged = None if said is None else (_whole(said[0]), _text(said[1]))
            if head["kind"] not in ("enrol", "round") or not isinstance(head["settings"], dict):
                raise ProtocolError("a request of unknown form", "check the server's version")
            return cls(
                head["kind"], _text(head["run"]), _text(head["learner"]), _text(head["nonce"]),
                _whole(head["round"]), acknowledged, head["settings"], body,
            )  # fmt: skip
        except (KeyError, TypeError, IndexError, ValueError):
            raise ProtocolError("a request of unknown form", "check the server's version") from None


@dataclass(frozen=True)
class Reply:
    """From a learner to the server."""

    kind: str
    """"enrolled", "release" or "refusal"."""
    learner: str
    answers: str
    """Hash of the request."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Enrolled: epoch, round, daemon, settings. Refusal: why."""
    body: bytes = b""

    def sign(self, key: PrivateKey) -> bytes:
        """As it is sent."""
        head = {
            "kind": self.kind, "learner": self.learner, "answers": self.answers,
            "facts": self.facts,
        }  # fmt: skip
        return _seal(head, self.body, key)

    @classmethod
    def claimed_learner(cls, data: bytes) -> str:
        """Whom it says it is from, before anything is checked."""
        head, _ = _parts(data)
        return _text(head.get("learner"))

    @classmethod
    def read(cls, data: bytes, key: PublicKey) -> Reply:
        """Check the signature, then the form."""
        claimed = cls.claimed_learner(data)
        head, body = _open(data, key, f"learner {claimed!r}")
        kind, facts = head.get("kind"), head.get("facts")
        if kind not in ("enrolled", "release", "refusal") or not isinstance(facts, dict):
            raise ProtocolError("a reply of unknown form", "check the learner's version")
        return cls(kind, claimed, _text(head.get("answers")), facts, body)


def digest(data: bytes) -> str:
    """How a reply names its request."""
    return hashlib.sha256(data).hexdigest()


def _seal(head: dict[str, Any], body: bytes, key: PrivateKey) -> bytes:
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    signed = _HEAD.pack(_MAGIC, len(text)) + text + body
    return signed + key.sign(hashlib.sha256(signed).digest())


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    if len(data) < _HEAD.size + _SIGNATURE_BYTES or data[:4] != _MAGIC:
        raise ProtocolError("a message of unknown form", "check the sender's version")
    (_, length) = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if length > _LONGEST_HEAD or end + _SIGNATURE_BYTES > len(data):
        raise ProtocolError("a message that is cut short", "check the connection")
    try:
        head = json.loads(data[_HEAD.size : end])
    except (ValueError, RecursionError):
        raise ProtocolError("a message of unknown form", "check the sender's version") from None
    if not isinstance(head, dict):
        raise ProtocolError("a message of unknown form", "check the sender's version")
    return head, data[end:-_SIGNATURE_BYTES]


def _open(data: bytes, key: PublicKey, sender: str) -> tuple[dict[str, Any], bytes]:
    signed = hashlib.sha256(memoryview(data)[:-_SIGNATURE_BYTES]).digest()
    if len(data) < _SIGNATURE_BYTES or not key.verifies(data[-_SIGNATURE_BYTES:], signed):
        raise ProtocolError(
            f"a message that is not signed by {sender}",
            "both sides need keys that `veilstream keys` made together",
        )
    return _parts(data)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError("a message of unknown form", "check the sender's version")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ProtocolError("a message of unknown form", "check the sender's version")
    return value
