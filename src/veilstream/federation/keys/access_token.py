"""The learner API's access token: made once, kept in a file that only this account can read."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from veilstream.errors import InputError

_FORM = re.compile(r"[A-Za-z0-9_-]{32,128}")
_WAY_OUT = "remove it: a new token is made at the next start"


def token_path(store: Path) -> Path:
    """Where the token of a store's learner is, if nothing else is said."""
    return store.with_suffix(".token")


def open_token(path: Path) -> tuple[str, bool]:
    """The token in this file, and whether it was made just now.

    Raises:
        InputError: a link, a file that other accounts can read, or one without a token in it.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return read_token(path), False
    token = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token, True


def read_token(path: Path) -> str:
    """The token in this file.

    Raises:
        InputError: no file, a link, one that other accounts can read, or one without a token.

    """
    shown = str(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise InputError(
            "--token-file",
            shown,
            "the token file of a learner",
            "a learner makes it when it is started with --learner-api",
        ) from None
    except OSError as error:
        raise InputError("--token-file", shown, "a plain file", str(error)) from None
    with os.fdopen(handle, encoding="utf-8", errors="replace") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077 or about.st_uid != os.getuid():
            raise InputError(
                "--token-file", shown, "a file of this account that no other can read (mode 0600)", _WAY_OUT
            )
        token = file.read(1024).strip()
    if not _FORM.fullmatch(token):
        raise InputError("--token-file", shown, "a file with 32 letters and digits or more", _WAY_OUT)
    return token
