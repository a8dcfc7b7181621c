"""Renders the few things of Helm's templates that deploy/helm uses, where helm itself is not installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*(-?)\}\}(\s*)", re.DOTALL)
_PIPES = {"toJson": lambda value: json.dumps(value, separators=(",", ":")), "last": lambda value: value[-1]}


def rendered(chart: Path, values: dict[str, Any], release: str) -> list[dict[str, Any]]:
    """The chart's manifests with these values over its own."""
    root = {"Values": _over(yaml.safe_load((chart / "values.yaml").read_text()), values), "Release": {"Name": release}}
    found = []
    for template in sorted((chart / "templates").glob("*.yaml")):
        pieces = list(_pieces(template.read_text()))
        text = _block(iter(pieces), root, root)
        found += [document for document in yaml.safe_load_all(text) if document]
    return found


def _over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _over(below.get(key), value) for key, value in above.items()}
    return above


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    for match in _ACTION.finditer(text):
        before, trims, action, trims_after, after = match.groups()
        yield "text", text[at : match.start()] + ("" if trims else before)
        yield "action", action
        yield "text", "" if trims_after else after
        at = match.end()
    yield "text", text[at:]


def _block(pieces: Iterator[tuple[str, str]], dot: Any, root: Any) -> str:
    out = ""
    for kind, content in pieces:
        if kind == "text":
            out += content
        elif content == "end":
            return out
        elif content.startswith("if "):
            inside = list(_until_end(pieces))
            out += _block(iter(inside), dot, root) if _value(content[3:], dot, root) else ""
        elif content.startswith("range "):
            inside = list(_until_end(pieces))
            out += "".join(_block(iter(inside), each, root) for each in _value(content[6:], dot, root))
        else:
            value = _value(content, dot, root)
            out += value if isinstance(value, str) else json.dumps(value)
    return out


def _until_end(pieces: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    depth = 1
    for kind, content in pieces:
        if kind == "action":
            depth += content.startswith(("if ", "range ")) - (content == "end")
            if not depth:
                return
        yield kind, content


def _value(expression: str, dot: Any, root: Any) -> Any:
    path, *pipes = (part.strip() for part in expression.split("|"))
    value = root if path.startswith("$") else dot
    for name in filter(None, path.removeprefix("$").split(".")):
        value = value.get(name)
    for pipe in pipes:
        if pipe.startswith("splitList"):
            value = value.split(json.loads(pipe.split()[1]))
        else:
            value = _PIPES[pipe](value)
    return value
