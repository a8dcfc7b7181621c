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

from veilstream.deployment.terms import Terms, causes, differences
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import PublicKey, ServerKeys
from veilstream.federation.server.checkpoint import RunHead, stored_message
from veilstream.federation.server.enrolments import ENROLMENTS, verified_enrolments
from veilstream.files import write_file
from veilstream.reports.promise import promise_of
from veilstream.reports.provenance import audit_of
from veilstream.runs.folder import Run
from veilstream.runs.released_model import plan_digest
from veilstream.runs.tables import changed_settings, damaged, table_rows
from veilstream.wording import hidden, shown

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

    Guarantees: the stated promise is computed again from the plan, and its terms are those that every
    learner signed when it enrolled in this run, that the server's checkpoint names, and on whose grid the
    stored messages lie; run and ledger heads are those of the checkpoint, and the list of releases has
    them too. A folder in which one of these does not fit is refused (`InputError`).
    """
    if not run.is_federation:
        raise InputError(
            "run",
            str(run.path),
            "a federation's run folder",
            "a simulation protects no one, so there is nothing to state: deploy its plan",
        )
    head = RunHead.load(run.path)
    if not any(seat.name in keys.learners for seat in head.seats):
        raise InputError(
            "keys",
            str(keys.path),
            f"the keys of this run's server, with its learners ({', '.join(seat.name for seat in head.seats[:8])})",
            "none of them is there: name the folder that the server was started with",
        )
    agreed = _check_folder(run, head, keys)
    key = keys.identity
    parts = _parts(run, head, agreed, keys, time.time() if now is None else now)
    body = "\n\n".join(f"{title}\n\n" + "\n".join(_wrapped(line) for line in lines) for title, lines in parts)
    text = f"PRIVACY STATEMENT\n{run.plan.name}\n\n{body}\n"
    if (found := hidden(text)) is not None:
        raise InputError(
            "run",
            str(run.path),
            f"text that shows as it is, not {found}",
            "a name, the audit or versions.json in this folder has it; such characters can make a signed text look "
            "like another",
        )
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
    if (found := hidden(text)) is not None:
        raise ProtocolError(
            f"a signed statement with {found}, which can make it look like another",
            "it is not shown; ask the server's operator for one without such characters",
        )
    return text


def write_statement(run: Run, keys: ServerKeys) -> list[Path]:
    """Put statement.txt and statement.html into a run's folder; errors as of `make_statement`."""
    statement = make_statement(run, keys)
    paths = [run.path / "statement.txt", run.path / "statement.html"]
    write_file(paths[0], statement.signed_text)
    write_file(paths[1], _page(statement, run.plan.name))
    return paths


def _parts(run: Run, head: RunHead, agreed: list[str], keys: ServerKeys, now: float) -> Parts:
    guarantee, plan = run.guarantee, run.plan
    promise = promise_of(guarantee, simulated=False)
    versions = _versions(run)
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    parts = [
        (
            "What is promised",
            [f"{promise['symbols']}: {guarantee.unit}, {guarantee.neighbours.value} neighbours.", promise["words"]],
        ),
        ("What it rests on", [f"- {line}" for line in promise["rests"]]),
        ("What leaves a learner", [" ".join(promise["leaves"])]),
        ("What is not covered", [f"- {line}" for line in promise["uncovered"]]),
        ("Who has agreed to it", agreed),
        ("How far it has come, by the server's account", _heads(run, head, keys)),
        ("The last audit", _audit(run)),
        (
            "Plan and run",
            [
                f"Plan {plan.name}, SHA-256 {plan_digest(plan)}.",
                *(
                    f"Changed between two starts, and no part of the terms: {line}."
                    for line in changed_settings(run.path)
                ),
                f"Terms, SHA-256 {head.terms}.",
                f"Run {head.run}, started {versions['began']}, veilstream {versions['veilstream']}, commit "
                f"{versions['commit']}, as versions.json says.",
                f"Stated {day}.",
            ],
        ),
    ]
    if promise["remarks"]:
        parts.insert(2, ("What a careful reader should know", promise["remarks"]))
    return parts


