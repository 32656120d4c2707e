"""Tests of fields that only the gateway requests, and of hints.

Fields that the gateway requests for capture never reach a client that did not request them. Hints are reported and
honoured by the chat template, or refused by strict settings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis import answers
from headrace_gateway.capture.transcript import Transcript
from headrace_gateway.requests.chat_call import ChatCall, Target, canonical_request, core_of
from headrace_gateway.requests.chat_request import ChatRequest, parse_chat
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.requests.identity import CallIdentity
from headrace_gateway.requests.request_context import RequestContext, header_value, metric_label
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.support.fake_replica import VERSION, FakeReplica, Fault, Generation, entry
from tests.support.gateway import gateway, lenient, strict

KEY = ids.session_key("default", "s")
TOP = {"id", "object", "created", "model", "choices", "usage"}
CHOICE = {"index", "message", "delta", "logprobs", "finish_reason"}
SAID = {"role", "content", "refusal", "tool_calls", "reasoning_content"}
TOOLS = [{"type": "function", "function": {"name": "search"}}]
NOISE = st.dictionaries(
    st.sampled_from(
        [
            "prompt_logprobs", "kv_transfer_params", "weight_version", "status", "code", "routed_experts",
            "stop_reason", "x",
        ]
    ),
    st.sampled_from([None, 1, "secret", [1, 2], {"a": "secret"}]),
)  # fmt: skip
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "logprobs": st.booleans(),
        "return_token_ids": st.booleans(),
        "max_tokens": st.integers(1, 6),
        "tools": st.just(TOOLS),
    },
)


def call_of(fields: dict[str, Any]) -> ChatCall:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **fields}
    request = parse_chat(json.dumps(body).encode(), strict(8))
    messages = tuple(message.event for message in request.messages)
    return ChatCall(
        request=request,
        messages=messages,
        sampling=request.sampling,
        identity=CallIdentity("default", "s", KEY, "header", None, None, "train"),
        target=Target("tiny"),
        response_id=ids.response_id(KEY),
        digest="0" * 64,
        retry=0,
        started_at=utcnow(),
        core=core_of(canonical_request(request, messages, request.sampling), request),
    )


def check(part: dict[str, Any], fields: dict[str, Any]) -> None:
    """Check that a response body or chunk has only OpenAI's fields and the extra fields that were requested."""
    extra = {"prompt_token_ids"} if fields.get("return_token_ids") else set()
    assert set(part) <= TOP | extra
    for choice in part["choices"]:
        assert set(choice) <= CHOICE | ({"token_ids"} if fields.get("return_token_ids") else set())
        assert set(choice.get("message") or choice.get("delta") or {}) <= SAID
        if not fields.get("logprobs"):
            assert choice["logprobs"] is None
    assert "secret" not in json.dumps(part)


@given(fields=REQUESTS, noise=NOISE)
def test_a_whole_answer_shows_only_what_was_asked_for(fields: dict[str, Any], noise: dict[str, Any]) -> None:
    call = call_of(fields)
    work = Generation(json.loads(call.body(VERSION)), VERSION)
    choices = [
        {
            **noise,
            "index": index,
            "message": {**noise, "role": "assistant", "content": "text", "reasoning": "why"},
            "logprobs": {**noise, "content": [entry(token) for token in work.tokens(index)]},
            "token_ids": work.tokens(index),
            "finish_reason": "stop",
        }
        for index in range(work.n)
    ]
    raw = {**noise, "model": VERSION, "choices": choices, "usage": work.usage(), "prompt_token_ids": work.prompt_ids}
    body = json.loads(answers.completion_body(call, EngineAnswer.model_validate_json(json.dumps(raw))))
    check(body, fields)
    assert body["usage"] == work.usage()
    assert body["choices"][0]["message"]["reasoning_content"] == "why"
    assert body["id"] == call.response_id


