"""Comparisons of gateways: with and without the runtime's tuning, and the CPU time of equal calls of each API.

Two gateways on one broker and one replica without a model answer blocks of calls alternately, `CONCURRENT` at a time,
so that a busy machine disturbs both equally. The untuned gateway collects garbage as Python does by default and watches
its loop with a timer of 20 ms. Afterwards both are idle, and the voluntary context switches of their threads count as
wake-ups. The memory before and after the load shows the cost of infrequent collections.

Each call is the sixth of a conversation with tools, as an agent sends it in that API. The APIs take turns in blocks of
calls on one gateway, so that a busy machine disturbs them equally.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks._run_processes import Summary
from tests.support.service_process import GatewayProcess

CONCURRENT = 16
P99_RATIO_MAX = 0.6
WAKE_UPS_RATIO_MAX = 0.7
_REST_S = 20.0
_UNTUNED = """
import asyncio, time
from headrace_runtime import main
from headrace_runtime.process import event_loop

main.tune_garbage_collection = lambda threshold: None

async def run(self):
    while True:
        before = time.monotonic(), time.thread_time(), event_loop.waited_for_core_s()
        await asyncio.sleep(0.02)
        time.monotonic(), time.thread_time(), event_loop.waited_for_core_s()

event_loop.LoopWatch.run = run
"""
RATIO_MAX = 1.25
_STEPS = 5
_RULES = "You are an agent that answers questions about a mailbox. " * 20
_SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_TOOLS = {name: f"Look into the {name} of the user, by a query." for name in ("mail", "notes", "calendar", "files")}
_TASK = "Who sent the mail about the meeting on Monday at 10:30?"
_RESULT = "Two mails of Ada, of Monday and of Tuesday. " * 10
_ARGUMENTS = {"query": "meeting on Monday"}


@dataclass
class Side:
    """One of the two gateways, with its measurements."""

    gateway: GatewayProcess
    latencies_ms: list[Summary] = field(default_factory=list)
    """Latencies of each block."""
    cpu_ms: list[float] = field(default_factory=list)
    """CPU time of the gateway's process per request, of each block."""
    wake_ups_hz: float = 0.0
    memory_mb: tuple[float, float] = (0.0, 0.0)
    """Memory in MB before and after the load."""

    async def load(self, seconds: float, model: str) -> None:
        """Call the gateway for one block."""
        before_s, latencies = cpu_s(self.gateway.pid), []
        until = time.perf_counter() + seconds
        body = {"model": model, "messages": [{"role": "user", "content": "Is the meeting on Monday?"}]}

        async def call(http: aiohttp.ClientSession) -> None:
            while (began := time.perf_counter()) < until:
                async with http.post(f"{self.gateway.url}/v1/chat/completions", json=body) as response:
                    response.raise_for_status()
                    await response.read()
                latencies.append((time.perf_counter() - began) * 1e3)

        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(call(http) for _ in range(CONCURRENT)))
        self.latencies_ms.append(Summary.of(latencies))
        self.cpu_ms.append((cpu_s(self.gateway.pid) - before_s) * 1e3 / len(latencies))

    def result(self) -> dict[str, Any]:
        quantiles = {f"p{share * 100:.0f}_ms": self.median(share) for share in (0.5, 0.99)}
        return {
            **{name: round(value, 2) for name, value in quantiles.items()},
            "cpu_per_request_ms": round(statistics.median(self.cpu_ms), 3),
            "requests": sum(len(block.values) for block in self.latencies_ms),
            "wake_ups_hz": round(self.wake_ups_hz, 1),
            "memory_mb": [round(value, 1) for value in self.memory_mb],
        }

    def median(self, share: float) -> float:
        """Return the median over the blocks of a quantile."""
        return statistics.median(block.quantile(share) for block in self.latencies_ms)


def untuned_environment(folder: Path) -> Mapping[str, str]:
    """Return the environment in which a service runs without the tuning."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_UNTUNED)
    return {"PYTHONPATH": str(folder)}


async def compare(
    tuned: GatewayProcess, untuned: GatewayProcess, model: str, pairs: int, block_s: float
) -> dict[str, Any]:
    """Call both gateways alternately, `pairs` times, each for `block_s`, then leave both idle."""
    sides = [Side(tuned), Side(untuned)]
    for side in sides:
        await side.load(block_s, model)  # warm up: the first calls open connections and compile
        side.latencies_ms.clear()
        side.cpu_ms.clear()
        side.memory_mb = (_memory_mb(side.gateway.pid), 0.0)
    for pair in range(pairs):
        for side in sides if pair % 2 else reversed(sides):
            await side.load(block_s, model)
    for side in sides:
        side.memory_mb = (side.memory_mb[0], _memory_mb(side.gateway.pid))
    before = [wake_ups(side.gateway.pid) for side in sides]
    await asyncio.sleep(_REST_S)
    for side, count in zip(sides, before, strict=True):
        side.wake_ups_hz = (wake_ups(side.gateway.pid) - count) / _REST_S
    ratios = [
        tuned_block.quantile(0.99) / untuned_block.quantile(0.99)
        for tuned_block, untuned_block in zip(sides[0].latencies_ms, sides[1].latencies_ms, strict=True)
    ]
    return {
        "tuned": sides[0].result(),
        "untuned": sides[1].result(),
        "p99_ratio": round(statistics.median(ratios), 3),
        "p99_ratio_max": P99_RATIO_MAX,
        "wake_ups_ratio": round(sides[0].wake_ups_hz / sides[1].wake_ups_hz, 3),
        "wake_ups_ratio_max": WAKE_UPS_RATIO_MAX,
    }


def wake_ups(pid: int) -> int:
    """Return the number of voluntary context switches of all threads of a process."""
    count = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may have ended meanwhile
            match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (thread / "status").read_text(), re.MULTILINE)
            count += int(match[1]) if match else 0
    return count


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def _memory_mb(pid: int) -> float:
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None, "only Linux reports RssAnon"
    return int(match[1]) / 1024


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


async def compare_apis(gateway: GatewayProcess, blocks: int, calls: int) -> dict[str, Any]:
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
