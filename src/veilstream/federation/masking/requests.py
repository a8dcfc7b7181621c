"""Bodies of the server's requests: what a learner needs for each step, without a look at models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from veilstream.federation.masking.statements import (
    HASH_BYTES,
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
    """The run's keys, certificates of those who gave them, and all their parts of a graph's draw, once told."""

    keys: bytes
    certificates: tuple[bytes, ...]
    told: tuple[bytes, ...] = ()
    """By place."""

    def pack(self) -> bytes:
        """As it is sent."""
        return pack_parts([self.keys, b"".join(self.told), *self.certificates])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> KeysRequest:
        """As it was packed."""
        parts = [bytes(part) for part in unpack_all(content)]
        if len(parts) < 2 or len(parts[1]) % HASH_BYTES:
            raise malformed("a list of keys")
        told = tuple(parts[1][at : at + HASH_BYTES] for at in range(0, len(parts[1]), HASH_BYTES))
        return cls(parts[0], tuple(parts[2:]), told)


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
    """A set to be opened; and who has agreed on it, where that comes first."""

    opened: tuple[OpenCertificate, ...]
    what: SetOfRound
    agreed: Signatures | None = None

    def pack(self) -> bytes:
        """As it is sent."""
        agreed = b"" if self.agreed is None else self.agreed.pack()
        return pack_parts([pack_parts(c.pack() for c in self.opened), self.what.pack(), agreed])

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> ShareRequest:
        """As it was packed."""
        opened, what, agreed = unpack_parts(content, 3)
        certificates = tuple(OpenCertificate.unpack(part) for part in unpack_all(opened))
        return cls(certificates, SetOfRound.unpack(what), Signatures.unpack(agreed) if agreed else None)


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
