"""Tests of 300 random requests for each API: the vendor's types parse the responses, and streams equal plain responses.

Requests have content blocks, tools, parallel calls and reasoning; equal conversations give equal prompts in each API.
Answers end by length or by a stop string, are empty, or have reasoning and several calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import anthropic
import openai
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.answers import AnswerShape
from headrace_gateway.apis.chat import Read, read_chat
from headrace_gateway.apis.messages_api.answers import read_messages
from headrace_gateway.apis.responses_api.answers import read_responses
from headrace_gateway.apis.text_completions import read_completion
from headrace_gateway.requests.chat_call import ChatCall, Target, canonical_request, core_of, digest_of
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.requests.identity import CallIdentity
from headrace_schemas.values import ids
from tests.support.drawn_conversations import PARAMETERS, STOP, DrawnConversation
from tests.support.fake_replica import VERSION
from tests.support.gateway import lenient
from tests.support.presence import draw_seed

ANSWERS = 300
KEY = ids.session_key("default", "s")
IDENTITY = CallIdentity("default", "s", KEY, "header", None, None, "train")
TEXTS = ("", "Hello.", "naïve \u2028 café", "line\nline", '{"a": 1}', "x" * 300, "🙂 STOP more")
ARGUMENTS = ('{"query": "mail"}', "{}", "", '{"query": "é\\n"}', "[1]", '{"query": ')
SEARCH = {"name": "search", "parameters": PARAMETERS}
OLD_BODIES: dict[str, dict[str, Any]] = {
    "functions": {"messages": [{"role": "user", "content": "q"}], "functions": [SEARCH]},
    "completions": {"prompt": "q", "logprobs": 2},
}
READERS: dict[str, Read] = {
    "chat": read_chat,
    "functions": read_chat,
    "completions": read_completion,
    "messages": read_messages,
    "responses": read_responses,
}


def body_of(api: str, conversation: DrawnConversation) -> dict[str, Any]:
    """Return the request body of `conversation` for `api`; old forms of chat completions have a fixed body."""
    body = OLD_BODIES.get(api) or conversation.body(api)
    if api == "responses" and conversation.has_tools:
        return {**body, "tools": [*body["tools"], {"type": "custom", "name": "patch"}]}
    return body


def call_of(api: str, conversation: DrawnConversation, *, stream: bool) -> tuple[ChatCall, AnswerShape]:
    body = {"model": "tiny", **body_of(api, conversation), "stream": stream}
    if stream and api in ("chat", *OLD_BODIES):
        body["stream_options"] = {"include_usage": True}
    request, shape = READERS[api](json.dumps(body).encode(), lenient())
    messages = tuple(message.event for message in request.messages)
    canonical_json = canonical_request(request, messages, request.sampling)
    call = ChatCall(
        request=request, messages=messages, sampling=request.sampling, identity=IDENTITY, target=Target("tiny"),
        response_id=ids.response_id(KEY), digest=digest_of("tiny", canonical_json), retry=0,
        started_at=datetime.now(UTC), core=core_of(canonical_json, request),
    )  # fmt: skip
    return call, shape


def drawn_message(draw: random.Random, *, is_text: bool = False) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw.choice(TEXTS)}
    if is_text:
        return message
    if draw.random() < 0.4:
        message["reasoning_content"] = draw.choice(TEXTS[1:])
    if draw.random() < 0.5:
        names = draw.choices(("search", "patch", "invented"), k=draw.randint(1, 3))
        message["tool_calls"] = [
            {"id": f"call_{at}", "function": {"name": name, "arguments": draw.choice(ARGUMENTS)}}
            for at, name in enumerate(names)
        ]
    return message


def pieces(draw: random.Random, text: str) -> Iterator[str]:
    while text:
        size = draw.randint(1, len(text))
        yield text[:size]
        text = text[size:]


def deltas(draw: random.Random, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `message` in deltas as an engine streams them: reasoning, text, then one call after the other."""
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        yield from ({name: piece} for piece in pieces(draw, message.get(name) or ""))
    for at, call in enumerate(message.get("tool_calls", [])):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": at, "id": call["id"], "type": "function", "function": function}]}
        for piece in pieces(draw, call["function"]["arguments"]):
            yield {"tool_calls": [{"index": at, "function": {"arguments": piece}}]}


