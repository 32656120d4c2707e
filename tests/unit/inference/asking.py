"""Requests of tests to the HTTP interface, and clients' interpretation of the responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.unit.inference.scripted import VERSION

USER = [{"role": "user", "content": "What is new?"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query":  "mail"}}</tool_call>'
FULL = {"return_token_ids": True, "logprobs": True}
Json = dict[str, Any]


async def ask(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": VERSION, "messages": USER, **fields})


async def ask_stream(http: httpx.AsyncClient, **fields: object) -> list[Json]:
    """The chunks of a stream that ended well."""
    response = await ask(http, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: Sequence[Json], choice: int = 0) -> Json:
    """One choice of a stream, put together as a client does."""
    message: Json = {
        "content": "",
        "reasoning_content": "",
        "tool_calls": [],
        "token_ids": [],
        "logprobs": [],
        "ends": [],
    }
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != choice:
                continue
            delta = part["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            message["tool_calls"] += delta.get("tool_calls", [])
            message["token_ids"] += part.get("token_ids", [])
            message["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            message["ends"] += [part["finish_reason"]] if part["finish_reason"] else []
    return message
