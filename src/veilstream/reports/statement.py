"""A privacy statement: one page for data-protection officers, signed with the server's key.

It says what a federation promised, with what, to whom, until when, how far learners' ledgers have
come by the server's account, and what the last audit measured. The text is what is signed; the HTML
page shows the same text. Whoever has the server's public key (`server.pub` in every learner's
folder of keys) can check it without this machine.

What a signature proves: the holder of the server's key states this. That the promise holds does
not rest on the server at all: learners enforce it, and whoever doubts it reads their ledgers
(`veilstream ledger verify`) and audits the code (`veilstream audit`).
"""

from __future__ import annotations

import hashlib
import html
import re
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.identity import PrivateKey, PublicKey
from veilstream.files import write_file
from veilstream.plans.released_model import plan_digest
from veilstream.plans.run_folder import Run
from veilstream.plans.run_tables import damaged_table, table_rows
from veilstream.reports.promise_words import promise_of
from veilstream.reports.report_state import audit_of

__all__ = ["Statement", "make_statement", "public_key", "verify_statement", "write_statement"]

_DOMAIN = b"veilstream privacy statement 1\n"
_MARK = "\n---- signature: Ed25519 of all above ----\n"
_WIDTH = 92
_LINK = re.compile("[0-9a-f]{64}")


Parts = list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Statement:
    """What is stated, by whom, and the signature."""

    text: str
    key: str
    """The server's public key, in hexadecimal."""
    signature: str
    parts: Parts
    """The same text as headings and their paragraphs."""

    @property
    def signed_text(self) -> str:
        """As statement.txt holds it."""
        return f"{self.text}{_MARK}key       {self.key}\nsignature {self.signature}\n"


def make_statement(run: Run, key: PrivateKey, *, now: float | None = None) -> Statement:
    """State what a federation's folder says, and sign it.

    Args:
        run: a server's run folder.
        key: the server's identity.
        now: seconds since the epoch; the clock's where it is left out.

    Raises:
        InputError: for a simulation, which protects no one, or a folder that is damaged.

    """
    if "epsilon" not in run.guarantees:
        raise InputError(
            "run", str(run.path), "a federation's run folder",
            "a simulation protects no one, so there is nothing to state; deploy its plan",
        )  # fmt: skip
    parts = _parts(run, time.time() if now is None else now)
    body = "\n\n".join(
        f"{title}\n\n" + "\n".join(_wrapped(line) for line in lines) for title, lines in parts
    )
    text = f"PRIVACY STATEMENT\n{run.plan.name}\n\n{body}\n"
    return Statement(text, key.public.raw.hex(), key.sign(_DOMAIN + text.encode()).hex(), parts)


def verify_statement(content: str, server: PublicKey) -> str:
    """Check a statement.txt against the server's public key; returns the text that was signed.

    Raises:
        ProtocolError: it is no statement, was changed, or another key signed it.

    """
    text, mark, tail = content.partition(_MARK)
    said = dict(line.split(None, 1) for line in tail.splitlines() if len(line.split(None, 1)) == 2)
    try:
        signature = bytes.fromhex(said.get("signature", ""))
    except ValueError:
        signature = b""
    if not mark or set(said) != {"key", "signature"} or len(signature) != 64:
        raise ProtocolError("a file that is no signed statement", "take statement.txt, unchanged")
    if said["key"] != server.raw.hex():
        raise ProtocolError(
            f"a statement of another key ({said['key'][:16]}…, expected {server.raw.hex()[:16]}…)",
            "ask the server's operator which key is theirs",
        )
    if not server.verifies(signature, _DOMAIN + text.encode()):
        raise ProtocolError(
            "a statement whose text is not what was signed", "ask for the original; trust none else"
        )
    return text


def write_statement(run: Run, key: PrivateKey) -> list[Path]:
    """Put statement.txt and statement.html into a run's folder."""
    statement = make_statement(run, key)
    paths = [run.path / "statement.txt", run.path / "statement.html"]
    write_file(paths[0], statement.signed_text)
    write_file(paths[1], _page(statement, run.plan.name))
    return paths


