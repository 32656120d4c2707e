"""Valid requests to every route of the gateway, about existing turns, for `inputs.mutate` to change."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.attack.inputs import TEXTS, Raw, mutate

EXAMPLES = Path(ids.__file__).parents[1] / "examples.json"
_CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"query": "a"}'}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the mails.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@dataclass(frozen=True, slots=True)
class KnownTurns:
    """Identifiers that the attacker knows: its own responses and sessions, and one response of another tenant."""

    model: str
    version: str
    response_ids: tuple[str, ...]
    session_ids: tuple[str, ...]
    foreign_response_id: str


@dataclass(frozen=True, slots=True)
class HttpInput:
    """One HTTP request. `path` is already percent-encoded."""

    method: str
    path: str
    headers: dict[str, bytes]
    body: bytes


def http_input(turns: KnownTurns, rng: random.Random, *, chat: bool) -> HttpInput:
    """Draw a request. With `chat`, draw one that calls a model, which takes a hundred times as long as the others."""
    routes = _CHAT_ROUTES if chat else _OTHER_ROUTES
    path, template = rng.choice(routes)
    document = template(turns, rng)
    body = b"" if document is None else mutate(document, rng)
    return HttpInput("GET" if document is None else "POST", _path(path, turns, rng), _headers(rng), body)


def topic_inputs() -> dict[str, list[object]]:
    """Return example events by topic."""
    return {
        topic: list(examples.values())
        for topic, examples in json.loads(EXAMPLES.read_text(encoding="utf-8"), parse_float=Raw).items()
    }


def record_headers(topic: str, rng: random.Random) -> list[tuple[str, bytes]]:
    """Return the CloudEvents headers of a record of `topic`. In one of ten records one header is hostile."""
    types = {"training-metrics": "training-metrics", "dead-letter-decisions": "dead-letter-decision"}
    kind = types.get(topic, topic.removesuffix("s"))
    headers = {
        "ce_specversion": "1.0",
        "ce_id": str(ids.uuid7()),
        "ce_type": f"headrace.{kind}.v1",
        "ce_source": "outside",
        "ce_time": utcnow().isoformat(),
        "ce_subject": "x",
    }
    if rng.random() < 0.1:
        headers[rng.choice(list(headers))] = rng.choice(TEXTS)[:2000]
    return [(name, value.encode("utf-8", "surrogatepass")) for name, value in headers.items()]


def _headers(rng: random.Random) -> dict[str, bytes]:
    headers = {"content-type": b"application/json"}
    if rng.random() < 0.15:
        name = rng.choice(
            ("x-session-id", "x-task-id", "x-run-id", "x-user-id", "traceparent", "x-stainless-retry-count")
        )
        headers[name] = rng.choice(TEXTS).encode(rng.choice(("utf-8", "utf-16")), "surrogatepass")[:4000]
    return headers


def _path(path: str, turns: KnownTurns, rng: random.Random) -> str:
    name = rng.choice((*turns.session_ids, *TEXTS))[:6000]
    path = path.replace("{}", quote(name.encode("utf-8", "surrogatepass"), safe=rng.choice(("", "/"))))
    if rng.random() < 0.05:
        path = f"/sessions/{quote(rng.choice(TEXTS)[:4000].encode('utf-8', 'surrogatepass'), safe='')}{path}"
    return path


def _target(turns: KnownTurns, rng: random.Random) -> dict[str, Any]:
    match rng.randrange(6):
        case 0:
            return {"session_id": rng.choice(turns.session_ids)}
        case 1:
            return {"msg_ids": rng.sample(turns.response_ids, min(3, len(turns.response_ids)))}
        case 2:
            return {"response_id": turns.foreign_response_id}
        case _:
            return {"response_id": rng.choice(turns.response_ids)}


def _feedback(turns: KnownTurns, rng: random.Random) -> dict[str, Any]:
    number = rng.random
    statement: dict[str, Any]
    match rng.randrange(9):
        case 0:
            statement = {"value": Raw(number()), "rater": f"rater-{rng.randrange(5)}"}
        case 1:
            statement = {"rating": Raw(3), "scale": [Raw(1), Raw(5)], "metric": "tone"}
        case 2:
            statement = {"parts": {f"m{at}": Raw(number()) for at in range(rng.choice((1, 31, 32)))}}
        case 3:
            response = rng.choice(turns.response_ids)
            edit = {"role": "assistant", "content": "better", "tool_calls": [_CALL] if number() < 0.5 else None}
            return {"response_id": response, "edit": edit, "comment": "why"}
        case 4:
            pair = rng.sample(turns.response_ids, 2)
            return {"preference": {"chosen": pair[0], "rejected": pair[1]}, "rater": "r"}
        case 5:
            statement = {"label": "good", "level": "turn", "context": {"expected": ["a", Raw(1), {"b": "c"}]}}
            return statement | {"response_id": rng.choice(turns.response_ids)}
        case 6:
            return {"level": "task", "task_id": f"t{rng.randrange(9)}", "value": Raw(number()), "context": {"k": "v"}}
        case 7:
            statement = {
                "value": True,
                "level": "response",
                "choice": Raw(0),
                "feedback_id": f"f{rng.randrange(10**9)}",
            }
            return statement | {"response_id": rng.choice(turns.response_ids), "run_id": Raw(7)}
        case _:
            statement = {"value": Raw(number()), "comment": "fine", "context": {"k": "v"}, "source": "user"}
    return statement | _target(turns, rng)


def _trinity(turns: KnownTurns, rng: random.Random) -> dict[str, Any]:
    return {"msg_ids": rng.sample(turns.response_ids, 2), "reward": Raw(0.5), "task_id": "t", "run_id": Raw(1)}


def _commit(_turns: KnownTurns, _rng: random.Random) -> dict[str, Any]:
    return {"task_id": None, "run_id": None, "time_threshold": Raw(1_000_000)}


def _end(_turns: KnownTurns, _rng: random.Random) -> dict[str, Any]:
    return {}


def _trajectory(turns: KnownTurns, rng: random.Random) -> dict[str, Any]:
    name, now = f"outside-{rng.randrange(10**9)}", utcnow().isoformat()
    span = {"start": Raw(2), "logprobs": [Raw(-0.5), Raw(-0.25)], "turn_id": f"{name}-1", "version": turns.version}
    return {
        "trajectory_id": name,
        "session_id": name,
        "session_key": ids.session_key("mallory", name),
        "tenant": "mallory",
        "model": turns.model,
        "branches": [{"token_ids": [Raw(at) for at in (1, 2, 3, 4)], "spans": [span]}],
        "end_reason": "ingest",
        "time": now,
        "started_at": now,
    }


def _chat(turns: KnownTurns, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": turns.model,
        "messages": [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who wrote?"}],
        "max_tokens": Raw(2),
        "metadata": {"session_id": f"s{rng.randrange(50)}", "task_id": "t"},
    }
    extras: tuple[dict[str, Any], ...] = (
        {"temperature": Raw(0.7), "top_p": Raw(0.9), "presence_penalty": Raw(0.1), "seed": Raw(1)},
        {"tools": [_TOOL], "tool_choice": "auto", "chat_template_kwargs": {"a": {"b": [Raw(1)]}}},
        {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "search"}}},
        {"stop": ["x", "end"], "n": Raw(2), "logprobs": True, "top_logprobs": Raw(2)},
        {"logit_bias": {"5": Raw(1.5)}, "user": "u"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        {"stream": True, "stream_options": {"include_usage": True}},
    )
    body |= rng.choice(extras)
    if rng.random() < 0.3:
        body["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "call_1", "content": "none"},
            {"role": "user", "content": [{"type": "text", "text": "Who?"}], "name": "n"},
        ]
    return body


def _responses(turns: KnownTurns, rng: random.Random) -> dict[str, Any]:
    part = {"type": "input_text", "text": "Who wrote?"}
    body: dict[str, Any] = {
        "model": turns.model,
        "input": [{"role": "user", "content": [part]}],
        "instructions": "Answer.",
        "max_output_tokens": Raw(16),
        "temperature": Raw(1.0),
        "metadata": {"session_id": "r"},
    }
    schema = {"type": "object"}
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"tools": [{"type": "function", **_TOOL["function"]}], "tool_choice": {"type": "function", "name": "search"}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        {"stream": True, "top_p": Raw(0.9), "top_logprobs": Raw(2), "include": ["message.output_text.logprobs"]},
    )
    if rng.random() < 0.3:
        body["input"] += [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "search", "arguments": '{"query": "a"}'},
            {"type": "function_call_output", "call_id": "c", "output": "none"},
        ]
    return body | rng.choice(extras)


def _messages(turns: KnownTurns, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": turns.model,
        "max_tokens": Raw(16),
        "system": "Answer.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Who wrote?"}]}],
        "metadata": {"user_id": "r"},
    }
    function = _TOOL["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"tools": [tool], "tool_choice": {"type": "tool", "name": "search"}},
        {"stream": True, "top_p": Raw(0.9), "stop_sequences": ["end"]},
        {"thinking": {"type": "enabled", "budget_tokens": Raw(8)}, "service_tier": "auto"},
    )
    if rng.random() < 0.3:
        body["messages"] += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "none"}]},
        ]
    return body | rng.choice(extras)


def _nothing(_turns: KnownTurns, _rng: random.Random) -> None:
    return None


_Template = Callable[[KnownTurns, random.Random], dict[str, Any] | None]
_CHAT_ROUTES: tuple[tuple[str, _Template], ...] = (
    ("/v1/chat/completions", _chat),
    ("/v1/chat/completions", _chat),
    ("/chat", _chat),
    ("/v1/responses", _responses),
    ("/v1/messages", _messages),
)
_OTHER_ROUTES: tuple[tuple[str, _Template], ...] = (
    ("/v1/feedback", _feedback), ("/v1/feedback", _feedback), ("/v1/feedback", _feedback), ("/feedback", _trinity),
    ("/commit", _commit), ("/v1/sessions/{}/end", _end), ("/v1/trajectories", _trajectory), ("/v1/models/{}", _nothing),
    ("/sessions/{}/v1/feedback", _feedback),
)  # fmt: skip
