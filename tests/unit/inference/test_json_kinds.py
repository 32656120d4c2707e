"""A value of a wrong JSON type, at any place of a body, is refused by name or taken; a replica never fails."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.http.request import ChatRequest
from headrace_schemas.http.replica_api import ScoreRequest, TokensToScore
from tests.support.hostile_json import FORMAT, MESSAGES, TOOL, kinds_everywhere
from tests.unit.inference.scripted import VERSION, ScriptedEngine, client

ASKED = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["end"], "n": 1, "max_tokens": 4}
CHAT = {"model": VERSION, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", **ASKED}
NAMED = {"type": "function", "function": {"name": "look"}}
RESUMED = {"index": 0, "token_ids": [1, 2], "logprobs": [-0.5, -0.5]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "metadata": {"a": "b"}, "chat_template_kwargs": {"a": {"b": [1]}}}),
    "forced": ("/v1/chat/completions", {**CHAT, "tool_choice": NAMED, "parallel_tool_calls": False}),
    "schema": ("/v1/chat/completions", {"model": VERSION, "messages": MESSAGES[:2], "response_format": FORMAT}),
    "resumed": ("/v1/chat/completions", {**CHAT, "stream": True, "headrace_resume": {"choices": [RESUMED]}}),
    "logprobs": ("/v1/logprobs", {"model": VERSION, "answers": [{"prompt_token_ids": [1, 2], "token_ids": [3]}]}),
}


class ScoringEngine(ScriptedEngine):
    """A scripted engine that also returns a logprob of -0.5 for each given token."""

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
