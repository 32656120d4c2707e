"""`POST /v1/completions`: calls of the unmodified `openai` package, and the turns that they become."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace_gateway.refusals import ApiError
from headrace_gateway.text_completions import read_completion
from tests.support.fake_replica import VERSION, FakeReplica, Fault, text_of
from tests.support.gateway import Gateway, gateway
from tests.support.requests import lenient, strict


@contextlib.asynccontextmanager
async def served(folder: Path, *replicas: FakeReplica) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        server = await stack.enter_async_context(gateway(folder, *replicas))
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        yield server, await stack.enter_async_context(client)


async def test_a_text_prompt_is_one_turn_with_the_tokens_of_the_engine(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with served(tmp_path, replica) as (server, client):
        answer = await client.completions.create(
            model="tiny", prompt="Once upon", logprobs=2, temperature=0.5, extra_body={"return_token_ids": True},
            extra_headers={"x-session-id": "run-1"},
        )  # fmt: skip
        (turn,) = server.turns
    (choice,), (recorded,) = answer.choices, turn.choices
    fields = choice.model_extra or {}
    assert (answer.id, answer.model, answer.object) == (turn.turn_id, VERSION, "text_completion")
    assert choice.text == "".join(map(text_of, recorded.token_ids)) == recorded.message.content
    assert (fields["token_ids"], fields["prompt_token_ids"]) == (list(recorded.token_ids), list(turn.prompt_token_ids))
    assert bytes(turn.prompt_token_ids).decode() == "Once upon", "no template was rendered around the prompt"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == list(recorded.logprobs)
    for offset, token in zip(choice.logprobs.text_offset or (), choice.logprobs.tokens or (), strict=True):
        assert choice.text[offset : offset + len(token)] == token
    assert (turn.rendered, turn.session_id, turn.sampling.temperature) == (False, "run-1", 0.5)
    assert turn.sampling.max_tokens == 16, "the default of the API"
    assert [(message.role, message.text) for message in turn.messages] == [("user", "Once upon")]


@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids"])
async def test_token_ids_are_the_prompt_of_the_turn_and_its_text_is_the_engines(tmp_path: Path, field: str) -> None:
    ids = [7, 300, 2_000_000_000]
    async with served(tmp_path, FakeReplica()) as (server, client):
        prompt: dict[str, Any] = {"prompt": ids} if field == "prompt" else {"prompt": None, "extra_body": {field: ids}}
        answer = await client.completions.create(model="tiny", **prompt)
        (turn,) = server.turns
    assert turn.prompt_token_ids == tuple(ids)
    assert answer.usage
    assert answer.usage.prompt_tokens == 3
    assert turn.messages[0].text == "".join(map(text_of, ids))


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6]])
async def test_a_stream_adds_up_to_the_plain_answer(tmp_path: Path, prompt: Any) -> None:
    async with served(tmp_path, FakeReplica()) as (server, client):
        fields: dict[str, Any] = {
            "model": "tiny", "prompt": prompt, "n": 2, "logprobs": 1, "extra_body": {"return_token_ids": True}
        }  # fmt: skip
        plain = await client.completions.create(**fields)
        stream = await client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        events = [event async for event in stream]
        plain_turn, streamed_turn = server.turns
    assert [choice.token_ids for choice in plain_turn.choices] == [choice.token_ids for choice in streamed_turn.choices]
    assert {event.id for event in events} == {streamed_turn.turn_id}
    assert events[-1].usage == plain.usage
    for choice in plain.choices:
        parts = [part for event in events for part in event.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        assert [token for part in parts for token in (part.model_extra or {})["token_ids"]] == (
            choice.model_extra or {}
        )["token_ids"]
        assert (parts[0].model_extra or {})["prompt_token_ids"] == list(plain_turn.prompt_token_ids)
        assert choice.logprobs is not None
        assert [
            offset for part in parts for offset in (part.logprobs and part.logprobs.text_offset) or ()
        ] == choice.logprobs.text_offset


async def test_a_broken_stream_continues_on_another_replica_after_the_same_prompt(tmp_path: Path) -> None:
    replicas = [FakeReplica(name, faults=[Fault(drop_after=2)]) for name in ("one", "two")]
    async with served(tmp_path, *replicas) as (server, client):
        stream = await client.completions.create(model="tiny", prompt=[5, 6], stream=True)
        text = "".join([choice.text async for event in stream for choice in event.choices])
        (turn,) = server.turns
    assert turn.prompt_token_ids == (5, 6)
    assert text == turn.choices[0].message.content


async def test_the_next_prompt_of_a_session_extends_the_turn_before(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (server, client):
        headers = {"x-session-id": "run-1"}
        ids = list(range(100))
        first = await client.completions.create(
            model="tiny", prompt=ids, extra_headers=headers, extra_body={"return_token_ids": True}
        )
        answer = (first.choices[0].model_extra or {})["token_ids"]
        await client.completions.create(model="tiny", prompt=[*ids, *answer, 1, 2], extra_headers=headers)
        event = server.bus.events(type(server.turns[0]))[1]
        second_turn = server.turns[1]
    assert event.extends
    assert event.extends.tokens == 106
    assert event.prompt_token_ids == (1, 2)
    assert second_turn.prompt_token_ids == (*ids, *answer, 1, 2)


async def test_a_replica_without_the_ability_is_no_reason_to_wait(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(prompts=False)) as (_, client):
        with pytest.raises(openai.BadRequestError, match="prompt: no replica of tiny takes text completions"):
            await client.completions.create(model="tiny", prompt="Once")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": "a\0b"}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logit_bias": {"1": 1}}, None),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "a", "logit_bias": {"one": 1}}, "logit_bias.one.[key]"),
        ({"prompt": "a", "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "n": 100}, "n"),
        ({"prompt": "a", "messages": ["b"]}, "messages"),
        ({"prompt": "a", "tools": []}, None),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], field: str | None) -> None:
    body = json.dumps({"model": "tiny", **fields}).encode()
    if field is None:
        read_completion(body, strict())
        return
    with pytest.raises(ApiError) as refusal:
        read_completion(body, lenient())
    assert (refusal.value.status, refusal.value.param) == (400, field)


def test_a_single_prompt_in_a_list_and_fields_without_effect_are_accepted() -> None:
    context = lenient()
    fields = {"prompt": ["a"], "echo": False, "best_of": 1, "suffix": None, "user": "u", "service_tier": "flex"}
    request, _ = read_completion(json.dumps({"model": "tiny", **fields}).encode(), context)
    assert (request.messages[0].content, context.ignored) == ("a", ("service_tier",))
