"""Tests of the Messages API with the unmodified `anthropic` package, and of the conversion to chat requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, ToolUseBlock

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.messages_api.answers import MessageWriter
from headrace_gateway.apis.messages_api.request import parse_messages
from headrace_gateway.requests.engine_wire import EngineAnswer
from tests.support.fake_replica import VERSION, Called, FakeReplica, text_of
from tests.support.gateway import Gateway, gateway, lenient, strict

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH: Any = {"name": "search", "description": "looks", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Any mail?"}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [USER]}


@contextlib.asynccontextmanager
async def served(
    folder: Path, replica: FakeReplica, *, key: str = "none", **settings: Any
) -> AsyncIterator[tuple[Gateway, anthropic.AsyncAnthropic]]:
    async with (
        replica.running(),
        gateway(folder, replica, **settings) as running,
        anthropic.AsyncAnthropic(base_url=running.url, api_key=key, max_retries=0) as client,
    ):
        yield running, client


async def streamed(client: anthropic.AsyncAnthropic, **fields: Any) -> tuple[Message, list[Any]]:
    """Return the message of a stream and its raw events, each parsed by the package's types."""
    async with client.messages.stream(**fields) as stream:
        events = [event async for event in stream]
        return await stream.get_final_message(), events


async def test_a_text_answer_is_one_captured_turn(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(script=["Hello there."])) as (running, client):
        answer = await client.messages.with_raw_response.create(
            **ASKED, system="Be brief.", metadata={"user_id": "ada"}, extra_body={"temperature": 0.5, "top_k": 7}
        )
        message = await answer.parse()
        (turn,) = running.turns
    assert answer.headers["request-id"] == message.id == turn.turn_id, "feedback about it needs no other name"
    assert (message.type, message.role, message.model) == ("message", "assistant", VERSION)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello there."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == turn.usage.prompt_tokens
    assert message.usage.output_tokens == turn.usage.completion_tokens
    assert [(entry.role, entry.text) for entry in turn.messages] == [("system", "Be brief."), ("user", "Any mail?")]
    assert (turn.sampling.temperature, turn.sampling.top_k, turn.sampling.max_tokens) == (0.5, 7, 50)


async def test_a_call_is_the_turn_that_a_chat_call_would_be(tmp_path: Path) -> None:
    replica = FakeReplica(grammars=("tool_choice",))
    function = {"name": "search", "description": "looks", "parameters": SCHEMA}
    async with served(tmp_path, replica) as (running, client):
        choice: Any = {"type": "tool", "name": "search", "disable_parallel_tool_use": True}
        await client.messages.create(**ASKED, tools=[SEARCH], tool_choice=choice)
        await running.chat(
            "Any mail?",
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "search"}},
            parallel_tool_calls=False,
            max_tokens=50,
        )
        first, second = running.turns
    differing = {"time", "turn_id", "started_at", "repeats"}
    assert first.model_dump(exclude=differing) == second.model_dump(exclude=differing)
    assert replica.requests[0] == replica.requests[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_of_several_turns_ends_with_a_text(tmp_path: Path, *, stream: bool) -> None:
    script: list[Any] = [Called("search", {"query": "mail"}), Called("search", {"query": "Ada"}), "It was Ada."]
    messages: list[Any] = [USER]
    async with served(tmp_path, FakeReplica(script=list(script))) as (running, client):
        while True:
            fields: dict[str, Any] = {**ASKED, "messages": messages, "tools": [SEARCH]}
            message = (await streamed(client, **fields))[0] if stream else await client.messages.create(**fields)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
            if not calls:
                break
            assert message.stop_reason == "tool_use"
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Ada wrote"} for call in calls]
            messages.append({"role": "user", "content": results})
        turns = running.turns
    assert message.content[0].to_dict() == {"type": "text", "text": "It was Ada."}
    assert len(turns) == len(script)
    assert len({turn.session_key for turn in turns}) == 1
    assert [entry.role for entry in turns[-1].messages] == ["user", *(["assistant", "tool"] * 2)]
    for before, after in itertools.pairwise(turns):
        assert after.messages[len(before.messages)].tool_calls == before.choices[0].message.tool_calls


@pytest.mark.parametrize("script", ["Hello there, friend.", Called("search", {"query": "mail"})])
async def test_a_stream_gives_the_message_of_a_plain_call(tmp_path: Path, script: Any) -> None:
    async with served(tmp_path, FakeReplica(script=[script, script])) as (running, client):
        plain = await client.messages.create(**ASKED, tools=[SEARCH])
        final, events = await streamed(client, **ASKED, tools=[SEARCH])
        first, second = running.turns
    assert final.to_dict() | {"id": ""} == plain.to_dict() | {"id": ""}
    assert first.choices[0].token_ids == second.choices[0].token_ids
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens == second.usage.prompt_tokens


async def test_the_raw_stream_names_its_events_and_sends_a_ping(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(script=["Hi."])) as (running, _):
        answer = await running.client.post("/v1/messages", json={**ASKED, "stream": True})
    lines = answer.text.split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    kinds = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    assert names == kinds
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-1] == "message_stop"


