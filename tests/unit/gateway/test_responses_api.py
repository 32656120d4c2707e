"""Tests of the Responses API with the unmodified `openai` package, and of the turns that its calls are recorded as."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.responses_api.request import NEUTRAL, parse_responses
from tests.support.fake_replica import VERSION, Called, FakeReplica, Fault
from tests.support.gateway import Gateway, gateway, strict

SEARCH: dict[str, Any] = {
    "type": "function",
    "name": "search",
    "description": "looks",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    "strict": True,
}
ALL = ("response_format", "tool_choice")


@contextlib.asynccontextmanager
async def served(
    folder: Path, replica: FakeReplica, **settings: Any
) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    async with (
        replica.running(),
        gateway(folder, replica, **settings) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


async def test_text_in_and_out_is_one_captured_turn(tmp_path: Path) -> None:
    replica = FakeReplica(script=["Hello there, friend."])
    async with served(tmp_path, replica) as (server, client):
        answer = await client.responses.create(
            model="tiny", input="hello", instructions="Be brief.", temperature=0.5, max_output_tokens=50, store=False,
            metadata={"session_id": "run-1"},
        )  # fmt: skip
        assert answer.output_text == "Hello there, friend."
        assert (answer.status, answer.model, answer.incomplete_details) == ("completed", VERSION, None)
        assert answer.usage is not None
        (turn,) = server.turns
        assert turn.turn_id == answer.id, "feedback on it needs no other name"
        assert answer.usage.input_tokens == turn.usage.prompt_tokens
        assert answer.usage.output_tokens == turn.usage.completion_tokens
    assert [message.role for message in turn.messages] == ["system", "user"]
    assert (turn.session_id, turn.sampling.temperature, turn.sampling.max_tokens) == ("run-1", 0.5, 50)


async def test_it_is_the_turn_that_a_chat_call_would_be(tmp_path: Path) -> None:
    replica = FakeReplica(grammars=ALL)
    schema = {"type": "object", "properties": {}}
    chat_tool = {"type": "function", "function": {name: SEARCH[name] for name in SEARCH if name != "type"}}
    async with served(tmp_path, replica) as (server, client):
        await client.responses.create(
            model="tiny", input=[{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
            tools=[SEARCH], tool_choice={"type": "function", "name": "search"}, parallel_tool_calls=False,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        )  # type: ignore[call-overload]  # fmt: skip
        await server.chat(
            tools=[chat_tool], tool_choice={"type": "function", "function": {"name": "search"}},
            parallel_tool_calls=False,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        )  # fmt: skip
        responses_turn, chat_turn = server.turns
    differing = {"time", "turn_id", "started_at", "messages", "repeats", "response"}
    assert responses_turn.model_dump(exclude=differing) == chat_turn.model_dump(exclude=differing)
    assert replica.requests[0] == replica.requests[1]
    assert [message.text for message in responses_turn.messages] == ["hello"]


async def test_a_tool_is_called_and_its_output_comes_back_as_items(tmp_path: Path) -> None:
    replica = FakeReplica(script=[Called("search", {"query": "mail"}), "You have one."])
    async with served(tmp_path, replica) as (server, client):
        input_items: list[Any] = [{"role": "user", "content": "Any mail?"}]
        first = await client.responses.create(model="tiny", input=input_items, tools=[SEARCH])  # type: ignore[list-item]
        (call,) = first.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("search", {"query": "mail"})
        input_items += [item.to_dict() for item in first.output]
        input_items.append({"type": "function_call_output", "call_id": call.call_id, "output": "1"})
        second = await client.responses.create(model="tiny", input=input_items, tools=[SEARCH])  # type: ignore[list-item]
        assert second.output_text == "You have one."
        first_turn, second_turn = server.turns
    assert second_turn.messages[1].tool_calls == first_turn.choices[0].message.tool_calls
    assert (second_turn.messages[2].role, second_turn.messages[2].tool_call_id, second_turn.messages[2].text) == (
        "tool",
        call.call_id,
        "1",
    )
    assert first_turn.session_key == second_turn.session_key


@pytest.mark.parametrize("script", ["Hello there, friend.", Called("search", {"query": "mail"})])
async def test_a_stream_ends_with_the_response_that_a_plain_call_gets(tmp_path: Path, script: Any) -> None:
    replica = FakeReplica(script=[script, script])
    async with served(tmp_path, replica) as (server, client):
        fields: dict[str, Any] = {"model": "tiny", "input": "hello", "tools": [SEARCH]}
        plain = await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            events = [event async for event in stream]
            final: Response = await stream.get_final_response()
        names = [event.type for event in events]
        assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert names[-2:] == ["response.output_item.done", "response.completed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == plain.output_text == final.output_text
        arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert arguments == [item.arguments for item in plain.output if item.type == "function_call"]
        differing = {"id", "created_at", "output"}
        assert final.to_dict() | dict.fromkeys(differing) == plain.to_dict() | dict.fromkeys(differing)
        plain_turn, streamed_turn = server.turns
    assert plain_turn.choices[0].token_ids == streamed_turn.choices[0].token_ids


async def test_an_answer_that_is_cut_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (_, client):
        cut = await client.responses.create(model="tiny", input="hello", max_output_tokens=2)
        stream = await client.responses.create(model="tiny", input="hello", max_output_tokens=2, stream=True)
        last = [event async for event in stream][-1]
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"
    assert last.response.output_text == cut.output_text != ""


async def test_logprobs_where_they_are_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(script=["one two", "one two"])) as (server, client):
        answer = await client.responses.create(
            model="tiny", input="x", include=["message.output_text.logprobs"], top_logprobs=2
        )
        plain = await client.responses.create(model="tiny", input="x")
        turn = server.turns[0]
    (item,) = answer.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    logprobs = item.content[0].logprobs
    assert logprobs is not None
    assert [token.logprob for token in logprobs] == pytest.approx(turn.choices[0].logprobs)
    assert [len(token.top_logprobs) for token in logprobs] == [2, 2]
    assert "logprobs" not in plain.output[0].to_dict()["content"][0]  # type: ignore[index]


async def test_a_stream_that_breaks_says_so_and_is_no_turn(tmp_path: Path) -> None:
    replica = FakeReplica(resumes=False, faults=[Fault(drop_after=2)])
    async with served(tmp_path, replica) as (server, client):
        stream = await client.responses.create(model="tiny", input="hello", stream=True)
        last = [event async for event in stream][-1]
        assert (last.type, getattr(last, "code", None)) == ("error", "overloaded")
        assert server.turns == []


def refusal(**fields: Any) -> ApiError:
    body = {"model": "tiny", "input": "hello", **fields}
    with pytest.raises(ApiError) as caught:
        parse_responses(json.dumps(body).encode(), strict())
    return caught.value


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    for neutral in (None, *NEUTRAL[name]):
        parse_responses(json.dumps({"model": "m", "input": "x", name: neutral}).encode(), strict())
    error = refusal(**{name: "resp_1"})
    assert (error.status, error.param) == (400, name)
    assert str(error).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "no item with this id"),
        ({"input": [{"type": "compaction", "id": "x"}]}, "input.0", "compaction"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no such response"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.message.content", "input_image"),
        ({"tools": [{"type": "web_search"}]}, "tools.web_search", "can be offered"),
        ({"tools": [{"type": 7}]}, "tools.0", ""),
        ({"tools": [{**SEARCH, "defer_loading": True}]}, "tools.defer_loading", "defer_loading"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", ""),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"include": ["file_search_call.results"]}, "include", "gateway.strict"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "gateway.strict"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "gateway.strict"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"messages": []}, None, ""),
        ({"top_logprobs": 21}, "top_logprobs", "less"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    if fields == {"messages": []}:
        return  # an empty field asks for nothing, whatever its name
    error = refusal(**fields)
    assert error.status == (404 if "item with this id" in words else 400)
    assert str(error.param).startswith(param)
    assert words in str(error)


def test_the_items_of_one_turn_are_one_message() -> None:
    input_items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "a", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "b", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]  # fmt: skip
    request = parse_responses(json.dumps({"model": "m", "input": input_items}).encode(), strict()).chat
    roles = [message.role for message in request.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    turn = request.messages[1].event
    assert (turn.reasoning_content, turn.text) == ("hm", "I look.")
    assert [call.id for call in turn.tool_calls or ()] == ["c1", "c2"]
    assert request.messages[3].event.text == "2"
