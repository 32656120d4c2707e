"""Tests of the fields of chat requests, and of compressed request bodies.

They cover valid and invalid fields, the error messages, the old fields `functions` and `function_call`, and compressed
bodies that expand beyond the limit.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cramjam
import openai
import pytest

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.chat_messages import MessageMemory
from headrace_gateway.requests.chat_request import HARMLESS, NEUTRAL, ChatRequest, parse_chat
from headrace_gateway.requests.http_request import decompress
from headrace_gateway.settings import LimitSettings
from headrace_schemas import Message, Sampling
from tests.support.fake_replica import Called, FakeReplica
from tests.support.gateway import gateway, strict

USER = {"role": "user", "content": "hello"}
FUNCTION = {"name": "search", "arguments": "{}"}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}


def parsed(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode(), strict())


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    return caught.value


def test_the_clients_sampling_is_kept_and_openais_defaults_fill_the_rest() -> None:
    """Pitfall 28: the gateway keeps the temperature of the client."""
    request = parsed(temperature=0.25, top_p=0.5, top_k=7, min_p=0.1, max_completion_tokens=9, seed=3, stop="END")
    assert request.sampling == Sampling(
        temperature=0.25, top_p=0.5, top_k=7, min_p=0.1, max_tokens=9, seed=3, stop=("END",)
    )
    assert parsed().sampling == Sampling()
    assert parsed(temperature=0).sampling.temperature == 0.0


def test_an_unknown_field_is_refused_with_the_name_that_was_meant() -> None:
    """Pitfall 25: a misspelled field must not be ignored."""
    error = refused(temprature=0.5)
    assert (error.status, error.code, error.param) == (400, "unknown_field", "temprature")
    assert str(error) == "unknown field 'temprature'; did you mean 'temperature'?"


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_cannot_be_honoured_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for neutral in (None, *NEUTRAL[name]):
        parsed(**{name: neutral})
    error = refused(**{name: {"something": "else"}})
    assert (error.status, error.code, error.param) == (400, "unsupported_field", name)
    assert str(error).startswith(f"{name}: ")


def test_harmless_fields_pass() -> None:
    parsed(**dict.fromkeys(HARMLESS, "x"), store=False, service_tier="auto", metadata={"a": "b"})
    parsed(response_format={"type": "text"}, stream=True, stream_options={"include_usage": True})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, None),
        ({"top_logprobs": 2}, None),
        ({"seed": 2**63}, "seed"),
        ({"stop": 7}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]}, "tools.0.function.parametres"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"metadata": "x"}, "metadata"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str | None) -> None:
    error = refused(**fields)
    assert error.status == 400
    assert error.param == param
    assert error.kind == "invalid_request_error"


def test_refusals_do_not_repeat_what_the_user_wrote() -> None:
    error = refused(messages=[{"role": "user", "content": {"secret": "my diary"}}])
    assert "diary" not in str(error)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "a", "model"'])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body, strict())
    assert caught.value.status == 400


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}', strict())
    assert (caught.value.code, caught.value.param) == ("missing_field", "model")


@pytest.mark.parametrize(
    "echoed",
    [
        {"content": "ok", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        {"tool_calls": [CALL], "name": "agent"},
        {"content": None, "tool_calls": [{**CALL, "index": 0}], "refusal": None, "parsed": None},
        {"content": "", "tool_calls": [{**CALL, "function": {**FUNCTION, "parsed_arguments": {}}}]},
        {"content": None, "tool_calls": [CALL], "provider_specific_fields": {"refusal": None}},
        {
            "content": "ok",
            "thinking_blocks": [],
            "images": [{"url": None, "detail": ""}],
            "provider": {"a": {"b": [{}]}},
        },
        {"content": "ok", "reasoning_content": "because"},
        {"content": "ok", "reasoning": "because"},
        {"content": None},
    ],
    ids=str,
)
def test_answers_that_sdks_echo_come_back_as_plain_messages(echoed: dict[str, Any]) -> None:
    request = parsed(messages=[USER, {"role": "assistant", **echoed}, USER])
    message = request.messages[1].event
    assert type(message) is Message
    assert message.content == echoed.get("content")
    assert message.name == echoed.get("name")
    assert message.reasoning_content == echoed.get("reasoning_content", echoed.get("reasoning"))
    assert bool(message.tool_calls) == bool(echoed.get("tool_calls"))


@pytest.mark.parametrize(
    "field",
    [
        {"audio": {"id": "a"}},
        {"provider_specific_fields": {"refusal": "no"}},
        {"thinking_blocks": [{}, {"signature": "x"}]},
        {"cached": False},
        {"score": 0},
    ],
    ids=str,
)
def test_an_echoed_field_with_content_is_not_dropped_in_silence(field: dict[str, Any]) -> None:
    error = refused(messages=[USER, {"role": "assistant", "content": "x", **field}])
    assert f"{next(iter(field))!r} in a message is not supported" in str(error)


@pytest.mark.parametrize("value", [None, "", [], {}, {"a": [None, ""]}], ids=str)
def test_a_field_that_says_nothing_asks_for_nothing(value: Any) -> None:
    assert parsed(guided_json=value, audio=value, of_some_sdk=value).messages


def test_text_parts_are_kept_as_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = parsed(messages=[{"role": "user", "content": parts}]).messages[0].event
    assert message.text == "ab"
    assert isinstance(message.content, tuple)


@pytest.mark.parametrize(
    "fields", [{"stop": ""}, {"stop": []}, {"messages": [{"role": "user", "content": "q", "name": ""}]}]
)
def test_empty_fields_ask_for_nothing(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}], **fields}
    request = parse_chat(json.dumps(body).encode(), strict(1, 1000))
    assert request.stop is None
    assert request.messages[0].name is None


def zstd(data: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(data))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd}


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_body_comes_back_up_to_its_bound_and_not_beyond(encoding: str) -> None:
    data = b"abc" * 1000
    compressed = COMPRESS[encoding](data)
    assert decompress(compressed, encoding, len(data)) == data
    for bomb in (compressed, COMPRESS[encoding](b"0" * 50_000_000)):
        with pytest.raises(ApiError) as caught:
            decompress(bomb, encoding, len(data) - 1)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_damaged_body_is_refused(encoding: str) -> None:
    compressed = COMPRESS[encoding](b"abc" * 1000)
    for damaged in (b"no such thing", compressed[:-4]):
        with pytest.raises(ApiError) as caught:
            decompress(damaged, encoding, 100_000)
        assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


def test_a_gzip_body_may_have_several_members() -> None:
    assert decompress(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 10) == b"ab"


def test_a_gzip_body_of_very_many_members_is_refused() -> None:
    """Decompression copies the rest of the body for each member: 8 MB of empty members took minutes in one thread."""
    with pytest.raises(ApiError, match="more than 100 gzip members") as caught:
        decompress(gzip.compress(b"") * 200_000, "gzip", 8_000_000)
    assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


def test_arguments_with_a_number_beyond_float64_are_refused() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1.0}}}
    body = json.dumps({"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [call]}, USER]})
    assert parse_chat(body.encode(), strict()).messages
    with pytest.raises(ApiError, match="JSON compliant"):
        parse_chat(body.replace("1.0", "1e999").encode(), strict())


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_a_compressed_call_is_served_and_a_large_one_refused(tmp_path: Path, encoding: str) -> None:
    limits = LimitSettings(body_bytes_max=10_000)
    async with FakeReplica().running() as replica, gateway(tmp_path, replica, limits_per_key=limits) as served:
        for length, status in ((10, 200), (20_000, 413)):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * length}]}
            headers = {"content-encoding": encoding, "content-type": "application/json"}
            content = COMPRESS[encoding](json.dumps(body).encode())
            answer = await served.client.post("/v1/chat/completions", content=content, headers=headers)
            assert answer.status_code == status, answer.text


def test_a_message_is_read_once_for_each_tenant_and_never_as_another() -> None:
    memory = MessageMemory()
    drawn: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "a"},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": "a", "tool_calls": None},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    body = json.dumps({"model": "tiny", "messages": drawn}).encode()
    plain = parse_chat(body, strict())

    def read(tenant: str) -> ChatRequest:
        return parse_chat(body, replace(strict(), known_messages=memory.view(tenant)))

    first, second, other = read("a"), read("a"), read("b")
    assert plain.messages == first.messages == second.messages == other.messages
    assert [message.event for message in second.messages] == [message.event for message in plain.messages]
    again = [cached is repeated for cached, repeated in zip(first.messages, second.messages, strict=True)]
    assert again == [True] * 6 + [False] * 2, "messages with fields of other clients are checked anew"
    assert not any(cached is repeated for cached, repeated in zip(first.messages, other.messages, strict=True))


def test_a_message_that_is_refused_is_refused_again() -> None:
    memory = MessageMemory()
    body = json.dumps({"model": "tiny", "messages": [{"role": "tool", "content": "a"}]}).encode()
    for _ in range(2):
        with pytest.raises(ApiError, match="tool_call_id"):
            parse_chat(body, replace(strict(), known_messages=memory.view("a")))


SEARCH: dict[str, Any] = {"name": "search", "description": "looks", "parameters": {"type": "object", "properties": {}}}
MAIL_QUESTION: Any = {"role": "user", "content": "Any mail?"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_is_called_and_its_result_comes_back_with_exact_tokens(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica(script=[Called("search", {"query": "mail"}), "You have one."])
    async with replica.running(), gateway(tmp_path, replica) as server:
        server.replica_set.update(replica.replica_id, replica.heartbeat(histories=True))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = {"model": "tiny", "functions": [SEARCH], "function_call": "auto", "stream": stream}
            answer: Any = await client.chat.completions.create(messages=[MAIL_QUESTION], **fields)
            if stream:
                deltas = [choice async for chunk in answer for choice in chunk.choices]
                assert all(choice.delta.tool_calls is None for choice in deltas)
                calls = [choice.delta.function_call for choice in deltas if choice.delta.function_call]
                assert deltas[-1].finish_reason == "function_call"
                called = {"name": calls[0].name, "arguments": "".join(call.arguments or "" for call in calls)}
            else:
                (choice,) = answer.choices
                assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
                called = choice.message.function_call.model_dump()
            assert called == {"name": "search", "arguments": json.dumps({"query": "mail"})}
            echo: Any = {"role": "assistant", "content": None, "function_call": called}
            result: Any = {"role": "function", "name": "search", "content": "1"}
            await client.chat.completions.create(messages=[MAIL_QUESTION, echo, result], **fields)
        first, second = server.turns
    assert [tool.function.name for tool in first.tools] == ["search"]
    (call,) = second.messages[1].tool_calls or ()
    assert (second.messages[2].role, second.messages[2].tool_call_id) == ("tool", call.id)
    assert second.session_key == first.session_key
    history = replica.requests[1]["headrace_history"]
    assert history["messages"] == 1, "the replica knows the call by another id, so it gets the tokens"


def test_functions_are_the_tools_of_the_request() -> None:
    old = {"functions": [SEARCH], "function_call": {"name": "search"}}
    new = {
        "tools": [{"type": "function", "function": SEARCH}],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "parallel_tool_calls": False,
    }
    requests = [
        parse_chat(json.dumps({"model": "tiny", "messages": [MAIL_QUESTION], **fields}).encode(), strict())
        for fields in (old, new)
    ]
    compared = [request.model_dump(exclude={"functions", "function_call"}) for request in requests]
    assert compared[0] == compared[1]
    assert requests[0].sampling == requests[1].sampling


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"functions": [SEARCH], "tools": [{"type": "function", "function": SEARCH}]},
            "functions: must not be sent together",
        ),
        ({"functions": [SEARCH], "tool_choice": "auto"}, "functions: must not be sent together with tools"),
        ({"functions": [SEARCH], "function_call": {"name": "other"}}, "function_call: names a function"),
        ({"function_call": {"name": "other"}}, "function_call: names a function"),
        ({"functions": [SEARCH], "function_call": "required"}, "function_call"),
        ({"functions": [{}]}, "functions.0.name"),
        ({"messages": [{**MAIL_QUESTION, "function_call": {"name": "a", "arguments": ""}}]}, "messages.0"),
        ({"messages": [{"role": "function", "name": "a"}]}, "messages.0"),
    ],
)
def test_a_contradiction_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    body = json.dumps({"model": "tiny", "messages": [MAIL_QUESTION], **fields}).encode()
    with pytest.raises(ApiError, match=problem) as refusal:
        parse_chat(body, strict())
    assert refusal.value.status == 400


@pytest.mark.parametrize("fields", [{"functions": [], "function_call": None}, {"function_call": "none"}])
def test_empty_functions_have_no_effect(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "tiny", "messages": [MAIL_QUESTION], **fields}).encode()
    assert parse_chat(body, strict()).tools is None