async def test_an_answer_that_its_limit_cuts_has_the_reason_max_tokens(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (_, client):
        message = await client.messages.create(**{**ASKED, "max_tokens": 2})
    assert message.stop_reason == "max_tokens"


async def test_a_stop_sequence_is_named(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (running, client):
        await client.messages.create(**ASKED)
        last = text_of(running.turns[0].choices[0].token_ids[-1])
        message = await client.messages.create(**ASKED, stop_sequences=["never", last[1:].strip()])
        final, _ = await streamed(client, **ASKED, stop_sequences=["never", last[1:].strip()])
        sampled = running.turns[1].sampling
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", last[1:].strip())
    assert (final.stop_reason, final.stop_sequence) == (message.stop_reason, message.stop_sequence)
    assert sampled.stop == ("never", last[1:].strip())


def messages_of(**fields: Any) -> list[dict[str, Any]]:
    """Return the chat messages that a Messages API request with `fields` is converted to, without empty fields."""
    _, request = parse_messages(json.dumps({**ASKED, **fields}).encode(), lenient())
    return [message.event.model_dump(mode="json", exclude_none=True) for message in request.messages]


def test_blocks_become_chat_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "search", "input": {"query": "é"}},
        {"type": "tool_use", "id": "c2", "name": "search", "input": {}},
    ]
    lines = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": lines},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": "no such mail", **cached},
        {"type": "text", "text": "Go on."},
    ]  # fmt: skip
    chat_messages = messages_of(
        system=[{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r", **cached}]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": results},
            {"role": "user", "content": "Please."},
        ],
    )
    calls = chat_messages[2].pop("tool_calls")
    assert chat_messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "q\n\nr"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "1\n2"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no such mail"},
        {"role": "user", "content": "Go on.\n\nPlease."},
    ]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("c1", '{"query": "é"}'), ("c2", "{}")]


def test_the_text_of_thousands_of_blocks_is_joined_once() -> None:
    """Repeated concatenation copies the text each time: 10,000 blocks occupied the thread for large bodies for 10 s."""
    blocks = [{"type": kind, kind: "x" * 200} for _ in range(5000) for kind in ("text", "thinking")]
    messages = [{"role": "assistant", "content": blocks}, {"role": "user", "content": blocks[:10_000:2]}]
    body = json.dumps({**ASKED, "messages": messages}).encode()
    began_s = time.thread_time()
    _, request = parse_messages(body, lenient(json_values_max=100_000))
    assert time.thread_time() - began_s < 2
    answer, user = request.messages
    assert answer.content == answer.reasoning_content == "x" * 1_000_000
    assert user.content == "\n\n".join(["x" * 200] * 5000)


