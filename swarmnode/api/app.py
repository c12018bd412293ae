"""The routes. Each answer carries, beside OpenAI's fields, what the swarm did for it (`swarm`)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarmnode.api.access import Access, AccessGuard, LimitGuard, count_answers
from swarmnode.api.answer_text import Reading
from swarmnode.api.answering import Answering, Piece, jobs_for
from swarmnode.api.answers import (
    CLIENT_GONE,
    failure,
    on_crash,
    on_gone,
    on_http_error,
    refusal,
)
from swarmnode.api.body import Bodies
from swarmnode.api.dashboard_routes import Dashboard, dashboard_routes
from swarmnode.api.event_stream import EventStream, Tell, end_when_gone
from swarmnode.api.forms import Choice, ResponseForm, swarm_headers, usage_of
from swarmnode.api.metrics import CONTENT_TYPE, Family, Metrics, RequestMeter
from swarmnode.api.node_routes import NodeApi, node_routes
from swarmnode.api.openai import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    parse_chat_untrusted,
    parse_completion_untrusted,
)
from swarmnode.api.prompts import Prompt, Prompts, parse_body_untrusted
from swarmnode.api.rules import Rules
from swarmnode.config import ApiConfig
from swarmnode.errors import SwarmError
from swarmnode.models.chat import ChatTemplate
from swarmnode.models.grammar import GrammarConstraint
from swarmnode.services.engine import Engine, GenerateRequest
from swarmnode.services.runners import Runner, Threads

MAX_BODY_BYTES = 8 << 20

_COUNTED = frozenset(
    {
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/api/swarm",
    }
)
"""Routes that have a metric of their own."""

Parse = Callable[[object], CompletionRequest]


@dataclass(frozen=True)
class Served:
    """What the routes work with. `swarm_state` returns the JSON of GET /api/swarm."""

    engine: Engine
    model_name: str
    template: ChatTemplate | None
    swarm_state: Callable[[], dict[str, Any]]
    started_s: int
    threads: Runner = field(default_factory=lambda: Threads(ApiConfig.prompt_threads))
    """Where prompts become tokens."""
    config: ApiConfig = field(default_factory=ApiConfig)
    node: NodeApi | None = None
    """What the node-local routes work with; None: there are none."""
    access: Access = field(default_factory=Access)
    metrics: Metrics = field(default_factory=Metrics)
    gauges: Callable[[], Sequence[Family]] = tuple
    """Further metrics, of what is so now."""
    dashboard: Dashboard | None = None
    """What the page at `/` works with; None: there is none."""


def build_app(served: Served) -> Starlette:
    """The ASGI application of one backbone."""
    routes = _Routes(served)
    limited = [Middleware(LimitGuard, access=served.access)]
    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/embeddings", routes.embeddings, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"], middleware=limited),
            Route("/v1/chat/completions", routes.chat, methods=["POST"], middleware=limited),
            Route("/api/swarm", routes.swarm),
            *(node_routes(served.node) if served.node is not None else ()),
            *(dashboard_routes(served.dashboard) if served.dashboard is not None else ()),
        ],
        middleware=_middleware(served),
        exception_handlers={HTTPException: on_http_error, ClientDisconnect: on_gone, Exception: on_crash},
    )
    app.router.redirect_slashes = False
    return app


def _middleware(served: Served) -> list[Middleware]:
    """Pages of other origins are told outside of the guard, so that they can read its refusals."""
    meter = Middleware(RequestMeter, metrics=served.metrics, routes=_COUNTED)
    guard = Middleware(AccessGuard, access=served.access)
    if not served.config.cors:
        return [meter, guard]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=served.config.cors,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=[
            "x-swarm-share-remote",
            "x-swarm-workers",
            "x-swarm-hedges",
            "x-swarm-fallbacks",
            "retry-after",
        ],
    )
    return [meter, cors, guard]


class _Routes:
    def __init__(self, served: Served) -> None:
        self._served = served
        engine = served.engine
        self._prompts = Prompts(engine.tokenizer, served.template, engine.model.n_ctx)
        self._rules = Rules(engine.tokenizer, served.template)
        self._bodies = Bodies(served.config)
        self._n_preparing = 0
        """Answers whose prompts become tokens."""
        self._prepared: WeakSet[Answering] = WeakSet()
        """Of all requests that are under way; whatever ends one, it leaves nothing here."""

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        served = self._served
        engine = served.engine
        own = (
            Family("swarmnode_slots_free", "gauge", "Slots that no answer uses.", [({}, engine.n_free)]),
            Family("swarmnode_waiting", "gauge", "Answers that wait for a slot.", [({}, engine.n_waiting)]),
        )
        return Response(served.metrics.text((*own, *served.gauges())), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._served.model_name:
            return self._no_model(request.path_params["name"])
        return JSONResponse(self._model_entry())

    async def embeddings(self, request: Request) -> Response:
        return refusal(
            400,
            f"embeddings are not served: {self._served.model_name} writes text; use POST /v1/chat/completions or "
            "/v1/completions, and a server with an embedding model for embeddings",
            code="unsupported",
        )

    async def swarm(self, request: Request) -> Response:
        return JSONResponse(self._served.swarm_state())

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion_untrusted, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat_untrusted, chat=True)

    async def _answer(self, request: Request, parse: Parse, *, chat: bool) -> Response:
        served = self._served
        try:
            async with self._bodies.read(request, MAX_BODY_BYTES) as body:
                read = partial(parse_body_untrusted, body, parse, served.config.max_body_marks)
                asked = await served.threads.run(read)
                if asked.model not in (None, served.model_name):
                    return self._no_model(str(asked.model))
                if self._n_waiting + asked.n_answers > served.config.max_waiting:
                    return self._busy()
                refused = count_answers(request.scope, asked.n_answers)
                if refused is not None:
                    return refused
                answering = await self._prepare(asked)
                self._prepared.add(answering)
        except SwarmError as error:
            return failure(error)
        form = ResponseForm(
            f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            served.model_name,
            int(time.time()),
            chat,
            served.engine.tokenizer,
            asked.stream and asked.include_usage,
        )
        if not asked.stream:
            return await self._whole(request, answering, form)
        return EventStream(
            partial(_stream, answering, form),
            lambda: swarm_headers(answering.account),
            head_wait_s=served.config.head_wait_s,
            stalled_s=self._stalled_s,
        )

    @property
    def _n_waiting(self) -> int:
        """Answers without a slot. A request is among them from when it is let in, so that no two have one place."""
        n_unasked = sum(answering.n_unasked for answering in self._prepared)
        return self._served.engine.n_waiting + self._n_preparing + n_unasked

    def _stalled_s(self) -> float:
        config = self._served.config
        return config.crowded_stalled_s if self._served.engine.n_waiting else config.stalled_s

    def _model_entry(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.model_name,
            "object": "model",
            "created": served.started_s,
            "owned_by": "swarmnode",
        }

    def _no_model(self, name: str) -> Response:
        message = f"there is no model {name!r} here; this backbone serves {self._served.model_name!r}"
        return refusal(404, message, code="model_not_found")

    def _busy(self) -> Response:
        config = self._served.config
        message = (
            f"{config.max_waiting} answers at most may wait for a slot; try again in {config.retry_after_s} s"
        )
        headers = {"Retry-After": str(config.retry_after_s)}
        return refusal(429, message, "rate_limit_error", "rate_limit_exceeded", headers)

    async def _prepare(self, asked: CompletionRequest) -> Answering:
        """Raises UsageError or ContextFullError for what cannot be generated."""
        engine = self._served.engine
        self._n_preparing += asked.n_answers
        try:
            prompts, constraint = await self._served.threads.run(partial(self._read, asked))
        finally:
            self._n_preparing -= asked.n_answers
        use = asked.tool_use
        reading = Reading(
            chat=asked.is_chat,
            stops=asked.stops,
            is_thinking=prompts[0].is_thinking,
            tools=use.parameters if use.tools else None,
            one_call=bool(use.tools) and not use.parallel,
        )
        jobs: list[GenerateRequest] = []
        for prompt in prompts:
            job = GenerateRequest(
                prompt.tokens,
                asked.max_tokens or min(DEFAULT_MAX_TOKENS, max(1, engine.model.n_ctx - len(prompt.tokens))),
                asked.sampling,
                engine.tokenizer.end_ids,
                asked.n_logprobs,
            )
            engine.check(job)
            jobs += jobs_for(job, asked.n, reading, constraint)
        return Answering(engine, jobs, asked.n, reading, self._served.metrics)

    def _read(self, asked: CompletionRequest) -> tuple[list[Prompt], GrammarConstraint | None]:
        """On a thread."""
        prompts = self._prompts.prompts(asked)
        return prompts, self._rules.constraint(asked, prompts[0])

    async def _whole(self, request: Request, answering: Answering, form: ResponseForm) -> Response:
        """All answers in one piece. A client that goes away meanwhile ends the generation."""
        answer = Response(status_code=CLIENT_GONE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_when_gone, request.receive, nursery.cancel_scope)
            answer = await _collect(answering, form)
            nursery.cancel_scope.cancel()
        return answer


async def _collect(answering: Answering, form: ResponseForm) -> Response:
    choices = [Choice() for _ in answering.jobs]
    notices: list[str] = []

    async def take(piece: Piece) -> None:
        choice = choices[piece.index]
        choice.add(piece.delta)
        if piece.logprobs is not None:
            choice.logprobs.append(piece.logprobs)
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        if piece.notice is not None:
            notices.append(piece.notice)

    try:
        await answering.run(take)
    except Exception as error:  # whatever it is, the client gets an answer
        return failure(error)
    account = answering.account
    answer = form.whole(choices, usage_of(answering.counts, account))
    told = account.as_dict() | ({"notice": notices[0]} if notices else {})
    return JSONResponse(answer | {"swarm": told}, headers=swarm_headers(account))


async def _stream(answering: Answering, form: ResponseForm, tell: Tell) -> None:
    """Events: one a token, one at each answer's end, then (if asked for) usage."""
    begun: set[int] = set()

    async def take(piece: Piece) -> None:
        event = form.chunk(
            piece.index,
            piece.delta,
            piece.finish_reason,
            first=piece.index not in begun,
            logprobs=None if piece.logprobs is None else [piece.logprobs],
        )
        begun.add(piece.index)
        event["swarm"] = piece.account.as_dict() | ({"notice": piece.notice} if piece.notice else {})
        if piece.token is not None:
            event["token"] = piece.token
        await tell(event)

    await answering.run(take)
    if form.has_usage:
        await tell(form.usage_chunk(usage_of(answering.counts, answering.account)))
