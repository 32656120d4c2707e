"""`POST /v1/chat/completions` on an engine that says what the test wants."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_inference.chat.answer import Delta
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Tokens
from headrace_inference.errors import Overloaded
from headrace_inference.http.wire import Wire
from headrace_runtime.versions import file_digest
from tests.unit.inference.conftest import Models
from tests.unit.inference.scripted import CONTEXT, VERSION, ScriptedEngine, client

USER = [{"role": "user", "content": "What is new?"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query":  "mail"}}</tool_call>'
FULL = {"return_token_ids": True, "logprobs": True}
Json = dict[str, Any]


async def ask(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": VERSION, "messages": USER, **fields})


async def ask_stream(http: httpx.AsyncClient, **fields: object) -> list[Json]:
    """The chunks of a stream that ended well."""
    response = await ask(http, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: Sequence[Json], choice: int = 0) -> Json:
    """One choice of a stream, put together as a client does."""
    found: Json = {
        "content": "",
        "reasoning_content": "",
        "tool_calls": [],
        "token_ids": [],
        "logprobs": [],
        "ends": [],
    }
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != choice:
                continue
            delta = part["delta"]
            for name in ("content", "reasoning_content"):
                found[name] += delta.get(name) or ""
            found["tool_calls"] += delta.get("tool_calls", [])
            found["token_ids"] += part.get("token_ids", [])
            found["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            found["ends"] += [part["finish_reason"]] if part["finish_reason"] else []
    return found


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
        whole = (await ask(http, tools=TOOLS, **FULL)).json()["choices"][0]
        chunks = await ask_stream(http, tools=TOOLS, stream_options={"include_usage": True}, **FULL)
    stream = joined(chunks)
    assert stream["token_ids"] == whole["token_ids"] == engine.tokens_of(0)
    assert stream["logprobs"] == whole["logprobs"]["content"]
    assert stream["content"] == (whole["message"]["content"] or "")
    assert stream["reasoning_content"] == whole["message"].get("reasoning_content", "")
    shown = [(call["index"], call["type"], call["function"]) for call in stream["tool_calls"]]
    assert shown == [(i, c["type"], c["function"]) for i, c in enumerate(whole["message"].get("tool_calls", []))]
    assert stream["ends"] == [whole["finish_reason"]]
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
        whole = (await ask(http, n=3, tools=TOOLS, **FULL)).json()
        chunks = await ask_stream(http, n=3, tools=TOOLS, **FULL)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one", "two", None]
    assert whole["usage"]["completion_tokens"] == sum(len(engine.tokens_of(i)) for i in range(3))
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
    """JSON has no infinity; strict parsers would refuse the whole answer."""
    wire = Wire(tokenizer, VERSION, token_ids=True, logprobs=True)
    tokens = Tokens(0, [9], [-0.5], [[(9, -0.5), (10, float("-inf"))]], "stop")
    chunk = json.loads(wire.chunk(tokens, Delta(), 0, "stop").removeprefix(b"data: "), parse_constant=pytest.fail)
    (content,) = chunk["choices"][0]["logprobs"]["content"]
    assert [top["logprob"] for top in content["top_logprobs"]] == [-0.5, -9999.0]


async def test_sampling_reaches_the_engine_as_the_client_meant_it(tokenizer: ChatTokenizer) -> None:
    """Pitfalls 5 and 28: no model's defaults, no overwriting."""
    engine = ScriptedEngine(tokenizer, "Hi.")
    async with client(engine, tokenizer) as http:
        await ask(http)
        await ask(
            http, temperature=0, top_p=0.5, top_k=7, seed=-3, max_completion_tokens=9, presence_penalty=1,
            frequency_penalty=-1.5, ignore_eos=True,
        )  # fmt: skip
    default, chosen = (asked.sampling for asked in engine.asked)
    assert (default.temperature, default.top_p, default.top_k, default.seed) == (1.0, 1.0, 0, None)
    assert (default.max_tokens, default.stop_ids) == (None, tokenizer.stop_ids)
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.seed, chosen.max_tokens) == (0.0, 0.5, 7, -3, 9)
    assert (chosen.presence_penalty, chosen.frequency_penalty, chosen.stop_ids) == (1.0, -1.5, frozenset())


