"""Reference pages that are made from the program itself, so that they cannot differ from it.

    python docs/reference_pages.py            write them
    python docs/reference_pages.py --check    exit 1 and name those that are not current

plan-keys.md comes from the tables of a plan, commands.md from the command line, exit-codes.md from
the tree of errors. The suite checks that the pages are current, and that every key has an example
which its own rule accepts.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from made_files import write_or_check

from veilstream import errors
from veilstream.errors import VeilstreamError
from veilstream.plans.plan import Plan
from veilstream.plans.schema import Table

DOCS = Path(__file__).resolve().parent

MADE = "<!-- Made by docs/reference_pages.py from the program itself; change that, then run it. -->"

EXAMPLES: dict[str, Any] = {
    "name": "visits",
    "description": "answers to calls, three stations",
    "learning.rounds": 1000,
    "learning.unbounded": True,
    "learning.local_steps": 4,
    "learning.learners": 20,
    "learning.clients_per_step": 8,
    "learning.clip_norm": 0.5,
    "federation.method": "buffered @ 2",
    "privacy.honest": 5,
    "privacy.colluding": 1,
    "learning.task": "my_model:make_task",
    "learning.ridge": 0.01,
    "learning.projection_radius": 5.0,
    "learning.start": "runs/air",
    "learning.start_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "learning.start_ca": "ca.pem",
    "data.kind": "table",
    "data.source": "records/*.csv",
    "data.query": "SELECT * FROM visits ORDER BY minute",
    "data.key": "id",
    "data.learner": "station",
    "data.client": "person",
    "data.time": "minute",
    "data.label": "answered",
    "data.labels": ["no", "yes"],
    "data.label_range": [0.0, 100.0],
    "data.label_shares": [0.73, 0.27],
    "learning.class_weights": [0.4, 1.0],
    "data.interactions": ["hour * channel"],
    "data.bias": False,
    "data.encode": "my_model:encode",
    "data.features.name": "hour",
    "data.features.low": 0.0,
    "data.features.high": 24.0,
    "data.features.center": 10.0,
    "data.features.scale": 10.0,
    "data.features.vocabulary": ["phone", "mail"],
    "privacy.participations": 5,
    "privacy.min_separation": 100,
    "run.seeds": 3,
    "run.evaluate_every": 50,
    "run.regret": False,
    "federation.epochs": 3,
    "methods.name": "ours",
    "methods.mechanism": "buffered",
    "methods.objective": "published",
    "methods.step_decay": 0.5,
    "methods.epsilon": 1.0,
    "methods.delta": 1e-6,
    "methods.clients_per_step": 4,
}
"""Values where neither a hint nor a rule has one that tells more than the default."""


# --- plan keys -----------------------------------------------------------------------------------


def tables(table: type[Table] = Plan, path: str = "") -> Iterator[tuple[str, type[Table], bool]]:
    """A plan's tables: dotted path, class, and whether it comes several times."""
    for name, entry in table._entries.items():
        if entry.table is not None:
            yield f"{path}{name}", entry.table, entry.array
            yield from tables(entry.table, f"{path}{name}.")


def meanings(table: type[Table]) -> dict[str, str]:
    """What stands below each field of a table's class."""
    (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(table))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            below = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            found[field.target.id] = inspect.cleandoc(str(text.value.value)) if below else ""
    return found


def meaning(entry: Any, documented: str, key: str) -> str:
    """What a key is for: its documentation, else what its hint says of it.

    Raises:
        LookupError: for a key of which nothing is said.

    """
    said = documented or re.sub(r"(^|[;,] )(try|leave it out)\b.*$", "", entry.rule.hint)
    if not said:
        raise LookupError(f"{key}: write what it is for, as a text below the field")
    said = re.sub(r"``(.*?)``", r"`\1`", " ".join(said.split()))
    said = re.sub(r" \(`(veilstream|mechanisms)\.[\w.]+`\)", "", said)  # for readers of the code
    if re.match("[a-z]{2}|a ", said):  # not a symbol
        said = said[0].upper() + said[1:]
    return said + ("" if said.endswith(".") else ".")


def example(entry: Any, key: str) -> Any:
    """A value that the key's own rule accepts.

    Raises:
        LookupError: where none can be told; EXAMPLES is for that.

    """
    if key in EXAMPLES:
        given = EXAMPLES[key]
    elif hinted := re.search(r"\b(?:try|; \w+ =) ([-\d.e]+)$", entry.rule.hint):
        given = entry.kind(float(hinted[1]))
    elif entry.rule.choices:
        other = next((c for c in entry.rule.choices if c != entry.default), None)
        given = [other] if entry.array else other
    elif entry.default not in (MISSING, None):
        given = entry.default
    elif entry.kind in (int, float) and (hinted := re.search(r"\d[\d.e-]*", entry.rule.hint)):
        given = entry.kind(float(hinted[0]))
    else:
        given = None
    if given is None:
        raise LookupError(f"{key}: add an example to EXAMPLES in docs/reference_pages.py")
    entry.accepted(given)
    return given


def kind_in_words(entry: Any) -> str:
    """The type of a key, in TOML's words."""
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return ("array of " if entry.array else "") + names[entry.kind]


def rule_in_words(entry: Any) -> str:
    """What a key's rule asks beyond its type."""
    if entry.rule.choices:
        listed = ", ".join(f"`{json.dumps(choice)}`" for choice in entry.rule.choices)
        return f"that is one of {listed}" + (f", or {entry.rule.shape}" if entry.rule.shape else "")
    if entry.rule.shape:
        return f"of the form: {entry.rule.shape}"
    asked = [f"{sign} {bound:.7g}" for sign, bound in entry.rule.bounds.items()]
    return " and ".join(asked if entry.rule.empty else [*asked, "that is not empty"])


