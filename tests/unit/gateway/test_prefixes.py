"""What a base URL may carry for clients that can set nothing else."""

from __future__ import annotations

import pytest
from starlette.types import Message, Receive, Scope, Send

from headrace_gateway.prefixes import KEY, SESSION, Prefixes


async def seen(path: str) -> Scope:
    scopes: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        scopes.append(scope)

    async def nothing() -> Message:
        raise AssertionError("nothing is read here")

    async def nowhere(_message: Message) -> None:
        raise AssertionError("nothing is sent here")

    await Prefixes(app)({"type": "http", "path": path, "raw_path": path.encode()}, nothing, nowhere)
    return scopes[0]


@pytest.mark.parametrize(
    ("path", "rest", "key", "session"),
    [
        ("/v1/models", "/v1/models", None, None),
        ("/t/KEY/feedback", "/feedback", "KEY", None),
        ("/t/KEY//feedback", "/feedback", "KEY", None),
        ("//feedback", "/feedback", None, None),
        ("/sessions/run-1/v1/chat/completions", "/v1/chat/completions", None, "run-1"),
        ("/t/K/sessions/run%2F1%20b/v1/chat/completions", "/v1/chat/completions", "K", "run/1 b"),
        ("/sessions/a/t/K/v1/models", "/v1/models", "K", "a"),
        ("/sessions/a/sessions/b/v1/models", "/sessions/b/v1/models", None, "a"),
        ("/v1/sessions/a/end", "/v1/sessions/a/end", None, None),
        ("/t/", "/t", None, None),
        ("/v1/chat/completions/", "/v1/chat/completions", None, None),
        ("/chat/completions", "/v1/chat/completions", None, None),
        ("/t/K/messages/count_tokens", "/v1/messages/count_tokens", "K", None),
        ("/v1/v1/messages", "/v1/messages", None, None),
        ("/models/tiny", "/v1/models/tiny", None, None),
        ("/chat", "/chat", None, None),
        ("/", "/", None, None),
    ],
)
async def test_prefixes_are_peeled(path: str, rest: str, key: str | None, session: str | None) -> None:
    scope = await seen(path)
    assert (scope["path"], scope.get(KEY), scope.get(SESSION)) == (rest.rstrip("/") or "/", key, session)
