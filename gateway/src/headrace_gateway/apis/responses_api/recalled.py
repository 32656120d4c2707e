"""Recovery of responses and conversations from the newest turns on the bus after a restart of the gateway.

Turns of recovered sessions can again refer to earlier turns, restarted replicas continue the exact tokens of a
conversation, and clients may refer to earlier responses.

A turn contains the messages, tools and sampling parameters of its request and the model's answer. It lacks the
request's labels (`metadata`), the format of its text and the original names of custom tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from headrace_gateway.apis.responses_api import output
from headrace_gateway.apis.responses_api.items import (
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ReasoningText,
    size_of,
)
from headrace_gateway.apis.responses_api.output import Json
from headrace_gateway.capture.captured_turns import CapturedTurns, read_turn
from headrace_gateway.requests.engine_wire import EngineUsage
from headrace_gateway.requests.identity import CallIdentity
from headrace_gateway.requests.response_store import (
    ResponseStore,
    StoredConversation,
    StoredResponse,
    is_conversation_id,
    item_id_of,
    named_items,
)
from headrace_runtime.errors import InvalidEvent, Unavailable
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import decode
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Message, Turn
from headrace_schemas.events.turn import ResponseRecord
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values import ids

_OUTPUT: TypeAdapter[tuple[Item, ...]] = TypeAdapter(tuple[Item, ...])


def recall_response(turn: Turn, store: ResponseStore) -> None:
    """Store the response that a complete turn records, and the conversation as it was after that response.

    A turn is skipped if its response id or conversation id was not created by a gateway, or if its answer is not valid
    output.
    """
    record = turn.response
    if record is None or ids.key_of_response(turn.turn_id) is None or not _is_own(record.conversation):
        return
    messages = turn.messages[1:] if record.instructions else turn.messages
    body = body_of(turn, record)
    try:
        answer = _OUTPUT.validate_python(body["output"])
    except ValidationError:
        return
    answer_ids = tuple(item["id"] for item in body["output"])
    response = conversation = None
    if record.stored:
        previous_id = record.previous_response_id
        continues = previous_id is not None and record.added_messages and store.has(turn.tenant, previous_id)
        is_part = continues or record.conversation is not None
        added = tuple(items_of(messages[-record.added_messages :] if is_part else messages))
        response = StoredResponse(
            response_id=turn.turn_id,
            body=to_json(body),
            previous_id=previous_id if continues else None,
            input=added,
            output=answer,
            output_ids=answer_ids,
            item_bytes=size_of((*added, *answer)),
            conversation_id=record.conversation,
        )
    if record.conversation is not None:
        earlier = tuple(items_of(messages))
        conversation = StoredConversation(
            conversation_id=record.conversation,
            items=(*named_items(earlier), *zip(answer_ids, answer, strict=True)),
            item_bytes=size_of((*earlier, *answer)),
            session_key=turn.session_key,
            last_response=turn.turn_id,
            is_recalled=True,
        )
    store.recall(turn.tenant, response, conversation)


def _is_own(conversation_id: str | None) -> bool:
    return conversation_id is None or is_conversation_id(conversation_id)


def items_of(messages: Iterable[Message]) -> Iterator[Item]:
    """Convert chat messages to items of the Responses API: the inverse of `messages_of`."""
    for message in messages:
        texts = (message.content,) if isinstance(message.content, str) else _texts(message)
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            yield CallOutputItem.model_construct(type="function_call_output", call_id=call_id, output=texts)
            continue
        if message.reasoning_content:
            reasoning = ReasoningText(text=message.reasoning_content)
            yield ReasoningItem.model_construct(type="reasoning", content=(reasoning,))
        if any(texts) or message.role != "assistant":
            yield MessageItem.model_construct(role=message.role, content=texts)
        for call in message.tool_calls or ():
            name, arguments = call.function.name, call.function.arguments
            yield CallItem.model_construct(type="function_call", call_id=call.id, name=name, arguments=arguments)


def body_of(turn: Turn, record: ResponseRecord) -> Json:
    """Rebuild the JSON of a response from its turn. Fields that turns do not record get their defaults."""
    choice, sampling = turn.choices[0], turn.sampling
    status = output.status_of(choice.finish_reason)
    usage = EngineUsage(
        prompt_tokens=turn.usage.prompt_tokens,
        completion_tokens=turn.usage.completion_tokens,
        total_tokens=turn.usage.prompt_tokens + turn.usage.completion_tokens,
    )
    tools = [
        {"type": "function", "strict": None, **tool.function.model_dump(mode="json", exclude_none=True)}
        for tool in turn.tools
    ]
    return {
        "id": turn.turn_id,
        "object": "response",
        "created_at": int(turn.started_at.timestamp()),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": turn.messages[0].text if record.instructions else None,
        "max_output_tokens": sampling.max_tokens,
        "metadata": {},
        "model": turn.version,
        "output": list(_output_of(turn.turn_id, choice.message, status)),
        "parallel_tool_calls": True,
        **({"conversation": {"id": record.conversation}} if record.conversation else {}),
        "previous_response_id": record.previous_response_id,
        "store": True,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": tools,
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": output.usage_of(usage),
    }


def _texts(message: Message) -> tuple[str, ...]:
    return tuple(part.text for part in message.content or () if not isinstance(part, str))


def _output_of(response_id: str, message: Message, status: str) -> Iterator[Json]:
    items: list[tuple[str, dict[str, Any]]] = []
    if message.reasoning_content:
        text = message.reasoning_content
        items.append(("rs", output.reasoning("", text, "completed", encrypts=False)))
    if message.text or not (items or message.tool_calls):
        items.append(("msg", output.message("", message.text, "completed", None)))
    for call in message.tool_calls or ():
        name, arguments = call.function.name, call.function.arguments
        items.append(("fc", output.function_call("", call.id, name, None, arguments, "completed")))
    for position, (kind, item) in enumerate(items):
        is_last = position == len(items) - 1
        yield {**item, "id": item_id_of(kind, response_id, position), "status": status if is_last else "completed"}


log = get_logger(__name__)
_RECORDS_MAX = 2_048
"""Newest records of each partition that are read."""
_BYTES_MAX = 134_217_728
"""Total bytes of records that are read, so that the start stays fast. Further records are skipped."""
_HISTORY_TOKENS_MAX = 8_000_000
_TRIES, _PAUSE_S, _POLL_MS = 20, 1.0, 500


async def recall_turns(
    bus: BusSettings, blobs: BlobStore, captured: CapturedTurns, responses: ResponseStore, client_id: str
) -> None:
    """Read the newest turns of the topic once into `captured` and `responses`. If the bus does not answer after several
    attempts, both stay empty.

    Turns that this process captures meanwhile are newer, and are not replaced.
    """
    try:
        for _ in range(_TRIES if captured.remembers or responses.remembers else 0):
            reader = consumer(bus, client_id)
            try:
                await reader.start()
                count = await _read(reader, blobs, captured, responses)
                log.info("turns_recalled", turns=count)
                return
            except (KafkaError, OSError, Unavailable) as error:
                log.warning("turns_not_recalled", error=repr(error))
            finally:
                await reader.stop()
            await asyncio.sleep(_PAUSE_S)
    finally:
        captured.end_recall()
        responses.end_recall()


async def _read(reader: AIOKafkaConsumer, blobs: BlobStore, captured: CapturedTurns, responses: ResponseStore) -> int:
    partitions = await assign_all(reader, Turn.topic)
    begins, ends = await reader.beginning_offsets(partitions), await reader.end_offsets(partitions)
    for partition in partitions:
        reader.seek(partition, max(begins[partition], ends[partition] - _RECORDS_MAX))
    history = TurnHistory(_HISTORY_TOKENS_MAX)
    count, remaining_bytes = 0, _BYTES_MAX
    while any([await reader.position(partition) < ends[partition] for partition in partitions]):
        for messages in (await reader.getmany(timeout_ms=_POLL_MS)).values():
            for message in messages:
                record = record_of(message)
                remaining_bytes -= len(record.value or b"")
                if remaining_bytes < 0:
                    return count
                try:
                    event = (await decode(record, blobs)).event
                    assert isinstance(event, Turn)
                    turn = history.whole_turn(event)
                except InvalidEvent:  # damaged, or it extends a turn before the range; the collector reports it
                    continue
                remaining_bytes -= 4 * len(event.prompt_token_ids)
                identity = CallIdentity(
                    turn.tenant, turn.session_id, turn.session_key, turn.session_source, None, None, turn.purpose
                )
                captured.recall(identity, read_turn(turn))
                recall_response(turn, responses)
                count += 1
                await asyncio.sleep(0)
    return count
