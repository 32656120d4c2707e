"""Endpoints of `/v1/conversations` and `/v1/responses/{id}`: conversations that later requests continue, and stored
responses that they refer to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.admission import Admission, AdmittedRequest
from headrace_gateway.apis.responses_api import output
from headrace_gateway.apis.responses_api.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    size_of,
)
from headrace_gateway.apis.responses_api.output import Json
from headrace_gateway.apis.responses_api.request import resolve_item
from headrace_gateway.requests.http_request import check_values, headers_of, parse
from headrace_gateway.requests.request_context import RequestContext
from headrace_gateway.requests.response_store import CallerResponses, ResponseStore, StoredConversation, named_items
from headrace_gateway.settings import RequestRules
from headrace_runtime.http.web import parameters_of
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_schemas.values.base import Model
from headrace_schemas.values.bounds import JsonObject
from headrace_schemas.values.text import printable

_ITEMS_MAX = 20
"""Most items that one request may add, as in OpenAI's API."""
_PAGE, _PAGE_MAX = 20, 100
NamedItem = tuple[str, Item]


def _items(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_Items = Annotated[tuple[Item, ...], BeforeValidator(_items), Field(max_length=_ITEMS_MAX)]


class _NewConversation(Model):
    """Body of `POST /v1/conversations`."""

    items: _Items | None = None
    metadata: JsonObject | None = None


class _Update(Model):
    """Body of `POST /v1/conversations/{id}`."""

    metadata: JsonObject | None


class _NewItems(Model):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: _Items


M = TypeVar("M", _NewConversation, _Update, _NewItems)


@dataclass(frozen=True, slots=True)
class _Added:
    """Items to append to a conversation, their size in bytes, and the caller's maximum size of a conversation in
    bytes."""

    items: list[NamedItem]
    size_bytes: int
    bytes_max: int

    def append_to(self, conversation: StoredConversation) -> StoredConversation:
        """Return the conversation with the new items appended.

        Raises:
            ApiError: 413, it would become too large.
        """
        if conversation.item_bytes + self.size_bytes > self.bytes_max:
            message = f"items: the conversation would be larger than {self.bytes_max} bytes; begin another one"
            raise ApiError(413, "body_too_large", message, "items")
        return conversation.extended(self.items, self.size_bytes)


@dataclass(frozen=True, slots=True)
class Conversations:
    """Endpoints of `/v1/conversations`. They need the scope `chat`."""

    admission: Admission
    store: ResponseStore
    rules: RequestRules
    workers: WorkerThreads

    async def create(self, request: Request) -> Response:
        """Create a conversation, with the items in the body if there are any, and return it. Raises `ApiError`."""
        async with self.admission.enter(request.scope, request.receive, "chat") as admitted:
            view = self.store.view(admitted.caller)
            body, added = await self._read(_NewConversation, admitted, view)
            conversation = added.append_to(
                StoredConversation(metadata=body.metadata or {}, session_key=view.session_key)
            )
            view.add(conversation)
        return JSONResponse(_json(conversation))

    async def get(self, request: Request) -> Response:
        """Return the id, the time of creation and the metadata of a conversation. Raises `ApiError` 404."""
        return JSONResponse(_json(self._conversation(request)))

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a conversation, and return the conversation. Raises `ApiError`."""
        async with self.admission.enter(request.scope, request.receive, "chat") as admitted:
            view = self.store.view(admitted.caller)
            body, _ = await self._read(_Update, admitted, view)
            metadata = body.metadata or {}
            conversation = view.change(
                _id_of(request), lambda current: replace(current, metadata=metadata, is_recalled=False)
            )
        return JSONResponse(_json(conversation))

    async def delete(self, request: Request) -> Response:
        """Delete a conversation from the store. Its responses and the captured turns stay. Raises `ApiError` 404."""
        self._view(request).delete_conversation(_id_of(request))
        return JSONResponse({"id": _id_of(request), "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request) -> Response:
        """Add items at the end of a conversation, and return them. Raises `ApiError`."""
        async with self.admission.enter(request.scope, request.receive, "chat") as admitted:
            view = self.store.view(admitted.caller)
            _, added = await self._read(_NewItems, admitted, view)
            view.change(_id_of(request), added.append_to)
        return await self._page(added.items, added.size_bytes, has_more=False)

    async def list_items(self, request: Request) -> Response:
        """Return a page of the items of a conversation. Raises `ApiError`."""
        conversation = self._conversation(request)
        query = parameters_of(request, "order", "limit", "after", "include")
        order, limit, after = query.get("order", "desc"), query.get("limit", str(_PAGE)), query.get("after")
        if order not in ("asc", "desc"):
            raise ApiError(400, "invalid_value", "order: must be 'asc' or 'desc'", "order")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _PAGE_MAX):
            raise ApiError(400, "invalid_value", f"limit: must be a number from 1 to {_PAGE_MAX}", "limit")
        items = conversation.items if order == "asc" else conversation.items[::-1]
        if after is not None:
            items = items[_position(items, after) + 1 :]
        page = items[: int(limit)]
        return await self._page(page, conversation.item_bytes, has_more=len(items) > len(page))

    async def get_item(self, request: Request) -> Response:
        """Return an item of a conversation. Raises `ApiError` 404."""
        items = self._conversation(request).items
        return JSONResponse(item_json(*items[_position(items, request.path_params["item_id"])]))

    async def delete_item(self, request: Request) -> Response:
        """Remove an item from a conversation, and return the conversation. Raises `ApiError` 404."""
        item_id = request.path_params["item_id"]
        return JSONResponse(
            _json(self._view(request).change(_id_of(request), lambda current: _without(current, item_id)))
        )

    def _view(self, request: Request) -> CallerResponses:
        return self.store.view(self.admission.caller(request.scope, headers_of(request.scope), "chat"))

    def _conversation(self, request: Request) -> StoredConversation:
        return self._view(request).conversation(_id_of(request))

    async def _read(self, model: type[M], admitted: AdmittedRequest, view: CallerResponses) -> tuple[M, _Added]:
        """Parse the body, in a worker thread if it is large, and return it with the items that it appends."""
        bytes_max = admitted.caller.limits.body_bytes_max

        def read() -> tuple[M, _Added]:
            body = admitted.body or b"{}"
            check_values(body, self.rules.json_values_max, "send a smaller request")
            context = RequestContext(self.rules, bytes_max, view)
            parsed = parse(model, body, context=context)
            items: tuple[Item, ...] = getattr(parsed, "items", None) or ()
            added = [resolve_item(item, f"items.{number}", context) for number, item in enumerate(items)]
            return parsed, _Added(named_items(added), size_of(added), bytes_max)

        size_bytes = len(admitted.body) + view.bytes_referred_by(admitted.body, bytes_max)
        return await self.workers.run(size_bytes, read, admitted.caller.tenant)

    async def _page(self, items: Any, size_bytes: int, *, has_more: bool) -> Response:
        def write() -> Response:
            data = [item_json(*item) for item in items]
            first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")
            return JSONResponse(
                {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
            )

        return await self.workers.run(size_bytes, write)


def item_json(item_id: str, item: Item) -> Json:
    """Convert a stored item of a conversation, such as a message or a tool call, to the JSON of the Responses API."""
    match item:
        case MessageItem(role="assistant"):
            parts = [output.text_part(text) for text in item.content]
            return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": parts}
        case MessageItem():
            texts = [{"type": "input_text", "text": text} for text in item.content]
            return {"id": item_id, "type": "message", "role": item.role, "status": "completed", "content": texts}
        case ReasoningItem():
            return output.reasoning(item_id, item.text, "completed", encrypts=True)
        case CallItem() | CustomCallItem():
            return {"id": item_id, "status": "completed", **item.model_dump(mode="json", exclude_none=True)}
        case CallOutputItem():
            fields = {"type": item.type, "call_id": item.call_id, "output": "".join(item.output)}
            return {"id": item_id, "status": "completed", **fields}
    return {"id": item_id, **item.model_dump(mode="json", exclude_none=True)}


def _id_of(request: Request) -> str:
    return str(request.path_params["conversation_id"])


def _without(conversation: StoredConversation, item_id: str) -> StoredConversation:
    """Return the conversation without an item. Raises `ApiError` 404."""
    position = _position(conversation.items, item_id)
    items = conversation.items[:position] + conversation.items[position + 1 :]
    item_bytes = conversation.item_bytes - size_of([conversation.items[position][1]])
    return replace(conversation, items=items, item_bytes=item_bytes, last_response=None, is_recalled=False)


def _position(items: tuple[NamedItem, ...], item_id: str) -> int:
    for position, (name, _) in enumerate(items):
        if name == item_id:
            return position
    raise ApiError(404, "item_not_found", f"item '{printable(item_id)}' is not in this conversation", "item_id")


def _json(conversation: StoredConversation) -> Json:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": conversation.created_s,
        "metadata": conversation.metadata,
    }


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """Endpoints of `/v1/responses/{id}`. They need the scope `chat`."""

    admission: Admission
    store: ResponseStore

    async def get(self, request: Request) -> Response:
        """Return the JSON of a stored response. Raises `ApiError` 404."""
        response_id = request.path_params["response_id"]
        stored = self._view(request).get(response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Delete a response from the store. The captured turn stays. Raises `ApiError` 404."""
        response_id = request.path_params["response_id"]
        if not self._view(request).delete(response_id):
            raise _not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _view(self, request: Request) -> CallerResponses:
        return self.store.view(self.admission.caller(request.scope, headers_of(request.scope), "chat"))


def _not_found(response_id: str) -> ApiError:
    message = f"response '{printable(response_id)}' is not stored by this gateway; it may have expired"
    return ApiError(404, "response_not_found", message, "response_id")
