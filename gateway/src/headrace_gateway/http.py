"""HTTP application of the gateway with all its routes, and the endpoints of `/v1/models`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_gateway.access.refusals import internal_error_response, is_anthropic, refusal_response
from headrace_gateway.apis.admission import Admission
from headrace_gateway.apis.chat import Chat, TokenCounting, read_chat, reader
from headrace_gateway.apis.messages_api.answers import read_messages
from headrace_gateway.apis.messages_api.request import parse_count
from headrace_gateway.apis.responses_api.answers import read_responses
from headrace_gateway.apis.responses_api.conversations import Conversations, StoredResponses
from headrace_gateway.apis.responses_api.request import parse_input_tokens
from headrace_gateway.apis.sessions_api import Lookup, SessionsApi, no_known_models
from headrace_gateway.apis.text_completions import read_completion
from headrace_gateway.capture.captured_turns import CapturedTurns
from headrace_gateway.capture.recent_turns import RecentTurns, RepeatedRequests, SignalsOf, no_signals
from headrace_gateway.metrics import REQUESTS
from headrace_gateway.requests.chat_messages import MessageMemory
from headrace_gateway.requests.http_request import PathPrefixes, headers_of
from headrace_gateway.requests.response_store import ResponseStore
from headrace_gateway.routing.dispatch import Dispatchers
from headrace_gateway.routing.engine import Engines
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_gateway.routing.placement import Placement, StickyVersions
from headrace_gateway.routing.relay import Relay
from headrace_gateway.routing.replica_set import ReplicaSet
from headrace_gateway.settings import GatewaySettings
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_runtime.http import web
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.settings.sections import Common
from headrace_runtime.settings.source_values import SourceValues
from headrace_schemas import Routing


@dataclass(frozen=True, slots=True)
class ModelsApi:
    """Endpoints of `/v1/models`, which read the routing table and need the scope `chat`."""

    admission: Admission
    catalog: ModelCatalog

    async def list(self, request: Request) -> Response:
        """Return the models that the caller may use."""
        caller = self.admission.caller(request.scope, headers_of(request.scope), "chat")
        rows = self.catalog.names(caller.may_use)
        if is_anthropic(request):
            names = [name for name, _ in rows]
            listed = [self._anthropic_model(name, routing) for name, routing in rows]
            ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
            return JSONResponse({"data": listed, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": [self._model(name, routing) for name, routing in rows]})

    async def get(self, request: Request) -> Response:
        """Return one model, by any name that a call may use for it. Raises `ApiError` 404."""
        caller = self.admission.caller(request.scope, headers_of(request.scope), "chat")
        name = request.path_params["model"]
        routing = self.catalog.routing_of(self.catalog.resolve(name, caller.may_use, by_agent=True))
        form = self._anthropic_model if is_anthropic(request) else self._model
        return JSONResponse(form(name, routing))

    def _model(self, name: str, routing: Routing) -> dict[str, JsonValue]:
        return {
            "id": name,
            "object": "model",
            "created": int(routing.time.timestamp()),
            "owned_by": "headrace",
            "version": self.catalog.version_of(self.catalog.resolve(name, by_agent=True)),
        }

    def _anthropic_model(self, name: str, routing: Routing) -> dict[str, JsonValue]:
        created = routing.time.astimezone(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": created,
            "lifecycle": "active",
            "version": self.catalog.version_of(self.catalog.resolve(name, by_agent=True)),
        }


_PARSE_THREADS = 2
"""Threads that parse large requests and answers outside of the event loop. One more thread parses those over 256
KiB."""


OTHER = "other"
"""Metric label of unknown paths and of some routes."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Objects of the gateway that all requests share."""

    settings: GatewaySettings
    admission: Admission
    catalog: ModelCatalog
    replica_set: ReplicaSet
    engines: Engines
    clock: Clock
    common: Common | None = None
    known_models: Lookup = no_known_models
    signals_of: SignalsOf = no_signals
    values: SourceValues = field(default_factory=SourceValues)
    captured: CapturedTurns | None = None
    """Remembered turns; None for an empty memory."""
    responses: ResponseStore | None = None
    """Stored responses; None for an empty store."""


async def _root(_request: Request) -> Response:
    """Respond to clients that test before their first call whether the server is available, for example Claude Code."""
    return PlainTextResponse("Headrace gateway\n")


