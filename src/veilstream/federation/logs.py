"""Logs of the long-running commands: on stderr, with levels, as text or as lines of JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from enum import StrEnum
from typing import Any

from veilstream.deployment.process_secrecy import shown_without_values
from veilstream.wording import shown_lines


class Level(StrEnum):
    """The least important lines to show."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Format(StrEnum):
    """Lines for people, or for a log collector."""

    TEXT = "text"
    JSON = "json"


def configure_logs(level: Level = Level.INFO, form: Format = Format.TEXT, *, learner: str | None = None) -> None:
    """Write our log and Python's warnings to stderr; exceptions as places, without text that may quote data.

    ``learner``: whose process this is; every line of JSON then says so.
    """
    handler = _Stderr()
    handler.setFormatter(_JsonLines(learner) if form is Format.JSON else _Text())
    ours = logging.getLogger("veilstream")
    ours.handlers[:] = [handler]
    ours.setLevel(level.name)
    ours.propagate = False  # a framework may have given the root logger handlers of its own

    def as_log(message: Warning | str, *_: object, **__: object) -> None:
        ours.warning("%s", message)

    warnings.showwarning = as_log


def log_options() -> tuple[str, str]:
    """Level and format now, for a process of ours that logs beside this one."""
    ours = logging.getLogger("veilstream")
    level = logging.getLevelName(ours.getEffectiveLevel()).lower()
    as_json = any(isinstance(handler.formatter, _JsonLines) for handler in ours.handlers)
    return level if level in {each.value for each in Level} else Level.WARNING.value, (
        Format.JSON if as_json else Format.TEXT
    ).value


class _Stderr(logging.StreamHandler[Any]):
    """Writes to the current stderr, which a progress bar may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _Text(logging.Formatter):
    """2026-11-16T16:20:03Z WARNING veilstream.federation.server.coordinator: learner north ..."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return shown_lines(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return shown_without_values(ei[1]).rstrip("\n")


_FIELDS = ("event", "learner", "round")
"""What a line of JSON has besides, where the line is about one: `extra` of the call that logs it."""


class _JsonLines(_Text):
    def __init__(self, learner: str | None = None) -> None:
        super().__init__()
        self._ours = {} if learner is None else {"learner": learner}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._ours,
            **{name: getattr(record, name) for name in _FIELDS if hasattr(record, name)},
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
