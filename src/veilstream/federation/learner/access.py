"""The learner API's access token, which programs show; and the link that it buys for a browser."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from veilstream.errors import InputError, ProtocolError, VeilstreamError
from veilstream.http_client import is_loopback, send_request
from veilstream.strict_json import InvalidJson, read_json

_ASK_S = 10.0
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}")
_NEW_TOKEN = "remove it: the learner makes a new token at its next start"


def token_path(store: Path) -> Path:
    """Where the token of a store's learner is."""
    return store.with_suffix(".token")


def open_token(path: Path) -> str:
    """The token in this file, which is made where there is none; it is shown nowhere else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return read_token(path)
    token = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token


def read_token(path: Path) -> str:
    """The token in this file, which must be a plain file that no other account can read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        way_out = "a learner makes it when it is started with --learner-api"
        raise InputError("access token", str(path), "a learner's token file", way_out) from None
    except OSError as error:
        raise InputError("access token", str(path), "a plain file", str(error)) from None
    with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077 or about.st_uid != os.getuid():
            rule = "a file of this account that no other can read (mode 0600)"
            raise InputError("access token", str(path), rule, _NEW_TOKEN)
        token = file.read(1024).strip()
    if not _TOKEN.fullmatch(token):
        raise InputError("access token", str(path), "a file with at least 32 letters and digits", _NEW_TOKEN)
    return token


def page_link(address: tuple[str, int], token: str) -> str:
    """Ask a running learner for a link to its page."""
    link = _asked(address, token, "/page/link").get("link")
    if not isinstance(link, str) or not link.startswith(f"http://{_shown(address)}/page?once="):
        raise _no_learner(address)
    return link


def tell_to_pause(address: tuple[str, int], token: str, *, pause: bool) -> bool:
    """Have a running learner begin no round, or go on; whether it pauses now."""
    paused = _asked(address, token, "/pause" if pause else "/resume").get("paused")
    if not isinstance(paused, bool):
        raise _no_learner(address)
    return paused


def _asked(address: tuple[str, int], token: str, path: str) -> dict[str, object]:
    """Ask on loopback only, since the token goes along."""
    if not is_loopback(address[0]):
        raise InputError("--learner-api", address[0], "a loopback address", "ask on the learner's machine")
    at = _shown(address)
    headers = {"Authorization": f"Bearer {token}", "Content-Length": "0"}
    try:
        answer = send_request(
            f"http://{at}{path}", method="POST", headers=headers, most_bytes=1 << 14, timeout_s=_ASK_S
        )
    except VeilstreamError:
        raise ProtocolError(
            f"no learner API answers at {at}",
            "start the learner with --learner-api, or give the address that its log shows",
        ) from None
    if answer.status != 200:
        raise ProtocolError(f"{at} refused the token (HTTP {answer.status})", "is it this store's learner?")
    try:
        said = read_json(answer.body)
    except InvalidJson:
        said = None
    if not isinstance(said, dict):
        raise _no_learner(address)
    return said


def _shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _no_learner(address: tuple[str, int]) -> ProtocolError:
    return ProtocolError(f"what answers at {_shown(address)} is not a learner API", "check --learner-api")
