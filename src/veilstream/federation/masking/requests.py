"""Bodies of the server's requests: what a learner needs for each step, without a look at models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from veilstream.federation.masking.agreement import SEALED_BYTES
from veilstream.federation.masking.statements import (
    Attempt,
    OpenCertificate,
    SetOfRound,
    Signatures,
    VoidCertificate,
    malformed,
    pack_parts,
    unpack_all,
    unpack_parts,
)


def run_on_terms(run: str, settings: Mapping[str, Any]) -> str:
    """What learners sign their keys for: the run and the digest of their own settings.

    Each counts on the noise of the others. So one whose plan is another has no key that they take, whatever the
    server told each of them about the plan.
    """
    return f"{run} {settings['digest']}"


@dataclass(frozen=True)
class KeysRequest:
    """The run's keys, and certificates of those who gave them."""

    keys: bytes
    certificates: tuple[bytes, ...]

    def pack(self) -> bytes:
        """As it is sent."""
        return pack_parts([self.keys, *self.certificates])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> KeysRequest:
        """As it was packed."""
        parts = [bytes(part) for part in unpack_all(content)]
        if not parts:
            raise malformed("a list of keys")
        return cls(parts[0], tuple(parts[1:]))


@dataclass(frozen=True)
class MaskRequest:
    """An attempt of a round, with proof of what it follows on, and the model."""

    at: Attempt
    opened: tuple[OpenCertificate, ...]
    """Of earlier rounds, the oldest first."""
    proof: VoidCertificate | None
    """That the attempts before are void."""
    model: bytes | memoryview

    def pack(self) -> bytes:
        """As it is sent."""
        proof = b"" if self.proof is None else self.proof.pack()
        return pack_parts([self.at.pack(), pack_parts(c.pack() for c in self.opened), proof, self.model])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> MaskRequest:
        """As it was packed."""
        at, opened, proof, model = unpack_parts(content, 4)
        certificates = tuple(OpenCertificate.unpack(part) for part in unpack_all(opened))
        return cls(Attempt.unpack(at), certificates, VoidCertificate.unpack(proof) if proof else None, model)


@dataclass(frozen=True)
class ShareRequest:
    """A set, its signatures, and what its learners sealed for this one."""

    opened: tuple[OpenCertificate, ...]
    what: SetOfRound
    signatures: Signatures
    sealed: dict[int, bytes]

    def pack(self) -> bytes:
        """As it is sent."""
        sealed = b"".join(self.sealed[place] for place in sorted(self.what.members))
        opened = pack_parts(c.pack() for c in self.opened)
        return pack_parts([opened, self.what.pack(), self.signatures.pack(), sealed])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> ShareRequest:
        """As it was packed."""
        opened, set_, signatures, sealed = unpack_parts(content, 4)
        what = SetOfRound.unpack(set_)
        members = sorted(what.members)
        if len(sealed) != SEALED_BYTES * len(members):
            raise malformed("a request to open a sum")
        each = [bytes(sealed[at : at + SEALED_BYTES]) for at in range(0, len(sealed), SEALED_BYTES)]
        certificates = tuple(OpenCertificate.unpack(part) for part in unpack_all(opened))
        return cls(certificates, what, Signatures.unpack(signatures), dict(zip(members, each, strict=True)))


@dataclass(frozen=True)
class VoidRequest:
    """An attempt that the server gives up, with proof of earlier ones."""

    at: Attempt
    opened: tuple[OpenCertificate, ...]
    proof: VoidCertificate | None

    def pack(self) -> bytes:
        """As it is sent."""
        proof = b"" if self.proof is None else self.proof.pack()
        return pack_parts([self.at.pack(), pack_parts(c.pack() for c in self.opened), proof])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> VoidRequest:
        """As it was packed."""
        at, opened, proof = unpack_parts(content, 3)
        certificates = tuple(OpenCertificate.unpack(part) for part in unpack_all(opened))
        return cls(Attempt.unpack(at), certificates, VoidCertificate.unpack(proof) if proof else None)
