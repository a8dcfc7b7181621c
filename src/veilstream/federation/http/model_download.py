"""A released model, fetched from a server's model API over a connection that is checked."""

from __future__ import annotations

import hashlib
import http.client
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError, VeilstreamError
from veilstream.federation.addresses import is_loopback
from veilstream.plans.plan import Plan
from veilstream.runs.released_model import ReleasedModel, plan_digest

_LARGEST = 4 << 30
_EXAMPLE = "try https://fl.example.org:8480"


def fetch_model(
    url: str,
    *,
    ca: Path | None = None,
    round_: int | None = None,
    known: ReleasedModel | None = None,
    timeout_s: float = 60.0,
) -> ReleasedModel:
    """The newest model, or that of a round.

    Args:
        url: the model API's address, or a model there (`/model/17`).
        ca: the certificate authority that vouches for the server (`keys/server/ca.pem`); the
            system's where it is left out.
        round_: which model; the newest where it is left out.
        known: returned if the server's is the same; it is not sent again then.
        timeout_s: how long the server may keep silent.

    Returns:
        The model with its plan and guarantee, as the server states them.

    Raises:
        InputError: an address of another form, or a round that is not done.
        ProtocolError: a certificate that the CA does not vouch for, or an answer that is no model.
        VeilstreamError: the server cannot be reached.

    """
    host, port, path, secure = _parsed(url, round_)
    headers = {"Accept": "application/x-npz"}
    if known is not None:
        headers["If-None-Match"] = _tag(known)
    connection: http.client.HTTPConnection
    if secure:
        context = _trust(ca)
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(_LARGEST + 1)
    except ssl.SSLCertVerificationError as error:
        raise ProtocolError(
            f"the certificate of {host}:{port} ({error.verify_message})",
            "--ca names who vouches for it: keys/server/ca.pem of the server's keys",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise VeilstreamError(f"{url}: {error or type(error).__name__} (is the server up, with --model-api?)") from None
    finally:
        connection.close()
    if answer.status == 304 and known is not None:
        return known
    if answer.status == 404:
        raise InputError("round", round_ or path, "a round whose model is released", "leave it out")
    if answer.status != 200 or len(body) > _LARGEST:
        raise ProtocolError(f"an answer of {host}:{port} with status {answer.status}", "check the address")
    return ReleasedModel.from_bytes(body, url)


def check_plan(model: ReleasedModel, plan: Plan) -> None:
    """Refuse a model of another plan, or one whose stated guarantee is not what the plan gives.

    Raises:
        ProtocolError: it is not of this plan.

    """
    theirs, ours = plan_digest(model.plan), plan_digest(plan)
    if theirs != ours:
        raise ProtocolError(
            f"a model of another plan (digest {theirs[:16]}…, expected {ours[:16]}…)",
            "ask whoever runs the server which plan it is for",
        )
    if not Terms.promises(plan, len(model.model), model.guarantee):
        raise ProtocolError("a model whose stated guarantee is not what its plan gives", "do not trust the server")


def _parsed(url: str, round_: int | None) -> tuple[str, int, str, bool]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or parts.scheme not in ("https", "http") or parts.query or parts.username:
        raise InputError("URL", url, "https://HOST:PORT", _EXAMPLE)
    secure = parts.scheme == "https"
    if not secure and not is_loopback(host):
        raise InputError("URL", url, "https, unless it is on this machine", f"a model may be changed; {_EXAMPLE}")
    match parts.path.strip("/").split("/"):
        case [""]:
            name = "latest"
        case ["model", given]:
            name = given.partition(".")[0]
        case _:
            raise InputError("URL", url, "https://HOST:PORT or …/model/ROUND", _EXAMPLE)
    if round_ is not None and name not in ("latest", str(round_)):
        raise InputError("--round", round_, f"the round in the URL ({name})", "leave one out")
    name = name if round_ is None else str(round_)
    if name != "latest" and not (name.isascii() and name.isdecimal()):
        raise InputError("URL", url, "…/model/latest or …/model/ROUND", _EXAMPLE)
    return host, port or (443 if secure else 80), f"/model/{name}.npz", secure


def _trust(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            "--ca", str(ca), "a file with a certificate (PEM)", f"{error}; keys/server/ca.pem is one"
        ) from None


def _tag(model: ReleasedModel) -> str:
    """As the model API makes it."""
    digest = hashlib.sha256(model.model.astype("<f4").tobytes()).hexdigest()
    return f'"{digest[:32]}-npz"'
