"""Serves released models over HTTP.

    GET /model/latest     the newest
    GET /model/17         the one after 17 rounds
    GET /status           run, rounds done, guarantee, digest of the plan, days of the certificate
    GET /healthz          200, or 503 where the server no longer looks for messages
    GET /metrics          counts of this server, for Prometheus
    GET /live             where it is asked for: a page that goes on by itself (`live_routes`)

A model is JSON with its guarantee; with `.f32` after the path, or `Accept:
application/octet-stream`, raw little-endian float32 with the rest in headers; with `.npz`, or
`Accept: application/x-npz`, one file with plan and guarantee (`veilstream.runs.released_model`).
An ETag is the hash of the parameters, so a model that a caller has already is not sent again.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from veilstream.errors import InputError, MissingExtra
from veilstream.federation.direct.certificates import days_left
from veilstream.federation.http.asgi_server import AsgiServer, Limits, SharedBody
from veilstream.federation.server.server_metrics import CONTENT_TYPE, ServerMetrics
from veilstream.plans.plan import Plan
from veilstream.runs.released_model import ReleasedModel, model_sha256, plan_digest

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import BaseRoute, Route
except ImportError as error:
    raise MissingExtra("starlette", "federation", "the model API") from error


_FORMS = {"json": "application/json", "f32": "application/octet-stream", "npz": "application/x-npz"}
_HELP = "try /model/latest or /model/ROUND (also with .npz or .f32), /status, /healthz or /metrics"
_KEPT_BYTES = 32 << 20
_KEPT_BODIES = 8
_KEPT_TAGS = 256
_STUCK_S = 60.0  # without a look for messages, which come every 0.2 s
_SLOWEST = 50_000  # bytes a second that a caller must be able to read


class Published(Protocol):
    """A `Coordinator`, or what another process was told of one (`model_process`)."""

    @property
    def run(self) -> str:
        """Its name."""

    @property
    def round(self) -> int:
        """Rounds that are done."""

    @property
    def idle_s(self) -> float:
        """Seconds since the coordinator last looked for messages."""

    @property
    def terms(self) -> Any:
        """rounds, dim and guarantee."""

    @property
    def models(self) -> Any:
        """`read` gives the model of a round."""


class Counts(Protocol):
    """Where requests are counted, and the metrics page comes from."""

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""

    def refuse(self, reason: str) -> None:
        """Count a connection that was cut."""

    def text(self, coordinator: Any) -> str:
        """The page."""


class ModelApi:
    """Serves a coordinator's models until `close`."""

    def __init__(
        self,
        coordinator: Published,
        plan: Plan,
        address: tuple[str, int] | socket.socket,
        tls: tuple[Path, Path] | None = None,
        *,
        metrics: Counts | None = None,
        limits: Limits | None = None,
        more: Sequence[BaseRoute] = (),
    ) -> None:
        self._coordinator, self._certificate = coordinator, None if tls is None else tls[0]
        self._metrics: Counts = metrics or ServerMetrics()
        self._plan_toml, self._plan_digest = plan.to_toml(), plan_digest(plan)
        self._encoded: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._tags: OrderedDict[int, str] = OrderedDict()
        self._working = asyncio.Lock()
        if limits is None:
            limits = Limits(answer_s=60.0 + 24 * coordinator.terms.dim / _SLOWEST)
        app = Starlette(
            routes=[
                Route("/status", self._status),
                Route("/healthz", self._healthz),
                Route("/metrics", self._metrics_page),
                Route("/model/{name}", self._model),
                *more,
            ],
            exception_handlers={HTTPException: _not_found},
        )
        self._server = AsgiServer(
            app, address, option="--model-api", tls=tls, limits=limits, refused=self._metrics.refuse
        )
        self.port = self._server.port

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return self._server.connections

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    async def _status(self, _: Request) -> Response:
        days = {} if self._certificate is None else {"certificate_days": days_left(self._certificate)}
        return JSONResponse(self._facts() | days)

    async def _healthz(self, _: Request) -> Response:
        stuck = self._coordinator.idle_s > _STUCK_S
        return JSONResponse({"status": "stuck" if stuck else "ok"}, 503 if stuck else 200)

    async def _metrics_page(self, _: Request) -> Response:
        return Response(self._metrics.text(self._coordinator), media_type=CONTENT_TYPE)

    async def _model(self, request: Request) -> Response:
        name, dot, suffix = request.path_params["name"].partition(".")
        form = suffix if dot else _accepted(request.headers.get("accept", ""))
        done = self._coordinator.round
        if form not in _FORMS:
            return _error(_HELP)
        if name != "latest" and not (name.isdecimal() and name.isascii() and len(name) < 10):
            return _error(_HELP)
        round_ = done if name == "latest" else int(name)
        if round_ > done:
            return _error(f"round {round_} is not done; the last is {done}")
        try:
            tag = f'"{await self._tag(round_)}-{form}"'
            headers = {"ETag": tag, "Vary": "Accept", "Cache-Control": "no-cache"}
            known = request.headers.get("if-none-match", "").split(",")
            if tag in (each.strip().removeprefix("W/") for each in known):
                return Response(status_code=304, headers=headers)
            body = await self._body(round_, form)
        except InputError as error:
            return _error(str(error))
        if form == "f32":
            headers |= {
                "Veilstream-Run": self._coordinator.run,
                "Veilstream-Round": str(round_),
                "Veilstream-Plan": self._plan_digest,
                "Veilstream-Guarantee": json.dumps(self._facts()["guarantee"]),
            }
        self._metrics.add("model_requests")
        return SharedBody(body, headers=headers, media_type=_FORMS[form])

    def _facts(self) -> dict[str, Any]:
        coordinator = self._coordinator
        return {
            "run": coordinator.run,
            "round": coordinator.round,
            "rounds": coordinator.terms.rounds,
            "guarantee": coordinator.terms.guarantee.as_dict(),
            "plan": self._plan_digest,
        }

    async def _tag(self, round_: int) -> str:
        """A released model never changes while a server runs, so its hash is worked out once."""
        async with self._working:
            tag = self._tags.get(round_)
            if tag is None:
                tag = await asyncio.to_thread(lambda: model_sha256(self._coordinator.models.read(round_)))
                self._tags[round_] = tag
                while len(self._tags) > _KEPT_TAGS:
                    self._tags.popitem(last=False)
        return tag

    async def _body(self, round_: int, form: str) -> bytes:
        async with self._working:
            body = self._encoded.get((round_, form))
            if body is None:
                body = await asyncio.to_thread(self._encode, round_, form)
                kept = self._encoded
                kept[round_, form] = body
                while len(kept) > 1 and (len(kept) > _KEPT_BODIES or sum(map(len, kept.values())) > _KEPT_BYTES):
                    kept.popitem(last=False)
        return body

    def _encode(self, round_: int, form: str) -> bytes:
        model, facts = self._coordinator.models.read(round_), self._facts()
        if form == "f32":
            return bytes(model.tobytes())
        if form == "npz":
            return ReleasedModel(
                model, round_, facts["rounds"], facts["run"], self._plan_toml, facts["guarantee"]
            ).to_bytes()
        facts |= {"round": round_, "dim": len(model), "model": model.tolist()}
        return (json.dumps(facts, allow_nan=False) + "\n").encode()


def _accepted(header: str) -> str:
    named = [part.partition(";")[0].strip().lower() for part in header.split(",")]
    forms = {kind: form for form, kind in _FORMS.items()}
    return next((forms[kind] for kind in named if kind in forms), "json")


def _error(why: str, status: int = 404, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status, headers)


def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    more = {"Connection": "close", **(error.headers or {})}
    return _error(_HELP, error.status_code, more)
