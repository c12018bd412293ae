"""The routes. Each answer carries, beside OpenAI's fields, what the swarm did for it (`swarm`)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swarmnode.api.answers import (
    CLIENT_GONE,
    explain,
    failure,
    on_crash,
    on_gone,
    on_http_error,
    refusal,
)
from swarmnode.api.body import read_body
from swarmnode.api.guard import LoopbackGuard
from swarmnode.api.node_routes import NodeApi, node_routes
from swarmnode.api.openai import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    ResponseForm,
    parse_chat_untrusted,
    parse_completion_untrusted,
    usage_of,
)
from swarmnode.api.prompts import Prompts, parse_body_untrusted
from swarmnode.config import ApiConfig
from swarmnode.errors import SwarmError
from swarmnode.models.chat import ChatTemplate
from swarmnode.services.engine import DoneEvent, Engine, GenerateRequest, TokenEvent
from swarmnode.services.runners import Runner, Threads

MAX_BODY_BYTES = 8 << 20

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


def build_app(served: Served) -> Starlette:
    """The ASGI application of one backbone."""
    routes = _Routes(served)
    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/api/swarm", routes.swarm),
            *(node_routes(served.node) if served.node is not None else ()),
        ],
        middleware=[Middleware(LoopbackGuard)],
        exception_handlers={HTTPException: on_http_error, ClientDisconnect: on_gone, Exception: on_crash},
    )
    app.router.redirect_slashes = False
    return app


class _Routes:
    def __init__(self, served: Served) -> None:
        self._served = served
        engine = served.engine
        self._prompts = Prompts(engine.tokenizer, served.template, engine.model.n_ctx)
        self._n_preparing = 0

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        name = self._served.model_name
        entry = {"id": name, "object": "model", "created": self._served.started_s, "owned_by": "swarmnode"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def swarm(self, request: Request) -> Response:
        return JSONResponse(self._served.swarm_state())

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion_untrusted, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat_untrusted, chat=True)

    async def _answer(self, request: Request, parse: Parse, *, chat: bool) -> Response:
        served = self._served
        try:
            asked = await served.threads.run(
                partial(parse_body_untrusted, await read_body(request, MAX_BODY_BYTES), parse)
            )
            if asked.model not in (None, served.model_name):
                message = (
                    f"there is no model {asked.model!r} here; this backbone serves {served.model_name!r}"
                )
                return refusal(404, message, code="model_not_found")
            if served.engine.n_waiting + self._n_preparing >= served.config.max_waiting:
                return self._busy()
            job = await self._prepare(asked)
        except SwarmError as error:
            return failure(error)
        form = ResponseForm(
            f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            served.model_name,
            int(time.time()),
            chat,
        )
        if asked.stream:
            return StreamingResponse(
                self._stream(job, form, asked.include_usage), media_type="text/event-stream"
            )
        return await self._whole(request, job, form)

    def _busy(self) -> Response:
        config = self._served.config
        message = f"{config.max_waiting} requests wait already; try again in {config.retry_after_s} s"
        headers = {"Retry-After": str(config.retry_after_s)}
        return refusal(429, message, "rate_limit_error", "rate_limit_exceeded", headers)

    async def _prepare(self, asked: CompletionRequest) -> GenerateRequest:
        """Raises UsageError or ContextFullError for what cannot be generated."""
        engine = self._served.engine
        self._n_preparing += 1
        try:
            tokens = await self._served.threads.run(partial(self._prompts.tokens, asked))
        finally:
            self._n_preparing -= 1
        room = max(1, engine.model.n_ctx - len(tokens))
        max_tokens = asked.max_tokens or min(DEFAULT_MAX_TOKENS, room)
        job = GenerateRequest(tokens, max_tokens, asked.sampling, engine.tokenizer.end_ids)
        engine.check(job)
        return job

    async def _whole(self, request: Request, job: GenerateRequest, form: ResponseForm) -> Response:
        """The answer in one piece. A client that goes away meanwhile ends the generation."""
        answer = Response(status_code=CLIENT_GONE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, request, nursery.cancel_scope)
            answer = await self._collect(job, form)
            nursery.cancel_scope.cancel()
        return answer

    async def _collect(self, job: GenerateRequest, form: ResponseForm) -> Response:
        text = ""
        try:
            async with aclosing(self._served.engine.generate(job)) as events:
                async for event in events:
                    text += event.text
        except Exception as error:  # whatever it is, the client gets an answer
            return failure(error)
        assert isinstance(event, DoneEvent)
        answer = form.whole(text, event.finish_reason, _usage(event))
        return JSONResponse(answer | {"swarm": event.account.as_dict()})

    async def _stream(
        self, job: GenerateRequest, form: ResponseForm, include_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events: one a token, then (if asked for) usage, or the error; then [DONE]."""
        first = True
        try:
            async with aclosing(self._served.engine.generate(job)) as events:
                async for event in events:
                    reason = event.finish_reason if isinstance(event, DoneEvent) else None
                    piece = form.chunk(event.text, reason, first)
                    piece["swarm"] = event.account.as_dict()
                    if isinstance(event, TokenEvent):
                        piece["token"] = event.token
                    yield _sse(piece)
                    first = False
            assert isinstance(event, DoneEvent)
            if include_usage:
                yield _sse(form.usage_chunk(_usage(event)))
        except Exception as error:  # whatever it is, the stream ends as it should
            yield _sse(explain(error)[1])
        yield "data: [DONE]\n\n"


async def _cancel_when_gone(request: Request, scope: trio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _usage(event: DoneEvent) -> dict[str, Any]:
    return usage_of(event.prompt_tokens, event.new_tokens, event.cached_tokens)


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
