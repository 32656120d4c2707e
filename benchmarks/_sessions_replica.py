"""Servers beside the gateway: `python -m benchmarks._sessions_replica PORT [UPSTREAM]`.

Without UPSTREAM it is a replica without a model whose prompts continue earlier ones exactly. A prompt has one token per
byte of its messages, and the sampled tokens of an answer at the place of the answer's text. The replica finds those
tokens in the text itself, so it needs no memory: token 117 reads `w117 `. With UPSTREAM it is a minimal pass-through
proxy.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from aiohttp import web
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


ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END = 5
ANSWER_TOKENS = 24
_FIRST_TOKEN = 300
_TOKENS = 1000
VOCABULARY = _FIRST_TOKEN + _TOKENS


def prompt_of(messages: list[dict[str, Any]]) -> list[int]:
    """Return the prompt of a conversation."""
    prompt: list[int] = []
    for message in messages:
        prompt.append(ROLES[message["role"]])
        text = message["content"]
        if message["role"] == "assistant":
            prompt += [int(word[1:]) for word in text.split()]
        else:
            prompt += text.encode()
        prompt.append(END)
    return [*prompt, ROLES["assistant"]]


def answer_of(prompt: list[int]) -> list[int]:
    """Return the sampled tokens, which depend on the prompt alone."""
    seed = zlib.crc32(json.dumps(prompt[-64:]).encode()) + len(prompt)
    return [_FIRST_TOKEN + (seed * (at + 1)) % _TOKENS for at in range(ANSWER_TOKENS)]


async def _chat(request: web.Request) -> web.Response:
    body = json.loads(await request.read())
    prompt = prompt_of(body["messages"])
    tokens = answer_of(prompt)
    text = "".join(f"w{token} " for token in tokens)
    content = [{"token": f"w{token} ", "logprob": -(token % 64) / 64} for token in tokens]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": tokens,
    }
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    usage = {**counts, "total_tokens": sum(counts.values())}
    answer = {"model": body["model"], "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
    return web.json_response(answer)


async def _health(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def main(port: int, upstream: str | None = None) -> None:
    if upstream is not None:
        uvicorn.run(application(upstream), host="127.0.0.1", port=port, log_level="warning")
        return
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_get("/health", _health)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