def _check_folder(run: Run, head: RunHead, keys: ServerKeys) -> list[str]:
    """Refuse a folder whose files do not fit each other; returns what is said about enrolments."""
    if not head.terms:
        raise InputError(
            "run",
            str(run.path / "checkpoint.bin"),
            "a checkpoint that names the terms of its run",
            "an earlier version wrote it, and what ran cannot be checked: state it with that version; if the run "
            "is not over, start its server again, so that learners enrol again",
        )
    plan = run.plan
    if not Terms.promises(plan, head.dim, run.guarantees):
        raise InputError(
            "run",
            str(run.path / "guarantee.json"),
            "the guarantee that plan.toml gives",
            "one of the two was changed, or another version wrote them: restore them, or state it with that version",
        )
    terms = Terms.of(plan, head.dim)
    agreed = _agreed(run, head, terms.settings, keys)
    if head.terms != terms.settings["digest"]:
        raise InputError(
            "run",
            str(run.path / "checkpoint.bin"),
            f"the terms that plan.toml gives (digest {terms.settings['digest'][:16]}…, not {head.terms[:16]}…)",
            _ONE_COPY,
        )
    _check_messages(run, head, terms)
    if run.finished:
        summary = run.federation
        if (summary.run, summary.rounds, summary.guarantee) != (head.run, head.round, run.guarantee):
            raise InputError(
                "run",
                str(run.path / "summary.json"),
                f"the summary of run {head.run} after {head.round} rounds, as checkpoint.bin has it",
                "restore the whole folder from one copy",
            )
    return agreed


_ONE_COPY = (
    "one of them was changed, or another version of veilstream, NumPy or SciPy made other numbers: restore the whole "
    "folder from one copy, or state it with the versions in versions.json"
)


def _agreed(run: Run, head: RunHead, settings: dict[str, Any], keys: ServerKeys) -> list[str]:
    """Check what learners signed when they enrolled: this run, and the terms that plan.toml gives."""
    path = run.path / ENROLMENTS
    signed, others = verified_enrolments(run.path, keys.identity.public, keys.learners)
    for (name, epoch), enrolment in signed.items():
        if enrolment.run != head.run:
            raise InputError(
                "run",
                str(path),
                f"enrolments in run {head.run}, as checkpoint.bin calls it; {name} signed epoch {epoch} of another",
                "restore the whole folder from one copy",
            )
        if unlike := differences(enrolment.settings, settings):
            told = ", ".join(f"{shown(k)}: {shown(repr(pair[0]))}" for k, pair in causes(unlike).items())
            raise InputError(
                "run",
                str(run.path / "plan.toml"),
                f"the plan that {name} signed when it enrolled ({shown(told, 400)})",
                _ONE_COPY,
            )
    seats = {seat.name: seat for seat in head.seats}
    needed = {(s.name, s.epoch) for s in head.seats if s.accepted is not None or s.state in ("open", "base")}
    for name, epoch in sorted(needed - set(signed)):
        by_another = (name, epoch) in others
        raise InputError(
            "run",
            str(path),
            f"the enrolment of {name} in epoch {epoch}, signed with its key",
            f"{'the one there is of another key' if by_another else 'it is missing'}: restore the whole folder from "
            "one copy, or name the folder of keys that the server was started with (--keys)",
        )
    for name, epoch in sorted(signed):
        if name not in seats or epoch > seats[name].epoch or seats[name].state == "new":
            raise InputError(
                "run",
                str(run.path / "checkpoint.bin"),
                f"{name} as enrolled in epoch {epoch} or later, which it signed",
                "restore the whole folder from one copy; after a kill, start the server again",
            )
    lines = [
        f"{len(needed)} of {len(head.seats)} learners have enrolled. Each signed these terms with its own key, and "
        "the signatures are verified."
    ]
    earlier = {(name, epoch) for name, epoch, _, _ in _listed_releases(run.path / "releases.csv")}
    lines += [
        f"NOT VERIFIED: {name}'s enrolment in epoch {epoch}, which is over, is missing or of a key that the server no "
        "longer knows."
        for name, epoch in sorted(earlier - set(signed))
    ]
    return lines


