"""Functions of one's own that a plan names: "package.module:function", the same on every machine.

The file that holds the function is hashed, and the hash is part of the terms that all sides
compare: two machines with other code under one name do not train together.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veilstream.errors import InputError

__all__ = ["code_hash", "load_function"]


def load_function(key: str, name: str) -> Callable[..., Any]:
    """The function that a plan names.

    Modules are looked for where Python looks, and in the current directory.

    Args:
        key: the plan's key, for errors.
        name: "package.module:function".

    Raises:
        InputError: where it cannot be imported, or is no function.

    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here never stands in for an installed package
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a stranger's module does on import
        raise InputError(
            key, name, "a module that can be imported here",
            f"{type(error).__name__}: {error}; is it installed, or in the current directory?",
        ) from error  # fmt: skip
    found = getattr(module, function_name, None)
    if not callable(found):
        raise InputError(
            key, name, f"a function {function_name} in {module_name}",
            "it has " + (", ".join(_functions(module)) or "none"),
        )  # fmt: skip
    function: Callable[..., Any] = found
    return function


def code_hash(key: str, name: str) -> str:
    """SHA-256 of the file that holds the function."""
    function = load_function(key, name)
    module = sys.modules[name.partition(":")[0]]
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():
        raise InputError(
            key, name, "a module in a file, whose hash all sides compare", "put it into a .py file"
        )
    del function
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _functions(module: Any) -> list[str]:
    return sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:20]
