"""Tests of `POST /v1/chat/completions` with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace_inference.chat.answer import Delta
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Tokens
from headrace_inference.http.wire import ResponseFormatter
from tests.unit.inference.conftest import (
    CALL,
    CONTEXT,
    FULL,
    TOOLS,
    USER,
    VERSION,
    Json,
    ScriptedEngine,
    ask,
    ask_stream,
    client,
    joined,
)


async def test_a_whole_answer_carries_its_exact_tokens(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Nothing at all.")
    async with client(engine, tokenizer) as http:
        answer = (await ask(http, **FULL)).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert answer["model"] == VERSION
    assert choice["message"] == {"role": "assistant", "content": "Nothing at all."}
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == engine.tokens_of(0), "the end of the turn is among them"
    assert answer["prompt_token_ids"] == engine.asked[0].prompt
    assert tokenizer.text_of(answer["prompt_token_ids"]).strip().startswith("user\nWhat is new?")
    assert answer["usage"] == {
        "prompt_tokens": len(engine.asked[0].prompt),
        "completion_tokens": len(choice["token_ids"]),
        "total_tokens": len(engine.asked[0].prompt) + len(choice["token_ids"]),
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    assert content[0] == {
        "token": content[0]["token"],
        "logprob": -0.5,
        "bytes": content[0]["bytes"],
        "top_logprobs": [],
    }
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == "Nothing at all.<|im_end|>"


async def test_tokens_and_logprobs_are_shown_on_request_only(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        answer = (await ask(http)).json()
        chunks = await ask_stream(http)
    assert answer["choices"][0]["logprobs"] is None
    for part in (answer, answer["choices"][0], *chunks, *(chunk["choices"][0] for chunk in chunks)):
        assert not {"token_ids", "prompt_token_ids"} & part.keys()


@pytest.mark.parametrize("portion", [1, 3, 1000])
@pytest.mark.parametrize(
    "text", ["Hi there.", f"<think>hm</think>Let me look. {CALL}", "<tool_call>{oops}</tool_call>", "é😀"]
)
async def test_a_stream_says_what_a_whole_answer_says(tokenizer: ChatTokenizer, text: str, portion: int) -> None:
    engine = ScriptedEngine(tokenizer, text)
    engine.portion = portion
    async with client(engine, tokenizer) as http:
        response = (await ask(http, tools=TOOLS, **FULL)).json()["choices"][0]
        chunks = await ask_stream(http, tools=TOOLS, stream_options={"include_usage": True}, **FULL)
    stream = joined(chunks)
    assert stream["token_ids"] == response["token_ids"] == engine.tokens_of(0)
    assert stream["logprobs"] == response["logprobs"]["content"]
    assert stream["content"] == (response["message"]["content"] or "")
    assert stream["reasoning_content"] == response["message"].get("reasoning_content", "")
    streamed_calls = [(call["index"], call["type"], call["function"]) for call in stream["tool_calls"]]
    assert streamed_calls == [
        (i, c["type"], c["function"]) for i, c in enumerate(response["message"].get("tool_calls", []))
    ]
    assert stream["ends"] == [response["finish_reason"]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == engine.asked[0].prompt
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(stream["token_ids"])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["model"] for chunk in chunks} == {VERSION}
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_a_tool_call_in_openais_shape(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, CALL), tokenizer) as http:
        choice = (await ask(http, tools=TOOLS)).json()["choices"][0]
        untold = (await ask(http)).json()["choices"][0]
        forbidden = (await ask(http, tools=TOOLS, tool_choice="none")).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "search", "arguments": '{"query":  "mail"}'}
    for other in (untold, forbidden):
        assert (other["finish_reason"], other["message"]["content"]) == ("stop", CALL)


async def test_a_call_cut_off_by_its_length_is_text(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, CALL), tokenizer) as http:
        choice = (await ask(http, tools=TOOLS, max_tokens=5, **FULL)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert CALL.startswith(choice["message"]["content"])
    assert len(choice["token_ids"]) == 5


async def test_several_choices(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "one", "two", CALL)
    async with client(engine, tokenizer) as http:
        response = (await ask(http, n=3, tools=TOOLS, **FULL)).json()
        chunks = await ask_stream(http, n=3, tools=TOOLS, **FULL)
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in response["choices"]] == ["one", "two", None]
    assert response["usage"]["completion_tokens"] == sum(len(engine.tokens_of(i)) for i in range(3))
    for i in range(3):
        assert joined(chunks, i)["token_ids"] == engine.tokens_of(i)
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1


async def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "one two three")
    async with client(engine, tokenizer) as http:
        choice = (await ask(http, stop=["two", "x"], **FULL)).json()["choices"][0]
        stream = joined(await ask_stream(http, stop="two", **FULL))
    assert choice["message"]["content"] == stream["content"] == "one "
    assert choice["token_ids"] == stream["token_ids"]
    assert tokenizer.text_of(choice["token_ids"]) == "one two"
    assert (choice["finish_reason"], stream["ends"]) == ("stop", ["stop"])


async def test_top_logprobs(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        content = (await ask(http, logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert all([top["logprob"] for top in item["top_logprobs"]] == [-0.5, -2.0] for item in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]


async def test_the_logprob_of_the_impossible_is_a_number(tokenizer: ChatTokenizer) -> None:
    """JSON has no infinity, and strict parsers would refuse the whole answer."""
    wire = ResponseFormatter(tokenizer, VERSION, token_ids=True, logprobs=True)
    tokens = Tokens(0, [9], [-0.5], [[(9, -0.5), (10, float("-inf"))]], "stop")
    chunk = json.loads(wire.chunk(tokens, Delta(), 0, "stop").removeprefix(b"data: "), parse_constant=pytest.fail)
    (content,) = chunk["choices"][0]["logprobs"]["content"]
    assert [top["logprob"] for top in content["top_logprobs"]] == [-0.5, -9999.0]


async def test_sampling_reaches_the_engine_as_the_client_meant_it(tokenizer: ChatTokenizer) -> None:
    """Pitfalls 5 and 28: the model's own defaults do not replace the client's sampling parameters."""
    engine = ScriptedEngine(tokenizer, "Hi.")
    async with client(engine, tokenizer) as http:
        await ask(http)
        await ask(
            http, temperature=0, top_p=0.5, top_k=7, min_p=0.25, seed=-3, max_completion_tokens=9, presence_penalty=1,
            frequency_penalty=-1.5, ignore_eos=True,
        )  # fmt: skip
    default, chosen = (request.sampling for request in engine.asked)
    assert (default.temperature, default.top_p, default.top_k, default.seed) == (1.0, 1.0, 0, None)
    assert (default.min_p, chosen.min_p) == (0.0, 0.25)
    assert (default.max_tokens, default.stop_ids) == (None, tokenizer.stop_ids)
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.seed, chosen.max_tokens) == (0.0, 0.5, 7, -3, 9)
    assert (chosen.presence_penalty, chosen.frequency_penalty, chosen.stop_ids) == (1.0, -1.5, frozenset())


class TestResume:
    """Tests of streams that another replica began and this replica resumes (P8)."""

    async def test_from_every_point(self, tokenizer: ChatTokenizer) -> None:
        """The two partial streams together contain the events of one complete stream."""
        engine = ScriptedEngine(tokenizer, f"<think>hm</think>Look: é {CALL} done")
        async with client(engine, tokenizer) as http:
            engine.portion = 1
            full = await ask_stream(http, tools=TOOLS, **FULL)
            joined_stream = joined(full)
            for cut in range(len(joined_stream["token_ids"]) + 1):
                ids = joined_stream["token_ids"][:cut]
                resume = {"choices": [{"index": 0, "token_ids": ids, "logprobs": [-0.5] * cut}]}
                usage = {"include_usage": True}
                rest_chunks = await ask_stream(http, tools=TOOLS, headrace_resume=resume, stream_options=usage, **FULL)
                rest, seen = joined(rest_chunks), joined(full[: cut + 1])
                assert seen["token_ids"] + rest["token_ids"] == joined_stream["token_ids"]
                if not seen["ends"]:
                    assert rest["ends"] == joined_stream["ends"]
                    assert seen["content"] + rest["content"] == joined_stream["content"]
                    assert seen["reasoning_content"] + rest["reasoning_content"] == joined_stream["reasoning_content"]
                    functions = [call["function"] for call in seen["tool_calls"] + rest["tool_calls"]]
                    assert functions == [call["function"] for call in joined_stream["tool_calls"]]
                assert all("role" not in part["delta"] for chunk in rest_chunks for part in chunk["choices"])
                assert rest_chunks[0]["prompt_token_ids"] == engine.asked[0].prompt
                assert rest_chunks[-1]["usage"]["completion_tokens"] == len(joined_stream["token_ids"])

    async def test_after_the_prompt_that_was_sampled_from(self, tokenizer: ChatTokenizer) -> None:
        """The first replica may have remembered exact tokens of the conversation that this replica does not have
        (P2)."""
        engine = ScriptedEngine(tokenizer, "one")
        ids = engine.tokens_of(0)[:1]
        resume = {"prompt_token_ids": [9, 8, 7], "choices": [{"index": 0, "token_ids": ids, "logprobs": [-0.5]}]}
        async with client(engine, tokenizer) as http:
            chunks = await ask_stream(http, headrace_resume=resume, stream_options={"include_usage": True}, **FULL)
        assert engine.asked[0].prompt == chunks[0]["prompt_token_ids"] == [9, 8, 7]
        assert chunks[-1]["usage"]["prompt_tokens"] == 3

    async def test_a_complete_choice_gets_no_further_chunk(self, tokenizer: ChatTokenizer) -> None:
        engine = ScriptedEngine(tokenizer, "one", "two")
        complete = {"index": 0, "token_ids": engine.tokens_of(0), "logprobs": [-0.5] * len(engine.tokens_of(0))}
        resume = {"choices": [{**complete, "finish_reason": "stop"}]}
        async with client(engine, tokenizer) as http:
            chunks = await ask_stream(http, n=2, headrace_resume=resume, **FULL)
        assert joined(chunks, 0)["token_ids"] == joined(chunks, 0)["ends"] == []
        assert joined(chunks, 1)["content"] == "two"
        assert [start.choice for start in engine.asked[0].starts] == [1]

    async def test_an_end_that_was_never_told_is_told(self, tokenizer: ChatTokenizer) -> None:
        engine = ScriptedEngine(tokenizer, "one")
        ids = engine.tokens_of(0)
        resume = {"choices": [{"index": 0, "token_ids": ids, "logprobs": [-0.5] * len(ids)}]}
        async with client(engine, tokenizer) as http:
            assert joined(await ask_stream(http, headrace_resume=resume))["ends"] == ["stop"]
            resume["choices"][0].update(token_ids=ids[:2], logprobs=[-0.5] * 2)
            assert joined(await ask_stream(http, headrace_resume=resume, max_tokens=2))["ends"] == ["length"]
        assert engine.asked == [], "there was nothing left to sample"

    @pytest.mark.parametrize(
        ("resume", "word"),
        [
            ({"choices": [{"index": 1, "token_ids": [5], "logprobs": [-1]}]}, "no choice 1"),
            ({"choices": [{"index": 0, "token_ids": [5], "logprobs": []}]}, "1 token ids and 0 logprobs"),
            ({"choices": [{"index": 0, "token_ids": [99_999], "logprobs": [-1]}]}, "token 99999 has no row"),
            (
                {"prompt_token_ids": [99_999], "choices": [{"index": 0, "token_ids": [5], "logprobs": [-1]}]},
                "headrace_resume: token 99999 has no row",
            ),
            ({"choices": []}, "choices"),
            ([], "headrace_resume"),
        ],
    )
    async def test_what_cannot_be_resumed_is_refused(self, tokenizer: ChatTokenizer, resume: Any, word: str) -> None:
        async with client(ScriptedEngine(tokenizer, "one"), tokenizer) as http:
            response = await ask(http, stream=True, headrace_resume=resume)
        assert response.status_code == 400
        assert word in response.json()["error"]["message"]


async def test_models_lists_what_answers(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (VERSION, "model", CONTEXT)


async def test_the_name_alone_finds_the_version_and_the_answer_says_which(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        assert (await ask(http, model="tiny")).json()["model"] == VERSION


async def test_what_sdks_echo_is_accepted(tokenizer: ChatTokenizer) -> None:
    echoed: Json = {
        "role": "assistant",
        "content": "Hi.",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]}
    engine = ScriptedEngine(tokenizer, "Hi.")
    async with client(engine, tokenizer) as http:
        assert (
            await ask(http, messages=[{"role": "developer", "content": "Be kind."}, *USER, echoed, parts])
        ).is_success
    text = tokenizer.text_of(engine.asked[0].prompt)
    assert "And now?" in text
    assert text.startswith("system\nBe kind."), "templates know the role by its older name"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_engine(tokenizer: ChatTokenizer, stream: bool) -> None:
    engine = ScriptedEngine(tokenizer, "Hi there, this never ends.")
    engine.hold = asyncio.Event()
    async with client(engine, tokenizer) as http:
        asking = asyncio.create_task(ask(http, stream=stream))
        await engine.begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
    assert engine.closed == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_prompt_is_no_conversation(tokenizer: ChatTokenizer, stream: bool) -> None:
    text = "<|im_start|>user\nOnce upon"
    engine = ScriptedEngine(tokenizer, f"<think>hm</think>{CALL}")
    async with client(engine, tokenizer) as http:
        fields: Json = {"messages": [{"role": "user", "content": text}], "headrace_prompt": {}, **FULL}
        answer = joined(await ask_stream(http, **fields)) if stream else (await ask(http, **fields)).json()
        ids = engine.asked[0].prompt
        fields["headrace_prompt"] = {"token_ids": ids[1:]}
        of_ids = (await ask_stream(http, **fields))[0] if stream else (await ask(http, **fields)).json()
        follow_up = await ask(http, messages=[*fields["messages"], {"role": "assistant", "content": "a"}, *USER])
    assert ids == tokenizer.encode_raw(text, add_special_tokens=True)
    assert tokenizer.token_id("<|im_start|>") in ids, "the text may have control tokens"
    content = answer["content"] if stream else answer["choices"][0]["message"]["content"]
    assert content == f"<think>hm</think>{CALL}", "the answer is text"
    assert engine.asked[1].prompt == ids[1:]
    assert of_ids["headrace_prompt_text"] == tokenizer.decode(ids[1:])
    assert follow_up.status_code == 200
    assert engine.asked[2].prompt[: len(ids)] != ids, "the turn is no beginning of a conversation"


@pytest.mark.parametrize(
    "fields",
    [
        {"headrace_prompt": {}, "tools": TOOLS},
        {"headrace_prompt": {}, "messages": [*USER, *USER]},
        {"headrace_prompt": {}, "response_format": {"type": "json_object"}},
        {"headrace_prompt": {}, "messages": [{"role": "user", "content": ""}]},
        {"headrace_prompt": {"token_ids": []}},
        {"headrace_prompt": {"token_ids": [2**30]}},
    ],
)
async def test_a_raw_prompt_that_is_none_is_refused(tokenizer: ChatTokenizer, fields: Json) -> None:
    async with client(ScriptedEngine(tokenizer, "a"), tokenizer) as http:
        response = await ask(http, **fields)
    assert response.status_code == 400
    assert "prompt" in response.json()["error"]["message"]


async def test_an_engine_that_cannot_refuses_by_name(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Hi.")
    engine.grammars = False
    async with client(engine, tokenizer) as http:
        for fields in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}):
            refused = await ask(http, **fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in fields
