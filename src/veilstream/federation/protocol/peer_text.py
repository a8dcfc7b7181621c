"""What a peer says, made fit for a terminal or a log: nothing in it can act, and it ends.

Control characters could move a cursor or begin a false line, marks of direction reorder what is
read. `shown` writes all that does not print as escapes.
"""

from __future__ import annotations

_LONGEST = 200


def shown(said: object, longest: int = _LONGEST) -> str:
    """A peer's text with escapes for what does not print, cut to so many characters."""
    text = str(said)
    escaped = "".join(_escaped(letter) for letter in text[: longest + 1])
    return escaped if len(escaped) <= longest else escaped[: longest - 3] + "..."


def _escaped(letter: str) -> str:
    if letter.isprintable():
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")
