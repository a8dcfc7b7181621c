"""The learner API, for programs beside it: give a record, or ask for a prediction.

    POST /observe  {"client": "...", "record": {"age": 41, ...}}      -> {"answer": "taken"}
                   {"client": "...", "features": [...], "target": 1}
                   [{...}, {...}]                -> {"answers": ["taken", "refused"], "counts": ...}
    POST /predict  {"record": {...}}, {"features": [...]}             -> {"prediction": ...}
    GET /status                                      where it stands, refusals, the local account
    GET /page                                        the same for a person, in a browser
    POST /page/link                                  a link that opens it once (`page_access`)
    POST /person   {"client": "..."}                 whether this person took part
    /page/person                                     the same as a form, which needs the token too

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
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from typing import Any, TypeVar

from veilstream.deployment.ledger.inspect import PersonsPart, part_of_person
from veilstream.errors import InputError, LedgerError, MissingExtra
from veilstream.federation.addresses import is_loopback, is_own_host
from veilstream.federation.http.asgi_server import AsgiServer, Limits
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.live_records import LiveRecords, RefusedRequest, read_json
from veilstream.federation.learner.local_page import PAGE_HEADERS, PERSON_PATH, LocalPage
from veilstream.federation.learner.person_page import FORM_HEADERS, asked_person, form_fields, person_html
from veilstream.learning.tasks import admission_of
from veilstream.plans.records import schema_of
from veilstream.records.admission import Answer
from veilstream.records.schema import Encoded
from veilstream.streams.intake import Offered
from veilstream.streams.live_source import LiveSource
from veilstream.streams.waiting_source import WaitingRecord

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra("starlette", "federation", "the learner API") from error


_log = logging.getLogger(__name__)

T = TypeVar("T")

_WAITING = 64  # callers of /observe, or of /predict, whose turn has not come
_LOG_EVERY_S = 60.0
_TAKEN_WITHIN_S = 10.0
_BATCH_RECORDS = 1024
_FORM_BYTES = 16 << 10
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
                "--learner-api",
                address[0],
                "a loopback address, since people's records come here",
                "put a proxy with TLS in front of it",
            )
        self._daemon, self._source, self._token = daemon, source, token.encode()
        plan, admission = daemon.learner.plan, admission_of(daemon.learner.task)
        schema = schema_of(plan) if plan.data.kind == "table" else None
        self._records = LiveRecords(admission, schema, daemon.name)
        self._largest = self._records.largest_bytes
        self._refusals: Counter[str] = Counter()
        self._logged, self._log_at = 0, 0.0
        self._one_count = threading.Lock()
        self._page = LocalPage(self.status)
        self._predicting, self._looking = _Turns("predict"), _Turns("person")
        self.port = address[1]  # until the server has one: its first callers may be quicker
        self._taken_within_s = taken_within_s
        self._ending = False
        routes = [
            Route("/observe", self._observe, methods=["POST"]),
            Route("/predict", self._predict, methods=["POST"]),
            Route("/status", self._status, methods=["GET"]),
            Route(LocalPage.PATH, self._show_page, methods=["GET"]),
            Route(LocalPage.LINK_PATH, self._link, methods=["POST"]),
            Route("/person", self._person, methods=["POST"]),
            Route(PERSON_PATH, self._show_form, methods=["GET"]),
            Route(PERSON_PATH, self._answer_form, methods=["POST"]),
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

        self._server = AsgiServer(checked, address, option="--learner-api", limits=limits, refused=self._count)
        self.port = self._server.port

    def close(self) -> None:
        """Stop answering; whoever still waits for a round is told to come again."""
        self._ending = True
        if self._source is not None:
            self._source.release()
        self._server.close()
        self._predicting.close()
        self._looking.close()

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
        if len(hosts) != 1 or not is_own_host(hosts[0], self.port):
            where = f"127.0.0.1:{self.port}"
            raise self._refuse(403, "Host", f"expected this machine and port, like {where}")
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise self._refuse(403, "Origin", "no web page of another origin may ask")
        path, code = request.url.path, request.query_params.get("once")
        if self._page.lets_in(request.method, path, request.headers, request.cookies, code):
            return
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        if not self._is_token(shown) or kind.lower() != "bearer":
            raise self._refuse(
                401,
                "token",
                "send `Authorization: Bearer TOKEN` (the learner's token file); a "
                "browser needs a new link from `veilstream ledger page STORE`",
                {"WWW-Authenticate": "Bearer"},
            )

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.strip().encode(errors="replace"), self._token)

    def _not_found(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        more = dict(error.headers or {})
        why = "try POST /observe, POST /predict, GET /status or GET /page"
        return self._refuse(error.status_code, "path or method", why, more).response

    # --- what is asked ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Where the learner stands; ``GET /status`` and the page show this, and nobody else."""
        learner = self._daemon.learner
        if self._daemon.ended is not None:
            state = "ended"
        else:
            state = "open" if self._source is not None and self._source.is_open else "waiting"
        return {
            "learner": self._daemon.name,
            "state": state,
            "epoch": learner.epoch,
            "round": learner.round,
            "rounds": learner.terms.rounds,
            "refusals": self.refusals,
            "local": None if self._daemon.account is None else self._daemon.account.as_dict(),
            "ledger": self._ledger(),
        }

    def _ledger(self) -> dict[str, Any]:
        ledger, promise = self._daemon.learner.ledger, self._daemon.learner.guarantee
        chain = ledger.chain
        return {
            "promise": f"({promise.epsilon:g}, {promise.delta:g})",
            "records": chain.length,
            "head": chain.head.hex(),
            "acknowledged": chain.standing.acknowledged,
            "ended": chain.standing.ended,
            "witness": str(ledger.witness_path),
        }

    async def _status(self, _: Request) -> Response:
        return _json(200, self.status())

    async def _link(self, request: Request) -> Response:
        return _json(200, self._page.new_link(request.headers["host"]))

    async def _show_page(self, request: Request) -> Response:
        code = request.query_params.get("once")
        if code is not None and (cookie := self._page.enter(code, self.port)) is not None:
            more = {"Location": LocalPage.PATH, "Set-Cookie": cookie}
            return Response(status_code=303, headers={**_SAFE, **PAGE_HEADERS, **more})
        page, headers = self._page.html(still="still" in request.query_params)
        return HTMLResponse(page, headers={**_SAFE, **headers})

    async def _person(self, request: Request) -> Response:
        client = self._parsed(asked_person, await self._read(request))
        try:
            part = await self._part_of(client)
        except InputError as error:
            raise self._refuse(422, "person", str(error)) from None
        return _json(200, part.as_dict())

    async def _show_form(self, _: Request) -> Response:
        return HTMLResponse(person_html(None), headers={**_SAFE, **FORM_HEADERS})

    async def _answer_form(self, request: Request) -> Response:
        """The token is in the form, whoever let the browser in; a wrong one is told no more."""
        body = await self._body_of(request, "application/x-www-form-urlencoded", _FORM_BYTES)
        client, token = self._parsed(form_fields, body)
        answer: PersonsPart | str
        status = 200
        if not self._is_token(token):
            self._count("token")
            status, answer = 401, "This is not the learner's access token."
        else:
            try:
                answer = await self._part_of(client)
            except InputError as error:
                self._count("person")
                status, answer = 422, escape(str(error))
        return HTMLResponse(person_html(answer), status, headers={**_SAFE, **FORM_HEADERS})

    async def _part_of(self, client: str) -> PersonsPart:
        store = self._daemon.learner.ledger.path
        look = functools.partial(part_of_person, store, client)
        try:
            part: PersonsPart = await self._turn(self._looking, look)
        except LedgerError:
            again = {"Retry-After": "5"}
            raise self._refuse(503, "ledger", "the ledger cannot be read now", again) from None
        return part

    async def _body_of(self, request: Request, kind: str, most: int) -> bytes:
        """A small body of one kind."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
            raise self._refuse(415, "Content-Type", f"expected Content-Type: {kind}")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise self._refuse(413, "too large", f"at most {most} bytes")
        return bytes(body)

    async def _observe(self, request: Request) -> Response:
        said = await self._read(request, batch=True)
        if self._source is None:
            raise self._refuse(404, "not live", "this learner reads its records itself (--data live takes calls)")
        if isinstance(said, list):
            return await self._observe_batch(self._source, said)
        record = self._parsed(self._records.observation, said, counted=True)
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
                records.append(self._parsed(self._records.observation, record, counted=True))
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

    async def _answers(self, source: LiveSource, records: list[Encoded]) -> list[Answer | None]:
        """Have them wait for a round; None for those that none took in time."""
        if (why := self._daemon.ended) is not None:
            raise self._refuse(410, "ended", why)
        if self._ending:
            return [None] * len(records)
        waiting = _Waiting([Offered(each.client, each.sample) for each in records])
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
        if (account := self._daemon.account) is not None:
            for record, answer in zip(records, waiting.answers, strict=True):
                if answer is not None:
                    account.looked_at(record)
        return waiting.answers

    async def _predict(self, request: Request) -> Response:
        said = await self._read(request)
        features = self._parsed(self._records.features, said)
        ask = functools.partial(self._daemon.predict, features)
        prediction = await self._turn(self._predicting, ask)
        if prediction is None:
            return _json(503, {"error": "no model has come yet"}, {"Retry-After": "1"})
        words = self._records.in_words(prediction) if "record" in said else {}
        return _json(200, {"prediction": prediction, **words})

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
        said = self._parsed(read_json, bytes(body))
        if not isinstance(said, (dict, list) if batch else dict):
            kinds = "one JSON object, or a list of them" if batch else "one JSON object"
            raise self._refuse(400, "JSON", f"expected {kinds}")
        return said

    def _parsed(self, parse: Callable[[Any], T], said: Any, *, counted: bool = False) -> T:
        """What was sent, as what it means; ``counted`` puts a refused record into the account."""
        try:
            return parse(said)
        except RefusedRequest as refused:
            account = self._daemon.account
            if counted and refused.record is not None and account is not None:
                account.looked_at(refused.record)
            raise self._refuse(refused.status, refused.reason, refused.why) from None

    def _too_large(self) -> _Refusal:
        return self._refuse(413, "too large", f"at most {self._largest} bytes for one record")

    # --- refusals --------------------------------------------------------------------------------

    def _count(self, reason: str) -> None:
        with self._one_count:
            self._refusals[reason] += 1

    def _refuse(self, status: int, reason: str, why: str, headers: dict[str, str] | None = None) -> _Refusal:
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
            WaitingRecord(each, functools.partial(self._answered, place)) for place, each in enumerate(offered)
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
