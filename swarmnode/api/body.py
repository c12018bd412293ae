"""The body of a request, read no further than its bound."""

from __future__ import annotations

from contextlib import aclosing

from starlette.requests import Request

from swarmnode.errors import UsageError


async def read_body(request: Request, most_bytes: int) -> bytes:
    """All of it; UsageError as soon as it is larger than `most_bytes`."""
    body = bytearray()
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > most_bytes:
                raise UsageError(f"the body is larger than {most_bytes} bytes")
    return bytes(body)
