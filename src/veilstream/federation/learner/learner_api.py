"""The learner API, for programs on the learner's machine: give a record, or ask for a prediction.

    POST /observe  {"client": "...", "record": {"age": 41, ...}}      -> {"answer": "taken"}
                   {"client": "...", "features": [...], "target": 1}
                   [{...}, {...}]                -> {"answers": ["taken", "refused"], "counts": ...}
    POST /predict  {"record": {...}}, {"features": [...]}    -> {"prediction": ..., "model": {...}}
    GET /status                                      where it stands, refusals, the local account
    GET /healthz                                     200, or 503 while its disk cannot be written
    GET /metrics                                     the counts, for Prometheus on this machine
    GET /page                                        the same as a web page
    POST /page/link                                  a link that opens the page once (`access`)
    POST /pause, /resume                             begin no round, by a person's decision; go on
    POST /person   {"client": "..."}                 whether this person took part
    /page/person                                     the same as a form, which also needs the token

It listens on loopback and answers only callers who show the access token (`Authorization: Bearer
...`). So a web page that someone has open here, or another account, can use up no step and learn
nothing about a client; without the token `/healthz` says only whether the disk can be written. A record
is checked before the ledger is asked whether its client took part.
Every well-formed record gets the same answer, "taken", once it is stored, whatever became of it. A
record of a named client that cannot be used waits for a round like any other and takes its step with a
zero gradient; then it is answered 422, with the reason. So the server sees nothing of the refusal.

Records wait in a bounded queue for the next round, also between rounds and while the learner pauses.
If the queue is full the answer is 429, if no round came in time 503, both with Retry-After, and
after the last round 410: then the record was not used, and may be sent again. A list is answered by
position, with "wait" for records that no round took; if all are refused the answer is 422. Refusals
are counted by reason, on this machine only.
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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qs

from veilstream.deployment.ledger.inspect import PersonsPart, part_of_person
from veilstream.errors import InputError, LedgerError, MissingExtra
from veilstream.federation.addresses import is_own_host
from veilstream.federation.http.asgi_server import AsgiServer, Limits
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.health import LearnerHealth, metrics_text
from veilstream.federation.learner.live_records import LiveRecords, RefusedRequest
from veilstream.federation.learner.local_page import PERSON_PATH, LearnerPages, LocalPage
from veilstream.http_client import is_loopback
from veilstream.learning.quality import probabilities
from veilstream.learning.tasks import admission_of
from veilstream.plans.records import schema_of
from veilstream.records.admission import Answer
from veilstream.records.schema import Encoded
from veilstream.streams.intake import Offered
from veilstream.streams.waiting_source import LiveSource, WaitingRecord
from veilstream.strict_json import InvalidJson, read_json, read_values

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

_MOST_WAITING = 64  # callers of /predict, or of /person, whose turn has not come
_LOG_EVERY_S = 60.0
_TAKEN_WITHIN_S = 10.0
_BATCH_RECORDS = 1024
_BATCH_BYTES = 8 << 20  # of a request to /observe, one record or a list
_FORM_BYTES = 16 << 10
_LIMITS = Limits(connections=256, connections_per_address=128, answer_s=60.0)
_SAFE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_AGAIN = {"Retry-After": "1"}


class LearnerApi:
    """Serves one daemon until `close`, on loopback; ``source`` None: the learner reads its own data."""

    def __init__(
        self,
        daemon: Daemon,
        source: LiveSource | None,
        address: tuple[str, int],
        token: str,
        pages: LearnerPages | None = None,
        limits: Limits = _LIMITS,
        taken_within_s: float = _TAKEN_WITHIN_S,
        health: LearnerHealth | None = None,
    ) -> None:
        if not is_loopback(address[0]):
            rule = "a loopback address, since people's records come here"
            raise InputError("--learner-api", address[0], rule, "put a proxy with TLS in front of it")
        self._daemon, self._source, self._token = daemon, source, token.encode()
        self._health = LearnerHealth() if health is None else health
        plan, admission = daemon.learner.plan, admission_of(daemon.learner.task)
        schema = schema_of(plan) if plan.data.kind == "table" else None
        self._records = LiveRecords(admission, schema, daemon.name)
        self._refusals: Counter[str] = Counter()
        self._logged, self._log_at = 0, 0.0
        self._counting = threading.Lock()
        self._page = None if pages is None else LocalPage(pages)
        self._predicting, self._looking = _Turns("predict"), _Turns("person")
        self.port = address[1]  # the first callers may come before the server has its port
        self._taken_within_s = taken_within_s
        self._ending = False
        routes = Starlette(
            routes=[
                Route("/observe", self._observe, methods=["POST"]),
                Route("/predict", self._predict, methods=["POST"]),
                Route("/status", self._status, methods=["GET"]),
                Route("/healthz", self._healthz, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route(LocalPage.PATH, self._show_page, methods=["GET"]),
                Route(LocalPage.LINK_PATH, self._link, methods=["POST"]),
                Route("/pause", self._pause, methods=["POST"]),
                Route("/resume", self._resume, methods=["POST"]),
                Route("/person", self._person, methods=["POST"]),
                Route(PERSON_PATH, self._show_form, methods=["GET"]),
                Route(PERSON_PATH, self._answer_form, methods=["POST"]),
            ],
            exception_handlers={
                RefusedRequest: lambda _, error: self._refused(error),
                HTTPException: lambda _, error: self._refused(_no_such_path(error)),
                ClientDisconnect: lambda *_: Response(status_code=408),
            },
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            """Decide who may ask before anything else, the path included."""
            try:
                self._check_caller(Request(scope))
            except RefusedRequest as refusal:
                await self._refused(refusal)(scope, receive, send)
            else:
                await routes(scope, receive, send)

        self._server = AsgiServer(app, address, option="--learner-api", limits=limits, refused=self._count)
        self.port = self._server.port

    def attach(self, daemon: Daemon, source: LiveSource | None) -> None:
        """Go on with another daemon of the same learner, whose store was opened anew."""
        self._daemon, self._source = daemon, source

    def close(self) -> None:
        """Stop answering; records that still wait are answered "wait"."""
        self._ending = True
        if self._source is not None:
            self._source.release()
        self._server.close()
        self._predicting.close()
        self._looking.close()

    @property
    def refusals(self) -> dict[str, int]:
        """How many requests were refused, by reason, since the start."""
        with self._counting:
            return dict(sorted(self._refusals.items()))

    def log_refusals(self) -> None:
        """Log the counts if there are new refusals, once a minute at most."""
        found = self.refusals
        total, now = sum(found.values()), time.monotonic()
        if total > self._logged and now >= self._log_at:
            self._logged, self._log_at = total, now + _LOG_EVERY_S
            reasons = ", ".join(f"{reason} {count}" for reason, count in found.items())
            _log.warning("learner API: requests refused since the start: %s", reasons)

    def _count(self, reason: str) -> None:
        with self._counting:
            self._refusals[reason] += 1

    def _refused(self, refusal: Exception) -> Response:
        """The connection ends, since the rest of the request is not read."""
        assert isinstance(refusal, RefusedRequest)
        self._count(refusal.reason)
        headers = {"Connection": "close", **refusal.headers}
        return _json(refusal.status, {"answer": "refused", "why": refusal.why}, headers)

    def _check_caller(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not is_own_host(hosts[0], self.port):
            why = f"expected this machine and port, like 127.0.0.1:{self.port}"
            raise RefusedRequest(why, status=403, reason="Host")
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise RefusedRequest("a web page of another origin may not ask", status=403, reason="Origin")
        path, code = request.url.path, request.query_params.get("once")
        if (request.method, path) == ("GET", "/healthz"):
            return
        if self._page and self._page.lets_in(request.method, path, request.headers, request.cookies, code):
            return
        if not self._shows_token(request):
            raise RefusedRequest(
                "send `Authorization: Bearer TOKEN` (the learner's token file); a "
                "browser needs a new link from `veilstream ledger page STORE`",
                status=401,
                reason="token",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _shows_token(self, request: Request) -> bool:
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        return self._is_token(shown) and kind.lower() == "bearer"

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.strip().encode(errors="replace"), self._token)

    def status(self) -> dict[str, Any]:
        """Where the learner stands, as ``GET /status`` and the page show it; it is never sent."""
        daemon, learner = self._daemon, self._daemon.learner
        if self._health.blocked:
            state = "blocked"
        elif daemon.ended is not None:
            state = "ended"
        else:
            state = "open" if self._source is not None and self._source.is_open else "waiting"
        chain, promise = learner.ledger.chain, learner.guarantee
        return {
            "learner": daemon.name,
            "state": state,
            "epoch": learner.epoch,
            "round": learner.round,
            "rounds": learner.terms.rounds,
            "refusals": self.refusals,
            "health": self._health.as_dict(trusted=True),
            **({} if (core := daemon.site.core) is None else {"core": {"learners": core[0], "needed": core[1]}}),
            "local": None if daemon.account is None else daemon.account.as_dict(),
            "ledger": {
                "promise": f"({promise.epsilon:g}, {promise.delta:g})",
                "records": chain.length,
                "head": chain.head.hex(),
                "acknowledged": chain.standing.acknowledged,
                "ended": chain.standing.ended,
                "witness": str(learner.ledger.witness_path),
            },
        }

    async def _status(self, _: Request) -> Response:
        return _json(200, self.status())

    async def _healthz(self, request: Request) -> Response:
        told = self._health.as_dict(trusted=self._shows_token(request))
        return _json(503 if self._health.blocked else 200, told)

    async def _metrics(self, _: Request) -> Response:
        text = metrics_text(self._daemon, self._health, self.refusals)
        return Response(text, headers=_SAFE, media_type="text/plain; version=0.0.4; charset=utf-8")

    @property
    def _local_page(self) -> LocalPage:
        if self._page is None:
            raise RefusedRequest("this learner has no page", status=404, reason="path or method")
        return self._page

    async def _link(self, request: Request) -> Response:
        return _json(200, self._local_page.new_link(request.headers["host"]))

    async def _show_page(self, request: Request) -> Response:
        page, code = self._local_page, request.query_params.get("once")
        if code is not None and (cookie := page.enter(code, self.port)) is not None:
            more = {"Location": LocalPage.PATH, "Set-Cookie": cookie}
            return Response(status_code=303, headers={**_SAFE, **page.headers(), **more})
        still = "still" in request.query_params
        shown = page.pages.status_html(self.status(), still=still)
        return HTMLResponse(shown, headers={**_SAFE, **page.headers(reload=not still)})

    async def _pause(self, _: Request) -> Response:
        return self._told(paused=True)

    async def _resume(self, _: Request) -> Response:
        return self._told(paused=False)

    def _told(self, *, paused: bool) -> Response:
        account = self._daemon.account
        if account is None:
            raise RefusedRequest("this learner counts nothing", status=404, reason="path or method")
        account.pause_rounds() if paused else account.go_on()
        said = "paused: no round begins" if paused else "goes on; what records say now is taken as usual"
        _log.warning("learner %s %s (asked through its API)", self._daemon.name, said)
        return _json(200, {"paused": account.paused})

    async def _person(self, request: Request) -> Response:
        said = await self._json_of(request)
        if set(said) != {"client"} or type(said["client"]) is not str:
            raise RefusedRequest('expected {"client": "the tag"} and nothing else', reason="person")
        try:
            part = await self._part_of(said["client"])
        except InputError as error:
            raise RefusedRequest(str(error), reason="person") from None
        return _json(200, part.as_dict())

    async def _show_form(self, _: Request) -> Response:
        return self._form(None)

    def _form(self, answer: PersonsPart | str | None, status: int = 200) -> Response:
        page = self._local_page
        return HTMLResponse(page.pages.person_html(answer), status, headers={**_SAFE, **page.headers(form=True)})

    async def _answer_form(self, request: Request) -> Response:
        """The form needs the token too; a wrong one gets one answer, whoever it asks about."""
        body = await self._body(request, "application/x-www-form-urlencoded", _FORM_BYTES)
        client, token = _form_fields(body)
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
                status, answer = 422, str(error)
        return self._form(answer, status)

    async def _part_of(self, client: str) -> PersonsPart:
        store = self._daemon.learner.ledger.path
        try:
            return await self._looking.take(functools.partial(part_of_person, store, client))
        except LedgerError:
            why, again = "the ledger cannot be read now", {"Retry-After": "5"}
            raise RefusedRequest(why, status=503, reason="ledger", headers=again) from None

    async def _observe(self, request: Request) -> Response:
        most = max(self._records.largest_bytes, _BATCH_BYTES)  # no text in a record is too long for its step
        said = _parsed(await self._body(request, "application/json", most), of_records=True)
        if self._source is None:
            why = "this learner reads its records itself (--data live takes calls)"
            raise RefusedRequest(why, status=404, reason="not live")
        if isinstance(said, list):
            return await self._observe_batch(self._source, said)
        if not isinstance(said, dict):
            raise RefusedRequest("expected one JSON object, or a list of them", status=400, reason="JSON")
        record = self._observation(said)
        if isinstance(record, RefusedRequest) and record.client is None:
            raise record
        (answer,) = await self._answers(self._source, [record])
        if answer is None:
            told = {}
            if isinstance(record, RefusedRequest):
                told = {"why": record.why}
                self._count("record")
            return _json(503, {"answer": "wait", **told}, _AGAIN)
        if isinstance(record, RefusedRequest):
            raise record
        return _json(200, {"answer": answer.value, **self._used()})

    async def _observe_batch(self, source: LiveSource, said: list[Any]) -> Response:
        if not 0 < len(said) <= _BATCH_RECORDS:
            why = f"expected a list of 1 to {_BATCH_RECORDS} records"
            raise RefusedRequest(why, status=413 if said else 422, reason="batch")
        answers, reasons = ["refused"] * len(said), Counter[str]()
        records: dict[int, Encoded | RefusedRequest] = {}
        for place, each in enumerate(said):
            record = self._observation(each)
            if isinstance(record, RefusedRequest):
                self._count(record.reason)
                reasons[record.why] += 1
            if record.client is not None:
                records[place] = record
        if records:
            told = await self._answers(source, list(records.values()))
            for place, answer in zip(records, told, strict=True):
                refused = isinstance(records[place], RefusedRequest)
                answers[place] = "wait" if answer is None else "refused" if refused else answer.value
        counts = Counter(answers)
        body = {"answers": answers, "counts": dict(counts), "why": dict(reasons)}
        if "taken" in counts:
            return _json(200, body | self._used())
        return _json(503, body, _AGAIN) if counts["wait"] else _json(422, body)

    def _used(self) -> dict[str, str]:
        """What those who were taken are told of when they are used: never more than that."""
        return {} if self._daemon.learner.plan.window is None else {"used": "within the next window"}

    def _observation(self, said: Any) -> Encoded | RefusedRequest:
        """The record, or why it is refused; one that names nobody is counted here, since no round takes it."""
        try:
            return self._records.observation(said)
        except RefusedRequest as refused:
            if refused.client is None:
                self._look_at(refused)
            return refused

    def _look_at(self, record: Encoded | RefusedRequest) -> None:
        looked_at = record.record if isinstance(record, RefusedRequest) else record
        if looked_at is not None and self._daemon.account is not None:
            self._daemon.account.looked_at(looked_at)

    async def _answers(self, source: LiveSource, records: list[Encoded | RefusedRequest]) -> list[Answer | None]:
        """Let records wait for a round; None for those that no round took in time."""
        if (why := self._daemon.takes_nobody) is not None:
            raise RefusedRequest(why, status=410, reason="ended")
        if self._ending or self._health.blocked:
            return [None] * len(records)
        waiting = _Waiting([_offered(each) for each in records])
        if not source.put(waiting.records):
            why = "too many records wait for a round"
            raise RefusedRequest(why, status=429, reason="queue full", headers=_AGAIN)
        try:
            await asyncio.wait_for(asyncio.shield(waiting.all_answered), self._taken_within_s)
        except TimeoutError:
            source.withdraw(waiting.records)
            await waiting.all_answered  # a round that holds some of them answers soon
        if (why := self._daemon.takes_nobody) is not None and not any(waiting.answers):
            raise RefusedRequest(why, status=410, reason="ended")
        for record, answer in zip(records, waiting.answers, strict=True):
            if answer is not None:
                self._look_at(record)
        return waiting.answers

    async def _predict(self, request: Request) -> Response:
        said = await self._json_of(request)
        features = self._records.features(said)
        published = self._daemon.published
        if (model := published.model) is None:
            return _json(503, {"error": "no model has come yet"}, _AGAIN)
        targets, logits = await self._predicting.take(functools.partial(model.decisions, features[None]))
        prediction = targets[0].tolist()
        answer: dict[str, Any] = {"prediction": prediction}
        if "record" in said:
            answer |= self._records.in_words(prediction)
        if logits is not None and model.classes is not None:
            shares = probabilities(logits)[0].tolist()
            answer["probabilities"] = dict(zip(model.classes, shares, strict=True))
        return _json(200, {**answer, "model": {"round": model.round, "run": model.run, "sha256": model.sha256}})

    async def _json_of(self, request: Request) -> dict[str, Any]:
        said = _parsed(await self._body(request, "application/json", self._records.largest_bytes))
        if not isinstance(said, dict):
            raise RefusedRequest("expected one JSON object", status=400, reason="JSON")
        return said

    async def _body(self, request: Request, kind: str, most: int) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
            raise RefusedRequest(f"expected Content-Type: {kind}", status=415, reason="Content-Type")
        declared = request.headers.get("content-length", "0")
        too_large = RefusedRequest(f"at most {most} bytes", status=413, reason="too large")
        if not declared.isdecimal() or len(declared) > 12 or int(declared) > most:
            raise too_large
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise too_large
        return bytes(body)


class _Waiting:
    def __init__(self, offered: list[Offered]) -> None:
        self._loop = asyncio.get_running_loop()
        self.all_answered: asyncio.Future[None] = self._loop.create_future()
        self.answers: list[Answer | None] = [None] * len(offered)
        self._left, self._counting = len(offered), threading.Lock()
        self.records = [
            WaitingRecord(each, functools.partial(self._answered, place)) for place, each in enumerate(offered)
        ]

    def _answered(self, place: int, answer: Answer | None) -> None:
        """From the learner's thread, or from the one that withdraws what still waits."""
        self.answers[place] = answer
        with self._counting:
            self._left -= 1
            done = not self._left
        if done:
            with contextlib.suppress(RuntimeError):  # the server was closed meanwhile
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self.all_answered.done():
            self.all_answered.set_result(None)


