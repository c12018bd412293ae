"""The routes. Each answer carries, beside OpenAI's fields, what the swarm did for it (`swarm`)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swarmnode.api.openai import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    ResponseForm,
    error_object,
    parse_chat_untrusted,
    parse_completion_untrusted,
    usage_of,
)
from swarmnode.errors import ContextFullError, LocalError, SwarmError, UsageError
from swarmnode.models.chat import ChatTemplate
from swarmnode.services.engine import DoneEvent, Engine, GenerateRequest, TokenEvent

MAX_BODY_BYTES = 8 << 20


@dataclass(frozen=True)
class Served:
    """What the routes work with. `swarm_state` returns the JSON of GET /api/swarm."""

    engine: Engine
    model_name: str
    template: ChatTemplate | None
    swarm_state: Callable[[], dict[str, Any]]
    started_s: int


def build_app(served: Served) -> Starlette:
    """The ASGI application of one backbone."""
    routes = _Routes(served)
    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/api/swarm", routes.swarm),
        ]
    )


class _Routes:
    def __init__(self, served: Served) -> None:
        self._served = served

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

    async def _answer(
        self, request: Request, parse: Callable[[object], CompletionRequest], *, chat: bool
    ) -> Response:
        try:
            asked = parse(await _json_body(request))
            job = self._job(asked)
            self._served.engine.check(job)
        except UsageError as error:
            return JSONResponse(error_object(str(error), "invalid_request_error"), 400)
        except ContextFullError as error:
            return JSONResponse(
                error_object(str(error), "invalid_request_error", "context_length_exceeded"), 400
            )
        if asked.model not in (None, self._served.model_name):
            message = (
                f"there is no model {asked.model!r} here; this backbone serves {self._served.model_name!r}"
            )
            return JSONResponse(error_object(message, "invalid_request_error", "model_not_found"), 404)
        form = ResponseForm(
            f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            self._served.model_name,
            int(time.time()),
            chat,
        )
        if asked.stream:
            return StreamingResponse(
                self._stream(job, form, asked.include_usage), media_type="text/event-stream"
            )
        return await self._whole(job, form)

    def _job(self, asked: CompletionRequest) -> GenerateRequest:
        engine = self._served.engine
        if asked.prompt is not None:
            tokens = engine.tokenizer.encode(asked.prompt)
        elif self._served.template is None:
            raise UsageError("this model has no chat template; use /v1/completions")
        else:
            text = self._served.template.render(asked.messages, variables=asked.template_variables)
            tokens = engine.tokenizer.encode(text, parse_special=True)
        room = max(1, engine.model.n_ctx - len(tokens))
        max_tokens = asked.max_tokens or min(DEFAULT_MAX_TOKENS, room)
        return GenerateRequest(tokens, max_tokens, asked.sampling, engine.tokenizer.end_ids)

    async def _whole(self, job: GenerateRequest, form: ResponseForm) -> Response:
        text = ""
        try:
            async with aclosing(self._served.engine.generate(job)) as events:
                async for event in events:
                    text += event.text
        except LocalError as error:
            return JSONResponse(error_object(str(error), "server_error"), 500)
        assert isinstance(event, DoneEvent)
        answer = form.whole(text, event.finish_reason, usage_of(event.prompt_tokens, event.new_tokens))
        return JSONResponse(answer | {"swarm": event.account.as_dict()})

    async def _stream(
        self, job: GenerateRequest, form: ResponseForm, include_usage: bool
    ) -> AsyncIterator[str]:
        """Server-sent events: one a token, then (if asked for) usage, then [DONE]."""
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
                yield _sse(form.usage_chunk(usage_of(event.prompt_tokens, event.new_tokens)))
        except SwarmError as error:
            yield _sse(error_object(str(error), "server_error"))
        yield "data: [DONE]\n\n"


async def _json_body(request: Request) -> object:
    body = bytearray()
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise UsageError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not valid JSON: {error}") from error


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