def test_a_system_message_inside_the_conversation_becomes_a_users_text() -> None:
    chat_messages = messages_of(
        system="s",
        messages=[
            {"role": "system", "content": "t"},
            USER,
            {"role": "assistant", "content": "No."},
            {"role": "system", "content": [{"type": "text", "text": "It is noon."}]},
            {"role": "user", "content": "And now?"},
        ],
    )
    assert [entry["content"] for entry in chat_messages] == [
        "s\n\nt", "Any mail?", "No.", "<system>\nIt is noon.\n</system>\n\nAnd now?",
    ]  # fmt: skip
    assert [entry["role"] for entry in chat_messages] == ["system", "user", "assistant", "user"]


def test_claude_codes_billing_line_is_left_out_of_the_prompt_and_reported() -> None:
    context = strict()
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "You help."}]
    _, request = parse_messages(json.dumps({**ASKED, "system": system}).encode(), context)
    assert request.messages[0].content == "You help."
    assert context.ignored == ("system.billing_header",)


HINTS: dict[str, Any] = {
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "output_config": {"effort": "high"},
    "service_tier": "auto",
    "of_a_new_beta": {"a": 1},
    "tools": [SEARCH, {"type": "web_search_20250305", "name": "web_search"}],
}


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("thinking", "thinking.budget_tokens"),
        ("context_management", "context_management"),
        ("output_config", "output_config.effort"),
        ("service_tier", "service_tier"),
        ("of_a_new_beta", "of_a_new_beta"),
        ("tools", "tools.web_search_20250305"),
    ],
)
async def test_a_hint_is_accepted_and_named_in_a_header_and_refused_by_strict_settings(
    tmp_path: Path, name: str, reported: str
) -> None:
    body = {**ASKED, name: HINTS[name]}
    async with served(tmp_path, FakeReplica()) as (running, _):
        for stream in (False, True):
            answer = await running.client.post("/v1/messages", json={**body, "stream": stream})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-headrace-ignored"] == reported
        plain = await running.client.post("/v1/messages", json=ASKED)
    assert "x-headrace-ignored" not in plain.headers
    with pytest.raises(ApiError) as caught:
        parse_messages(json.dumps(body).encode(), strict())
    assert caught.value.status == 400
    assert str(caught.value.param).startswith(name)


@pytest.mark.parametrize(("kind", "switch"), [("disabled", False), ("enabled", True), ("adaptive", None)])
def test_thinking_is_switched_by_the_chat_template(kind: str, switch: bool | None) -> None:
    _, request = parse_messages(json.dumps({**ASKED, "thinking": {"type": kind}}).encode(), strict())
    assert request.chat_template_kwargs == (None if switch is None else {"enable_thinking": switch})


def with_block(role: str, block: dict[str, Any]) -> dict[str, Any]:
    """Return the `messages` field of a request whose first message contains `block`."""
    return {"messages": [{"role": role, "content": [block]}, USER]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": None}, "max_tokens", ""),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "must end with a user message"),
        (with_block("user", {"type": "image", "source": {}}), "messages.0.content.0", "image"),
        (with_block("user", {"type": "server_tool_use"}), "messages.0.content.0", "server_tool"),
        (with_block("user", {"type": "tool_use", "id": "c", "name": "n", "input": {}}), "messages", "'tool_use'"),
        (with_block("assistant", {"type": "tool_result", "tool_use_id": "c"}), "messages", "tool_result"),
        ({"tools": [{"name": "search"}]}, "tools.0.input_schema", "required"),
        ({"tool_choice": {"type": "tool", "name": "none"}, "tools": [SEARCH]}, "tool_choice", "not among the tools"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "calls no tools"),
        ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1"),
        ({"temperature": 3}, "temperature", "less"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_messages(json.dumps({**ASKED, **fields}).encode(), lenient())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in str(caught.value)


async def test_an_image_is_replaced_by_a_text_where_the_settings_allow_it(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}]}
    fields = {**ASKED, "messages": [USER, called, {"role": "user", "content": [result]}]}
    async with served(tmp_path, FakeReplica(), media="placeholder") as (running, client):
        answer = await client.messages.with_raw_response.create(**fields)
        (turn,) = running.turns
    assert turn.messages[-1].text == "[image omitted: this model reads text only]"
    assert answer.headers["x-headrace-ignored"] == "media.image"


