"""A small real HTTP server of OpenAI's chat completions that follows a test's script, including faults.

    with FakeLLM(verdict(outcome=4)) as llm:
        llm.then(status(429, retry_after=1), drop())  # the next two calls
        ... base_url=llm.base_url ...
        assert len(llm.calls) == 3

A behaviour is a function that takes the call and returns a reply. The behaviours given to `then` are used first, then
the usual one. `Headrace` is a gateway in memory for the agents of the examples.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx2
from openai import AsyncOpenAI

_HANG_S_MAX = 60.0


@dataclass(frozen=True)
class Call:
    """One received request."""

    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def prompt(self) -> str:
        """Return all text of the request that a model would read."""
        return "\n\n".join(message["content"] for message in self.body["messages"])

    @property
    def last(self) -> str:
        content: str = self.body["messages"][-1]["content"]
        return content


@dataclass(frozen=True)
class Reply:
    """Reaction to a call: an answer with `status` and `body`, a delay, or a dropped connection."""

    body: object = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    drop: bool = False
    raw: bytes | None = None


Behaviour = Callable[[Call], Reply]


def completion(text: str | None, *, tokens: tuple[int, int] | None = (100, 20), **message: object) -> dict[str, object]:
    """Return a chat completion with that text. With `tokens` None it has no usage."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}}
    return {"id": "cmpl-1", "object": "chat.completion", "choices": [choice], **usage}


def say(text: str | None, **options: Any) -> Behaviour:
    return lambda _call: Reply(completion(text, **options))


def answer(function: Callable[[Call], str]) -> Behaviour:
    """Answer with the result of `function` for the call."""
    return lambda call: Reply(completion(function(call)))


def verdict(reason: str = "because", **criteria: object) -> Behaviour:
    """Return a behaviour that answers with a valid verdict of a judge."""
    return say(json.dumps({"reason": reason, "criteria": criteria}))


def fenced(reason: str = "because", **criteria: object) -> Behaviour:
    text = json.dumps({"reason": reason, "criteria": criteria}, indent=2)
    return say(f"Here is my verdict.\n\n```json\n{text}\n```\nI hope that helps!")


def abstain(reason: str = "nothing to see") -> Behaviour:
    return say(json.dumps({"abstain": True, "reason": reason}))


def prose() -> Behaviour:
    return say("The agent did rather well, I would say four out of five.")


def status(code: int, *, retry_after: object = None) -> Behaviour:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return lambda _call: Reply({"error": {"message": "no", "code": code}}, code, headers)


def raw(content: bytes) -> Behaviour:
    """Return a behaviour that answers 200 with `content` as the body."""
    return lambda _call: Reply(raw=content)


def hang() -> Behaviour:
    """Return a behaviour that never answers."""
    return lambda _call: Reply(hang=True)


def drop() -> Behaviour:
    """Return a behaviour that closes the connection in the middle of the answer."""
    return lambda _call: Reply(drop=True)


class FakeLLM:
    """The server, on a free port, in threads. Use it as a context manager."""

    def __init__(self, usual: Behaviour, port: int = 0) -> None:
        self.usual = usual
        self.calls: list[Call] = []
        self._next: deque[Behaviour] = deque()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def then(self, *behaviours: Behaviour) -> None:
        """Use these behaviours for the next calls, one each."""
        self._next.extend(behaviours)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        self._thread.join()

    def _reply(self, call: Call) -> Reply:
        with self._lock:
            self.calls.append(call)
            behaviour = self._next.popleft() if self._next else self.usual
        return behaviour(call)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """End kept-alive connections, because `server_close` would wait for their threads."""
        for request in list(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of clients that give up, which many tests cause."""


def _handler(llm: FakeLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/v1/chat/completions":
                return self._send(Reply({"error": {"message": "no such path"}}, 404))
            self._send(llm._reply(Call({k.lower(): v for k, v in self.headers.items()}, json.loads(body))))
            return None

        def _send(self, reply: Reply) -> None:
            if reply.hang:
                llm._stopping.wait(_HANG_S_MAX)
            content = json.dumps(reply.body).encode() if reply.raw is None else reply.raw
            self.close_connection = reply.hang or reply.drop
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if reply.drop else content)

        def log_message(self, *_: object) -> None:
            """Log no requests."""

    return Handler


class Headrace:
    """Gateway in memory: it returns the model's answers and stores the feedback."""

    def __init__(self, model: Behaviour) -> None:
        self.feedback: list[dict[str, Any]] = []
        self.spoken: list[str] = []
        self.heard = asyncio.Event()
        self.refusal: int | None = None
        self.pairs_per_version: int | None = None
        """Number of preferences after which the model's name means another version, or None for a single version."""
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
