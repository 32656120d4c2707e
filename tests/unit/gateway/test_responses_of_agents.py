"""Tests of API features that agents use.

Responses API: hints, custom tools and namespaces. Messages API: keys, errors as the `anthropic` package raises them,
and sessions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from openai.types.responses import Response

from headrace_gateway.apis.responses_api.items import encode_reasoning
from headrace_gateway.apis.responses_api.request import parse_responses
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.request_context import RequestContext
from headrace_gateway.settings import KeySettings, LimitSettings
from headrace_schemas import Turn
from tests.support.fake_replica import Called, FakeReplica, Fault
from tests.support.gateway import gateway, lenient, strict, until
from tests.unit.gateway.test_messages_api import ASKED, streamed
from tests.unit.gateway.test_messages_api import served as messages_gateway
from tests.unit.gateway.test_responses_api import SEARCH, served


def parse_chat_request(context: RequestContext, **fields: Any) -> ChatRequest:
    return parse_responses(json.dumps({"model": "m", "input": "x", **fields}).encode(), context).chat


CODEX: dict[str, Any] = {
    "store": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "client_metadata": {"a": "b"},
    "prompt_cache_key": "thread",
    "text": {"verbosity": "low"},
    "truncation": "auto",
    "tools": [SEARCH, {"type": "web_search"}, {"type": "local_shell"}],
}


def test_the_hints_of_codex_and_other_agents_are_accepted_and_reported() -> None:
    context = lenient()
    request = parse_chat_request(context, **CODEX)
    assert [tool.function.name for tool in request.tools or ()] == ["search"]
    assert set(context.ignored) == {
        "client_metadata", "truncation", "text.verbosity", "reasoning.effort", "reasoning.summary", "tools.web_search",
        "tools.local_shell",
    }  # fmt: skip


@pytest.mark.parametrize("effort", ["none", "minimal"])
def test_an_effort_of_none_switches_thinking_off(effort: str) -> None:
    context = strict()
    assert parse_chat_request(context, reasoning={"effort": effort}).chat_template_kwargs == {"enable_thinking": False}
    assert context.ignored == ()


def test_items_of_server_tools_are_left_out_and_reported() -> None:
    context = lenient()
    request = parse_chat_request(
        context, input=[{"role": "user", "content": "q"}, {"type": "web_search_call", "id": "ws_1"}]
    )
    assert len(request.messages) == 1
    assert context.ignored == ("input.web_search_call",)


PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "mail", "description": "d", "tools": [SEARCH, PATCH]}


def test_custom_tools_and_namespaces_are_functions_for_the_model() -> None:
    context = lenient()
    tools = parse_chat_request(context, tools=[PATCH, NAMESPACE]).tools or ()
    assert [tool.function.name for tool in tools] == ["apply_patch", "mail__search", "mail__apply_patch"]
    description = tools[0].function.description or ""
    assert description.startswith("Edits files.")
    assert description.endswith("lark grammar:\nstart: /x+/")
    assert context.ignored == ("tools.format",)


def test_allowed_tools_are_the_ones_that_are_offered() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "search"}]}
    request = parse_chat_request(lenient(), tools=[SEARCH, PATCH], tool_choice=choice)
    assert [tool.function.name for tool in request.tools or ()] == ["search"]
    assert request.tool_choice == "required"


def test_tools_that_an_item_adds_are_offered() -> None:
    input_items = [{"type": "additional_tools", "tools": [SEARCH]}, {"role": "user", "content": "q"}]
    assert [tool.function.name for tool in parse_chat_request(strict(), input=input_items).tools or ()] == ["search"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_custom_tool_and_of_a_namespace_has_its_own_name(tmp_path: Path, *, stream: bool) -> None:
    script: list[Any] = [Called("apply_patch", {"input": "*** a"}), Called("mail__search", {"query": "q"}), "Done."]
    input_items: list[Any] = [{"role": "user", "content": "Mend it."}]
    async with served(tmp_path, FakeReplica(script=script)) as (server, client):
        for _ in range(3):
            fields: dict[str, Any] = {"model": "tiny", "input": input_items, "tools": [PATCH, NAMESPACE]}
            if stream:
                async with client.responses.stream(**fields) as events:
                    kinds = [event.type async for event in events]
                    response: Response = await events.get_final_response()
            else:
                response = await client.responses.create(**fields)
                kinds = []
            input_items += [item.to_dict() for item in response.output]
            (item,) = response.output
            if item.type == "custom_tool_call":
                assert (item.name, item.input) == ("apply_patch", "*** a")
                assert not stream or "response.custom_tool_call_input.done" in kinds
                input_items.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": "patched"})
            elif item.type == "function_call":
                assert (item.namespace, item.name, item.arguments) == ("mail", "search", '{"query": "q"}')
                input_items.append({"type": "function_call_output", "call_id": item.call_id, "output": "1"})
        last = server.turns[-1]
    assert response.output_text == "Done."
    calls = [call for message in last.messages for call in message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("apply_patch", '{"input": "*** a"}'), ("mail__search", '{"query": "q"}'),
    ]  # fmt: skip


async def test_reasoning_comes_back_from_its_encoded_form(tmp_path: Path) -> None:
    encoded = encode_reasoning("hm")
    input_items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "encrypted_content": encoded},
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB-of-another-server"},
        {"role": "user", "content": "r"},
    ]
    messages = parse_chat_request(strict(), input=input_items).messages
    assert [message.reasoning_content for message in messages] == [None, "hm", None]


async def test_input_tokens_are_counted_as_the_call_counts_them(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (server, client):
        counted = await client.responses.input_tokens.count(model="tiny", input="hi", instructions="s")
        assert server.turns == []
        response = await client.responses.create(model="tiny", input="hi", instructions="s")
    assert response.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)


def key_settings(secret: str, **fields: Any) -> KeySettings:
    return KeySettings(name=secret, sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


KEYS = (
    key_settings("s3cret", tenant="acme"),
    key_settings("slow", limits=LimitSettings(burst=1, requests_per_s=0.01)),
    key_settings("feedback", scopes=("feedback",)),
)


async def test_a_key_comes_in_either_header(tmp_path: Path) -> None:
    async with messages_gateway(tmp_path, FakeReplica(), key="s3cret", keys=KEYS) as (running, client):
        await client.messages.create(**ASKED)
        async with anthropic.AsyncAnthropic(base_url=running.url, auth_token="s3cret", api_key=None) as bearer:
            await bearer.messages.create(**ASKED)
        assert [turn.tenant for turn in running.turns] == ["acme", "acme"]


@pytest.mark.parametrize(
    ("key", "fields", "kind", "name"),
    [
        ("wrong", {}, anthropic.AuthenticationError, "authentication_error"),
        ("feedback", {}, anthropic.PermissionDeniedError, "permission_error"),
        ("s3cret", {"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        ("s3cret", {"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "invalid_request_error"),
        ("s3cret", {"metadata": {"user_id": "x" * 2**21}}, anthropic.APIStatusError, "request_too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refusal_raises_the_packages_own_error(
    tmp_path: Path, key: str, fields: dict[str, Any], kind: type[anthropic.APIStatusError], name: str
) -> None:
    limits = LimitSettings(body_bytes_max=1_048_576)
    async with messages_gateway(tmp_path, FakeReplica(), key=key, keys=KEYS, limits_per_key=limits) as (_, client):
        with pytest.raises(kind) as caught:
            await client.messages.create(**{**ASKED, **fields})
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", name)
    assert caught.value.request_id == body["request_id"]


async def test_too_many_requests_raise_a_rate_limit_error(tmp_path: Path) -> None:
    async with messages_gateway(tmp_path, FakeReplica(), key="slow", keys=KEYS) as (_, client):
        await client.messages.create(**ASKED)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**ASKED)
    assert int(caught.value.response.headers["retry-after"]) > 1


async def test_a_gateway_without_replicas_is_overloaded(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        answer = await running.client.post("/v1/messages", json=ASKED)
        unknown = await running.client.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
    assert "retry-after" in answer.headers
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_stream_that_breaks_ends_with_an_error_and_is_no_turn(tmp_path: Path) -> None:
    replica = FakeReplica(resumes=False, faults=[Fault(drop_after=2)])
    async with messages_gateway(tmp_path, replica) as (running, client):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await streamed(client, **ASKED)
        assert running.turns == []
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


def claude_code_user(session: str) -> str:
    return json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": session})


@pytest.mark.parametrize(
    ("headers", "user_id", "session", "source"),
    [
        ({"x-claude-code-session-id": "s-1"}, claude_code_user("s-2"), "s-1", "header"),
        ({}, claude_code_user("s-2"), "s-2", "metadata"),
        ({}, f"user_{'a' * 64}_account__session_{'b' * 36}", "b" * 36, "metadata"),
        ({"x-session-id": "mine"}, claude_code_user("s-2"), "mine", "header"),
        ({}, "ada", None, "implicit"),
    ],
)
async def test_the_session_that_claude_code_sends_is_the_session_of_the_turn(
    tmp_path: Path, headers: dict[str, str], user_id: str, session: str | None, source: str
) -> None:
    async with messages_gateway(tmp_path, FakeReplica()) as (running, client):
        await client.messages.create(**ASKED, metadata={"user_id": user_id}, extra_headers=headers)
        turn: Turn = running.turns[0]
    assert turn.session_source == source
    assert session in (None, turn.session_id)


async def test_the_root_answers_a_client_that_looks_for_the_server(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        answer = await running.client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "status"), [("/v1/messages", 529), ("/v1/chat/completions", 503)])
async def test_a_call_that_the_end_of_the_server_cuts_may_be_sent_again(
    tmp_path: Path, route: str, status: int, *, stream: bool
) -> None:
    replica = FakeReplica(faults=[Fault(stall_after=0)])
    async with replica.running(), gateway(tmp_path, replica) as running:
        calling = asyncio.create_task(running.client.post(route, json={**ASKED, "stream": stream}))
        await until(lambda: replica.requests)
        for task in asyncio.all_tasks():
            if "run_asgi" in repr(task.get_coro()):
                task.cancel()
        answer = await calling
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
    assert "send the request again" in answer.json()["error"]["message"]
