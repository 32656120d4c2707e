"""The fields `functions` and `function_call` of chat completions, as old agents send them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace_gateway.chat_request import parse_chat
from headrace_gateway.refusals import ApiError
from tests.support.fake_replica import Called, FakeReplica
from tests.support.gateway import gateway
from tests.support.requests import strict

SEARCH: dict[str, Any] = {"name": "search", "description": "looks", "parameters": {"type": "object", "properties": {}}}
USER: Any = {"role": "user", "content": "Any mail?"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_is_called_and_its_result_comes_back_with_exact_tokens(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica(script=[Called("search", {"query": "mail"}), "You have one."])
    async with replica.running(), gateway(tmp_path, replica) as server:
        server.replica_set.update(replica.replica_id, replica.heartbeat(histories=True))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = {"model": "tiny", "functions": [SEARCH], "function_call": "auto", "stream": stream}
            answer: Any = await client.chat.completions.create(messages=[USER], **fields)
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
            await client.chat.completions.create(messages=[USER, echo, result], **fields)
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
        parse_chat(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode(), strict())
        for fields in (old, new)
    ]
    compared = [request.model_dump(exclude={"functions", "function_call"}) for request in requests]
    assert compared[0] == compared[1]
    assert requests[0].sampling == requests[1].sampling


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"functions": [SEARCH], "tools": [{"type": "function", "function": SEARCH}]}, "functions: tools are in their"),
        ({"functions": [SEARCH], "tool_choice": "auto"}, "functions: tools are in their place"),
        ({"functions": [SEARCH], "function_call": {"name": "other"}}, "function_call: names a function"),
        ({"function_call": {"name": "other"}}, "function_call: names a function"),
        ({"functions": [SEARCH], "function_call": "required"}, "function_call"),
        ({"functions": [{}]}, "functions.0.name"),
        ({"messages": [{**USER, "function_call": {"name": "a", "arguments": ""}}]}, "messages.0"),
        ({"messages": [{"role": "function", "name": "a"}]}, "messages.0"),
    ],
)
def test_a_contradiction_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    body = json.dumps({"model": "tiny", "messages": [USER], **fields}).encode()
    with pytest.raises(ApiError, match=problem) as refusal:
        parse_chat(body, strict())
    assert refusal.value.status == 400


@pytest.mark.parametrize("fields", [{"functions": [], "function_call": None}, {"function_call": "none"}])
def test_empty_functions_have_no_effect(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "tiny", "messages": [USER], **fields}).encode()
    assert parse_chat(body, strict()).tools is None
