"""One command, `veilstream`: results on stdout, progress on stderr, documented exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, NoReturn

import click
import typer

from veilstream import __version__
from veilstream.cli import audit, data, federation, keys, ledger, model, plan
from veilstream.cli.learner import learner_command
from veilstream.cli.new import new_command
from veilstream.cli.predict import predict_command
from veilstream.cli.report import compare_command, report_command
from veilstream.cli.run import demo_command, reproduce_command, run_command
from veilstream.cli.server import server_command
from veilstream.errors import MissingExtra, VeilstreamError
from veilstream.wording import shown_lines

app = typer.Typer(
    name="veilstream",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Train one shared model from streams of people's data that stay where they are.

    Start with `veilstream demo`, then `veilstream plan --help`.

    Exit codes: 0 done · 1 other error · 2 a value was refused · 3 a package is missing ·
    4 going on would break the privacy promise · 5 a solver did not converge ·
    6 another process holds the ledger · 7 a message was refused · 8 a disk cannot be written · 130 interrupted.
    """,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"veilstream {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
    ] = False,
) -> None:
    pass


app.command("new")(new_command)
app.command("plan")(plan.command)
app.command("demo")(demo_command)
app.command("run")(run_command)
app.command("reproduce")(reproduce_command)
app.command("report")(report_command)
app.command("compare")(compare_command)
app.command("predict")(predict_command)
app.command("audit")(audit.command)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(federation.app, name="federation")
app.command("server")(server_command)
app.command("learner")(learner_command)
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")


_EXTRAS = {
    "jax": "jax",
    "jaxlib": "jax",
    "matplotlib": "figures",
    "torch": "torch",
    "flwr": "flower",
    "onnx": "export",
    "safetensors": "export",
    "sklearn": "export",
}
"""Which extra brings a package that a command may lack."""


def main() -> None:
    """Run the command; deliberate errors become one clear line and a documented exit code."""
    warnings.showwarning = _say_warning
    os.umask(os.umask(0o077) & 0o077 | 0o022)  # folders are for their owner to write to, whatever it was
    try:
        code = app(standalone_mode=False) or 0  # typer turns Ctrl-C into the number 130
    except VeilstreamError as error:
        _leave(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name is None or (package := error.name.split(".")[0]) not in _EXTRAS:
            raise
        missing = MissingExtra(package, _EXTRAS[package], "this command")
        _leave(str(missing), missing.exit_code)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _leave("interrupted; nothing half-written was left", 130)
    except BrokenPipeError:
        # The reader of our output has closed it; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _leave("not enough memory for this; try fewer rounds or a smaller dim", 1)
    except OSError as error:
        _leave(str(error), 1)
    if code == 130:
        _leave("interrupted; nothing half-written was left", 130)
    sys.exit(code)


def _leave(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"veilstream: {shown_lines(message)}\n")
    sys.exit(code)


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    sys.stderr.write(f"veilstream: {shown_lines(str(message))}\n")
