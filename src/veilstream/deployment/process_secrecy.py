"""Secrets stay in a learner's process: no core dumps, no values in tracebacks.

Seeds, records and raw gradients are in this process's memory while it works. Three ways lead from
there to a file without anyone meaning to: a core dump when it crashes, an error report that prints
local variables, and an exception whose own text quotes a record.
"""

from __future__ import annotations

import ctypes
import functools
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from veilstream.errors import VeilstreamError

P = ParamSpec("P")
R = TypeVar("R")

_PR_SET_DUMPABLE = 4


def no_core_dumps() -> None:
    """Have this process leave no core dump, for as long as it lives.

    On Linux it also becomes undumpable, which holds where dumps go to a program, and keeps other
    processes of the same account from reading its memory.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


def without_values(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose exceptions carry no local variables.

    Tools that print tracebacks with locals (error collectors, debuggers, test runners) then show
    the lines of code and nothing else, for the method and everything it called.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.exc_info()[1]  # what the caller was handling is the caller's own
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            for each in _chain(error, before):
                traceback.clear_frames(each.__traceback__)
            del args, kwargs, before
            raise

    return call


def terse_tracebacks() -> None:
    """Show uncaught exceptions of this process as places in code, without text that may quote data.

    Our own errors keep their text: they are written not to.
    """

    def main(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
        sys.stderr.write(shown_without_values(error))

    def thread(args: Any) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            sys.stderr.write(shown_without_values(args.exc_value))

    def unraisable(args: Any) -> None:
        if args.exc_value is not None:
            sys.stderr.write(shown_without_values(args.exc_value))

    sys.excepthook, threading.excepthook, sys.unraisablehook = main, thread, unraisable


def shown_without_values(error: BaseException) -> str:
    """An exception as its type and the places it passed, causes first."""
    parts = []
    for each in reversed(list(_chain(error))):
        parts += traceback.format_tb(each.__traceback__)
        own = isinstance(each, VeilstreamError)
        parts.append(f"{type(each).__name__}{f': {each}' if own else ' (its text is not shown)'}\n")
    return "".join(parts)


def _chain(error: BaseException, before: BaseException | None = None) -> Iterator[BaseException]:
    """An exception and what led to it, each once; not what was there before."""
    waiting: list[BaseException | None] = [error]
    seen = {id(before)}
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__context__, each.__cause__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
