"""The user's own functions that a plan names: "package.module:function", the same on every machine.

The hash of the code is part of the terms that all sides compare. Hashed are the file of a single module, or
every .py file of the outermost package; not other modules that it imports, data files, or what it reads.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veilstream.errors import InputError


def load_function(key: str, name: str) -> Callable[..., Any]:
    """Import the function that a plan names, from where Python looks or from the current directory."""
    module_name, _, function_name = name.partition(":")
    _look_here()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a stranger's module may raise anything
        raise _not_imported(key, name, error) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        raise InputError(
            key,
            name,
            f"a function {function_name} in {module_name}",
            "it has " + (", ".join(_functions(module)) or "none"),
        )
    function: Callable[..., Any] = found
    return function


def code_hash(key: str, name: str) -> str:
    """SHA-256 of the code behind a name, without running it: its file, or its whole package."""
    module_name = name.partition(":")[0]
    _look_here()
    outermost = module_name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(outermost)
        # Only the outermost: for "a.b", `find_spec` would run a/__init__.py.
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    except Exception as error:
        raise _not_imported(key, name, error) from error
    if spec is None:
        raise _not_imported(key, name, ModuleNotFoundError(f"No module named {outermost!r}"))
    content = hashlib.sha256()
    if not folders:
        file = Path(spec.origin or "")
        if not file.is_file() or file.suffix != ".py":
            raise _no_file(key, name)
        content.update(file.read_bytes())
        return content.hexdigest()
    inner = Path(*module_name.split(".")[1:]) if "." in module_name else Path("__init__.py")
    if not any((folder / inner).with_suffix(".py").is_file() or (folder / inner).is_dir() for folder in folders):
        raise _no_file(key, name)
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            text = file.read_bytes()
            content.update(f"{file.relative_to(folder).as_posix()}\0{len(text)}\0".encode() + text)
    return content.hexdigest()


def _look_here() -> None:
    """Search the current directory last, so that it hides no installed package."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()  # a module may just have been written


def _not_imported(key: str, name: str, error: Exception) -> InputError:
    return InputError(
        key,
        name,
        "a module that can be imported here",
        f"{type(error).__name__}: {error}; is it installed, or in the current directory?",
    )


def _no_file(key: str, name: str) -> InputError:
    return InputError(key, name, "a module in a file, whose hash all sides compare", "put it into a .py file")


def _functions(module: Any) -> list[str]:
    return sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))[:20]
