"""The plans that ship with the package: one per figure of the paper, and the demo."""

from __future__ import annotations

from pathlib import Path

from veilstream.errors import UnknownName

__all__ = ["experiment_path"]


def experiment_path(name: str) -> Path:
    """The plan of this name, in an installed package or in a checkout."""
    package = Path(__file__).parent.parent
    for folder in (package / "_experiments", package.parent.parent / "experiments"):
        if folder.is_dir():
            known = sorted(path.stem for path in folder.glob("*.toml"))
            if name not in known:
                raise UnknownName("experiment", name, known)
            return folder / f"{name}.toml"
    raise UnknownName("experiment", name, [])
