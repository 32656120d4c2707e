"""Minimal pass-through proxy: `python -m benchmarks._bare_proxy PORT UPSTREAM`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


def application(upstream: str) -> Starlette:
    client = httpx.AsyncClient(base_url=upstream, timeout=60, trust_env=False)

    async def chat(request: Request) -> Response:
        headers = {"content-type": "application/json"}
        upstream_request = client.build_request("POST", request.url.path, content=await request.body(), headers=headers)
        response = await client.send(upstream_request, stream=True)

        async def body() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(response):
                async for chunk in response.aiter_raw():
                    yield chunk

        return StreamingResponse(body(), response.status_code, media_type=response.headers["content-type"])

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/health", health)])


if __name__ == "__main__":
    uvicorn.run(application(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