def _parts(run: Run, now: float) -> Parts:
    guarantee, plan = run.guarantees, run.plan
    promise = promise_of(guarantee, simulated=False)
    versions = run.versions
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    parts = [
        (
            "What is promised",
            [f"{promise['symbols']}: {guarantee['unit']}, {guarantee['neighbours']} neighbours.",
             promise["words"]],
        ),
        ("What it rests on", [f"- {line}" for line in promise["rests"]]),
        ("What leaves a learner", [
            "Noisy sums of clipped gradients, and nothing else of any client: no record and no "
            "name. Records stay at the learner; gradients are discarded after one step. The "
            "server sees in which rounds a learner answers.",
        ]),
        ("How far it has come, by the server's account", _heads(run)),
        ("The last audit", _audit(run.path)),
        ("What this is about", [
            f"Plan {plan.name}, SHA-256 {plan_digest(plan)}.",
            f"Run begun {versions.get('began', 'at an unknown time')}, veilstream "
            f"{versions.get('veilstream', 'of an unknown version')}, commit "
            f"{versions.get('commit', 'unknown')}.",
            f"Stated {day}.",
        ]),
    ]  # fmt: skip
    if promise["remarks"]:
        parts.insert(2, ("What a careful reader should know", promise["remarks"]))
    return parts


def _heads(run: Run) -> list[str]:
    """The last message of each learner that the server took, by its hash-chain link."""
    path = run.path / "releases.csv"
    last: dict[str, tuple[str, int, str]] = {}
    for line, row in table_rows(path, ["learner", "epoch", "learner_round", "hash"]):
        if not (row["learner_round"].isdecimal() and _LINK.fullmatch(row["hash"])):
            raise damaged_table(
                path, line, "a round and a whole hash in every row",
                "a server that is started again removes a last line that a kill cut short",
            )  # fmt: skip
        last[row["learner"]] = row["epoch"], int(row["learner_round"]) + 1, row["hash"]
    lines = [
        f"{name}: epoch {epoch}, {rounds} rounds, ledger head {head}"
        for name, (epoch, rounds, head) in sorted(last.items())
    ]
    return lines or ["No learner has sent anything yet."]


def _audit(folder: Path) -> list[str]:
    audit = audit_of(folder)
    if audit is None:
        return [
            "None lies in the run's folder. `veilstream audit --plan plan.toml --out audit` makes "
            "one."
        ]
    paths = (folder / "audit.json", folder / "audit" / "audit.json")
    digest = next(hashlib.sha256(p.read_bytes()).hexdigest() for p in paths if p.exists())
    return [f"{audit['verdict']}.", f"SHA-256 of audit.json: {digest}."]


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


_STYLE = """
html { font: 16px/1.5 ui-serif, Georgia, "Times New Roman", serif; color: #1c1d1f; background: #fff; }
body { max-width: 44rem; margin: 3rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.3rem 0 .3rem; }
p { margin: .25rem 0; overflow-wrap: anywhere; } .of { color: #55595f; margin: 0 0 1.5rem; }
.signature { font: .75rem/1.5 ui-monospace, Menlo, Consolas, monospace; border-top: 1px solid #ccc;
margin-top: 2rem; padding-top: .75rem; overflow-wrap: anywhere; }
@media print { html { font-size: 10.5pt; } body { margin: 0; max-width: none; } }
"""  # noqa: E501


def _page(statement: Statement, name: str) -> str:
    """The same text for people."""
    body = [
        f"<h2>{html.escape(title)}</h2>\n"
        + "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)
        for title, lines in statement.parts
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">"
        f"<title>Privacy statement · {html.escape(name)}</title><style>{_STYLE}</style></head>"
        f'<body><main><h1>Privacy statement</h1><p class="of">{html.escape(name)}</p>\n'
        + "\n".join(body)
        + '\n<p class="signature">Signed with the server’s key (Ed25519)<br>key '
        f"{statement.key}<br>signature {statement.signature}<br>The signature is of "
        "statement.txt beside this page: veilstream report statement.txt --verify server.pub"
        "</p></main></body></html>\n"
    )


def public_key(path: Path) -> PublicKey:
    """A server's public key: `server.pub`, or a folder of keys that has it.

    Raises:
        InputError: it is not there, or is no key.

    """
    found = path / "server.pub" if path.is_dir() else path
    try:
        raw: Any = bytes.fromhex(found.read_text(encoding="ascii").strip())
        return PublicKey(raw)
    except (OSError, ValueError) as error:
        raise InputError(
            "--verify", str(path), "the server's public key, as server.pub of a learner's keys",
            f"{error}; keys/learners/NAME/server.pub is one",
        ) from None  # fmt: skip