def _check_messages(run: Run, head: RunHead, terms: Terms) -> None:
    """Each learner's last message lies on the grid, and has the size and the steps, that the plan's terms give."""
    for index, seat in enumerate(head.seats):
        if seat.accepted is None:
            continue
        try:
            message = stored_message(run.path, head, index)
        except InputError:
            if RunHead.load(run.path) != head:
                raise InputError(
                    "run", str(run.path), "a run that stands still", "its server has closed a round: try again"
                ) from None
            raise
        wanted = {
            "epoch": seat.epoch,
            "grid": terms.grid.step,
            "numbers": terms.release_dim,
            "steps": (message.round + 1) * terms.local_steps,
        }
        found = {"epoch": message.epoch, "grid": message.grid, "numbers": len(message.prefix), "steps": message.steps}
        if unlike := {key: (value, wanted[key]) for key, value in found.items() if value != wanted[key]}:
            told = ", ".join(f"{key} {here:g}, by the plan {plan:g}" for key, (here, plan) in unlike.items())
            raise InputError(
                "run",
                str(run.path / "messages.bin"),
                f"a last message of {seat.name} under the terms of plan.toml ({told})",
                _ONE_COPY,
            )


_VERSIONS = {
    "began": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
    "veilstream": re.compile(r"[0-9A-Za-z.+!-]{1,60}|not installed"),
    "commit": re.compile(r"[0-9a-f]{40}(\+changes)?|not a checkout|unknown"),
}


def _versions(run: Run) -> dict[str, str]:
    """What versions.json says of time and version, where that is what a server writes: nothing else is signed."""
    said = run.versions
    for key, form in _VERSIONS.items():
        if not form.fullmatch(str(said.get(key, ""))):
            raise InputError(
                "run", str(run.path / "versions.json"), f"{key} as the server wrote it", "restore it from a copy"
            )
    return {key: str(said[key]) for key in _VERSIONS}


def _heads(run: Run, head: RunHead, keys: ServerKeys) -> list[str]:
    """Each learner's last accepted message, by its hash-chain link, in checkpoint and list of releases."""
    if run.plan.trust is not None:
        return _parts_in_sums(run, head, keys)
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


def _parts_in_sums(run: Run, head: RunHead, keys: ServerKeys) -> list[str]:
    """Of each learner, how many opened sums it was part of, by the certificates that learners signed."""
    from veilstream.reports.opened_sums import opened_sums  # with ciphers, which other runs do not need

    sums = opened_sums(run, head, keys)
    lines = [
        f"{head.round:,} rounds are done. Of each, one sum over learners was opened, and no learner's own message was "
        f"ever seen; {len(sums.core)} learners were part of all of them.",
        f"{sums.verified:,} of {head.round:,} certificates are verified: each says whose increments a sum was of, "
        f"signed by at least {sums.threshold} learners who opened it.",
    ]
    return [*lines, *(f"{seat.name}: part of {sums.parts[seat.name]:,} sums." for seat in head.seats)]


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
    told = {key: audit["claimed"].get(key) for key in ("epsilon", "delta")}
    if told != {"epsilon": run.guarantee.epsilon, "delta": run.guarantee.delta}:
        raise InputError(
            "run",
            "audit.json",
            f"an audit of the promise of this run ({run.guarantee.epsilon:g}, {run.guarantee.delta:g})",
            "it was changed, or is of another run: audit again, or remove it",
        )
    return [
        "What audit.json in the run's folder says; nobody has signed that file:",
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
