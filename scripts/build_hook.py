"""Hatch's build hook: sdist and wheel carry the charts' library and its licence.

An sdist has it, so a wheel that is built from one needs no npm. From a checkout npm fetches it; where it cannot, the
package is built without, and reports draw plainer charts.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ChartsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Fetches the library before files are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatch for every build, also an editable one."""
        path = Path(self.root) / "scripts/fetch_npm.py"
        spec = importlib.util.spec_from_file_location("fetch_npm", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            module.fetch("uplot", Path(self.root))
        except (module.NotFetched, OSError) as error:
            sys.stderr.write(f"veilstream is built without its chart library: {error}\n")
