"""The user's directories: where solutions are cached and data sets are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from veilstream.errors import MissingExtra


def user_directory(kind: Literal["cache", "data"]) -> Path:
    """`VEILSTREAM_CACHE` or `VEILSTREAM_DATA` where set, else where the platform wants it."""
    variable = f"VEILSTREAM_{kind.upper()}"
    if named := os.environ.get(variable):
        return Path(named)
    try:
        import platformdirs
    except ImportError as error:
        purpose = f"finding the {kind} directory ({variable} names one)"
        raise MissingExtra("platformdirs", None, purpose) from error
    places = {"cache": platformdirs.user_cache_path, "data": platformdirs.user_data_path}
    return places[kind]("veilstream", False)
