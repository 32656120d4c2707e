"""Counts every request by route and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_gateway.metrics import REQUESTS

_ROUTES = {
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
    if path.startswith("/v1/responses/") and path not in _ROUTES:
        return "stored_responses"
    return _ROUTES.get(path, "other")