class _Turns:
    """Calls in a thread of their own, one at a time, in order; a bounded number wait."""

    def __init__(self, name: str) -> None:
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def take(self, call: Callable[[], T]) -> T:
        if self._waiting >= _MOST_WAITING:
            raise RefusedRequest("ask again", status=503, reason="too many at once", headers=_AGAIN)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _offered(record: Encoded | RefusedRequest) -> Offered:
    """As a source hands it over: without a sample where it is refused."""
    assert record.client is not None
    return Offered(record.client, record.sample if isinstance(record, Encoded) else None)


def _no_such_path(error: Exception) -> RefusedRequest:
    assert isinstance(error, HTTPException)
    why = "try POST /observe, POST /predict, GET /status, GET /healthz, GET /metrics or GET /page"
    return RefusedRequest(why, status=error.status_code, reason="path or method", headers=error.headers or {})


def _parsed(body: bytes, *, of_records: bool = False) -> Any:
    """The request; ``of_records``: a number or text in a record that JSON cannot have spoils that record alone."""
    try:
        return read_values(body) if of_records else read_json(body)
    except InvalidJson as error:
        raise RefusedRequest(str(error), status=400, reason="JSON") from None


def _form_fields(body: bytes) -> tuple[str, str]:
    try:
        said = parse_qs(
            body.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=2
        )
        (client,), (token,) = said["client"], said["token"]
    except (ValueError, KeyError):
        why = "expected the fields client and token, each once"
        raise RefusedRequest(why, status=400, reason="form") from None
    return client, token


def _json(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(body, status, {**_SAFE, **(headers or {})})
