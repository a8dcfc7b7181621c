"""Which sums a run's server opened, by the certificates in its folder, each of them verified."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import ServerKeys
from veilstream.federation.keys.peers import PeerCertificates
from veilstream.federation.masking.links import Links, drawn
from veilstream.federation.masking.requests import KeysRequest, run_on_terms
from veilstream.federation.masking.rules import Rules
from veilstream.federation.masking.statements import KeyList, OpenCertificate
from veilstream.federation.server.checkpoint import RunHead
from veilstream.federation.server.masking_files import KEYS, OPENINGS, MaskingFiles
from veilstream.mask_graph import mask_graph
from veilstream.privacy.guarantee import SumTrust
from veilstream.runs.folder import Run
from veilstream.runs.tables import table_rows

_WHOLE = "restore the whole folder from one copy"


@dataclass(frozen=True)
class OpenedSums:
    """What the certificates say."""

    verified: int
    threshold: int
    """Signatures that each has at least."""
    core: frozenset[str]
    """Learners of every sum."""
    parts: Counter[str]
    """By learner: sums that it was part of."""


def opened_sums(run: Run, head: RunHead, keys: ServerKeys) -> OpenedSums:
    """Verify a certificate for each round that is done.

    Guarantees: each has the signatures of as many learners as open a sum, made with keys that the server knows them by
    (or that the CA has certified, of learners that were removed), over one set of learners in this run under the
    plan's terms; sets and cores are as large as the plan says, and sets are those that releases.csv lists. No round has
    certificates of two sets, and none is there of a round that has not begun.

    Raises:
        InputError: a certificate is missing, or not what it should be; it names the round.

    """
    trust, files = run.plan.trust, MaskingFiles(run.path)
    assert trust is not None
    rules = Rules(trust.learners, trust.honest, trust.colluding)
    path, openings, kept = run.path / OPENINGS, files.openings(), files.keys()
    _check_none_beyond(run, head, openings)
    if not head.round:
        return OpenedSums(0, rules.threshold, frozenset(), Counter())
    if kept is None:
        raise InputError("run", str(run.path / KEYS), "the run's list of keys", _WHOLE)
    listed, identities = _keys(run, head, keys, kept)
    rules = dataclasses.replace(rules, links=_links(run, listed, kept, trust))
    digest, core = listed.digest(), frozenset(range(len(listed.names)))
    parts: Counter[str] = Counter()
    releases = _listed(run.path / "releases.csv")
    for r in range(head.round):
        if r not in openings:
            raise InputError("run", str(path), f"a certificate of every round; round {r} has none", _WHOLE)
        why = _wrong(openings[r], r, digest, core, rules, identities)
        if why is None:
            core &= openings[r].opened.members
            names = {listed.names[place] for place in openings[r].opened.members}
            parts.update(names)
            proof = hashlib.sha256(openings[r].opened.pack()).hexdigest()
            if releases[r] != {(name, proof) for name in names}:
                why = "it is of another set than releases.csv lists"
        if why is not None:
            raise InputError("run", str(path), f"a certificate of round {r} that holds: {why}", _WHOLE)
    return OpenedSums(head.round, rules.threshold, frozenset(listed.names[place] for place in core), parts)


def _check_none_beyond(run: Run, head: RunHead, openings: Mapping[int, OpenCertificate]) -> None:
    """A kill may leave a certificate of the round that was under way, and none of a later one."""
    newest = max(openings, default=0)
    if newest <= head.round:
        return
    if RunHead.load(run.path) != head:
        raise InputError("run", str(run.path), "a run that stands still", "its server has closed a round: try again")
    rule = (
        f"certificates of the rounds up to {head.round}, which checkpoint.bin has begun; it has one of round {newest}"
    )
    raise InputError("run", str(run.path / OPENINGS), rule, _WHOLE)


def _links(run: Run, listed: KeyList, kept: KeysRequest, trust: SumTrust) -> Links:
    """Who shares masks with whom: all pairs, or the graph that follows from what every learner told."""
    many = len(listed.offers)
    graph = mask_graph(many, trust.colluding)
    try:
        return Links(many, graph, b"" if graph is None else drawn(listed, kept.told))
    except ProtocolError as error:
        raise InputError("run", str(run.path / KEYS), f"the draw of its learners' graph ({error})", _WHOLE) from error


def _keys(run: Run, head: RunHead, keys: ServerKeys, kept: KeysRequest) -> tuple[KeyList, list[bytes]]:
    """The list of keys, which each of its learners signed for this run and the plan's terms; and who they are."""
    path = str(run.path / KEYS)
    try:
        listed = KeyList.unpack(kept.keys)
        known = {name: key.raw for name, key in keys.learners.items()}
        removed = [c for name, c in zip(listed.names, kept.certificates, strict=False) if name not in known]
        if removed and keys.path is not None:
            began = datetime.datetime.fromisoformat(str(run.versions["began"]))
            known |= PeerCertificates(keys.path).identities(removed, began)
        listed.check(known, run.plan.learning.learners)
    except ProtocolError as error:
        raise InputError("run", path, f"the list of keys that learners signed ({error})", _WHOLE) from error
    if listed.run != run_on_terms(head.run, Terms.of(run.plan, head.dim).settings):
        raise InputError("run", path, "keys for this run, under the terms that plan.toml gives", _WHOLE)
    return listed, [known[name] for name in listed.names]


def _wrong(
    certificate: OpenCertificate, r: int, digest: bytes, core: frozenset[int], rules: Rules, identities: list[bytes]
) -> str | None:
    """Why it is no proof that round r was opened; None where it is one."""
    what = certificate.opened
    if (what.at.keys, what.at.round) != (digest, r):
        return "it is of another run or round"
    if what.core != core or not all(place < len(identities) for place in what.members):
        return "it says otherwise which learners took part in all rounds before"
    if len(what.members) < rules.least or not rules.enough_core(len(core & what.members)):
        return f"its set of {len(what.members)} learners is too small"
    if not rules.joined(what.members):
        return "its set has learners with too few neighbours in it"
    try:
        signers = certificate.signatures.check(what.open_content(), identities)
    except ProtocolError:
        return "it has signatures that were not made by those whom they name"
    if len(signers) < rules.threshold:
        return f"{len(signers)} learners signed it, where it takes {rules.threshold}"
    return None


def _listed(path: Path) -> defaultdict[int, set[tuple[str, str]]]:
    """By round of the server: who is listed as part of its sum, and the hash of the set."""
    found: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)
    for _, row in table_rows(path, ["learner", "epoch", "learner_round", "hash"]):
        if row["learner_round"].isdecimal():
            found[int(row["learner_round"])].add((row["learner"], row["hash"]))
    return found
