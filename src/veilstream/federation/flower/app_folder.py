"""The folder that `flwr run` submits: it describes an app whose code is veilstream's."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from veilstream import __version__
from veilstream.errors import InputError
from veilstream.files import write_file

_HERE = "veilstream.federation.flower"


def write_app(folder: Path, *, plan: Path, keys: Path, out: Path, sockets: Path | None = None) -> None:
    """Write an app for one run; ``sockets``, a folder of learners' sockets, is for Flower's simulation only."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError("DIR", str(folder), "a new or empty folder", "name another")
    config = {"plan": plan, "keys": keys, "out": out} | ({"sockets": sockets} if sockets else {})
    app = {
        "project": {
            "name": "veilstream-federation",
            "version": __version__,
            "license": "Apache-2.0",
            "description": "Carries a federation's signed messages between server and learners",
            "dependencies": [],  # veilstream is already installed there; nothing is fetched
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "veilstream",
                    "components": {"serverapp": f"{_HERE}.server_app:app", "clientapp": f"{_HERE}.client_app:app"},
                    "config": {name: str(path.absolute()) for name, path in config.items()},
                }
            }
        },
    }
    write_file(folder / "pyproject.toml", tomli_w.dumps(app))
    write_file(
        folder / "README.md", "Submit with `flwr run`. The SuperLink and the SuperNodes need veilstream installed.\n"
    )
