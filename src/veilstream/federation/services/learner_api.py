"""The learner API, for programs beside it: give a record, or ask for a prediction.

    POST /observe  {"tag": "...", "features": [...], "target": 1}     -> {"answer": "taken"}
    POST /observe  [{...}, {...}]                -> {"answers": ["taken", "refused"], "counts": ...}
    POST /predict  {"features": [...]}                                -> {"prediction": ...}
    GET /status                                      where it stands, refusals, the local account

It listens on this machine alone, and answers only who shows the access token
(`Authorization: Bearer ...`): a web page that someone has open here, or another account, can use up
no step and learn nothing about a tag. A record is looked at before anybody asks whether its client
took part; the answer to one that is well-formed is "taken", whatever became of the data, and comes
when it is stored.

Records wait in a bounded queue for the next round to take them, also between rounds and while the
learner pauses. Where the queue is full the answer is 429, where no round came in time 503, both
with Retry-After, and after the last round 410: then the record is not used, and may be sent again.
A list is answered by position, with "wait" for those that no round took; one of which every record
was refused is answered 422. What is refused is counted by reason, here only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from veilstream.deployment.ledger.tags import tag_forms
from veilstream.errors import InputError, MissingExtra
from veilstream.federation.addresses import is_loopback
from veilstream.federation.services.asgi_server import AsgiServer, Limits
from veilstream.federation.services.daemon import Daemon
from veilstream.learning.admission import Admission, Answer
from veilstream.learning.tasks import Sample
from veilstream.streams.intake import Offered
from veilstream.streams.live_source import LiveSource
from veilstream.streams.waiting_source import WaitingRecord

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra("starlette", "federation", "the learner API") from error

__all__ = ["LearnerApi"]

_log = logging.getLogger(__name__)

_NUMBER_BYTES = 32
_OTHER_BYTES = 8 << 10  # a tag, the fields' names, blanks
_WAITING = 64  # callers of /observe, or of /predict, whose turn has not come
_LOG_EVERY_S = 60.0
_TAKEN_WITHIN_S = 10.0
_BATCH_RECORDS = 1024
_BATCH_BYTES = 8 << 20
_LIMITS = Limits(connections=256, connections_per_address=128, answer_s=60.0)
_ONE_COUNT = threading.Lock()
_SAFE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class LearnerApi:
    """Serves one daemon until `close`.

    Args:
        daemon: whose learner takes the records and predicts.
        source: where records go; None if people do not call (then only predictions are made).
        address: host and port, loopback only; port 0 takes one that is free.
        token: what callers have to show.
        limits: what callers may take.
        taken_within_s: how long a record waits for a round to take it.

    Raises:
        InputError: an address that others can reach, or that is taken.

    """

    def __init__(
        self,
        daemon: Daemon,
        source: LiveSource | None,
        address: tuple[str, int],
        token: str,
        limits: Limits = _LIMITS,
        taken_within_s: float = _TAKEN_WITHIN_S,
    ) -> None:
        if not is_loopback(address[0]):
            raise InputError(
                "--learner-api", address[0], "a loopback address, since people's records come here",
                "put a proxy with TLS in front of it",
            )  # fmt: skip
        self._daemon, self._source, self._token = daemon, source, token.encode()
        self._admission = Admission.of(daemon.learner.task)
        size = math.prod(self._admission.shape)
        self._largest = _OTHER_BYTES + _NUMBER_BYTES * size
        self._refusals: Counter[str] = Counter()
        self._logged, self._log_at = 0, 0.0
        self._one_count = threading.Lock()
        self._predicting = _Turns("predict")
        self._taken_within_s = taken_within_s
        routes = [
            Route("/observe", self._observe, methods=["POST"]),
            Route("/predict", self._predict, methods=["POST"]),
            Route("/status", self._status, methods=["GET"]),
        ]
        handlers = {HTTPException: self._not_found, _Refusal: _refused, ClientDisconnect: _gone}
        app = Starlette(routes=routes, exception_handlers=handlers)

        async def checked(scope: Any, receive: Any, send: Any) -> None:
            """Who may ask is decided before anything else, the path included."""
            try:
                self._check_caller(Request(scope))
            except _Refusal as refusal:
                await refusal.response(scope, receive, send)
            else:
                await app(scope, receive, send)

        self._server = AsgiServer(
            checked, address, option="--learner-api", limits=limits, refused=self._count
        )
        self.port = self._server.port

    def close(self) -> None:
        """Stop answering."""
        self._server.close()
        self._predicting.close()

    @property
    def refusals(self) -> dict[str, int]:
        """How many requests were refused, by reason, since the start."""
        with self._one_count:
            return dict(sorted(self._refusals.items()))

    def log_refusals(self) -> None:
        """Log them if there are new ones, once a minute at most."""
        found = self.refusals
        total, now = sum(found.values()), time.monotonic()
        if total > self._logged and now >= self._log_at:
            self._logged, self._log_at = total, now + _LOG_EVERY_S
            reasons = ", ".join(f"{reason} {count}" for reason, count in found.items())
            _log.warning("learner API: requests refused since the start: %s", reasons)

    # --- who may ask -----------------------------------------------------------------------------

    def _check_caller(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            where = f"127.0.0.1:{self.port}"
            raise self._refuse(403, "Host", f"expected this machine and port, like {where}")
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise self._refuse(403, "Origin", "no web page of another origin may ask")
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(shown.strip().encode(errors="replace"), self._token)
        if kind.lower() != "bearer" or not same:
            raise self._refuse(
                401, "token", "send `Authorization: Bearer TOKEN` (the learner's token file)",
                {"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    def _is_ours(self, host: str) -> bool:
        """A name or address of this machine, with our port: a page that rebinds DNS has another."""
        try:
            parts = urlsplit(f"//{host}")
            return (
                parts.netloc == host
                and "@" not in host
                and is_loopback(parts.hostname or "")
                and (80 if parts.port is None else parts.port) == self.port
            )
        except ValueError:
            return False

    def _not_found(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        more = dict(error.headers or {})
        why = "try POST /observe, POST /predict or GET /status"
        return self._refuse(error.status_code, "path or method", why, more).response

    # --- what is asked ---------------------------------------------------------------------------

    async def _status(self, _: Request) -> Response:
        learner = self._daemon.learner
        if self._daemon.ended is not None:
            state = "ended"
        else:
            state = "open" if self._source is not None and self._source.is_open else "waiting"
        return _json(
            200,
            {
                "state": state, "epoch": learner.epoch, "round": learner.round,
                "rounds": learner.terms.rounds, "refusals": self.refusals,
                "local": None if self._daemon.account is None else self._daemon.account.as_dict(),
            },
        )  # fmt: skip

    async def _observe(self, request: Request) -> Response:
        said = await self._read(request, batch=True)
        if self._source is None:
            raise self._refuse(
                404, "not live", "this learner reads its records itself (--data live takes calls)"
            )
        if isinstance(said, list):
            return await self._observe_batch(self._source, said)
        record = self._record(said)
        (answer,) = await self._answers(self._source, [record])
        if answer is None:
            return _json(503, {"answer": "wait"}, {"Retry-After": "1"})
        return _json(200, {"answer": answer.value})

    async def _observe_batch(self, source: LiveSource, said: list[Any]) -> Response:
        if not 0 < len(said) <= _BATCH_RECORDS:
            why = f"expected a list of 1 to {_BATCH_RECORDS} records"
            raise self._refuse(413 if said else 422, "batch", why)
        answers, reasons = ["refused"] * len(said), Counter[str]()
        places, records = [], []
        for place, record in enumerate(said):
            try:
                records.append(self._record(record))
                places.append(place)
            except _Refusal as refusal:
                reasons[refusal.why] += 1
        if not records:
            body = {"answers": answers, "counts": {"refused": len(said)}, "why": dict(reasons)}
            return _json(422, body)
        for place, answer in zip(places, await self._answers(source, records), strict=True):
            answers[place] = "wait" if answer is None else answer.value
        counts = Counter(answers)
        body = {"answers": answers, "counts": dict(counts), "why": dict(reasons)}
        if "taken" not in counts:
            return _json(503 if counts["wait"] else 422, body, {"Retry-After": "1"})
        return _json(200, body)

    async def _answers(self, source: LiveSource, records: list[Offered]) -> list[Answer | None]:
        """Have them wait for a round; None for those that none took in time."""
        if (why := self._daemon.ended) is not None:
            raise self._refuse(410, "ended", why)
        waiting = _Waiting(records)
        if not source.put(waiting.records):
            why = "too many records wait for a round"
            raise self._refuse(429, "queue full", why, {"Retry-After": "1"})
        try:
            await asyncio.wait_for(asyncio.shield(waiting.all_answered), self._taken_within_s)
        except TimeoutError:
            source.withdraw(waiting.records)
            await waiting.all_answered  # a round that has some just now answers soon
        if (why := self._daemon.ended) is not None and not any(waiting.answers):
            raise self._refuse(410, "ended", why)
        return waiting.answers

    def _record(self, said: Any) -> Offered:
        """A record that may be looked at; else a refusal that says why."""
        if not isinstance(said, dict):
            raise self._refuse(422, "record", "expected a JSON object for each record")
        if unknown := set(said) - {"tag", "features", "target"}:
            raise self._refuse(422, "record", f"unknown field {min(unknown)[:32]!r}")
        tag = said.get("tag")
        if not isinstance(tag, str) or not tag_forms(tag):
            raise self._refuse(422, "record", "tag: expected text of 1 to 1024 characters")
        sample = self._admission.admitted(Sample(said.get("features"), said.get("target")))
        if sample is None:
            shape = " x ".join(map(str, self._admission.shape))
            labels = self._admission.labels
            target = "a number" if labels is None else f"one of {', '.join(map(str, labels))}"
            expected = f"expected {shape} numbers in features, and {target} as target"
            raise self._refuse(422, "record", expected)
        return Offered(tag, sample)

    async def _predict(self, request: Request) -> Response:
        said = await self._read(request)
        try:
            features = np.asarray(said.get("features"), np.float32)
        except (ValueError, TypeError, OverflowError):
            features = np.zeros(0, np.float32)
        shape = " x ".join(map(str, self._admission.shape))
        if features.shape != self._admission.shape or not np.isfinite(features).all():
            raise self._refuse(422, "record", f"features: expected {shape} numbers")
        ask = functools.partial(self._daemon.predict, features)
        prediction = await self._turn(self._predicting, ask)
        if prediction is None:
            return _json(503, {"error": "no model has come yet"}, {"Retry-After": "1"})
        return _json(200, {"prediction": prediction})

    async def _turn(self, turns: _Turns, call: Any) -> Any:
        if turns.waiting >= _WAITING:
            raise self._refuse(503, "too many at once", "ask again", {"Retry-After": "1"})
        return await turns.take(call)

    async def _read(self, request: Request, *, batch: bool = False) -> Any:
        """The JSON object of a request; with ``batch``, or the list."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise self._refuse(415, "Content-Type", "expected Content-Type: application/json")
        length = request.headers.get("content-length", "0")
        most = max(self._largest, _BATCH_BYTES) if batch else self._largest
        if not length.isdecimal() or len(length) > 12 or int(length) > most:
            raise self._too_large()
        body = bytearray()
        async for piece in request.stream():
            body += piece
            is_list = batch and body.lstrip(b" \t\r\n")[:1] == b"["
            if max(len(body), int(length)) > (most if is_list else self._largest):
                raise self._too_large()
        try:
            said = json.loads(bytes(body))
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, (dict, list) if batch else dict):
            kinds = "one JSON object, or a list of them" if batch else "one JSON object"
            raise self._refuse(400, "JSON", f"expected {kinds}")
        return said

    def _too_large(self) -> _Refusal:
        return self._refuse(413, "too large", f"at most {self._largest} bytes for these features")

    # --- refusals --------------------------------------------------------------------------------

    def _count(self, reason: str) -> None:
        with self._one_count:
            self._refusals[reason] += 1

    def _refuse(
        self, status: int, reason: str, why: str, headers: dict[str, str] | None = None
    ) -> _Refusal:
        """Counted; the connection ends, since the rest of the request is not read."""
        self._count(reason)
        more = {"Connection": "close", **(headers or {})}
        return _Refusal(_json(status, {"answer": "refused", "why": why}, more), why)


