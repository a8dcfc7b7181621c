"""The command line's own parser, without running anything."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():  # typer 0.20 uses names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    import click
    import typer
    from click import UsageError

    from veilstream.cli.app import app

__all__ = ["HELP", "UsageError", "options_of", "parse"]

HELP = app.info.help
"""Of the whole command: what it says first, with the exit codes."""


def _found(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """The command that the first words name, and the words behind it."""
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"no command {name}"
        command, context = found, click.Context(found, parent=context, info_name=name)
    return command, context, words


def parse(words: list[str]) -> None:
    """As the command line would: unknown options, missing ones and extra words are errors."""
    command, context, words = _found(words)
    assert not isinstance(command, click.Group), "a command is missing"
    command.parse_args(context, words)


def options_of(words: list[str]) -> set[str]:
    """All options that the command has which the first words name."""
    command, _, _ = _found(words)
    given = {option for p in command.params for option in (*p.opts, *p.secondary_opts) if "-" in option}
    return given | {"--help"}
