"""Around Flower's processes: what must be installed, where they write, whom they call."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

from veilstream.errors import MissingExtra

__all__ = [
    "address_of",
    "environment",
    "import_quietly",
    "require_flwr",
]


def require_flwr() -> None:
    """Say what to install."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("flwr", "flower", "a federation over Flower")


def import_quietly(module: str) -> Any:
    """One of this folder's modules that import flwr, which warns (of click) on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"veilstream.federation.transports.flower.{module}")


def environment(state: Path) -> dict[str, str]:
    """Flower's processes write in this folder only, fetch nothing and report nothing."""
    return {
        "FLWR_HOME": str(state / "home"), "TMPDIR": str(state),
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_LOG_LEVEL": "WARNING",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def address_of(host: str, port: int) -> str:
    """As it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
