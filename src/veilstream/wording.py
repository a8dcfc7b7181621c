"""Numbers with their nouns, and text that is not ours, as every message writes them."""

from __future__ import annotations

_LONGEST_SHOWN = 200


def counted(number: int, noun: str) -> str:
    """1 row, 2 rows, 0 rows."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(said: object, longest: int = _LONGEST_SHOWN) -> str:
    """A file's or a peer's text for a terminal or a log, cut to so many characters.

    What does not print becomes escapes: control characters move a cursor, and others change the order of letters.
    """
    escaped = "".join(map(_escaped, str(said)[: longest + 1]))
    return escaped if len(escaped) <= longest else escaped[: longest - 3] + "..."


def shown_lines(said: str) -> str:
    """The same for a whole text: nothing is cut, and its lines stay lines."""
    return "".join(letter if letter == "\n" else _escaped(letter) for letter in said)


def hidden(text: str) -> str | None:
    """The first character, other than the end of a line, that does not print as itself, and its line; None: none."""
    for number, line in enumerate(text.split("\n"), 1):
        for letter in line:
            if not letter.isprintable():
                return f"the character U+{ord(letter):04X} in line {number}"
    return None


def _escaped(letter: str) -> str:
    if letter.isprintable():
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")
