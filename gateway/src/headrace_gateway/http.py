"""The HTTP application over its parts: every URL of the gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_gateway.admission import Admission
from headrace_gateway.captured_turns import CapturedTurns
from headrace_gateway.chat import Chat, TokenCounting, read_chat, reader
from headrace_gateway.chat_messages import MessageMemory
from headrace_gateway.dispatch import Dispatchers
from headrace_gateway.engine import Engines
from headrace_gateway.messages_api.answers import read_messages
from headrace_gateway.messages_api.request import parse_count
from headrace_gateway.metrics import REQUESTS
from headrace_gateway.model_catalog import ModelCatalog, ModelsApi
from headrace_gateway.placement import Placement, StickyVersions
from headrace_gateway.recent_turns import RecentTurns, RepeatedRequests, SignalsOf, no_signals
from headrace_gateway.refusals import crashed, refused
from headrace_gateway.relay import Relay
from headrace_gateway.replica_set import ReplicaSet
from headrace_gateway.requests import Prefixes
from headrace_gateway.response_store import ResponseStore
from headrace_gateway.responses_api.answers import read_responses
from headrace_gateway.responses_api.conversations import Conversations, StoredResponses
from headrace_gateway.responses_api.request import parse_input_tokens
from headrace_gateway.sessions_api import Lookup, SessionsApi, nothing_known
from headrace_gateway.settings import GatewaySettings
from headrace_gateway.text_completions import read_completion
from headrace_runtime.clock import Clock
from headrace_runtime.errors import Refused
from headrace_runtime.http import web
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.settings.sections import Common
from headrace_runtime.settings.source_values import SourceValues

_PARSE_THREADS = 2
"""Threads that read large requests and answers outside of the event loop; one more takes those over 256 KiB."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the gateway that outlive a request."""

    settings: GatewaySettings
    admission: Admission
    catalog: ModelCatalog
    replica_set: ReplicaSet
    engines: Engines
    clock: Clock
    common: Common | None = None
    known_models: Lookup = nothing_known
    signals_of: SignalsOf = no_signals
    values: SourceValues = field(default_factory=SourceValues)
    captured: CapturedTurns | None = None
    """The remembered turns; None for an empty memory."""
    responses: ResponseStore | None = None
    """The stored responses; None for an empty store."""


async def _root(_request: Request) -> Response:
    """Answer clients that look whether the server is there before their first call, as Claude Code does."""
    return PlainTextResponse("Headrace gateway\n")


def application(parts: Parts) -> ASGIApp:
    """`/health` is 200 while chat requests can be served and captured; the bus being away does not change that."""
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
        {"routing": lambda: parts.catalog.is_ready, "capture": lambda: publisher.lacks_room or True},
        [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/input_tokens", input_tokens.count, methods=["POST"]),
            Route("/v1/responses/{response_id}", stored_responses.get),
            Route("/v1/responses/{response_id}", stored_responses.delete, methods=["DELETE"]),
            Route("/v1/conversations", conversations.create, methods=["POST"]),
            Route(conversation, conversations.get),
            Route(conversation, conversations.update, methods=["POST"]),
            Route(conversation, conversations.delete, methods=["DELETE"]),
            Route(items, conversations.list_items),
            Route(items, conversations.add_items, methods=["POST"]),
            Route(items + "/{item_id}", conversations.get_item),
            Route(items + "/{item_id}", conversations.delete_item, methods=["DELETE"]),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", message_tokens.count, methods=["POST"]),
            Route("/", _root),
            Route("/v1/models", models.list),
            Route("/v1/models/{model:path}", models.get),
            Route("/v1/feedback", sessions.feedback, methods=["POST"]),
            Route("/v1/sessions/{session_id:path}/end", sessions.end, methods=["POST"]),
            Route("/v1/trajectories", sessions.trajectories, methods=["POST"]),
            Route("/chat", chat, methods=["POST"]),
            Route("/feedback", sessions.trinity_feedback, methods=["POST"]),
            Route("/commit", sessions.trinity_commit, methods=["POST"]),
        ],
        parts.common,
        needs_disk=False,
    )
    for refusal in (Refused, HTTPException):
        starlette.add_exception_handler(refusal, refused)
    starlette.add_exception_handler(Exception, crashed)
    return Prefixes(Counting(starlette))


_ROUTE_LABELS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "count_tokens",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/models": "models",
    "/v1/feedback": "feedback",
    "/v1/trajectories": "trajectories",
    "/feedback": "trinity_feedback",
    "/commit": "trinity_commit",
    "/health": "health",
    "/metrics": "metrics",
}


class Counting:
    """Around the application; unknown paths share one label."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                REQUESTS.labels(route_of(scope["path"]), str(message["status"])).inc()
            await send(message)

        return await self._app(scope, receive, counted)


def route_of(path: str) -> str:
    if path.startswith("/v1/sessions/"):
        return "end"
    if path.startswith("/v1/models/"):
        return "models"
    if path.startswith("/v1/responses/") and path not in _ROUTE_LABELS:
        return "stored_responses"
    return _ROUTE_LABELS.get(path, "other")
