"""CPU time of the gateway for equal calls of its APIs: chat completions, Responses and Messages, plain and streamed.

Each call is the sixth of a conversation with tools, as an agent sends it in that API. The APIs take turns in blocks of
calls on one gateway, so that a busy machine disturbs them equally.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks._gateway_tuning import cpu_s
from tests.support.gateway_process import GatewayProcess

RATIO_MAX = 1.25
_STEPS = 5
_RULES = "You are an agent that answers questions about a mailbox. " * 20
_SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_TOOLS = {name: f"Look into the {name} of the user, by a query." for name in ("mail", "notes", "calendar", "files")}
_TASK = "Who sent the mail about the meeting on Monday at 10:30?"
_RESULT = "Two mails of Ada, of Monday and of Tuesday. " * 10
_ARGUMENTS = {"query": "meeting on Monday"}


@dataclass
class Dialect:
    """One API, with the CPU time per call of each block in milliseconds."""

    path: str
    body: dict[str, Any]
    cpu_ms: list[float] = field(default_factory=list)

    async def load(self, gateway: GatewayProcess, http: aiohttp.ClientSession, calls: int, *, stream: bool) -> None:
        """Make the calls of one block, one after the other."""
        began_s = cpu_s(gateway.pid)
        for _ in range(calls):
            body = {**self.body, "stream": stream}
            async with http.post(f"{gateway.url}{self.path}", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise RuntimeError(f"{self.path}: {response.status} {text[:500]}")
        self.cpu_ms.append((cpu_s(gateway.pid) - began_s) * 1e3 / calls)


def dialects() -> dict[str, Dialect]:
    """Return equal calls of the APIs."""
    chat: list[Any] = [{"role": "system", "content": _RULES}, {"role": "user", "content": _TASK}]
    items: list[Any] = [{"role": "user", "content": _TASK}]
    messages: list[Any] = [{"role": "user", "content": _TASK}]
    for step in range(_STEPS):
        name, call_id, arguments = list(_TOOLS)[step % len(_TOOLS)], f"call_{step}", json.dumps(_ARGUMENTS)
        function = {"name": name, "arguments": arguments}
        chat.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            }
        )
        chat.append({"role": "tool", "tool_call_id": call_id, "content": _RESULT})
        items.append({"type": "function_call", "call_id": call_id, **function})
        items.append({"type": "function_call_output", "call_id": call_id, "output": _RESULT})
        use = {"type": "tool_use", "id": call_id, "name": name, "input": _ARGUMENTS}
        messages.append({"role": "assistant", "content": [use]})
        result = {"type": "tool_result", "tool_use_id": call_id, "content": _RESULT}
        messages.append({"role": "user", "content": [result]})
    functions = [{"name": name, "description": text, "parameters": _SCHEMA} for name, text in _TOOLS.items()]
    chat_tools = [{"type": "function", "function": function} for function in functions]
    message_tools = [{"name": name, "description": text, "input_schema": _SCHEMA} for name, text in _TOOLS.items()]
    return {
        "chat": Dialect(
            "/v1/chat/completions", {"model": "tiny", "messages": chat, "tools": chat_tools, "max_tokens": 50}
        ),
        "responses": Dialect(
            "/v1/responses",
            {
                "model": "tiny", "instructions": _RULES, "input": items, "max_output_tokens": 50,
                "tools": [{"type": "function", **function} for function in functions],
            },
        ),
        "messages": Dialect(
            "/v1/messages",
            {"model": "tiny", "system": _RULES, "messages": messages, "tools": message_tools, "max_tokens": 50},
        ),
    }  # fmt: skip


async def compare(gateway: GatewayProcess, blocks: int, calls: int) -> dict[str, Any]:
    """Return the CPU time of a call of each API, and its ratio to that of a chat call in the median of the blocks."""
    results: dict[str, Any] = {"ratio_max": RATIO_MAX}
    async with aiohttp.ClientSession() as http:
        for mode in ("plain", "stream"):
            apis = dialects()
            for block in range(blocks + 1):
                for api in apis.values():
                    await api.load(gateway, http, calls, stream=mode == "stream")
                    if block == 0:
                        api.cpu_ms.clear()  # the first calls open connections and compile
            chat_ms = apis["chat"].cpu_ms
            results[mode] = {
                name: {
                    "cpu_ms": round(statistics.median(api.cpu_ms), 3),
                    "ratio": round(statistics.median(a / b for a, b in zip(api.cpu_ms, chat_ms, strict=True)), 3),
                }
                for name, api in apis.items()
            }
    return results


def holds(results: dict[str, Any]) -> bool:
    """Return whether no API costs more than `RATIO_MAX` times the chat call."""
    ratios: list[float] = [api["ratio"] for mode in ("plain", "stream") for api in results[mode].values()]
    return max(ratios) <= RATIO_MAX
