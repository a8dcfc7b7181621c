"""At which step of an epoch a record is used, if nobody outside the learner may know.

Every client's step is chosen by itself, uniformly among the steps, by HMAC-SHA256 of the client's tag under a
secret of the epoch. So there is no list to keep: the choice is the same after a crash, and for a record that is
offered twice. It is no permutation: in one, whoever knows where all others went knows where the last one is.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError

SECRET_BYTES = 32
_PURPOSE = b"veilstream step of a client\0"
_WORD_BITS = 64
_BLOCK_BYTES = 64  # of SHA-256


def chosen_step(secret: bytes, tag: bytes, steps: int) -> int:
    """The step, from 0, at which the client with this tag is used.

    Args:
        secret: of the epoch, 32 bytes from the operating system; in simulation made from a seed.
        tag: the client's tag in its one form (`veilstream.records.client_names`), as bytes.
        steps: how many steps the epoch has.

    Returns:
        Each step with the same probability, to the last bit, if the HMAC's bits are independent and uniform.

    """
    return int(chosen_steps(secret, [tag], steps)[0])


def chosen_steps(secret: bytes, tags: Sequence[bytes], steps: int) -> NDArray[np.int64]:
    """`chosen_step` of each of these clients."""
    if len(secret) != SECRET_BYTES:
        raise InputError("secret", f"{len(secret)} bytes", f"{SECRET_BYTES} bytes", "draw it anew")
    if not 1 <= steps < 1 << 63:
        raise InputError("steps", steps, "1 to 2^63 - 1", "an epoch has at least one step")
    inner, outer = _keyed_hashes(secret)
    digests = bytearray()
    for tag in tags:
        within, around = inner.copy(), outer.copy()
        within.update(tag)
        around.update(within.digest())
        digests += around.digest()[:8]
    words = np.frombuffer(bytes(digests), ">u8").astype(np.uint64)
    # Words from the last whole multiple of ``steps`` on would make the first steps more likely: drawn again.
    too_large = words > np.uint64((1 << _WORD_BITS) - 1 - (1 << _WORD_BITS) % steps)
    found = (words % np.uint64(steps)).astype(np.int64)
    for place in np.flatnonzero(too_large).tolist():
        found[place] = _drawn_again(secret, tags[place], steps)
    return found


def simulated_secret(seed: int, learner: int) -> bytes:
    """A learner's secret in a simulation; it protects nobody, and no deployed learner can be given it."""
    return hashlib.sha256(b"veilstream simulated order\0" + repr((int(seed), int(learner))).encode()).digest()


def simulated_tag(position: int) -> bytes:
    """The tag of the record that a simulated learner would meet at this place, from 0, in a known order."""
    return b"simulated record %d" % position


def _drawn_again(secret: bytes, tag: bytes, steps: int) -> int:
    limit = (1 << _WORD_BITS) - (1 << _WORD_BITS) % steps
    digest = hmac.digest(secret, _PURPOSE + tag, "sha256")
    while (word := int.from_bytes(digest[:8], "big")) >= limit:
        digest = hmac.digest(secret, digest, "sha256")
    return word % steps


def _keyed_hashes(secret: bytes) -> tuple[hashlib._Hash, hashlib._Hash]:
    """HMAC's two hashes with the key in them (RFC 2104), which are copied for each tag: half the work."""
    key = secret.ljust(_BLOCK_BYTES, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key))
    inner.update(_PURPOSE)
    return inner, hashlib.sha256(bytes(byte ^ 0x5C for byte in key))