class _Waiting:
    """Records of one request in the queue, and what they were answered with."""

    def __init__(self, offered: list[Offered]) -> None:
        self._loop = asyncio.get_running_loop()
        self.all_answered: asyncio.Future[None] = self._loop.create_future()
        self.answers: list[Answer | None] = [None] * len(offered)
        self._left = len(offered)
        self.records = [
            WaitingRecord(each, functools.partial(self._answered, place))
            for place, each in enumerate(offered)
        ]

    def _answered(self, place: int, answer: Answer | None) -> None:
        """From the learner's thread, or from the one that withdraws what still waits."""
        self.answers[place] = answer
        with _ONE_COUNT:
            self._left -= 1
            done = not self._left
        if done:
            with contextlib.suppress(RuntimeError):  # the server has been closed meanwhile
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self.all_answered.done():
            self.all_answered.set_result(None)


class _Turns:
    """Calls in a thread of their own, one at a time, in order."""

    def __init__(self, name: str) -> None:
        self.waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def take(self, call: Any) -> Any:
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Refusal(Exception):
    """An answer that ends a request."""

    def __init__(self, response: Response, why: str) -> None:
        super().__init__()
        self.response, self.why = response, why


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, _Refusal)
    return error.response


def _gone(_: Request, __: Exception) -> Response:
    """The caller has left, or was too slow and has been told."""
    return Response(status_code=408)


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(body, status, {**_SAFE, **(headers or {})})
