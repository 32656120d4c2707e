"""Headrace in memory for the agents of the examples: a model's answers, and a list of their feedback."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
from openai import AsyncOpenAI

from tests.support.fake_llm import Behaviour, Call


class Headrace:
    """A gateway in memory: a model's answers, and feedback that is kept."""

    def __init__(self, model: Behaviour) -> None:
        self.feedback: list[dict[str, Any]] = []
        self.spoken: list[str] = []
        self.heard = asyncio.Event()
        self.refusal: int | None = None
        self.pairs_per_version: int | None = None
        """Number of preferences after which the model's name means another version; None: there are no versions."""
        self._model = model

    @property
    def version(self) -> str | None:
        if self.pairs_per_version is None:
            return None
        return f"m@{sum('preference' in body for body in self.feedback) // self.pairs_per_version}"

    def client(self) -> AsyncOpenAI:
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self._answer))
        return AsyncOpenAI(base_url="http://headrace/v1", api_key="none", http_client=http, max_retries=0)

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(0)  # a server takes its time, and others get theirs
        if request.url.path.startswith("/v1/models/"):
            return httpx2.Response(200, json={"id": "m", "object": "model", "version": self.version})
        body = json.loads(request.content)
        if request.url.path == "/v1/chat/completions":
            reply = self._model(Call({}, body))
            self.spoken.append(reply.body["id"])  # type: ignore[index]
            return httpx2.Response(200, json=reply.body)
        assert request.url.path == "/v1/feedback"
        self.feedback.append(body)
        self.heard.set()
        return httpx2.Response(self.refusal or 202, json={})
