"""Tests of `POST /v1/chat/completions` with extreme or invalid values: each is answered, or refused by its field's
name.

The replica continues to serve afterwards. Numbers, token ids and values of wrong JSON types at any position are tested.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Sampling, Start
from headrace_inference.errors import Overloaded, PromptEmpty, TokenOutOfVocabulary
from headrace_inference.fleet import _report_tokens_without_row
from headrace_inference.http.wire import ChatRequest
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage.versions import TOKENIZER_FILE, file_digest, template_digest
from headrace_schemas.events.chat import Sampling as RecordedSampling
from headrace_schemas.http.replica_api import ScoreRequest, TokensToScore
from tests.support.hostile_json import FORMAT, MESSAGES, TOOL, kinds_everywhere
from tests.unit.inference.conftest import TOOLS, USER, VERSION, Models, ScriptedEngine, ask, client, prompt_of

EDGES = [
    "0", "-0", "0.0", "-0.0", "1", "2", "-1", "-2", "1e-39", "1e-45", "1e-320", "5e-324", "0.0099999", "0.01",
    "0.9999999999", "1.1754944e-38", "3.4028235e38", "3.5e38", "1e308", "-1e308", "1.8e308", "-1.8e308", "1e-9",
    str(2**31 - 1), str(2**31), str(2**63 - 1), str(2**63), str(-(2**63)), str(-(2**63) - 1), str(2**64), "9" * 400,
    "9" * 5000, "NaN", "Infinity", "true", '"1"', "[1]", "{}",
]  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "max_tokens",
    "max_completion_tokens", "n", "top_logprobs", "logit_bias", "min_p", "repetition_penalty",
)  # fmt: skip


@pytest.mark.parametrize("field", NUMBERS)
async def test_every_number_is_answered_or_refused_by_name(engine: TorchEngine, models: Models, field: str) -> None:
    version = models.first.version
    tokenizer = ChatTokenizer(models.first.folder, models.first.manifest)

    async def post(http: httpx.AsyncClient, edge: str) -> httpx.Response:
        how = {} if field in ("max_tokens", "max_completion_tokens") else {"max_tokens": 3}
        body = json.dumps({"model": version, "messages": USER, "logprobs": True, **how})
        return await http.post("/v1/chat/completions", content=f'{body[:-1]}, "{field}": {edge}}}'.encode())

    async with client(engine, tokenizer, version=version) as http:
        answers = await asyncio.gather(*(post(http, edge) for edge in EDGES))
    for edge, answer in zip(EDGES, answers, strict=True):
        description = f"{field} = {edge[:30]}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code in (200, 400), description
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert (
                field in (error["param"] or error["message"])
                or error["code"] == "invalid_json"
                or (field.startswith("max_") and error["code"] == "context_length_exceeded")
            ), description
            assert len(error["message"]) < 1000, description
        else:
            logprobs = [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]
            assert logprobs, description
            assert all(math.isfinite(value) for value in logprobs), description
    assert engine.alive
    assert engine._worker._failures == 0
    assert engine.in_flight() == 0


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-320, 1e-39, 1e-8, 0.0099])
async def test_what_is_sampled_greedily_is_never_recorded_as_sampled(
    engine: TorchEngine, models: Models, temperature: float
) -> None:
    version = models.first.version
    tokenizer = ChatTokenizer(models.first.folder, models.first.manifest)
    async with client(engine, tokenizer, version=version) as http:
        bodies = [{"temperature": value, "seed": 5} for value in (temperature, 0)]
        fixed = {"model": version, "messages": USER, "max_tokens": 12, "return_token_ids": True, "logprobs": True}
        cold, greedy = [(await http.post("/v1/chat/completions", json=fixed | body)).json() for body in bodies]
    assert cold["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]
    assert cold["choices"][0]["logprobs"] == greedy["choices"][0]["logprobs"]
    assert not RecordedSampling(temperature=temperature).untruncated
    assert RecordedSampling(temperature=0.01).untruncated


@pytest.mark.parametrize("outside", [-1, 320, 321, 2**31 - 1])
async def test_ids_without_a_row_never_enter_a_batch(engine: TorchEngine, models: Models, outside: int) -> None:
    version = models.first.version
    assert engine.vocabulary(version) == 320
    with pytest.raises(TokenOutOfVocabulary, match=str(outside)):
        engine.generate([*prompt_of(5), outside], Sampling(), version, [Start()], stream=True)
    with pytest.raises(TokenOutOfVocabulary, match="headrace_resume"):
        engine.generate(prompt_of(5), Sampling(), version, [Start(), Start(1, [3, outside])], stream=True)
    with pytest.raises(PromptEmpty):
        engine.generate([], Sampling(), version, [Start()], stream=True)
    assert engine.in_flight() == 0


@pytest.fixture
def larger(models: Models, tmp_path: Path) -> ChatTokenizer:
    """Return the tokenizer of `first` with extra text and control tokens that the model's embedding has no rows for."""
    folder = tmp_path / "larger"
    shutil.copytree(models.first.folder, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for number, (text, special) in enumerate((("<extra_0>", False), ("<extra_1>", False), ("<extra_2>", True)), 320):
        content["added_tokens"].append(
            {"id": number, "content": text, "special": special}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        )
    path.write_text(json.dumps(content), encoding="utf-8")
    digests = {"tokenizer_sha256": file_digest(path), "template_sha256": template_digest(folder)}
    return ChatTokenizer(folder, models.first.manifest.model_copy(update=digests))


def test_a_tokenizer_file_with_truncation_and_padding_leaves_prompts_whole(models: Models, tmp_path: Path) -> None:
    whole = ChatTokenizer(models.first.folder, models.first.manifest)
    folder = tmp_path / "cutting"
    shutil.copytree(models.first.folder, folder)
    file = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    file.enable_truncation(max_length=4)
    file.enable_padding(length=256)
    file.save(str(folder / TOKENIZER_FILE))
    digest = {"tokenizer_sha256": file_digest(folder / TOKENIZER_FILE)}
    cutting = ChatTokenizer(folder, models.first.manifest.model_copy(update=digest))
    text = whole.render([{"role": "user", "content": "Which mail is about the invoice?"}], None, {})
    assert cutting.encode(text) == whole.encode(text)
    assert cutting.encode_raw(text, add_special_tokens=True) == whole.encode_raw(text, add_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_word_that_the_model_has_no_row_for_is_refused_by_its_name(
    engine: TorchEngine, models: Models, larger: ChatTokenizer, stream: bool
) -> None:
    version = models.first.version
    async with client(engine, larger, version=version) as http:

        async def ask(**fields: object) -> httpx.Response:
            return await http.post(
                "/v1/chat/completions", json={"model": version, "max_tokens": 8, "messages": USER, **fields}
            )

        innocent = [asyncio.create_task(ask(stream=stream)) for _ in range(8)]
        messages = [{"role": "user", "content": "tell me about <extra_1> now"}]
        tool = {"type": "function", "function": {"name": "x", "description": "a <extra_0>"}}
        for fields in ({"messages": messages}, {"tools": [tool]}):
            refused = await ask(stream=stream, **fields)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "messages"
            assert "<extra_" in refused.json()["error"]["message"]
        control = await ask(messages=[{"role": "user", "content": "a control token <extra_2> is text here"}])
        assert control.status_code == 200
        assert [(await task).status_code for task in innocent] == [200] * 8
    assert engine.alive


def test_tokens_without_a_row_are_reported_by_name_when_a_version_is_loaded(larger: ChatTokenizer) -> None:
    with capture_logs() as logs:
        _report_tokens_without_row("tiny@1", larger, 320)
        _report_tokens_without_row("tiny@1", larger, 323)
    (entry,) = logs
    assert (entry["event"], entry["tokens"]) == ("tokens_without_row", ["<extra_0>", "<extra_1>", "<extra_2>"])


NAMED = {"type": "function", "function": {"name": "none_of_them"}}


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
        ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias.5"),
        ({"logit_bias": {"320": 1}}, 400, "invalid_value", "logit_bias"),
        ({"repetition_penalty": 1.1}, 400, "unknown_field", "repetition_penalty"),
        ({"tool_choice": "any", "tools": TOOLS}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS}, 400, "invalid_value", "tool_choice"),
        ({"response_format": {"type": "grammar"}}, 400, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, 400, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "invalid_value", None),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value", None),
        ({"stop": [""]}, 400, "invalid_value", "stop.0"),
        ({"model": "other@000000000000"}, 404, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "body_too_large", None),
    ],
)
async def test_each_is_refused_by_name(
    tokenizer: ChatTokenizer, body: Any, status: int, code: str | None, param: str | None
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


async def test_errors_do_not_repeat_what_the_user_wrote(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        response = await ask(http, messages=[{"role": "user", "content": 7, "name": "SECRET" * 100}])
    assert "SECRET" not in response.text


async def test_an_overloaded_engine_says_when_to_come_back(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Hi.")
    engine.refusal = Overloaded("full", retry_after_s=2)
    async with client(engine, tokenizer) as http:
        response = await ask(http)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert response.json()["error"]["code"] == "overloaded"
    assert response.json()["error"]["type"] == "server_error"


async def test_a_broken_engine_is_a_500_or_an_error_in_the_stream(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Hi there.")
    engine.fail_after = 0
    async with client(engine, tokenizer) as http:
        response = await ask(http)
        engine.fail_after = 2
        stream = await ask(http, stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    *_, last, end = stream.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert end == ""
    assert "[DONE]" not in stream.text
    assert engine.closed == 2


async def test_what_nobody_expected_tells_nothing_of_its_inside(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Hi.")
    engine.refusal = RuntimeError("SECRET")
    async with client(engine, tokenizer) as http:
        response = await ask(http)
    assert response.status_code == 500
    assert "SECRET" not in response.text
    assert response.json()["error"]["code"] == "internal_error"


async def test_an_internal_key_is_required_where_one_is_set(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer, internal_key="k") as http:
        assert (await ask(http)).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401
        http.headers["authorization"] = "Bearer k"
        assert (await ask(http)).status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_unknown_paths_and_methods_in_openais_shape(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        assert (await http.get("/v1/chat/completions")).status_code == 405


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


BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
COUNTED = BARE + "{% if tools %}You have {{ tools | length }} tools.{% endif %}"
NAMED_ALONE = BARE + "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


@pytest.mark.parametrize(
    ("template", "shows"),
    [(BARE, False), (COUNTED, False), (NAMED_ALONE, True), (BARE + "{{ tools | tojson if tools }}", True)],
    ids=["bare", "counted", "named", "all"],
)
async def test_tools_that_the_template_drops_are_refused(
    models: Models, tmp_path: Path, template: str, shows: bool
) -> None:
    folder = shutil.copytree(models.first.folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(template)
    digest = file_digest(folder / "chat_template.jinja")
    other = ChatTokenizer(folder, models.first.manifest.model_copy(update={"template_sha256": digest}))
    async with client(ScriptedEngine(other, "Hi."), other) as http:
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"stream": True}):
            response = await ask(http, tools=TOOLS, **choice)
            if shows:
                assert response.status_code == 200, response.text
                continue
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
            assert "does not show tools" in response.json()["error"]["message"]
        without: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
        for fields in without:
            assert (await ask(http, **fields)).status_code == 200


ASKED = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["end"], "n": 1, "max_tokens": 4}
CHAT = {"model": VERSION, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", **ASKED}
NAMED_IN_REFUSALS = {"type": "function", "function": {"name": "look"}}
RESUMED = {"index": 0, "token_ids": [1, 2], "logprobs": [-0.5, -0.5]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "metadata": {"a": "b"}, "chat_template_kwargs": {"a": {"b": [1]}}}),
    "forced": ("/v1/chat/completions", {**CHAT, "tool_choice": NAMED_IN_REFUSALS, "parallel_tool_calls": False}),
    "schema": ("/v1/chat/completions", {"model": VERSION, "messages": MESSAGES[:2], "response_format": FORMAT}),
    "resumed": ("/v1/chat/completions", {**CHAT, "stream": True, "headrace_resume": {"choices": [RESUMED]}}),
    "logprobs": ("/v1/logprobs", {"model": VERSION, "answers": [{"prompt_token_ids": [1, 2], "token_ids": [3]}]}),
}


class ScoringEngine(ScriptedEngine):
    """Scripted engine that also returns a logprob of -0.5 for each given token."""

    async def score(self, version: str, answers: Sequence[TokensToScore]) -> list[list[float]]:
        return [[-0.5] * len(answer.token_ids) for answer in answers]


@pytest.mark.parametrize("name", BODIES)
async def test_no_value_of_another_type_fails_a_replica(tokenizer: ChatTokenizer, name: str) -> None:
    route, body = BODIES[name]
    model = ScoreRequest if route == "/v1/logprobs" else ChatRequest
    statuses: Counter[int] = Counter()
    async with client(ScoringEngine(tokenizer, "Hi."), tokenizer) as http:
        for changed in kinds_everywhere(body, model.model_fields):
            answer = await http.post(route, content=json.dumps(changed))
            assert answer.status_code in {200, 400, 404, 413}, (json.dumps(changed), answer.text)
            statuses[answer.status_code] += 1
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["param"] or any(field in error["message"] for field in (*model.model_fields, "body")), (
                    error
                )
    assert statuses[400] > 20, statuses
