"""What capture asks of the engine never reaches a client that did not ask: every combination, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway import answers
from headrace_gateway.chat_call import ChatCall, canonical_request, core_of
from headrace_gateway.chat_request import parse_chat
from headrace_gateway.engine_wire import EngineAnswer
from headrace_gateway.identity import CallIdentity
from headrace_gateway.model_catalog import Target
from headrace_gateway.transcript import Transcript
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.support.fake_replica import VERSION, Fault, Generation, entry
from tests.support.requests import strict

KEY = ids.session_key("default", "s")
TOP = {"id", "object", "created", "model", "choices", "usage"}
CHOICE = {"index", "message", "delta", "logprobs", "finish_reason"}
SAID = {"role", "content", "refusal", "tool_calls", "reasoning_content"}
TOOLS = [{"type": "function", "function": {"name": "search"}}]
NOISE = st.dictionaries(
    st.sampled_from(
        [
            "prompt_logprobs",
            "kv_transfer_params",
            "weight_version",
            "status",
            "code",
            "routed_experts",
            "stop_reason",
            "x",
        ]
    ),
    st.sampled_from([None, 1, "secret", [1, 2], {"a": "secret"}]),
)
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
    messages = tuple(message.event() for message in request.messages)
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


def check(shown: dict[str, Any], fields: dict[str, Any]) -> None:
    """Only OpenAI's own names, and of the others exactly what was asked for."""
    extra = {"prompt_token_ids"} if fields.get("return_token_ids") else set()
    assert set(shown) <= TOP | extra
    for choice in shown["choices"]:
        assert set(choice) <= CHOICE | ({"token_ids"} if fields.get("return_token_ids") else set())
        assert set(choice.get("message") or choice.get("delta") or {}) <= SAID
        if not fields.get("logprobs"):
            assert choice["logprobs"] is None
    assert "secret" not in json.dumps(shown)


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
    shown = json.loads(answers.completion_body(call, EngineAnswer.model_validate_json(json.dumps(raw))))
    check(shown, fields)
    assert shown["usage"] == work.usage()
    assert shown["choices"][0]["message"]["reasoning_content"] == "why"
    assert shown["id"] == call.response_id


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
    shown = [json.loads(event.removeprefix(b"data: ")) for event in sent.split(b"\n\n") if event]
    for event in shown:
        check(event, fields)
        assert "usage" not in event or usage
    finishes = [choice["finish_reason"] for event in shown for choice in event["choices"] if choice["finish_reason"]]
    assert len(finishes) == work.n
    assert [event["usage"] for event in shown if event.get("usage")] == ([work.usage()] if usage else [])
    assert transcript.disagreement() is None, "hiding must not cost the capture anything"