class TestResume:
    """P8: a stream goes on here that another replica began."""

    async def test_from_every_point(self, tokenizer: ChatTokenizer) -> None:
        """What both streams gave out together is what one would have given out."""
        engine = ScriptedEngine(tokenizer, f"<think>hm</think>Look: é {CALL} done")
        async with client(engine, tokenizer) as http:
            engine.portion = 1
            full = await ask_stream(http, tools=TOOLS, **FULL)
            whole = joined(full)
            for cut in range(len(whole["token_ids"]) + 1):
                ids = whole["token_ids"][:cut]
                resume = {"choices": [{"index": 0, "token_ids": ids, "logprobs": [-0.5] * cut}]}
                usage = {"include_usage": True}
                rest_chunks = await ask_stream(http, tools=TOOLS, headrace_resume=resume, stream_options=usage, **FULL)
                rest, seen = joined(rest_chunks), joined(full[: cut + 1])
                assert seen["token_ids"] + rest["token_ids"] == whole["token_ids"]
                if not seen["ends"]:
                    assert rest["ends"] == whole["ends"]
                    assert seen["content"] + rest["content"] == whole["content"]
                    assert seen["reasoning_content"] + rest["reasoning_content"] == whole["reasoning_content"]
                    functions = [call["function"] for call in seen["tool_calls"] + rest["tool_calls"]]
                    assert functions == [call["function"] for call in whole["tool_calls"]]
                assert all("role" not in part["delta"] for chunk in rest_chunks for part in chunk["choices"])
                assert rest_chunks[0]["prompt_token_ids"] == engine.asked[0].prompt
                assert rest_chunks[-1]["usage"]["completion_tokens"] == len(whole["token_ids"])

    async def test_a_complete_choice_gets_no_further_chunk(self, tokenizer: ChatTokenizer) -> None:
        engine = ScriptedEngine(tokenizer, "one", "two")
        done = {"index": 0, "token_ids": engine.tokens_of(0), "logprobs": [-0.5] * len(engine.tokens_of(0))}
        resume = {"choices": [{**done, "finish_reason": "stop"}]}
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
            ({"choices": [{"index": 0, "token_ids": [99_999], "logprobs": [-1]}]}, "does not have"),
            ({"choices": []}, "choices"),
            ([], "headrace_resume"),
        ],
    )
    async def test_what_cannot_be_resumed_is_refused(self, tokenizer: ChatTokenizer, resume: Any, word: str) -> None:
        async with client(ScriptedEngine(tokenizer, "one"), tokenizer) as http:
            response = await ask(http, stream=True, headrace_resume=resume)
        assert response.status_code == 400
        assert word in response.json()["error"]["message"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "code", "param"),
        [
            (b"{", 400, "invalid_json", None),
            (b"[]", 400, "invalid_value", None),
            (b"\xff\xfe", 400, "invalid_json", None),
            ({"messages": []}, 400, "invalid_value", "messages"),
            ({"messages": "hi"}, 400, "invalid_value", "messages"),
            ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "invalid_value", "messages.0.role"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "invalid_value", None),
            ({"messages": [{"role": "user", "content": "x", "smell": 1}]}, 400, "unknown_field", "messages.0.smell"),
            ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
            ({"temperature": 3}, 400, "invalid_value", "temperature"),
            ({"temperature": float("nan")}, 400, None, None),
            ({"top_p": 0}, 400, "invalid_value", "top_p"),
            ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
            ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "invalid_value", None),
            ({"n": 5}, 400, "invalid_value", "n"),
            ({"top_logprobs": 21, "logprobs": True}, 400, "invalid_value", "top_logprobs"),
            ({"top_logprobs": 2}, 400, "invalid_value", None),
            ({"logit_bias": {"5": 1}}, 400, "unknown_field", "logit_bias"),
            ({"tool_choice": "required", "tools": TOOLS}, 400, "unsupported_value", "tool_choice"),
            ({"tool_choice": {"type": "function"}}, 400, "unsupported_value", "tool_choice"),
            ({"response_format": {"type": "json_object"}}, 400, "invalid_value", "response_format.type"),
            ({"stream_options": {"include_usage": True}}, 400, "invalid_value", None),
            ({"stop": [""]}, 400, "invalid_value", "stop.0"),
            ({"model": "other@000000000000"}, 404, "model_not_found", "model"),
            ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "body_too_large", None),
        ],
    )
    async def test_each_by_name(
        self, tokenizer: ChatTokenizer, body: Any, status: int, code: str | None, param: str | None
    ) -> None:
        engine = ScriptedEngine(tokenizer, "Hi.")
        data = body if isinstance(body, bytes) else json.dumps({"model": VERSION, "messages": USER, **body}).encode()
        async with client(engine, tokenizer) as http:
            response = await http.post("/v1/chat/completions", content=data)
            assert (await ask(http)).status_code == 200, "the next request is fine"
        assert response.status_code == status
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert code is None or error["code"] == code
        assert param is None or error["param"].startswith(param)
        assert len(engine.asked) == 1

    async def test_errors_do_not_repeat_what_the_user_wrote(self, tokenizer: ChatTokenizer) -> None:
        async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
            response = await ask(http, messages=[{"role": "user", "content": 7, "name": "SECRET" * 100}])
        assert "SECRET" not in response.text

    async def test_an_overloaded_engine_says_when_to_come_back(self, tokenizer: ChatTokenizer) -> None:
        engine = ScriptedEngine(tokenizer, "Hi.")
        engine.refusal = Overloaded("full", retry_after_s=2)
        async with client(engine, tokenizer) as http:
            response = await ask(http)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.json()["error"]["code"] == "overloaded"
        assert response.json()["error"]["type"] == "server_error"

    async def test_a_broken_engine_is_a_500_or_an_error_in_the_stream(self, tokenizer: ChatTokenizer) -> None:
        engine = ScriptedEngine(tokenizer, "Hi there.")
        engine.fail_after = 0
        async with client(engine, tokenizer) as http:
            whole = await ask(http)
            engine.fail_after = 2
            stream = await ask(http, stream=True)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_failed")
        *_, last, end = stream.text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        assert end == ""
        assert "[DONE]" not in stream.text
        assert engine.closed == 2

    async def test_what_nobody_expected_tells_nothing_of_its_inside(self, tokenizer: ChatTokenizer) -> None:
        engine = ScriptedEngine(tokenizer, "Hi.")
        engine.refusal = RuntimeError("SECRET")
        async with client(engine, tokenizer) as http:
            response = await ask(http)
        assert response.status_code == 500
        assert "SECRET" not in response.text
        assert response.json()["error"]["code"] == "internal_error"

    async def test_an_internal_key_is_required_where_one_is_set(self, tokenizer: ChatTokenizer) -> None:
        async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer, internal_key="k") as http:
            assert (await ask(http)).status_code == 401
            assert (await http.get("/v1/models")).status_code == 401
            http.headers["authorization"] = "Bearer k"
            assert (await ask(http)).status_code == 200
            assert (await http.get("/health")).status_code == 200

    async def test_unknown_paths_and_methods_in_openais_shape(self, tokenizer: ChatTokenizer) -> None:
        async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
            assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
            assert (await http.get("/v1/chat/completions")).status_code == 405


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


async def test_a_template_that_refuses_is_a_400(models: Models, tmp_path: Path) -> None:
    folder = shutil.copytree(models.first.folder, tmp_path / "picky")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only haiku') }}")
    digest = file_digest(folder / "chat_template.jinja")
    picky = ChatTokenizer(folder, models.first.manifest.model_copy(update={"template_sha256": digest}))
    async with client(ScriptedEngine(picky, "Hi."), picky) as http:
        response = await ask(http)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "only haiku" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "tools"])
async def test_a_client_cannot_bring_its_own_template(tokenizer: ChatTokenizer, name: str) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        response = await ask(http, chat_template_kwargs={name: "{{ 7 }}"})
        assert (await ask(http, chat_template_kwargs={"enable_thinking": False})).status_code == 200
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


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