async def test_tokens_are_counted_as_the_call_counts_them_and_no_turn_is_captured(tmp_path: Path) -> None:
    fields = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    async with served(tmp_path, FakeReplica()) as (running, client):
        counted = await client.messages.count_tokens(**fields, system="s", tools=[SEARCH], tool_choice={"type": "any"})
        assert running.turns == []
        message = await client.messages.create(**ASKED, system="s", tools=[SEARCH])
    assert counted.input_tokens == message.usage.input_tokens


async def test_cached_tokens_are_counted_apart() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 8}}
    usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11, **details}
    writer = MessageWriter("id", (), 50)
    start = writer.add(EngineAnswer.model_validate({"prompt_token_ids": [1] * 10}), "v", streamed=True)[0]
    writer.add(EngineAnswer.model_validate({"usage": usage}), "v", streamed=True)
    end = writer.end()[-2]
    assert start["message"]["usage"]["input_tokens"] == 10
    assert (end["usage"]["input_tokens"], end["usage"]["cache_read_input_tokens"]) == (2, 8)


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"x"', "NaN", '{"a": NaN}', '{"a": [-1e999]}'])
async def test_arguments_that_are_no_object_come_as_one_in_a_stream_and_in_a_plain_answer(arguments: str) -> None:
    call = {"id": "c", "function": {"name": "search", "arguments": arguments}}
    message = {"content": None, "reasoning_content": "hm", "tool_calls": [call]}
    plain_writer = MessageWriter("id", (), 50)
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    plain_writer.add(EngineAnswer.model_validate({"choices": [choice]}), "v", streamed=False)
    plain_writer.end()
    stream_writer = MessageWriter("id", (), 50)
    events = []
    for delta in ({"reasoning_content": "h"}, {"reasoning_content": "m"}, {"tool_calls": [{"index": 0, **call}]}):
        chunk = EngineAnswer.model_validate({"choices": [{"index": 0, "delta": delta}]})
        events += stream_writer.add(chunk, "v", streamed=True)
    events += stream_writer.end()
    assert stream_writer.message()["content"] == plain_writer.message()["content"]
    thinking, called = plain_writer.message()["content"]
    assert (thinking["thinking"], called["input"]) == ("hm", {"arguments": arguments})
    partial = "".join(event["delta"].get("partial_json", "") for event in events if "delta" in event)
    assert json.loads(partial) == called["input"]


async def test_a_silent_stream_is_kept_open_by_pings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_gateway.apis.chat.PING_S", 0.05)
    replica = FakeReplica(script=["One two three."], token_delay_s=0.2)
    async with served(tmp_path, replica) as (running, client):
        body = {**ASKED, "stream": True}
        kinds = []
        async with running.client.stream("POST", "/v1/messages", json=body) as answer:
            async for line in answer.aiter_lines():
                kinds += [line.removeprefix("event: ")] if line.startswith("event: ") else []
        message, _ = await streamed(client, **ASKED)
        chat = await running.client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": [USER], "stream": True}
        )
    first, last = kinds.index("content_block_delta"), len(kinds) - 1 - kinds[::-1].index("content_block_delta")
    assert kinds[first:last].count("ping") >= 2
    assert kinds[-1] == "message_stop"
    assert message.type == "message", "the package reads over pings"
    assert ": keep-alive" in chat.text
    assert chat.text.endswith("data: [DONE]\n\n")
