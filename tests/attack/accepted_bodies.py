"""The largest request bodies that each route accepts, and a measurement of how long they block the event loops.

Each body takes one limit (a length, a depth, a number of values) to its maximum and fills the remaining bytes with the
content that is most expensive to process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headrace_schemas import Feedback, Trajectory
from headrace_schemas.values import ids
from headrace_schemas.values.base import MAX_LENGTH
from headrace_schemas.values.bounds import CONTEXT_KEYS_MAX, JSON_CHARACTERS_MAX, JSON_DEPTH_MAX, JSON_VALUES_MAX
from tests.attack.stacks import SmallStack, beside, block_s, small_stack
from tests.support.fake_replica import LENGTH, VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.processes import wait_until
from tests.system.program import Line, at_most

BODY_BYTES = 8_388_608
_SLACK_BYTES = 4_096
_TEXT = "x\u00e9\u4e2d\U0001f600 "
"""Text with characters of one, two, three and four bytes in UTF-8."""
_LONG = 1_048_000


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _filled(make: Callable[[int], object], most: int, *, escaped: bool = False) -> bytes:
    """Return the largest accepted body among those that `make` builds for a count of up to `most`."""
    low, high, largest = 1, most, b""
    while low <= high:
        middle = (low + high) // 2
        body = json.dumps(make(middle), ensure_ascii=escaped, separators=(",", ":")).encode()
        if len(body) <= BODY_BYTES - _SLACK_BYTES:
            low, largest = middle + 1, body
        else:
            high = middle - 1
    return largest


def free_json() -> dict[str, dict[str, Any]]:
    """Return JSON objects at the limits of free-form JSON fields: values, containers, characters, depth."""
    deep: Any = 1
    for _ in range(JSON_DEPTH_MAX - 3):
        deep = {"a": deep}
    names = [f"k{at}" for at in range(CONTEXT_KEYS_MAX)]
    part = JSON_VALUES_MAX // CONTEXT_KEYS_MAX - 2
    characters = JSON_CHARACTERS_MAX // CONTEXT_KEYS_MAX - 8
    return {
        "numbers": {name: [0.1234567890123456] * part for name in names},
        "objects": {name: [{}] * (part // 3) for name in names},
        "names": {name: {f"n{at}": None for at in range(part)} for name in names},
        "text": dict.fromkeys(names, (_TEXT * characters)[: characters - 8]),
        "depth": {name: [deep] * 3 for name in names},
    }


def chat_bodies(model: str) -> dict[str, bytes]:
    """Return bodies of `/v1/chat/completions` by name."""
    user = {"role": "user", "content": "hi"}

    def chat(**fields: object) -> dict[str, object]:
        return {"model": model, "max_tokens": 1, "messages": [user], **fields}

    def calls(count: int) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return {"role": "assistant", "content": None, "tool_calls": [call] * count}

    function: dict[str, Any] = {"name": "f", "description": "d", "parameters": {}}
    tool = {"type": "function", "function": function}
    parts = [{"type": "text", "text": "x"}]
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(4000)}}
    bodies = {
        "messages": _dumps(chat(messages=[user] * 8_191)),
        "message text": _filled(lambda n: chat(messages=[{"role": "user", "content": (_TEXT * _LONG)[:n]}] * 4), _LONG),
        "escaped text": _filled(
            lambda n: chat(messages=[{"role": "user", "content": "\u4e2d" * n}] * 2), _LONG, escaped=True
        ),
        "parts": _dumps(chat(messages=[{"role": "user", "content": parts * 10_900}])),
        "messages of parts": _dumps(chat(messages=[{"role": "user", "content": parts}] * 5_000)),
        "tool calls": _dumps(chat(messages=[user, calls(5_000)])),
        "tools": _dumps(chat(tools=[tool] * 1_024)),
        "tools of text": _filled(
            lambda n: chat(tools=[{**tool, "function": {**function, "description": "d" * n}}] * 1_024), _LONG
        ),
        "schema": _dumps(chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})),
    }
    for name, value in free_json().items():
        small = {key: inner for at, (key, inner) in enumerate(value.items()) if at < CONTEXT_KEYS_MAX - 2}
        bodies[f"metadata: {name}"] = _dumps(chat(metadata=small))
        parameters = [{**tool, "function": {**function, "parameters": small}}]
        bodies[f"tool parameters: {name}"] = _dumps(chat(tools=parameters))
        bodies[f"template: {name}"] = _dumps(chat(chat_template_kwargs=small))
    return bodies


def responses_bodies(model: str) -> dict[str, bytes]:
    """Return bodies of `/v1/responses` by name."""

    def responses(**fields: object) -> dict[str, object]:
        return {"model": model, "max_output_tokens": 16, "input": "hi", **fields}

    message = {"type": "message", "role": "user", "content": "hi"}
    parts = [{"type": "input_text", "text": "x"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
    bodies = {
        "items": _dumps(responses(input=[message] * 8_100)),
        "items of parts": _dumps(responses(input=[{"role": "user", "content": parts}] * 5_000)),
        "parts": _dumps(responses(input=[{"role": "user", "content": parts * 10_900}])),
        "calls and outputs": _dumps(responses(input=[message, *([call, output] * 3_000)])),
        "text": _filled(lambda n: responses(input=[{"role": "user", "content": (_TEXT * _LONG)[:n]}] * 4), _LONG),
        "tools": _dumps(responses(tools=[tool] * 1_024)),
    }
    return bodies | {f"metadata: {name}": _dumps(responses(metadata=value)) for name, value in free_json().items()}


def feedback_bodies(turns: list[str]) -> dict[str, bytes]:
    """Return bodies of `/v1/feedback` by name. They refer to `turns`, the response ids of one session."""
    target = {"response_id": turns[0], "value": 0.5}
    named = [ids.response_id(ids.key_of_response(turns[0]) or "") for _ in range(4_095)]
    edit_call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    values = Feedback.values_max
    bodies = {
        "turns": _dumps({"msg_ids": named, "value": 0.5}),
        "parts": _dumps({**target, "value": None, "parts": {f"p{at}": 0.5 for at in range(32)}}),
        "comment": _filled(lambda n: {**target, "comment": (_TEXT * _LONG)[:n]}, _LONG),
        "escaped comment": _filled(lambda n: {**target, "comment": "\u4e2d" * n}, _LONG, escaped=True),
        "edit": _filled(
            lambda n: {"response_id": turns[0], "edit": {"content": None, "tool_calls": [edit_call] * n}}, values // 6
        ),
    }
    for name, value in free_json().items():
        half = {key: _halved(inner) for key, inner in value.items()}
        bodies[f"context: {name}"] = _dumps({**target, "context": half})
    return bodies


def _halved(value: Any) -> Any:
    """Return `value` with half of each long list or object: feedback may hold half as many values as free-form JSON."""
    if isinstance(value, dict):
        return dict(list(value.items())[: len(value) // 2 - 8])
    return value[: len(value) // 2 - 4] if isinstance(value, list) and len(value) > 8 else value


def trinity_bodies(turns: list[str]) -> dict[str, bytes]:
    """Return bodies of Trinity's `/feedback` route by name."""
    named = [ids.response_id(ids.key_of_response(turns[0]) or "") for _ in range(4_095)]
    body = _dumps({"msg_ids": named, "reward": 0.5})
    return {"turns": body, "white space": body + b" " * (BODY_BYTES - _SLACK_BYTES - len(body))}