@dataclass(frozen=True)
class DrawnAnswer:
    """Random answer of an engine: complete, in chunks, and with its finish reason."""

    whole: EngineAnswer
    chunks: list[EngineAnswer]
    finish: str
    is_stopped: bool
    """Whether its last token completed a stop string."""


def drawn_answer(draw: random.Random, conversation: DrawnConversation, *, is_text: bool) -> DrawnAnswer:
    """Return a random answer to a request. If `is_text`, it has neither reasoning nor tool calls."""
    message = drawn_message(draw, is_text=is_text)
    finish = draw.choice(("length", "tool_calls" if message.get("tool_calls") else "stop"))
    is_stopped = finish == "stop" and conversation.stops and draw.random() < 0.5
    stop_tokens = [{"token": token, "logprob": -0.5, "bytes": list(token.encode())} for token in ("x ST", "OP.")]
    end = {"index": 0, "finish_reason": finish, **({"logprobs": {"content": stop_tokens}} if is_stopped else {})}
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": draw.choice((0, 3))},
    }
    answer = {
        "model": VERSION,
        "choices": [{**end, "message": message}],
        "usage": usage,
        "prompt_token_ids": [1] * 7,
    }
    chunks: list[dict[str, Any]] = [
        {"model": VERSION, "choices": [{"index": 0, "delta": delta}]} for delta in deltas(draw, message)
    ]
    chunks[0]["prompt_token_ids"] = [1] * 7
    chunks += [{"model": VERSION, "choices": [{**end, "delta": {}}]}]
    chunks += [{"model": VERSION, "choices": [], "usage": usage}]
    read = EngineAnswer.model_validate
    return DrawnAnswer(read(answer), [read(chunk) for chunk in chunks], finish, is_stopped)


@dataclass(frozen=True)
class Served:
    """The plain response to a random request, and the events of the streamed response."""

    conversation: DrawnConversation
    answer: DrawnAnswer
    body: dict[str, Any]
    events: list[dict[str, Any]]


def served(api: str, draw: random.Random) -> Served:
    """Send one random request plain and streamed, and return both responses."""
    conversation = DrawnConversation.draw(draw)
    answer = drawn_answer(draw, conversation, is_text=api == "completions")
    plain_call, plain = call_of(api, conversation, stream=False)
    stream_call, shape = call_of(api, conversation, stream=True)
    stream_call = replace(stream_call, response_id=plain_call.response_id, started_at=plain_call.started_at)
    body = json.loads(plain.plain_body(plain_call, answer.whole))
    streamed = shape.streamed(stream_call)
    data = b"".join([*(streamed.events(chunk, VERSION) for chunk in answer.chunks), streamed.ping, streamed.end()])
    assert data.decode().count("\u2028") == 0, "some clients split events there"
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: ")]
    return Served(conversation, answer, body, [json.loads(line) for line in lines if line != "[DONE]"])


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(draw_seed(request.node.name))


def test_chat_completions_are_read_by_the_vendors_types(draw: random.Random) -> None:
    for _ in range(ANSWERS):
        exchange = served("chat", draw)
        completion = ChatCompletion.model_validate(exchange.body)
        state = ChatCompletionStreamState()
        for event in exchange.events:
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
        snapshot: Any = state.current_completion_snapshot
        message, plain = snapshot.choices[0].message, completion.choices[0].message
        assert (message.content or "") == (plain.content or "")
        assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()] == [
            (call.id, call.function.name, call.function.arguments)  # type: ignore[union-attr]
            for call in plain.tool_calls or ()
        ]
        assert (snapshot.id, snapshot.model, snapshot.choices[0].finish_reason, snapshot.usage) == (
            completion.id, completion.model, exchange.answer.finish, completion.usage,
        )  # fmt: skip
        assert completion.choices[0].finish_reason == exchange.answer.finish


