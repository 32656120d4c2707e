"""Tests of `conversation` in the Responses API, and of responses that a gateway restores after a restart."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.responses_api.items import messages_of
from headrace_gateway.apis.responses_api.recalled import items_of, recall_response
from headrace_gateway.requests.response_store import ResponseStore
from headrace_gateway.settings import KeySettings, LimitSettings
from headrace_schemas import FunctionCall, Message, ToolCall
from headrace_schemas.events.turn import ResponseRecord
from tests.support.fake_replica import Called, FakeReplica
from tests.support.gateway import Gateway
from tests.unit.gateway.test_responses_api import served

SEARCH: Any = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": True}


def restarted(folder: Path, server: Gateway, **options: Any) -> ResponseStore:
    """Return the response store of a second process that has read the turns of `server`."""
    store = ResponseStore(2**20, recalls=True, **options)
    for turn in server.turns:
        recall_response(turn, store)
    store.end_recall()
    return store


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_grows_by_requests_and_answers_and_is_one_session(tmp_path: Path, stream: bool) -> None:
    replica = FakeReplica(script=[Called("search", {"query": "mail"}), "You have one.", "Ada."])
    async with served(tmp_path, replica) as (server, client):
        conversation = await client.conversations.create(
            metadata={"user": "u"}, items=[{"type": "message", "role": "developer", "content": "Be brief."}]
        )

        async def respond(**fields: Any) -> Response:
            fields = {"model": "tiny", "tools": [SEARCH], **fields}
            if not stream:
                answer: Response = await client.responses.create(**fields)
                return answer
            async with client.responses.stream(**fields) as events:
                return await events.get_final_response()

        first = await respond(conversation=conversation.id, input="Any mail?")
        (call,) = first.output
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        second = await respond(conversation={"id": conversation.id}, input=[output], store=False)
        third = await respond(conversation=conversation.id, input="From whom?")
        items = [item async for item in client.conversations.items.list(conversation.id, order="asc", limit=2)]
        newest = await client.conversations.items.list(conversation.id, limit=1)
        turns = server.turns
    assert third.conversation is not None
    assert third.conversation.id == conversation.id
    roles = ["developer", "user", "assistant", "tool", "assistant", "user"]
    assert [message.role for message in turns[2].messages] == roles
    assert {turn.session_id for turn in turns} == {conversation.id}
    assert second.output_text == "You have one."
    kinds = ["message", "message", "function_call", "function_call_output", "message", "message", "message"]
    assert [item.type for item in items] == kinds
    assert len({item.id for item in items}) == 7
    assert newest.data[0].to_dict() == items[-1].to_dict()
    assert newest.has_more


async def test_items_are_added_read_and_removed(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (server, client):
        conversation = await client.conversations.create()
        items: list[Any] = [
            {"type": "message", "role": "user", "content": "Hello."},
            {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "One.", "annotations": []}]},
        ]
        added = await client.conversations.items.create(conversation.id, items=items)
        assert [item.type for item in added.data] == ["message", "function_call", "function_call_output", "message"]
        item = await client.conversations.items.retrieve(str(added.data[1].id), conversation_id=conversation.id)
        assert item == added.data[1]
        await client.conversations.items.delete(str(added.data[3].id), conversation_id=conversation.id)
        updated = await client.conversations.update(conversation.id, metadata={"a": "b"})
        assert (updated.metadata, updated.created_at) == ({"a": "b"}, conversation.created_at)
        assert await client.conversations.retrieve(conversation.id) == updated
        await client.responses.create(model="tiny", input="Bye.", conversation=conversation.id)
        assert [message.role for message in server.turns[0].messages] == ["user", "assistant", "tool", "user"]
        deleted = await client.conversations.delete(conversation.id)
        assert (deleted.deleted, deleted.object) == (True, "conversation.deleted")
        for read in (
            client.conversations.retrieve(conversation.id),
            client.conversations.delete(conversation.id),
            client.conversations.items.create(conversation.id, items=[]),
            client.responses.create(model="tiny", input="a", conversation=conversation.id),
        ):
            with pytest.raises(openai.NotFoundError, match="conversation"):
                await read


async def test_a_failed_call_leaves_the_conversation_as_it_was(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (_, client):
        conversation = await client.conversations.create()
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="tiny", input="a", conversation=conversation.id, temperature=9)
        assert (await client.conversations.items.list(conversation.id)).data == []


async def test_the_conversation_and_the_previous_response_exclude_each_other(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica()) as (_, client):
        conversation = await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="conversation: previous_response_id names the earlier items"):
            await client.responses.create(
                model="tiny", input="a", conversation=conversation.id, previous_response_id="chatcmpl-1"
            )
        response = await client.responses.create(model="tiny", input="a", conversation=conversation.id)
        with pytest.raises(openai.BadRequestError, match="part of a conversation"):
            await client.responses.create(model="tiny", input="a", previous_response_id=response.id)


async def test_a_conversation_is_as_large_as_a_request_body_at_most(tmp_path: Path) -> None:
    limits = LimitSettings(body_bytes_max=40_000)
    async with served(tmp_path, FakeReplica(), limits_per_key=limits) as (server, client):
        conversation = await client.conversations.create()
        long: Any = {"type": "message", "role": "user", "content": "x" * 30_000}
        await client.conversations.items.create(conversation.id, items=[long])
        with pytest.raises(openai.APIStatusError, match="items: the conversation") as refused:
            await client.conversations.items.create(conversation.id, items=[long])
        assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")
        with pytest.raises(openai.APIStatusError, match="conversation: the conversation with everything") as refused:
            await client.responses.create(model="tiny", input="y" * 20_000, conversation=conversation.id)
        assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")
        assert len((await client.conversations.items.list(conversation.id)).data) == 1
        assert server.turns == []


async def test_tenants_and_bound_keys_read_their_own_conversations_alone(tmp_path: Path) -> None:
    owners: tuple[dict[str, str], ...] = ({"tenant": "a"}, {"tenant": "a", "session_id": "s"}, {"tenant": "b"})
    keys = tuple(
        KeySettings(name=f"k{number}", sha256=hashlib.sha256(f"k{number}".encode()).hexdigest(), **owner)
        for number, owner in enumerate(owners)
    )
    async with served(tmp_path, FakeReplica(), keys=keys) as (server, _):
        clients = [openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key.name, max_retries=0) for key in keys]
        of_tenant = await clients[0].conversations.create()
        of_session = await clients[1].conversations.create()
        await clients[1].responses.create(model="tiny", input="a", conversation=of_session.id)
        assert server.turns[0].session_id == "s"
        assert (await clients[0].conversations.retrieve(of_session.id)).id == of_session.id
        for client, conversation in ((clients[1], of_tenant), (clients[2], of_tenant), (clients[2], of_session)):
            with pytest.raises(openai.NotFoundError):
                await client.conversations.retrieve(conversation.id)
        for client in clients:
            await client.close()


async def test_a_restarted_gateway_continues_responses_and_conversations(tmp_path: Path) -> None:
    script: list[Any] = [Called("search", {"query": "mail"}), "You have one.", "Hello."]
    async with served(tmp_path / "one", FakeReplica(script=[*script])) as (server, client):
        first = await client.responses.create(model="tiny", input="Any?", instructions="Be brief.", tools=[SEARCH])
        conversation = await client.conversations.create()
        await client.responses.create(model="tiny", input="Hi.", conversation=conversation.id)
        hidden = await client.responses.create(model="tiny", input="Hush.", store=False)
        store = restarted(tmp_path, server)
    (call,) = first.output
    assert call.type == "function_call"
    async with served(tmp_path / "two", FakeReplica(), responses=store) as (server, client):
        again = await client.responses.retrieve(first.id)
        assert again.output == first.output
        assert (again.usage, again.instructions, again.created_at) == (first.usage, "Be brief.", first.created_at)
        Response.model_validate(again.to_dict())
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        await client.responses.create(model="tiny", input=[output], previous_response_id=first.id)
        await client.responses.create(model="tiny", input="And?", conversation=conversation.id)
        await client.responses.create(model="tiny", input=[{"type": "item_reference", "id": str(call.id)}, output])
        for name in (hidden.id, "chatcmpl-unknown"):
            with pytest.raises(openai.BadRequestError, match="no such response is stored here"):
                await client.responses.create(model="tiny", input="a", previous_response_id=name)
        previous, continued, referenced = server.turns
    assert [message.role for message in previous.messages] == ["user", "assistant", "tool"], "without instructions"
    assert previous.messages[1].tool_calls is not None
    assert previous.messages[1].tool_calls[0].id == call.call_id
    assert [message.text for message in continued.messages] == ["Hi.", "You have one.", "And?"]
    assert continued.session_id == conversation.id
    assert [message.role for message in referenced.messages] == ["assistant", "tool"]


async def test_a_restart_brings_back_nothing_that_was_deleted_or_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "forgotten"
    store = ResponseStore(2**20, forgotten=path)
    async with served(tmp_path, FakeReplica(), responses=store) as (server, client):
        remaining, deleted = [await client.responses.create(model="tiny", input=text) for text in ("a", "b")]
        await client.responses.delete(deleted.id)
        names = [(await client.conversations.create()).id for _ in range(3)]
        for name in names:
            await client.responses.create(model="tiny", input=name, conversation=name)
        await client.conversations.delete(names[0])
        await client.conversations.items.create(
            names[1], items=[{"type": "message", "role": "user", "content": "more"}]
        )
        await client.conversations.update(names[2], metadata={"a": "b"})
        second = restarted(tmp_path, server, forgotten=path)
    assert second.get("default", remaining.id) is not None
    assert second.get("default", deleted.id) is None
    are_stored = [second.conversation("default", name) is not None for name in names]
    assert are_stored == [False, False, True], "the bus does not have the added item"


async def test_while_earlier_responses_are_read_the_client_is_told_to_try_again(tmp_path: Path) -> None:
    store = ResponseStore(2**20, recalls=True)
    async with served(tmp_path, FakeReplica(), responses=store) as (_, client):
        for read in (
            client.responses.retrieve("chatcmpl-1"),
            client.responses.create(model="tiny", input="a", previous_response_id="chatcmpl-1"),
            client.conversations.retrieve("conv_1"),
        ):
            with pytest.raises(openai.InternalServerError) as refusal:
                await read
            assert (refusal.value.status_code, refusal.value.response.headers["retry-after"]) == (503, "1")
        store.end_recall()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("chatcmpl-1")


async def test_recalled_responses_share_the_items_that_they_continue(tmp_path: Path) -> None:
    """If each response stored its whole conversation, the size of the store would grow with the square of its
    length."""
    texts = [character * 4_000 for character in "abcdef"]
    async with served(tmp_path, FakeReplica()) as (server, client):
        previous: Response | None = None
        for text in texts:
            previous = await client.responses.create(
                model="tiny", input=text, previous_response_id=previous.id if previous else openai.omit
            )
        assert previous is not None
        store = restarted(tmp_path, server)
        last_store = ResponseStore(2**20)
        recall_response(server.turns[-1], last_store)
    assert store.bytes_of("default") < 2 * 4_000 * len(texts)
    earlier, only_last = (each.items_up_to("default", previous.id) for each in (store, last_store))
    assert earlier is not None
    assert only_last == earlier, "the last turn is whole where those before it are no longer on the bus"
    assert [message["content"] for message in messages_of(earlier.items) if message["role"] == "user"] == texts


async def test_a_conversation_is_not_continued_from_an_old_state_while_turns_are_read(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(script=["One.", "Two."])) as (server, client):
        conversation = await client.conversations.create()
        for text in ("a", "b"):
            await client.responses.create(model="tiny", input=text, conversation=conversation.id)
        turns = server.turns
    store = ResponseStore(2**20, recalls=True)
    recall_response(turns[0], store)
    with pytest.raises(ApiError, match="still being read"):
        store.conversation("default", conversation.id)
    recall_response(turns[1], store)
    store.end_recall()
    recalled = store.conversation("default", conversation.id)
    assert recalled is not None
    assert [message["content"] for message in messages_of(item for _, item in recalled.items)] == [
        "a",
        "One.",
        "b",
        "Two.",
    ]


@pytest.mark.parametrize("first", [{"type": "web_search_call", "id": "ws"}, {"type": "reasoning", "summary": []}])
async def test_items_that_join_the_previous_answer_are_recalled_with_it(tmp_path: Path, first: Any) -> None:
    items: Any = [first, {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"}]
    items.append({"type": "function_call_output", "call_id": "c", "output": "1"})
    async with served(tmp_path, FakeReplica(script=["I look.", "Found."])) as (server, client):
        previous = await client.responses.create(model="tiny", input="Look.")
        last = await client.responses.create(model="tiny", input=items, previous_response_id=previous.id)
        store, turns = restarted(tmp_path, server), server.turns
    earlier = store.items_up_to("default", last.id)
    assert earlier is not None
    again = [Message.model_validate(message) for message in messages_of(earlier.items)]
    assert again == [*turns[-1].messages, turns[-1].choices[0].message]


@pytest.mark.parametrize(
    "foreign", [{"turn_id": "of-another-producer"}, {"response": ResponseRecord(conversation="conv_of-another")}]
)
async def test_records_with_foreign_ids_are_not_recalled(tmp_path: Path, foreign: dict[str, Any]) -> None:
    async with served(tmp_path, FakeReplica()) as (server, client):
        await client.responses.create(model="tiny", input="a")
        turn = server.turns[0].model_copy(update=foreign)
    store = ResponseStore(2**20)
    recall_response(turn, store)
    assert store.bytes_of("default") == 0
    assert store.get("default", turn.turn_id) is None
    assert store.conversation("default", "conv_of-another") is None


def test_items_of_messages_make_the_same_messages() -> None:
    call = ToolCall(id="c", function=FunctionCall(name="ns__search", arguments='{"input": "x"}'))
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", content=None, tool_calls=(call, call.model_copy(update={"id": "d"}))),
        Message(role="tool", tool_call_id="c", content=""),
        Message(role="assistant", content="text", reasoning_content="why", tool_calls=(call,)),
        Message(role="tool", tool_call_id="c", content="r"),
        Message(role="assistant", content="end"),
    ]
    again = [Message.model_validate(message) for message in messages_of(items_of(messages))]
    assert again == messages
