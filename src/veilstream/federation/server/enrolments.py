"""The learners' enrolments, kept as they were signed: which terms each learner agreed to, in which run.

`enrolments.csv` has a line for each learner and epoch: the server's request and the learner's reply,
whole, in base64. A request names the run and the server's settings; a reply names the hash of its
request, the learner's epoch and the learner's own settings. Whoever has the keys can check both, so
nobody can change what was agreed without a learner's key.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import PublicKey
from veilstream.federation.protocol.messages import Reply, Request, digest
from veilstream.files import write_file
from veilstream.runs.tables import damaged, table_rows

ENROLMENTS = "enrolments.csv"
ENROLMENTS_HEADER = "learner,epoch,request,reply\n"


@dataclass(frozen=True)
class Enrolment:
    """What a learner signed."""

    learner: str
    epoch: int
    run: str
    settings: dict[str, Any]


def enrolment_line(learner: str, epoch: int, request: bytes, reply: bytes) -> str:
    """A line of enrolments.csv."""
    return f"{learner},{epoch},{base64.b64encode(request).decode()},{base64.b64encode(reply).decode()}\n"


def drop_superseded(folder: Path) -> None:
    """Keep the newest line of each learner and epoch: learners enrol again whenever a server is started."""
    path = folder / ENROLMENTS
    rows = list(_rows(path))
    newest = {(learner, epoch): (request, reply) for learner, epoch, request, reply in rows}
    if len(newest) < len(rows):
        lines = [enrolment_line(*who, *messages).encode() for who, messages in newest.items()]
        write_file(path, [ENROLMENTS_HEADER.encode(), *lines])


def verified_enrolments(
    folder: Path, server: PublicKey, learners: Mapping[str, PublicKey]
) -> tuple[dict[tuple[str, int], Enrolment], set[tuple[str, int]]]:
    """The newest enrolment of each learner and epoch.

    Returns:
        Those whose request this server signed, and whose reply the named learner signed as the answer to it; and
        learner and epoch of those that these keys did not sign.

    """
    signed: dict[tuple[str, int], Enrolment] = {}
    others: set[tuple[str, int]] = set()
    for learner, epoch, request, reply in _rows(folder / ENROLMENTS):
        found = _verified(learner, epoch, request, reply, server, learners)
        signed.pop((learner, epoch), None)
        others.discard((learner, epoch))
        if found is None:
            others.add((learner, epoch))
        else:
            signed[learner, epoch] = found
    return signed, others


def _verified(
    learner: str, epoch: int, request: bytes, reply: bytes, server: PublicKey, learners: Mapping[str, PublicKey]
) -> Enrolment | None:
    if learner not in learners:
        return None
    try:
        asked, said = Request.read(request, server), Reply.read(reply, learners[learner])
    except ProtocolError:
        return None
    fits = (asked.kind, said.kind, said.learner, said.answers) == ("enrol", "enrolled", learner, digest(request))
    if not fits or said.facts["epoch"] != epoch:
        return None
    return Enrolment(learner, epoch, asked.run, said.facts["settings"])


def _rows(path: Path) -> Iterator[tuple[str, int, bytes, bytes]]:
    if not path.exists():
        raise InputError(
            "run folder",
            str(path),
            "the learners' signed enrolments",
            "put the whole folder back from one copy; a run of an earlier version has none",
        )
    for line, row in table_rows(path, ENROLMENTS_HEADER.strip().split(",")):
        try:
            messages = [base64.b64decode(row[name], validate=True) for name in ("request", "reply")]
            yield row["learner"], int(row["epoch"]), messages[0], messages[1]
        except (ValueError, binascii.Error):
            raise damaged(path, line, "a learner, an epoch and two messages", "restore the file") from None
