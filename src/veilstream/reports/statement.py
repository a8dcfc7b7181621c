"""A privacy statement: one page for data-protection officers, signed with the server's key.

The signature proves that the holder of the server's key states this; anyone with `server.pub` can check it. The
promise itself does not rest on the server: learners enforce it. To check that, read their ledgers
(`veilstream ledger verify`) and audit the code (`veilstream audit`).
"""

from __future__ import annotations

import html
import re
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import PublicKey, ServerKeys
from veilstream.federation.server.checkpoint import RunHead
from veilstream.files import write_file
from veilstream.reports.promise import promise_of
from veilstream.reports.provenance import audit_of
from veilstream.runs.folder import Run
from veilstream.runs.released_model import plan_digest
from veilstream.runs.tables import damaged, table_rows

_DOMAIN = b"veilstream privacy statement 1\n"
_MARK = "\n---- signature: Ed25519 of all above ----\n"
_TAIL = re.compile(r"key +(?P<key>[0-9a-f]{64})\nsignature (?P<signature>[0-9a-f]{128})\n")
_WIDTH = 92
_LINK = re.compile("[0-9a-f]{64}")


Parts = list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Statement:
    """A signed text."""

    text: str
    key: str  # the server's public key, in hexadecimal
    signature: str
    parts: Parts  # the same text as headings and their paragraphs

    @property
    def signed_text(self) -> str:
        """The content of statement.txt."""
        return _signed_text(self.text, self.key, self.signature)


def _signed_text(text: str, key: str, signature: str) -> str:
    return f"{text}{_MARK}key       {key}\nsignature {signature}\n"


def make_statement(run: Run, keys: ServerKeys, *, now: float | None = None) -> Statement:
    """State what a federation's folder says, and sign it.

    Guarantees: the stated promise is computed again from the plan; run and ledger heads are those
    of the server's checkpoint, and the list of releases has them too.
    """
    if not run.is_federation:
        raise InputError(
            "run",
            str(run.path),
            "a federation's run folder",
            "a simulation protects no one, so there is nothing to state: deploy its plan",
        )
    head = RunHead.load(run.path)
    _check_folder(run, head)
    if not any(seat.name in keys.learners for seat in head.seats):
        raise InputError(
            "keys",
            str(keys.path),
            f"the keys of this run's server, with its learners ({', '.join(seat.name for seat in head.seats[:8])})",
            "none of them is there: name the folder that the server was started with",
        )
    key = keys.identity
    parts = _parts(run, head, time.time() if now is None else now)
    body = "\n\n".join(f"{title}\n\n" + "\n".join(_wrapped(line) for line in lines) for title, lines in parts)
    text = f"PRIVACY STATEMENT\n{run.plan.name}\n\n{body}\n"
    return Statement(text, key.public.raw.hex(), key.sign(_DOMAIN + text.encode()).hex(), parts)


def verify_statement(content: str, server: PublicKey) -> str:
    """Check a statement.txt against the server's public key; returns the text that was signed.

    Guarantees: the whole file is what `Statement.signed_text` gives for the text returned; ends of
    lines may have been changed to CRLF on the way, nothing else.
    """
    content = content.replace("\r\n", "\n")
    text, _, tail = content.rpartition(_MARK)
    said = _TAIL.fullmatch(tail)
    # All of the file, to the byte: nothing may stand beside what was signed.
    if said is None or content != _signed_text(text, said["key"], said["signature"]):
        raise ProtocolError("a file that is no signed statement", "take statement.txt, unchanged")
    if said["key"] != server.raw.hex():
        raise ProtocolError(
            f"a statement of another key ({said['key'][:16]}…, expected {server.raw.hex()[:16]}…)",
            "ask the server's operator which key is theirs",
        )
    signature = bytes.fromhex(said["signature"])
    if not server.verifies(signature, _DOMAIN + text.encode()):
        raise ProtocolError("a statement whose text is not what was signed", "ask for the original; trust none else")
    return text


def write_statement(run: Run, keys: ServerKeys) -> list[Path]:
    """Put statement.txt and statement.html into a run's folder; errors as of `make_statement`."""
    statement = make_statement(run, keys)
    paths = [run.path / "statement.txt", run.path / "statement.html"]
    write_file(paths[0], statement.signed_text)
    write_file(paths[1], _page(statement, run.plan.name))
    return paths


def _parts(run: Run, head: RunHead, now: float) -> Parts:
    guarantee, plan = run.guarantee, run.plan
    promise = promise_of(guarantee, simulated=False)
    versions = run.versions
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    parts = [
        (
            "What is promised",
            [f"{promise['symbols']}: {guarantee.unit}, {guarantee.neighbours.value} neighbours.", promise["words"]],
        ),
        ("What it rests on", [f"- {line}" for line in promise["rests"]]),
        ("What leaves a learner", [" ".join(promise["leaves"])]),
        ("What is not covered", [f"- {line}" for line in promise["uncovered"]]),
        ("How far it has come, by the server's account", _heads(run, head)),
        ("The last audit", _audit(run)),
        (
            "Plan and run",
            [
                f"Plan {plan.name}, SHA-256 {plan_digest(plan)}.",
                f"Run {head.run}, started {versions.get('began', 'at an unknown time')}, veilstream "
                f"{versions.get('veilstream', 'of an unknown version')}, commit "
                f"{versions.get('commit', 'unknown')}.",
                f"Stated {day}.",
            ],
        ),
    ]
    if promise["remarks"]:
        parts.insert(2, ("What a careful reader should know", promise["remarks"]))
    return parts


