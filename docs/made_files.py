"""Files of docs/ that scripts make: written, or compared with what they would be now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["write_or_check"]


def write_or_check(folder: Path, made: Mapping[str, Callable[[], str]], script: str) -> int:
    """Write each file, or with --check only say which are not current.

    Args:
        folder: where they lie.
        made: their names, and what makes the text of each.
        script: what to run so that they are.

    Returns:
        An exit code: 1 if some file is not current.

    """
    stale = []
    for name, make in made.items():
        path, text = folder / name, make()
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    for name in stale:
        print(f"{name} is not current: python {script}", file=sys.stderr)
    return 1 if stale else 0
