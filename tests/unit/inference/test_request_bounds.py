"""Numbers and token ids at every edge: answered or refused by name, and the engine goes on."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Sampling, Start
from headrace_inference.errors import PromptEmpty, TokenOutOfVocabulary
from headrace_inference.fleet import _report_tokens_without_row
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage.versions import file_digest, template_digest
from headrace_schemas.events.chat import Sampling as RecordedSampling
from tests.unit.inference.asking import USER
from tests.unit.inference.conftest import Models, prompt_of
from tests.unit.inference.scripted import client

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
    """The tokenizer of `first` with tokens that its model has no row for, as text and as control tokens."""
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
