"""Tests of the Responses API with the unmodified `openai` package, of its turns, and of what agents need of it."""

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
from headrace_gateway.apis.responses_api.items import encode_reasoning
from headrace_gateway.apis.responses_api.request import NEUTRAL, parse_responses
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.request_context import RequestContext
from tests.support.fake_replica import VERSION, Called, FakeReplica, Fault
from tests.support.gateway import Gateway, gateway, lenient, strict

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