def commit_bodies() -> dict[str, bytes]:
    """Return bodies of `/commit` by name."""
    return {"white space": b" " * (BODY_BYTES - _SLACK_BYTES) + b'{"time_threshold":0}'}


def trajectory_bodies(model: str, version: str) -> dict[str, bytes]:
    """Return bodies of `/v1/trajectories` by name."""

    def span(start: int, logprobs: object, turn: str) -> dict[str, object]:
        return {"start": start, "logprobs": logprobs, "turn_id": turn, "version": version}

    def run(branches: list[dict[str, object]], **fields: object) -> dict[str, object]:
        named = {"trajectory_id": "worst", "session_id": "worst", "model": model}
        return {**named, "started_at": "2026-01-01T00:00:00Z", "branches": branches, **fields}

    def packed(count: int, code: str, value: float) -> str:
        return base64.b64encode(struct.pack(f"<{count}{code}", *[value] * count)).decode()

    def spans(branches: int, each: int) -> dict[str, object]:
        return run(
            [
                {
                    "token_ids": [1] * each,
                    "spans": [span(at, [-0.5], f"t{number}.{at}") for at in range(each)],
                }
                for number in range(branches)
            ]
        )

    branch = [{"token_ids": [1, 2], "spans": [span(1, [-0.5], "t")]}]
    message = {"role": "assistant", "content": "x"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    containers = Trajectory.containers_max
    ids_max = Trajectory.values_max // 2 - 200
    bodies = {
        "numbers": _dumps(
            run([{"token_ids": [100_000] * ids_max, "spans": [span(1, [-0.123456] * (ids_max - 1), "t")]}])
        ),
        "packed": _filled(
            lambda n: run([{"token_ids": packed(n, "i", 1), "spans": [span(1, packed(n - 1, "f", -0.5), "t")]}]),
            1_048_576,
        ),
        "packed branches": _filled(
            lambda n: run(
                [
                    {"token_ids": packed(n, "i", 1), "spans": [span(1, packed(n - 1, "f", -0.5), f"t{at}")]}
                    for at in range(1_024)
                ]
            ),
            10_000,
        ),
        "spans": _dumps(spans(4, containers // 8 - 4)),
        "branches": _dumps(spans(1_000, 5)),
        "messages": _dumps(run(branch, dialogues=[{"messages": [message] * 8_192}, {"messages": [message] * 8_000}])),
        "dialogues": _dumps(run(branch, dialogues=[{"messages": [message] * 14} for _ in range(1_000)])),
        "dialogue text": _filled(
            lambda n: run(branch, dialogues=[{"messages": [{"role": "user", "content": (_TEXT * _LONG)[:n]}] * 4}]),
            _LONG,
        ),
        "escaped text": _filled(
            lambda n: run(branch, dialogues=[{"messages": [{"role": "user", "content": "\u4e2d" * n}] * 2}]),
            _LONG,
            escaped=True,
        ),
        "tools": _dumps(run(branch, tools=[tool] * 1_024)),
        "left out": _dumps(run(branch, left_out=[{"turn_id": f"l{at}", "reason": "empty"} for at in range(4_096)])),
    }
    return bodies | {f"context: {name}": _dumps(run(branch, context=value)) for name, value in free_json().items()}


_LIMIT_S = 0.1
_ATTEMPTS = 3
"""Number of times that a body is sent. A body that blocks a loop does so every time; a busy machine only now and then.
"""
_SERVICES = ("gateway", "collector", "scorer")
_REWARDS = "def read(trajectory, feedback, context):\n    return 1.0\n"
_MODEL = "tiny"
_START_S = 300.0


@dataclass
class _Blocks:
    """The longest block of the event loop of each service, by kind of loop, with the body that caused it."""

    urls: dict[str, str]
    longest: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)

    def read(self) -> dict[tuple[str, str], float]:
        """Return the seconds of the longest loop blocks that the services have reported for the last few seconds."""
        kinds = ("busy", "late")
        return {(name, kind): blocked for kind in kinds for name, blocked in block_s(self.urls, kind).items()}

    def note(self, name: str, blocks: dict[tuple[str, str], float]) -> None:
        for loop, blocked in blocks.items():
            self.longest[loop] = max(self.longest.get(loop, (0.0, "")), (blocked, name))

    def lines(self) -> list[Line]:
        kinds = {"busy": "computed", "late": "stood still"}
        return [
            at_most(
                f"{service}, accepted bodies: longest that its loop {kinds[kind]} ({name})",
                round(1000 * blocked, 1),
                1000 * _LIMIT_S,
                " ms",
            )
            for (service, kind), (blocked, name) in sorted(self.longest.items())
        ]


async def accepted_bodies(folder: Path, rng: random.Random) -> list[Line]:
    """Send each body alone, and send it again if an event loop was blocked for longer than the limit."""
    rewards = folder / "rewards.py"
    await asyncio.to_thread(folder.mkdir, parents=True)
    await asyncio.to_thread(rewards.write_text, _REWARDS)
    async with small_stack(folder) as stack, _replica().running() as replica, httpx.AsyncClient(timeout=120) as http:
        settings = {"SCORER__FUNCTIONS": [f"{rewards}:read"], "COLLECTOR__IDLE_S": 2}
        services = {
            name: stack.service(name, **{k: v for k, v in settings.items() if k.startswith(name.upper())})
            for name in _SERVICES
        }
        for service in services.values():
            service.start(ready=False)
        await stack.send(routing(replica.versions[0]))
        async with beside(_beat(stack, replica)):
            for name, service in services.items():
                await asyncio.to_thread(wait_until, service.healthy, _START_S, f"{name} is ready")
            turns = await _turns(http, services["gateway"].url)
            blocks = _Blocks({name: service.url for name, service in services.items()})
            order = _bodies(turns)
            rng.shuffle(order)
            refused = [text for path, name, body in order if (text := await _send(http, blocks, path, name, body))]
    summary = "; ".join(refused[:3]) or f"0 of {len(order)}"
    return [*blocks.lines(), Line("largest bodies that were not accepted", summary, "0", not refused)]


def _bodies(turns: list[str]) -> list[tuple[str, str, bytes]]:
    """Return the path, the name and the content of each body."""
    routes = {
        "/v1/chat/completions": chat_bodies(_MODEL),
        "/v1/responses": responses_bodies(_MODEL),
        "/v1/feedback": feedback_bodies(turns),
        "/feedback": trinity_bodies(turns),
        "/commit": commit_bodies(),
        "/v1/trajectories": trajectory_bodies(_MODEL, VERSION),
    }
    return [(path, name, body) for path, bodies in routes.items() for name, body in bodies.items()]


async def _send(http: httpx.AsyncClient, blocks: _Blocks, path: str, name: str, body: bytes) -> str | None:
    """Send a body until one attempt blocks no event loop. Return the gateway's answer if the body was not accepted."""
    label = f"{path}: {name}"
    lowest: dict[tuple[str, str], float] = {}
    for attempt in range(_ATTEMPTS):
        before = await asyncio.to_thread(blocks.read)
        content = body.replace(b'"worst"', f'"worst-{name}-{attempt}"'.encode())
        answer = await http.post(f"{blocks.urls['gateway']}{path}", content=content, headers=_JSON)
        if answer.status_code not in (200, 202):
            return f"{label}: {answer.status_code} {answer.text[:200]}"
        await asyncio.sleep(1.5)  # the services behind the gateway read it within that time
        after = await asyncio.to_thread(blocks.read)
        longer = {loop: blocked for loop, blocked in after.items() if blocked > before[loop]}
        lowest = {loop: min(blocked, lowest.get(loop, blocked)) for loop, blocked in longer.items()}
        if max(longer.values(), default=0.0) <= _LIMIT_S:
            break
        await asyncio.to_thread(wait_until, lambda: max(blocks.read().values()) < _LIMIT_S, 120, "loops run freely")
    blocks.note(label, lowest)
    return None


_JSON = {"content-type": "application/json"}


def _replica() -> FakeReplica:
    """Return a replica whose prompts are as long as a turn allows, and which takes every form of an answer."""
    return FakeReplica(prompt_tokens_max=MAX_LENGTH - LENGTH, grammars=("response_format", "tool_choice"))


async def _turns(http: httpx.AsyncClient, url: str) -> list[str]:
    """Call the model in one session and return the ids of the responses."""
    body = {"model": _MODEL, "messages": [{"role": "user", "content": "hi"}]}
    turns = []
    for _ in range(3):
        answer = await http.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": "worst"})
        answer.raise_for_status()
        turns.append(str(answer.json()["id"]))
    return turns


async def _beat(stack: SmallStack, replica: FakeReplica) -> None:
    while True:
        with contextlib.suppress(Exception):
            await stack.send(replica.heartbeat())
        await asyncio.sleep(1)
