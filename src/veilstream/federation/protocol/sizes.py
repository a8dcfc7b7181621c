"""How large messages can be, from the model alone: whoever reads one refuses what is larger before looking at it."""

HEAD_BYTES = 1 << 16
"""A message without its body: names, hashes, settings, a refusal."""


def request_limit(dim: int) -> int:
    """Bytes of the largest request: two models of float32 numbers, a round's and the published one."""
    return HEAD_BYTES + 8 * dim


def reply_limit(dim: int) -> int:
    """Bytes of the largest reply: a prefix of int64 numbers."""
    return HEAD_BYTES + 8 * dim
