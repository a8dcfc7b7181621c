"""What server and learners say to each other: signed, and bound to what it answers.

    4 bytes   VSM2
    4 bytes   length of the head, little-endian
    head      JSON; holds the SHA-256 of the body
    64 bytes  Ed25519 signature over the SHA-256 of all before
    body      bytes: a model (float32), or a release (`veilstream.deployment.release`)

The signature covers the head, and the head names the body's hash. So a server hashes a model once
for all learners and signs small heads, and a transport keeps heads apart from the one body that
they share.

A *request* goes from the server to one learner, a *reply* back. A reply names the hash of its
request, so an old one proves nothing; a request names run, learner and round, so one that is sent
again gets the same bytes. Transports carry these messages without looking inside.

Reading checks the signature, then the body's hash, then the form: every field that belongs there
and no other, whole numbers from 0 to 2^32 - 1, finite numbers, texts of limited length.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from veilstream.errors import ProtocolError
from veilstream.federation.keys.identity import PrivateKey, PublicKey
from veilstream.strict_json import InvalidJson, read_json

LONGEST_TEXT = 2000
"""Characters of a refusal's reason."""

Buffer = bytes | memoryview

REQUESTS = ("enrol", "round", "end", "key", "keys", "mask", "set", "open", "void")
MASKING_REPLIES = ("key", "keys", "masked", "signed", "opened", "voided")
"""Without facts: what they say is in the body, in the words of `masking`."""

