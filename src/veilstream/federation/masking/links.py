"""Who shares a mask with whom, in one list of keys: all pairs, or the graph that the list's learners have drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from veilstream.errors import ProtocolError
from veilstream.federation.masking.statements import HASH_BYTES, KeyList
from veilstream.mask_graph import LISTS, MaskGraph

Set = frozenset[int]


def told_root(private: bytes) -> bytes:
    """What a learner's part of every draw of a run follows from; secret."""
    return HKDFExpand(SHA256(), HASH_BYTES, info=b"veilstream draw").derive(private)


def hashed(content: bytes, times: int) -> bytes:
    """SHA-256 so many times over.

    With its key a learner signs the last of `LISTS` of its root. For list ℓ it tells the one ℓ before that, which
    everybody can check and nobody else could have known.
    """
    for _ in range(times):
        content = hashlib.sha256(content).digest()
    return content


def drawn(keys: KeyList, told: Sequence[bytes]) -> bytes:
    """The seed of a list's graph, from what each of its learners told, by place."""
    if len(told) != len(keys.offers) or not 1 <= keys.number <= LISTS:
        raise ProtocolError("a draw of the graph without every learner's part", "ask those who are missing")
    for offer, part in zip(keys.offers, told, strict=True):
        if len(part) != HASH_BYTES or hashed(part, keys.number) != offer.anchor:
            raise ProtocolError(
                f"a part of the draw that learner {offer.name!r} did not commit to", "the server changed it, or it lies"
            )
    return hashlib.sha256(b"veilstream draw" + keys.digest() + b"".join(told)).digest()


class Links:
    """Of one list of so many learners; ``seed`` draws their places in the graph where there is one."""

    def __init__(self, many: int, graph: MaskGraph | None = None, seed: bytes = b"") -> None:
        self.many, self.graph = many, graph
        if graph is None:
            self._order: list[int] = list(range(many))
            return
        assert graph.learners == many
        assert len(seed) == HASH_BYTES

        def rank(learner: int) -> bytes:
            return hashlib.sha256(seed + learner.to_bytes(4)).digest()

        self._order = sorted(range(many), key=rank)

    @cached_property
    def _places(self) -> list[int]:
        return sorted(range(self.many), key=self._order.__getitem__)

    def near(self, learner: int) -> Set:
        """Its neighbours."""
        if self.graph is None:
            return frozenset(range(self.many)) - {learner}
        at = self._places[learner]
        steps = (sign * offset for offset in self.graph.offsets for sign in (1, -1))
        return frozenset(self._order[(at + step) % self.many] for step in steps)

    def holders(self, learner: int) -> list[int]:
        """Who has a share of its own mask: its neighbours and itself. It has shares of theirs."""
        return sorted(self.near(learner) | {learner})

    @property
    def least(self) -> int:
        """Least size of a set that the graph allows."""
        return 0 if self.graph is None else self.graph.least_set

    def joined(self, members: Set) -> bool:
        """Whether everybody in a set has neighbours enough in it (`mask_graph`: then honest ones are connected)."""
        return self.graph is None or not self.lacking(members)

    def lacking(self, members: Set) -> Set:
        """Who has too few."""
        if self.graph is None:
            return frozenset()
        here = sum(1 << k for k in members)
        return frozenset(k for k in members if (self._near[k] & here).bit_count() < self.graph.least_neighbours)

    @cached_property
    def _near(self) -> list[int]:
        """Each learner's neighbours as bits: a thousand of them are little."""
        return [sum(1 << k for k in self.near(learner)) for learner in range(self.many)]
