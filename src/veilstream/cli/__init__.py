"""The command `veilstream`."""

from veilstream.cli.app import main

__all__ = ["main"]
