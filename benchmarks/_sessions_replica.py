"""Replica without a model whose prompts continue earlier ones exactly: `python -m benchmarks._sessions_replica PORT`.

A prompt has one token per byte of its messages, and the sampled tokens of an answer at the place of the answer's text.
The replica finds those tokens in the text itself, so it needs no memory: token 117 reads `w117 `.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

from aiohttp import web

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


def main() -> None:
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_get("/health", _health)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
