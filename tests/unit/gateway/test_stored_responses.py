"""Responses that requests refer to: by the previous response, by an item, and by their own address."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace_gateway.request_context import RequestContext
from headrace_gateway.response_store import EarlierItems, ResponseStore, StoredConversation, StoredResponse
from headrace_gateway.responses_api.request import ParsedResponses, parse_responses
from headrace_gateway.settings import KeySettings, LimitSettings
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.support.fake_replica import Called, FakeReplica
from tests.support.gateway import gateway
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
    """Return a response with one item, its number."""
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
    """A response that kept the items of those before it would fill the memory beyond its bound."""
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


async def test_a_short_body_that_refers_to_a_long_conversation_is_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def parse(body: bytes, context: RequestContext) -> ParsedResponses:
        threads.append(threading.current_thread().name.partition("_")[0])
        return parse_responses(body, context)

    monkeypatch.setattr("headrace_gateway.responses_api.answers.parse_responses", parse)
    async with served(tmp_path, FakeReplica()) as (_, client):
        response = await client.responses.create(model="tiny", input="hi", store=False)
        response = await client.responses.create(model="tiny", input="x" * 100_000)
        response = await client.responses.create(model="tiny", input="y", previous_response_id=response.id)
    assert threads == [threading.current_thread().name, "worker", "worker"]
