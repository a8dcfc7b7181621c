"""Fetch a released model from a server's model API."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from veilstream.errors import InputError, ProtocolError
from veilstream.http_client import send_request, server_of
from veilstream.runs.released_model import ReleasedModel, model_sha256

_LARGEST = 4 << 30
_EXAMPLE = "try https://fl.example.org:8480"


def fetch_model(
    url: str, *, ca: Path | None = None, known: ReleasedModel | None = None, timeout_s: float = 60.0
) -> ReleasedModel:
    """The newest model, or the one that the URL names; plan and guarantee are as the server states them."""
    server_of(url)
    name = _model_name(url)
    headers = {"Accept": "application/x-npz"}
    if known is not None:
        headers["If-None-Match"] = f'"{model_sha256(known.model)}-npz"'
    where = urlsplit(url)._replace(path=f"/model/{name}.npz").geturl()
    answer = send_request(where, most_bytes=_LARGEST, headers=headers, ca=ca, timeout_s=timeout_s)
    if answer.status == 304 and known is not None:
        return known
    if answer.status == 404:
        raise InputError("URL", url, "a round whose model is released", "leave the round out for the newest")
    if answer.status != 200:
        raise ProtocolError(f"an answer of {where} with status {answer.status}", "check the address")
    try:
        return ReleasedModel.from_bytes(answer.body, url)
    except InputError as error:
        way_out = "is this the address of a model API? A server logs its own when it starts"
        raise InputError("model", url, error.rule, way_out) from error


def _model_name(url: str) -> str:
    parts = urlsplit(url)
    match parts.path.strip("/").split("/"):
        case [""]:
            name = "latest"
        case ["model", given]:
            name = given.partition(".")[0]
        case _:
            name = ""
    if parts.query or not (name == "latest" or (name.isascii() and name.isdecimal())):
        raise InputError("URL", url, "https://HOST:PORT or https://HOST:PORT/model/ROUND", _EXAMPLE)
    return name