def application(parts: Parts) -> ASGIApp:
    """Build the ASGI application with its routes and middleware.

    `/health` returns 200 while chat requests can be served and captured, also while the bus is unavailable.
    """
    sticky_versions = StickyVersions(parts.settings.sticky, parts.clock)
    placement = Placement(parts.catalog, sticky_versions, parts.replica_set)
    dispatchers = Dispatchers(parts.replica_set.capacity)
    captured = parts.captured or CapturedTurns(parts.settings.capture.references_bytes_max)
    upstream = parts.settings.upstream
    relay = Relay(parts.engines, parts.replica_set, placement, dispatchers, upstream, parts.clock, captured)
    workers, recent = WorkerThreads(_PARSE_THREADS), RecentTurns(parts.signals_of)
    repeated = RepeatedRequests(parts.clock)
    stored = parts.responses or ResponseStore(parts.settings.responses_bytes_max, parts.clock)
    memories = (recent, repeated, captured, MessageMemory())
    shared = (parts.settings, parts.admission, parts.catalog, relay, parts.clock, workers, *memories)
    chat, responses = Chat(read_chat, *shared), Chat(read_responses, *shared, stored)
    messages, completions = Chat(read_messages, *shared), Chat(read_completion, *shared)
    message_tokens = TokenCounting(Chat(reader(parse_count), *shared), {})
    input_tokens = TokenCounting(Chat(reader(parse_input_tokens), *shared, stored), {"object": "response.input_tokens"})
    stored_responses = StoredResponses(parts.admission, stored)
    conversations = Conversations(parts.admission, stored, parts.settings.request_rules, workers)
    conversation, items = "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"
    sessions = SessionsApi(
        parts.admission,
        sticky_versions,
        parts.clock,
        workers,
        recent,
        parts.known_models,
        parts.values,
    )
    models = ModelsApi(parts.admission, parts.catalog)
    publisher = parts.admission.publisher
    starlette = web.app(
        {"routing": lambda: parts.catalog.is_ready, "capture": lambda: publisher.refusal_reason or True},
        [
            Route("/v1/chat/completions", chat, methods=["POST"], name="chat"),
            Route("/v1/completions", completions, methods=["POST"], name="completions"),
            Route("/v1/responses", responses, methods=["POST"], name="responses"),
            Route("/v1/responses/input_tokens", input_tokens.count, methods=["POST"], name="count_tokens"),
            Route("/v1/responses/{response_id}", stored_responses.get, name="stored_responses"),
            Route("/v1/responses/{response_id}", stored_responses.delete, methods=["DELETE"], name="stored_responses"),
            Route("/v1/conversations", conversations.create, methods=["POST"], name=OTHER),
            Route(conversation, conversations.get, name=OTHER),
            Route(conversation, conversations.update, methods=["POST"], name=OTHER),
            Route(conversation, conversations.delete, methods=["DELETE"], name=OTHER),
            Route(items, conversations.list_items, name=OTHER),
            Route(items, conversations.add_items, methods=["POST"], name=OTHER),
            Route(items + "/{item_id}", conversations.get_item, name=OTHER),
            Route(items + "/{item_id}", conversations.delete_item, methods=["DELETE"], name=OTHER),
            Route("/v1/messages", messages, methods=["POST"], name="messages"),
            Route("/v1/messages/count_tokens", message_tokens.count, methods=["POST"], name="count_tokens"),
            Route("/", _root, name=OTHER),
            Route("/v1/models", models.list, name="models"),
            Route("/v1/models/{model:path}", models.get, name="models"),
            Route("/v1/feedback", sessions.feedback, methods=["POST"], name="feedback"),
            Route("/v1/sessions/{session_id:path}/end", sessions.end, methods=["POST"], name="end"),
            Route("/v1/trajectories", sessions.trajectories, methods=["POST"], name="trajectories"),
            Route("/chat", chat, methods=["POST"], name=OTHER),
            Route("/feedback", sessions.trinity_feedback, methods=["POST"], name="trinity_feedback"),
            Route("/commit", sessions.trinity_commit, methods=["POST"], name="trinity_commit"),
        ],
        parts.common,
        needs_disk=False,
    )
    for refusal in (Refused, HTTPException):
        starlette.add_exception_handler(refusal, refusal_response)
    starlette.add_exception_handler(Exception, internal_error_response)
    return PathPrefixes(RequestCounter(starlette, starlette.routes))


class RequestCounter:
    """Middleware that counts the responses in `headrace_gateway_requests_total`, labelled with the name of the route
    and the status."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        named = {route.path: route.name for route in routes if isinstance(route, Route)}
        self._labels = {path: name for path, name in named.items() if "{" not in path}
        prefixes = {path.partition("{")[0]: name for path, name in named.items() if "{" in path}
        self._prefixes = tuple(sorted(prefixes.items(), reverse=True))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                REQUESTS.labels(self.label_of(scope["path"]), str(message["status"])).inc()
            await send(message)

        return await self._app(scope, receive, counted)

    def label_of(self, path: str) -> str:
        """Return the name of the route that matches `path`, whatever the method of the request."""
        label = self._labels.get(path)
        if label is not None:
            return label
        return next((name for prefix, name in self._prefixes if path.startswith(prefix)), OTHER)
