"""Replicas report from which tokens an answer was sampled, so that the trainer can compute the same distribution."""

from __future__ import annotations

import json

import httpx

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_schemas import TokenGrammar
from headrace_schemas.events.allowed_tokens import check_sets, iterate_sets
from tests.unit.inference.asking import Json
from tests.unit.inference.conftest import Models
from tests.unit.inference.scripted import client
from tests.unit.inference.test_grammars import FORMAT, RealEngine, ask_real


def chunks_of(response: httpx.Response) -> list[Json]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


async def test_answers_report_the_tokens_that_they_were_sampled_from(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer
) -> None:
    """The grammar is in the whole answer or the first chunk, and stored sets are with their tokens."""
    ids: Json = {"return_token_ids": True, "max_tokens": 12}
    async with client(RealEngine(tokenizer, engine, models.first.version), tokenizer) as http:
        complete = (await ask_real(http, response_format=FORMAT, **ids)).json()
        grammar = TokenGrammar.model_validate(complete["headrace_grammar"])
        assert (grammar.library, grammar.vocabulary) == ("llguidance", 320)
        assert {*grammar.stop_ids} == tokenizer.stop_ids
        first, *later = chunks_of(await ask_real(http, response_format=FORMAT, stream=True, **ids))
        assert first["headrace_grammar"] == complete["headrace_grammar"]
        assert not any("headrace_grammar" in chunk for chunk in later)
        begun = {
            "choices": [{"index": 0, "token_ids": complete["choices"][0]["token_ids"][:3], "logprobs": [-1.0] * 3}]
        }
        (opening, *_) = chunks_of(
            await ask_real(http, response_format=FORMAT, stream=True, headrace_resume=begun, **ids)
        )
        assert opening["headrace_grammar"] == complete["headrace_grammar"]
        (truncated,) = (await ask_real(http, top_k=3, **ids)).json()["choices"]
        check_sets(truncated["headrace_stored_sets"], truncated["token_ids"])
        assert all(len(allowed) == 3 for allowed in iterate_sets(truncated["headrace_stored_sets"]))
        deltas = [chunk["choices"] for chunk in chunks_of(await ask_real(http, top_k=3, stream=True, **ids))]
        streamed = [n for choices in deltas for choice in choices for n in choice.get("headrace_stored_sets", ())]
        assert streamed == truncated["headrace_stored_sets"]
        assert "headrace" not in (await ask_real(http, **ids)).text
        assert "headrace" not in (await ask_real(http, response_format=FORMAT, top_k=3, max_tokens=12)).text
