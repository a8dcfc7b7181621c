"""What the commands of a federation have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veilstream.errors import InputError
from veilstream.federation.logs import Format, Level

PlanFile = Annotated[Path, typer.Option("--plan", help="The plan, the same on every machine.")]
TrustCarrier = Annotated[
    bool,
    typer.Option(
        "--trust-carrier", help="Let the Flower process run under the learner's own account, where it can read all."
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Loopback only: without TLS (Flower keeps its own).")]


LogLevel = Annotated[Level, typer.Option("--log-level", help="The least important lines to show on stderr.")]
LogFormat = Annotated[Format, typer.Option("--log-format", help="Lines as text, or as one JSON object each.")]


def parse_address(option: str, text: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise InputError(option, text, "HOST:PORT", "try 127.0.0.1:8400")
    return host.strip("[]"), int(port)