def _check_folder(run: Run, head: RunHead) -> None:
    if not Terms.promises(run.plan, head.dim, run.guarantees):
        raise InputError(
            "run",
            str(run.path / "guarantee.json"),
            "the guarantee that plan.toml gives",
            "one of the two was changed, or another version wrote them: restore them, or state it with that version",
        )
    if not run.finished:
        return
    summary = run.federation
    if (summary.run, summary.rounds, summary.guarantee) != (head.run, head.round, run.guarantee):
        raise InputError(
            "run",
            str(run.path / "summary.json"),
            f"the summary of run {head.run} after {head.round} rounds, as checkpoint.bin has it",
            "restore the whole folder from one copy",
        )


def _heads(run: Run, head: RunHead) -> list[str]:
    """Each learner's last accepted message, by its hash-chain link, in checkpoint and list of releases."""
    listed = _listed_releases(run.path / "releases.csv")
    lines = [f"{head.round:,} rounds are done."]
    for seat in sorted(head.seats, key=lambda seat: seat.name):
        if seat.accepted is None:
            sent_before = any(name == seat.name for name, _, _, _ in listed)
            new_epoch = f"epoch {seat.epoch}, no message in it yet"
            lines.append(f"{seat.name}: {new_epoch if sent_before else 'has never sent anything'}.")
            continue
        round_, link = seat.accepted
        if (seat.name, seat.epoch, round_, link) not in listed:
            raise InputError(
                "run",
                str(run.path / "releases.csv"),
                f"{seat.name}'s round {round_} of epoch {seat.epoch}, which checkpoint.bin has as accepted",
                "restore the whole folder from one copy",
            )
        excluded = {"held": "; left out for now", "void": "; left out for good"}
        lines.append(
            f"{seat.name}: epoch {seat.epoch}, {round_ + 1} rounds, ledger head {link}{excluded.get(seat.state, '')}"
        )
    return lines


_Releases = set[tuple[str, int, int, str]]


def _listed_releases(path: Path) -> _Releases:
    found: _Releases = set()
    for line, row in table_rows(path, ["learner", "epoch", "learner_round", "hash"]):
        numbers = row["epoch"].isdecimal() and row["learner_round"].isdecimal()
        if not (numbers and _LINK.fullmatch(row["hash"])):
            raise damaged(
                path,
                line,
                "an epoch, a round and a whole hash in every row",
                "if a kill cut the last line short, starting the server again removes it",
            )
        found.add((row["learner"], int(row["epoch"]), int(row["learner_round"]), row["hash"]))
    return found


def _audit(run: Run) -> list[str]:
    audit = audit_of(run)
    again = "`veilstream audit --plan plan.toml --out audit` in the run's folder makes one."
    if audit is None:
        return [f"There is none in the run's folder. {again}"]
    if not audit["of_this_plan"]:
        digest = audit["plan_sha256"]
        whose = f"is for another plan ({digest})" if digest else "does not say which plan it is for"
        return [f"The one in the run's folder {whose}, so it says nothing about this run. {again}"]
    return [
        f"{audit['verdict']}.",
        f"Made {audit['made']}, for this plan{audit['reduction']}, from {audit['runs']:,} runs with a canary; each "
        f"bound holds with probability {audit['confidence']:.0%}. It ran the learners' code "
        "on the auditor's machine, not the learners themselves.",
        "It cannot see:",
        *(f"- {line}" for line in audit["cannot_see"]),
        f"SHA-256 of audit.json: {audit['file_sha256']}.",
    ]


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


_STYLE = """
html { font: 16px/1.5 ui-serif, Georgia, "Times New Roman", serif; color: #1c1d1f; background: #fff; }
body { max-width: 44rem; margin: 3rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.3rem 0 .3rem; }
p { margin: .25rem 0; overflow-wrap: anywhere; } .of { color: #55595f; margin: 0 0 1.5rem; }
.signature { font: .75rem/1.5 ui-monospace, Menlo, Consolas, monospace; border-top: 1px solid #ccc;
margin-top: 2rem; padding-top: .75rem; overflow-wrap: anywhere; }
@media print { html { font-size: 10.5pt; } body { margin: 0; max-width: none; } }
"""


def _page(statement: Statement, name: str) -> str:
    body = [
        f"<h2>{html.escape(title)}</h2>\n" + "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)
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
        f"{statement.key}<br>signature {statement.signature}<br>It signs "
        "statement.txt beside this page: veilstream report statement.txt --verify server.pub"
        "</p></main></body></html>\n"
    )


def public_key(path: Path) -> PublicKey:
    """A server's public key: `server.pub`, or a folder of keys with it."""
    found = path / "server.pub" if path.is_dir() else path
    try:
        raw: Any = bytes.fromhex(found.read_text(encoding="ascii").strip())
        return PublicKey(raw)
    except (OSError, ValueError) as error:
        raise InputError(
            "--verify",
            str(path),
            "the server's public key, as server.pub of a learner's keys",
            f"{error}; keys/learners/NAME/server.pub is one",
        ) from None