MAGIC = b"VSM2"
_SIGNATURE_BYTES = 64
_HEAD = struct.Struct("<4sI")
_LONGEST_HEAD = (1 << 16) - 256  # with signature and a release's own header: 64 KiB
_WHOLE_BELOW = 1 << 32
_NAME, _HASH, _RUN = 63, 64, 200
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Request:
    """From the server to one learner."""

    kind: str
    """"enrol", "round" or "end"; where only sums are seen, "key", "keys", "mask", "set", "open" and "void" (`masking`)
    in the place of "round"."""
    run: str
    learner: str
    """To whom; "" in an enrolment or an end where the transport does not say who sits at a node."""
    nonce: str
    round: int = 0
    """The learner's own round: it counts those it took part in."""
    acknowledged: tuple[int, str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    body: Buffer = b""
    time: int = field(default_factory=lambda: int(time.time()))
    """The server's clock, seconds since 1970. A learner joins a run only by its server's word of
    now: a request that someone kept cannot bind a new epoch to a run that is over."""
    follows: tuple[str, ...] = ()
    """In an enrolment: earlier runs of this server, which are over; the newest last."""
    epoch: int = 0
    """In a round: the one that the server has enrolled this learner in."""
    published: int | None = None
    """In a round and an end: after how many rounds of the server the model was published that the body ends with
    (in a round, x^r itself where the body is no longer). None: none is sent."""

    def sign(self, key: PrivateKey, hashed_body: str | None = None) -> bytes:
        """As it is sent; ``hashed_body`` is `body_hash` of the body, where it is known."""
        return self.sign_head(key, hashed_body) + self.body

    def sign_head(self, key: PrivateKey, hashed_body: str | None = None) -> bytes:
        """All before the body."""
        return _seal(vars(self) | {"body": hashed_body or body_hash(self.body)}, key)

    @classmethod
    def read(cls, data: Buffer, key: PublicKey) -> Request:
        """Check the signature, then the body's hash, then the form."""
        head, body = _open(data, key, lambda: "the server")
        form = _Form("a request of unknown form", "check the server's version")
        head.setdefault("published", None)  # 0.6 had none, and its enrolments are kept in run folders
        form.fields(head, *(each.name for each in fields(cls)))
        if head["kind"] not in REQUESTS or not isinstance(head["follows"], list):
            raise form.error()
        return cls(
            head["kind"],
            form.text(head["run"], _RUN),
            form.text(head["learner"], _NAME),
            form.text(head["nonce"], _HASH),
            form.whole(head["round"]),
            form.accepted(head["acknowledged"]),
            form.table(head["settings"]),
            body,
            form.whole(head["time"]),
            tuple(form.text(run, _RUN) for run in head["follows"]),
            form.whole(head["epoch"]),
            None if head["published"] is None else form.whole(head["published"]),
        )


@dataclass(frozen=True)
class Reply:
    """From a learner to the server."""

    kind: str
    """"enrolled", "release", "absent", "ended" or "refusal", or one of `MASKING_REPLIES`. Absent: too few
    clients wait, and the round was not begun; it has neither facts nor body."""
    learner: str
    answers: str
    """Hash of the request."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Enrolled: epoch, round, daemon, settings, time (the learner's clock). Ended: epoch, round
    (how many it has sealed). Refusal: why."""
    body: Buffer = b""
    hashed_body: str = field(default="", compare=False)
    """`body_hash` of the body, in a reply that was read."""

    def sign(self, key: PrivateKey) -> bytes:
        """As it is sent."""
        head = {
            "kind": self.kind,
            "learner": self.learner,
            "answers": self.answers,
            "facts": self.facts,
            "body": self.hashed_body or body_hash(self.body),
        }
        return _seal(head, key) + self.body

    @classmethod
    def claimed_learner(cls, data: Buffer) -> str:
        """Whom it says it is from, before anything is checked."""
        head, _, _ = _parts(data)
        return _Form(*_UNKNOWN).text(head.get("learner"), _NAME)

    @classmethod
    def read(cls, data: Buffer, key: PublicKey) -> Reply:
        """Check the signature, then the body's hash, then the form."""
        head, body = _open(data, key, lambda: f"learner {cls.claimed_learner(data)!r}")
        form = _Form("a reply of unknown form", "check the learner's version")
        form.fields(head, "kind", "learner", "answers", "facts", "body")
        kind, facts = head["kind"], form.table(head["facts"])
        if not isinstance(kind, str) or kind not in _FACTS:
            raise form.error()
        form.fields(facts, *_FACTS[kind])
        for name, check in _FACTS[kind].items():
            check(form, facts[name])
        name = form.text(head["learner"], _NAME)
        return cls(kind, name, form.text(head["answers"], _HASH), facts, body, head["body"])


def digest(data: Buffer) -> str:
    """SHA-256 of the signed part, by which a reply names its request; of all bytes if this is no message."""
    end = len(data)
    if len(data) >= _HEAD.size and data[:4] == MAGIC:
        end = _HEAD.size + _HEAD.unpack_from(data)[1]
    return hashlib.sha256(memoryview(data)[:end]).hexdigest()


def body_hash(body: Buffer) -> str:
    """As a head names its body."""
    return hashlib.sha256(body).hexdigest()


_UNKNOWN = ("a message of unknown form", "check the sender's version")


class _Form:
    """Checks values, and says the same whatever is wrong: it is a peer's text."""

    def __init__(self, what: str, way_out: str) -> None:
        self._what, self._way_out = what, way_out

    def error(self) -> ProtocolError:
        return ProtocolError(self._what, self._way_out)

    def fields(self, table: dict[str, Any], *names: str) -> None:
        if set(table) != set(names):
            raise self.error()

    def whole(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _WHOLE_BELOW:
            raise self.error()
        return value

    def text(self, value: Any, longest: int) -> str:
        if not isinstance(value, str) or len(value) > longest:
            raise self.error()
        return value

    def hash(self, value: Any) -> str:
        """A release's hash: it is written to files and sent on, so it has one form."""
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self.error()
        return value

    def accepted(self, value: Any) -> tuple[int, str] | None:
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2:
            raise self.error()
        return self.whole(value[0]), self.hash(value[1])

    def table(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error()
        return value


_FACTS: dict[str, dict[str, Callable[[_Form, Any], Any]]] = {
    "enrolled": {
        "epoch": _Form.whole,
        "round": _Form.whole,
        "daemon": lambda form, value: form.text(value, _HASH),
        "settings": _Form.table,
        "time": _Form.whole,
    },
    "release": {},
    "absent": {},
    "ended": {"epoch": _Form.whole, "round": _Form.whole},
    "refusal": {"why": lambda form, value: form.text(value, LONGEST_TEXT)},
    **{kind: {} for kind in MASKING_REPLIES},
}


def _seal(head: dict[str, Any], key: PrivateKey) -> bytes:
    text = json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > _LONGEST_HEAD:
        raise ProtocolError(f"a message whose head has {len(text)} bytes", f"at most {_LONGEST_HEAD} are read")
    signed = _HEAD.pack(MAGIC, len(text)) + text
    return signed + key.sign(hashlib.sha256(signed).digest())


def _parts(data: Buffer) -> tuple[dict[str, Any], memoryview, int]:
    """The head, and where it ends; nothing is checked but that it can be read."""
    if len(data) < _HEAD.size + _SIGNATURE_BYTES or data[:4] != MAGIC:
        raise ProtocolError(*_UNKNOWN)
    (_, length) = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if length > _LONGEST_HEAD or end + _SIGNATURE_BYTES > len(data):
        raise ProtocolError("a message that is cut short", "check the connection")
    view = memoryview(data)
    try:
        head = read_json(bytes(view[_HEAD.size : end]), parse_int=_small)
    except InvalidJson:
        raise ProtocolError(*_UNKNOWN) from None
    if not isinstance(head, dict):
        raise ProtocolError(*_UNKNOWN)
    return head, view, end


def _open(data: Buffer, key: PublicKey, sender: Callable[[], str]) -> tuple[dict[str, Any], Buffer]:
    length = _HEAD.unpack_from(data)[1] if len(data) >= _HEAD.size else len(data)
    end = _HEAD.size + length
    signed = hashlib.sha256(memoryview(data)[:end]).digest()
    if not key.verifies(bytes(data[end : end + _SIGNATURE_BYTES]), signed):
        raise ProtocolError(
            f"a message that is not signed by {sender()}", "both sides need keys that `veilstream keys` made together"
        )
    head, view, end = _parts(data)
    body = view[end + _SIGNATURE_BYTES :]  # not copied: a thousand of them come at once
    if head.get("body") != body_hash(body):
        raise ProtocolError(f"a body that {sender()} did not sign", "it was changed or cut short on the way")
    return head, body


def _small(text: str) -> int:
    number = int(text) if len(text) <= 10 else _WHOLE_BELOW
    if not 0 <= number < _WHOLE_BELOW:
        raise ValueError("a whole number that is out of range")
    return number
