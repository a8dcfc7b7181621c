"""Results as they are stored in docs/results: the figures, with command, date and machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

__all__ = ["machine", "store"]


def machine() -> str:
    """This machine in words."""
    about = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", about.read_text()) if about.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def store(path: Path, command: str, figures: dict[str, Any], where: str = "") -> None:
    """Write a file of docs/results.

    Args:
        path: of the file.
        command: that makes it again.
        figures: numbers and lists of them, in the units that their names say.
        where: a remark on the machine, as that others used it too.

    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {"command": command, "date": today, "machine": f"{machine()}{where}"}
    path.write_text(json.dumps(head | figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