def test_old_functions_are_read_by_the_vendors_types(draw: random.Random) -> None:
    for _ in range(ANSWERS):
        exchange = served("functions", draw)
        (plain,) = ChatCompletion.model_validate(exchange.body).choices
        deltas = [choice for event in exchange.events for choice in ChatCompletionChunk.model_validate(event).choices]
        calls = [choice.delta.function_call for choice in deltas if choice.delta.function_call]
        called = plain.message.function_call
        assert "".join(choice.delta.content or "" for choice in deltas) == (plain.message.content or "")
        assert (called is None) == (not calls)
        if called is not None:
            assert called.name == "".join(call.name or "" for call in calls)
            assert called.arguments == "".join(call.arguments or "" for call in calls)
        assert deltas[-1].finish_reason == plain.finish_reason in ("stop", "length", "function_call")


def test_text_completions_are_read_by_the_vendors_types(draw: random.Random) -> None:
    for _ in range(ANSWERS):
        exchange = served("completions", draw)
        plain = Completion.model_validate(exchange.body)
        *parts, counted = [Completion.model_construct(**event) for event in exchange.events]
        choices: Any = [choice for part in parts for choice in part.choices]
        assert "".join(choice.text for choice in choices) == plain.choices[0].text
        assert choices[-1].finish_reason == plain.choices[0].finish_reason
        assert (counted.choices, counted.id, counted.usage) == ([], plain.id, plain.usage)


def test_messages_are_read_by_the_vendors_types(draw: random.Random) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for _ in range(ANSWERS):
        exchange = served("messages", draw)
        message = AnthropicMessage.model_validate(exchange.body)
        snapshot: Any = None
        buffers: Any = {}
        for event in (adapter.validate_python(event) for event in exchange.events if event["type"] != "ping"):
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
        streamed, plain = (json.loads(entry.to_json()) for entry in (snapshot, message))
        assert streamed == plain
        assert (message.stop_reason, message.stop_sequence) == _expected_stop(exchange)


def _expected_stop(exchange: Served) -> tuple[str, str | None]:
    answer = exchange.answer
    if answer.finish == "length":
        assert answer.whole.usage is not None
        is_cut_by_request = exchange.conversation.max_tokens == answer.whole.usage.completion_tokens
        return ("max_tokens" if is_cut_by_request else "model_context_window_exceeded"), None
    if answer.is_stopped:
        return "stop_sequence", STOP
    return {"tool_calls": "tool_use", "stop": "end_turn"}[answer.finish], None


def test_responses_are_read_by_the_vendors_types(draw: random.Random) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for _ in range(ANSWERS):
        exchange = served("responses", draw)
        response = Response.model_validate(exchange.body)
        parsed = [adapter.validate_python(event) for event in exchange.events]
        assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
        status = "incomplete" if exchange.answer.finish == "length" else "completed"
        assert (parsed[-1].type, response.status) == (f"response.{status}", status)
        assert parsed[-1].response == response
        items = [event.item for event in parsed if event.type == "response.output_item.done"]
        assert items == response.output
        opened = [event.item.id for event in parsed if event.type == "response.output_item.added"]
        assert opened == [item.id for item in response.output]


def test_equal_conversations_are_one_prompt_in_each_api(draw: random.Random) -> None:
    for _ in range(ANSWERS):
        conversation = DrawnConversation.draw(draw)
        calls = [call_of(api, conversation, stream=False)[0] for api in ("chat", "messages", "responses")]
        prompts = [
            [(message.role, message.text, message.reasoning_content, message.tool_calls, message.tool_call_id)
             for message in call.messages]
            for call in calls
        ]  # fmt: skip
        assert prompts[0] == prompts[1] == prompts[2]
        assert len({call.sampling.max_tokens for call in calls}) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 429, 500, 502, 503, 504])
def test_refusals_are_the_vendors_errors(status: int) -> None:
    import httpx2

    error = ApiError(status, "code", "a message", "field")
    for client, code, body in (
        (openai.OpenAI(api_key="none"), error.status, error.body),
        (anthropic.Anthropic(api_key="none"), error.anthropic_status, error.anthropic_body("req_1")),
    ):
        response = httpx2.Response(code, content=body, request=httpx2.Request("POST", "http://h/"))
        raised = client._make_status_error_from_response(response)
        names = {
            400: "BadRequestError",
            401: "AuthenticationError",
            403: "PermissionDeniedError",
            404: "NotFoundError",
            429: "RateLimitError",
        }
        if status in names:
            assert type(raised).__name__ == names[status]
        assert (raised.status_code, raised.body is not None) == (code, True)
        assert "a message" in str(raised)