@given(fields=REQUESTS, noise=NOISE, usage=st.booleans())
def test_a_stream_shows_only_what_was_asked_for(fields: dict[str, Any], noise: dict[str, Any], usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    call = call_of({**fields, **options, "stream": True})
    work = Generation(json.loads(call.body(VERSION)), VERSION)
    chunks, transcript, sent = answers.Chunks(call), Transcript(), b""
    for raw, _ in work.chunks(Fault()):
        noisy = {**noise, **raw, "choices": [{**noise, **choice} for choice in raw["choices"]]}
        chunk = EngineAnswer.model_validate_json(json.dumps(noisy))
        transcript.add(chunk, streamed=True)
        sent += chunks.events(chunk, transcript.version)
    sent_chunks = [json.loads(event.removeprefix(b"data: ")) for event in sent.split(b"\n\n") if event]
    for event in sent_chunks:
        check(event, fields)
        assert "usage" not in event or usage
    finishes = [
        choice["finish_reason"] for event in sent_chunks for choice in event["choices"] if choice["finish_reason"]
    ]
    assert len(finishes) == work.n
    assert [event["usage"] for event in sent_chunks if event.get("usage")] == ([work.usage()] if usage else [])
    assert transcript.disagreement() is None, "hiding must not cost the capture anything"


USER = {"role": "user", "content": "hello"}
TOO_LONG = Fault(status=400, message="the maximum context length is 100 tokens, you asked for 20 and 1000")


def parsed(context: RequestContext, **fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "tiny", "messages": [USER], **fields}).encode(), context)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("service_tier", "priority"),
        ("store", True),
        ("truncation", "auto"),
        ("include", ["x"]),
        ("client_metadata", {"a": "b"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("provider", {"order": ["x"]}),
        ("include_reasoning", True),
        ("num_ctx", 4096),
        ("skip_special_tokens", True),
        ("cache_control", {"type": "ephemeral"}),
    ],
)
def test_a_hint_is_reported_and_strict_settings_refuse_it(name: str, value: Any) -> None:
    context = lenient()
    request = parsed(context, **{name: value})
    assert context.ignored == (name,)
    assert request.chat_template_kwargs is None
    with pytest.raises(ApiError) as caught:
        parsed(strict(), **{name: value})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_field", name)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("fields", "switch"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"enabled": True}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
    ids=json.dumps,
)
def test_a_switch_of_thinking_reaches_the_chat_template(fields: dict[str, Any], switch: bool) -> None:
    context = strict()
    assert parsed(context, **fields).chat_template_kwargs == {"enable_thinking": switch}
    assert context.ignored == ()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_a": 0.5}, "top_a"),
        ({"mirostat": 2}, "mirostat"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"temprature": 1}, "temprature"),
        ({"of_nobody": 1}, "of_nobody"),
    ],
)
def test_a_field_that_changes_the_meaning_is_refused_also_without_strict(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(lenient(), **fields)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_bookkeeping_in_messages_is_reported_once_by_its_name() -> None:
    context = lenient()
    answer = {"role": "assistant", "content": "x", "id": "m", "reasoning_details": [{"type": "x"}]}
    parsed(context, messages=[USER, answer, {**USER, "id": "n"}])
    assert context.ignored == ("messages.id", "messages.reasoning_details")


def test_what_clients_send_back_in_other_forms_is_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    answers = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "refusal": "No."}]
    result = {"role": "tool", "tool_call_id": "c", "content": None}
    called, result_message, refusal = parsed(strict(), messages=[USER, answers[0], result, answers[1], USER]).messages[
        1:4
    ]
    assert called.tool_calls is not None
    assert called.tool_calls[0].function.arguments == '{"a": 1}'
    assert (result_message.content, refusal.content) == ("", "No.")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_media_is_refused_or_replaced_by_a_text(kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "See: "}, {"type": kind, kind: {"url": "x"}}]}]
    with pytest.raises(ApiError, match=r"gateway\.media"):
        parsed(lenient(), messages=messages)
    context = lenient(media="placeholder")
    request = parsed(context, messages=messages)
    assert request.messages[0].event.text == f"See: [{kind} omitted: this model reads text only]"
    assert context.ignored == (f"media.{kind}",)


async def test_ignored_fields_are_named_in_the_answer_and_counted(tmp_path: Path) -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("headrace_gateway_ignored_fields_total", {"field": "verbosity"}) or 0.0

    before = count()
    async with FakeReplica().running() as replica, gateway(tmp_path, replica) as served:
        for stream in (False, True):
            answer = await served.chat(verbosity="low", service_tier="flex", stream=stream)
            assert answer.headers["x-headrace-ignored"] == "verbosity, service_tier"
        assert "x-headrace-ignored" not in (await served.chat()).headers
        first, second, third = served.turns
    assert count() == before + 2
    assert first.request_digest == second.request_digest == third.request_digest


async def test_strict_settings_refuse_hints(tmp_path: Path) -> None:
    async with FakeReplica().running() as replica, gateway(tmp_path, replica, strict=True) as served:
        answer = await served.chat(service_tier="flex")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_beyond_the_context_are_cut_and_reported(tmp_path: Path, *, stream: bool) -> None:
    replica = FakeReplica(faults=[TOO_LONG])
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.chat('what is ,"max_tokens":1000 ?', max_tokens=1000, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-headrace-ignored"] == "max_tokens"
        (turn,) = served.turns
    first, second = replica.requests
    assert first.pop("max_tokens") == 1000
    assert first == second
    assert turn.sampling.max_tokens == 1000


async def test_a_prompt_beyond_the_context_is_refused(tmp_path: Path) -> None:
    replica = FakeReplica(faults=[TOO_LONG] * 3)
    async with replica.running(), gateway(tmp_path, replica) as served:
        variants: list[dict[str, Any]] = [{"max_tokens": 1000}, {}]
        for fields in variants:
            answer = await served.chat(**fields)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert served.turns == []


@pytest.mark.parametrize(("prompt_tokens", "attempts"), [(99, 2), (100, 1)])
async def test_a_prompt_that_fills_the_context_alone_is_tried_once(
    tmp_path: Path, prompt_tokens: int, attempts: int
) -> None:
    without = f"the maximum context length is 100 tokens, you asked for {prompt_tokens} in the messages"
    faults = [Fault(status=400, message=f"{without} and 7 for the completion"), Fault(status=400, message=without)]
    replica = FakeReplica(faults=faults)
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.chat(max_tokens=7)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, without)
    assert len(replica.requests) == attempts


def test_a_header_holds_printable_names_and_a_metric_known_ones() -> None:
    assert header_value(("tools.web\r\nx: y", "é")) == "tools.web__x__y, _"
    assert [metric_label(name) for name in ("tools.web_search", "media.image", "x-of-a-client")] == [
        "tools", "media", "other",
    ]  # fmt: skip
