"""Tests of stored responses, and of `POST /v1/completions` with the unmodified `openai` package.

Requests refer to a stored response by `previous_response_id`, by an item, or by its URL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.responses_api.request import ParsedResponses, parse_responses
from headrace_gateway.apis.text_completions import read_completion
from headrace_gateway.requests.request_context import RequestContext
from headrace_gateway.requests.response_store import EarlierItems, ResponseStore, StoredConversation, StoredResponse
from headrace_gateway.settings import KeySettings, LimitSettings
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.support.fake_replica import VERSION, Called, FakeReplica, Fault, text_of
from tests.support.gateway import Gateway, gateway, lenient, strict
from tests.support.streams import ManualClock
from tests.unit.gateway.test_responses_api import SEARCH, served


async def test_a_conversation_goes_on_from_the_previous_response(tmp_path: Path) -> None:
    replica = FakeReplica(script=[Called("search", {"query": "mail"}), "You have one.", "Yes."])
    async with served(tmp_path, replica) as (server, client):
        first = await client.responses.create(model="tiny", input="Any mail?", tools=[SEARCH])  # type: ignore[list-item]
        (call,) = first.output
        assert call.type == "function_call"
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"}]
        async with client.responses.stream(
            model="tiny",
            input=output,
            previous_response_id=first.id,
            tools=[SEARCH],  # type: ignore[list-item]
        ) as stream:
            second = await stream.get_final_response()
        third = await client.responses.create(model="tiny", input="Sure?", previous_response_id=second.id)
        turns = server.turns
    assert (third.output_text, third.previous_response_id) == ("Yes.", second.id)
    assert [message.role for message in turns[-1].messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert turns[1].messages[1].tool_calls == turns[0].choices[0].message.tool_calls
    assert len({turn.session_key for turn in turns}) == 1


async def test_an_item_is_found_by_a_reference_to_it(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(script=["Hello.", "Again."])) as (server, client):
        first = await client.responses.create(model="tiny", input="hi")
        input_items: list[Any] = [
            {"role": "user", "content": "hi"},
            {"type": "item_reference", "id": first.output[0].id},
        ]
        await client.responses.create(model="tiny", input=[*input_items, {"role": "user", "content": "and?"}])
        assert [message.text for message in server.turns[1].messages] == ["hi", "Hello.", "and?"]


async def test_a_stored_response_is_read_and_deleted(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (_, client):
        stored = await client.responses.create(model="tiny", input="hi")
        unstored = await client.responses.create(model="tiny", input="hi", store=False)
        assert (stored.to_dict()["store"], unstored.to_dict()["store"]) == (True, False)
        assert (await client.responses.retrieve(stored.id)).to_dict() == stored.to_dict()
        await client.responses.delete(stored.id)
        for missing in (stored.id, unstored.id, "resp_x"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(missing)
        with pytest.raises(openai.BadRequestError, match="send the earlier items"):
            await client.responses.create(model="tiny", input="x", previous_response_id=stored.id)


async def test_tenants_and_bound_keys_read_their_own_responses_only(tmp_path: Path) -> None:
    def key(name: str, **fields: Any) -> KeySettings:
        return KeySettings(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **fields)

    keys = (key("a", tenant="acme"), key("b", tenant="other"), key("c", tenant="acme", session_id="s"))
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=keys) as server:
        body = {"model": "tiny", "input": "hi"}
        headers = {name: {"authorization": f"Bearer {name}"} for name in "abc"}
        first = (await server.client.post("/v1/responses", json=body, headers=headers["a"])).json()["id"]
        bound = (await server.client.post("/v1/responses", json=body, headers=headers["c"])).json()["id"]
        read = {
            (name, response): (await server.client.get(f"/v1/responses/{response}", headers=headers[name])).status_code
            for name in "abc"
            for response in (first, bound)
        }
    allowed = {("a", first), ("a", bound), ("c", bound)}
    assert read == {pair: 200 if pair in allowed else 404 for pair in read}


NAMES = {number: ids.response_id(ids.session_key("a", "s")) for number in range(1, 5)}
ENTRY_BYTES = 1054


def stored_response(number: int, previous: int = 0) -> StoredResponse:
    """Return a response with one item, whose text is `number`."""
    return StoredResponse(NAMES[number], b"{}", NAMES.get(previous), (), (number,), (), ENTRY_BYTES - 1026)


def test_the_store_drops_the_oldest_response_of_the_largest_tenant() -> None:
    store = ResponseStore(3 * ENTRY_BYTES)
    for tenant, number in (("a", 1), ("a", 2), ("b", 3), ("a", 4)):
        store.add(tenant, stored_response(number))
    stored_ids = [(tenant, number) for tenant in "ab" for number in NAMES if store.get(tenant, NAMES[number])]
    assert stored_ids == [("a", 2), ("a", 4), ("b", 3)]
    assert not store.delete("b", NAMES[1])
    assert store.delete("b", NAMES[3])


def test_a_conversation_ends_with_the_first_of_its_responses_that_is_dropped() -> None:
    """A response that kept the items of dropped responses would exceed the memory limit."""
    store = ResponseStore(3 * ENTRY_BYTES)
    for number in (1, 2, 3):
        store.add("a", stored_response(number, number - 1))
    assert store.items_up_to("a", NAMES[3]) == EarlierItems((1, 2, 3), 84)
    assert store.items_up_to("b", NAMES[3]) is None
    assert store.bytes_of("a") == 3 * ENTRY_BYTES
    store.add("a", stored_response(4, 3))
    assert store.items_up_to("a", NAMES[4]) is None
    assert store.delete("a", NAMES[4])
    assert (store.bytes_of("a"), store.bytes_of("b")) == (2 * ENTRY_BYTES, 0)


def test_responses_and_conversations_are_dropped_after_thirty_days() -> None:
    clock = ManualClock()
    clock.at = utcnow()
    store = ResponseStore(2**20, clock)
    conversation = StoredConversation()
    store.add("a", stored_response(1))
    store.add("a", conversation)
    clock.advance(29 * 86_400)
    assert store.get("a", NAMES[1])
    assert store.conversation("a", conversation.conversation_id)
    clock.advance(2 * 86_400)
    assert store.get("a", NAMES[1]) is None
    assert store.conversation("a", conversation.conversation_id) is None
    assert store.bytes_of("a") == 0


async def test_a_conversation_is_bounded_with_all_that_it_refers_to(tmp_path: Path) -> None:
    """A body of 20 KB with 400 references to one long answer became a prompt of 40 MB, built on the event loop."""
    limits = LimitSettings(body_bytes_max=40_000)
    script: list[Any] = ["y" * 12_000, "short"]
    async with served(tmp_path, FakeReplica(script=script), limits_per_key=limits) as (server, client):
        first = await client.responses.create(model="tiny", input="hi")
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        second = await client.responses.create(model="tiny", input=[reference] * 2, previous_response_id=first.id)
        too_much: dict[str, dict[str, Any]] = {
            "input": {"input": [reference] * 200},
            "previous_response_id": {"input": [reference], "previous_response_id": second.id},
        }
        for field, fields in too_much.items():
            with pytest.raises(openai.APIStatusError, match=f"{field}: the conversation") as refused:
                await client.responses.create(model="tiny", **fields)
            assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")
        assert [message.text[:1] for message in server.turns[-1].messages] == ["h", "y", "y", "y"]


async def test_a_short_body_that_may_refer_to_a_long_conversation_is_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def parse(body: bytes, context: RequestContext) -> ParsedResponses:
        threads.append(threading.current_thread().name.partition("_")[0])
        return parse_responses(body, context)

    monkeypatch.setattr("headrace_gateway.apis.responses_api.answers.parse_responses", parse)
    async with served(tmp_path, FakeReplica()) as (_, client):
        response = await client.responses.create(model="tiny", input="hi", store=False)
        response = await client.responses.create(model="tiny", input="x" * 100_000)
        await client.responses.create(model="tiny", input="y")
        response = await client.responses.create(model="tiny", input="y", previous_response_id=response.id)
        body = json.dumps({"model": "tiny", "input": "y", "previous_response_id": response.id})
        await client.post("/responses", content=body.replace("p", "\\u0070").encode(), cast_to=object)
        reference: Any = {"id": response.output[0].id}
        await client.responses.create(model="tiny", input=[reference])
    loop = threading.current_thread().name
    assert threads == [loop, "worker", loop, "worker", "worker", "worker"]


@contextlib.asynccontextmanager
async def completions_served(folder: Path, *replicas: FakeReplica) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        server = await stack.enter_async_context(gateway(folder, *replicas))
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        yield server, await stack.enter_async_context(client)


async def test_a_text_prompt_is_one_turn_with_the_tokens_of_the_engine(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with completions_served(tmp_path, replica) as (server, client):
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
    async with completions_served(tmp_path, FakeReplica()) as (server, client):
        prompt: dict[str, Any] = {"prompt": ids} if field == "prompt" else {"prompt": None, "extra_body": {field: ids}}
        answer = await client.completions.create(model="tiny", **prompt)
        (turn,) = server.turns
    assert turn.prompt_token_ids == tuple(ids)
    assert answer.usage
    assert answer.usage.prompt_tokens == 3
    assert turn.messages[0].text == "".join(map(text_of, ids))


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6]])
async def test_a_stream_adds_up_to_the_plain_answer(tmp_path: Path, prompt: Any) -> None:
    async with completions_served(tmp_path, FakeReplica()) as (server, client):
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
    async with completions_served(tmp_path, *replicas) as (server, client):
        stream = await client.completions.create(model="tiny", prompt=[5, 6], stream=True)
        text = "".join([choice.text async for event in stream for choice in event.choices])
        (turn,) = server.turns
    assert turn.prompt_token_ids == (5, 6)
    assert text == turn.choices[0].message.content


async def test_the_next_prompt_of_a_session_extends_the_turn_before(tmp_path: Path) -> None:
    async with completions_served(tmp_path, FakeReplica()) as (server, client):
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
    async with completions_served(tmp_path, FakeReplica(prompts=False)) as (_, client):
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