def in_toml(given: Any) -> str:
    """A value as a plan has it."""
    if isinstance(given, list | tuple):
        return f"[{', '.join(in_toml(item) for item in given)}]"
    if isinstance(given, float):
        return re.sub(r"e([+-])0*", r"e\1", repr(given))
    return json.dumps(given, ensure_ascii=False)


def default_in_words(entry: Any) -> str:
    """What holds where the key is left out."""
    if entry.default is MISSING:
        return "must be given"
    return "none" if entry.default is None else f"`{in_toml(entry.default)}`"


def rows(table: type[Table], path: str) -> Iterator[str]:
    """One line of Markdown for each key of a table that holds a value."""
    said = meanings(table)
    for name, entry in table._entries.items():
        if entry.table is not None:
            continue
        key = f"{path}.{name}".removeprefix(".")
        shown = in_toml(example(entry, key))
        kind = f"{kind_in_words(entry)} {rule_in_words(entry)}".strip()
        kind = kind.replace("text of the form: text", "text").replace("text that is one", "one")
        about = f"{meaning(entry, said[name], key)} Example: `{name} = {shown}`"
        cells = (f"`{name}`", kind, default_in_words(entry), about)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def plan_keys() -> str:
    """Every key of a plan."""
    head = "| key | type and rule | default | what it is |\n| --- | --- | --- | --- |"
    page = [
        MADE,
        "",
        "# Plan keys",
        "",
        "A plan is a TOML file: all that a run needs, the same on every machine. Keys that are",
        "not listed here are refused, and so are values outside their rule, with the line, the",
        "rule and a way out. Some keys exclude each other; those errors name both. Greek letters",
        "are those of the paper. Words such as learner, round and step: [glossary](glossary.md).",
        "",
        "## At the top",
        "",
        head,
        *rows(Plan, ""),
    ]
    for path, table, several in tables():
        written = f"[[{path}]]" if several else f"[{path}]"
        about = inspect.cleandoc(table.__doc__ or "").splitlines()[0]
        often = " One for each." if several else ""
        page += ["", f"## `{written}`", "", about + often, "", head, *rows(table, path)]
    return "\n".join(page) + "\n"


# --- commands ------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options."""
    with warnings.catch_warnings():  # typer 0.20 uses names that click 8.5 deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        import typer

        from veilstream.cli.app import app

        root = typer.main.get_command(app)
    page = [
        MADE,
        "",
        "# Commands",
        "",
        "`veilstream X` where the package is installed, `./run X` in a clone. Results go to",
        "stdout, progress to stderr; `--json` gives results to programs.",
        "[Exit codes](exit-codes.md) are the same for all.",
    ]
    page += [line for name in root.commands for line in _command(root.commands[name], name)]
    return "\n".join(page) + "\n"


def _command(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for inner in command.commands:
            yield from _command(command.commands[inner], f"{name} {inner}")
        return
    yield from ("", f"## veilstream {name}", "", _markdown(command.help or ""))
    given = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    if given:
        yield from ("", "| argument | default | what it is |", "| --- | --- | --- |")
    for parameter in given:
        if parameter.param_type_name == "argument":
            shown = f"`{parameter.human_readable_name}`"
        else:
            shown = ", ".join(f"`{opt}`" for opt in [*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        plain = isinstance(default, str | int | float) and not isinstance(default, bool)
        stands = f"`{default}`" if plain else ("required" if parameter.required else "")
        said = _one_line(getattr(parameter, "help", None) or "")
        yield f"| {shown} | {stands} | {said} |".replace("|  |", "| |")


def _markdown(text: str) -> str:
    return "\n".join(line.rstrip() for line in inspect.cleandoc(text.replace("\b", "")).splitlines())


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- exit codes ----------------------------------------------------------------------------------


def exit_codes() -> str:
    """Every exit code, with the errors that end a command with it."""
    about: dict[str, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.search(r"(\w+)(?: \(\w+\))?\s+exit (\d+)\s*(.*)$", line):
            about[found[1]] = found[3]
    page = [
        MADE,
        "",
        "# Exit codes",
        "",
        "Part of the public interface: scripts and units may rely on them. Whatever ends a",
        "command on purpose is one line on stderr and one of these codes; in Python it is the",
        "error beside it, under `vs.errors`.",
        "",
        "| code | error | when |",
        "| ---: | --- | --- |",
        "| 0 | | done |",
    ]
    for error in sorted(_tree(VeilstreamError), key=lambda e: (e.exit_code, e.__name__)):
        when = about.get(error.__name__, "")
        when = when or "any other error that is veilstream's own"
        page.append(f"| {error.exit_code} | `{error.__name__}` | {when} |")
    page.append("| 130 | | interrupted (Ctrl-C) |")
    return "\n".join(page) + "\n"


def _tree(error: type[VeilstreamError]) -> Iterator[type[VeilstreamError]]:
    """Those of `veilstream.errors`; errors of other modules are kinds of these."""
    yield error
    for inner in error.__subclasses__():
        if inner.__module__ == errors.__name__:
            yield from _tree(inner)


PAGES = {"plan-keys.md": plan_keys, "commands.md": commands, "exit-codes.md": exit_codes}


def main() -> int:
    """Write the pages, or say which are not current."""
    return write_or_check(DOCS, PAGES, "docs/reference_pages.py")


if __name__ == "__main__":
    raise SystemExit(main())
