"""An inference replica without a model: the protocol of ARCHITECTURE.md, deterministic tokens, and faults on demand.

Equal requests get equal tokens from every fake replica, so that a resumed stream can be compared with an undisturbed
one. Each token is a word: token 17 reads `w17 `. `python -m tests.support.fake_replica ID PORT VERSION DELAY` serves
until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from headrace_schemas import LoadedVersion, Replica
from headrace_schemas.http.replica_api import RawPrompt, Resume

VERSION = "tiny@0123456789abcdef"
LENGTH = 6
"""Number of tokens of an answer, unless the request sets a smaller limit."""


@dataclass(frozen=True)
class Fault:
    """Fault of one request."""

    status: int = 200
    """Answer with this status and an OpenAI-shaped error."""
    message: str = "fault"
    drop_after: int | None = None
    """Cut the connection after this number of tokens (streams) or before the body (plain answers)."""
    abort_after: int | None = None
    """End every choice with `finish_reason: "abort"` after this number of tokens."""
    stall_after: int | None = None
    """Send this number of tokens, then pause until `FakeReplica.go_on` is set."""
    lose_logprobs: int = 0
    """Leave out this number of logprobs at the end."""
    usage_off_by: int = 0
    no_usage: bool = False
    model: str | None = None
    """Report this version instead of the requested one."""
    altered: Callable[[dict[str, Any]], bytes] | None = None
    """Function that returns the bytes to send in place of a JSON object: an error, a whole answer or a chunk."""

    def encoded(self, document: dict[str, Any]) -> bytes:
        return self.altered(document) if self.altered else json.dumps(document).encode()


@dataclass(frozen=True)
class Called:
    """A tool call with its exact text."""

    name: str
    arguments: dict[str, Any]


ScriptedAnswer = str | Called


@dataclass
class FakeReplica:
    """Replica that serves while `running()` is entered. Each request takes the first of the remaining `faults`."""

    replica_id: str = "replica-0"
    versions: tuple[str, ...] = (VERSION,)
    engine: str = "torch"
    resumes: bool = True
    grammars: tuple[str, ...] = ()
    prompts: bool = True
    capacity: int = 16
    faults: list[Fault] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    script: list[ScriptedAnswer] = field(default_factory=list)
    """Answers to successive requests instead of generated words. A request with an error `Fault.status` uses none."""
    token_delay_s: float = 0.0
    prompt_tail: tuple[int, ...] = ()
    """Tokens appended to every prompt. A replica that has not seen the conversation before also has other prompts."""
    prompt_tokens_max: int | None = None
    """Maximum length of a prompt before `prompt_tail`. A longer prompt is cut to its first tokens."""
    url: str = ""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    moves: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the replica hangs like a stopped process: it accepts connections and sends no bytes."""
    health_checks: int = 0
    """Number of health checks that arrived."""
    cancelled: int = 0
    """Number of requests that the gateway cancelled by closing the connection."""

    def __post_init__(self) -> None:
        self.moves.set()

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[FakeReplica]:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.go_on.set()
            self.moves.set()
            await runner.cleanup()

    def heartbeat(self, **changes: Any) -> Replica:
        now = datetime.now(UTC)
        ready = tuple(LoadedVersion(version=version, state="ready") for version in self.versions)
        beat = Replica(
            time=now,
            replica_id=self.replica_id,
            url=self.url,
            engine=self.engine,
            resumes=self.resumes,
            grammars=self.grammars,
            prompts=self.prompts,
            versions=ready,
            capacity=self.capacity,
            ttl_s=5,
            started_at=now,
        )
        return beat.model_copy(update=changes)

    async def _health(self, _request: web.Request) -> web.Response:
        self.health_checks += 1
        await self.moves.wait()
        return web.json_response({"status": "ok"})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.pop(0) if self.faults else Fault()
        if fault.status != 200:
            error = {"message": fault.message, "type": "fault", "param": None, "code": fault.status}
            content = fault.encoded({"error": error})
            return web.Response(body=content, status=fault.status, content_type="application/json")
        if body["model"] not in self.versions:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        try:
            await self.moves.wait()
            return await (self._stream if body.get("stream") else self._plain)(request, self._work(body, fault), fault)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _work(self, body: dict[str, Any], fault: Fault) -> Generation:
        scripted_answer = self.script.pop(0) if self.script else None
        return Generation(body, fault.model or body["model"], self.prompt_tail, scripted_answer, self.prompt_tokens_max)

    async def _plain(self, request: web.Request, work: Generation, fault: Fault) -> web.StreamResponse:
        await asyncio.sleep(self.token_delay_s * LENGTH)
        if fault.stall_after is not None:
            await self.go_on.wait()
        if fault.drop_after is not None:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(60)
        await self.moves.wait()
        choices = [self._build_choice(work, index, fault) for index in range(work.n)]
        prompt = work.prompt_ids
        answer: dict[str, Any] = {
            "id": "cmpl-of-the-engine",
            "object": "chat.completion",
            "model": work.model,
            "choices": choices,
            "usage": None if fault.no_usage else work.usage(fault.usage_off_by),
            "prompt_token_ids": prompt,
            "prompt_logprobs": None,
            **work.prompt_text,
            "kv_transfer_params": {"secret": 1},
        }
        return web.Response(body=fault.encoded(answer), content_type="application/json")

    def _build_choice(self, work: Generation, index: int, fault: Fault) -> dict[str, Any]:
        tokens = work.tokens(index)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(map(work.text, range(len(tokens)), tokens))}
        if work.calls_a_tool:
            message |= {"content": None, "tool_calls": [work.tool_call(index)]}
        logprob_count = len(tokens) - fault.lose_logprobs
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": [entry(token, work.top) for token in tokens[:logprob_count]]},
            "finish_reason": "abort" if fault.abort_after is not None else work.finish_reason,
            "stop_reason": None,
            "token_ids": tokens,
        }

    async def _stream(self, request: web.Request, work: Generation, fault: Fault) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        for chunk, tokens in work.chunks(fault):
            if fault.drop_after is not None and sent >= fault.drop_after and tokens:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(60)
            if fault.stall_after is not None and sent >= fault.stall_after and tokens:
                await self.go_on.wait()
            await self.moves.wait()
            sent += tokens
            await response.write(b"data: " + fault.encoded(chunk) + b"\n\n")
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
        await response.write(b"data: [DONE]\n\n")
        return response


@dataclass
class Generation:
    """One request and its answer."""

    body: dict[str, Any]
    model: str
    prompt_tail: tuple[int, ...] = ()
    scripted_answer: ScriptedAnswer | None = None
    prompt_tokens_max: int | None = None

    @property
    def n(self) -> int:
        return int(self.body.get("n") or 1)

    @property
    def top(self) -> int:
        return int(self.body.get("top_logprobs") or 0)

    @property
    def prompt_ids(self) -> list[int]:
        resume = self._resume()
        if resume is not None and resume.prompt_token_ids is not None:
            return list(resume.prompt_token_ids)
        raw = self.body.get("headrace_prompt")
        if raw and raw.get("token_ids"):
            return list(RawPrompt.model_validate(raw).token_ids or ())
        text: str = self.body["messages"][0]["content"] if raw else ""
        text = text or json.dumps([self.body["messages"], self.body.get("tools")])
        prompt = text.encode()[: self.prompt_tokens_max]
        return [*prompt, *self.prompt_tail]

    @property
    def prompt_text(self) -> dict[str, str]:
        """Return the field with the text of a prompt that was sent as token ids."""
        raw = self.body.get("headrace_prompt") or {}
        return {"headrace_prompt_text": "".join(map(text_of, self.prompt_ids))} if raw.get("token_ids") else {}

    @property
    def limit(self) -> int:
        if isinstance(self.scripted_answer, str):
            return len(self._pieces)
        return min(LENGTH, int(self.body.get("max_tokens") or LENGTH))

    @property
    def calls_a_tool(self) -> bool:
        if self.scripted_answer is not None:
            return not isinstance(self.scripted_answer, str)
        return bool(self.body.get("tools")) and self.body["messages"][-1]["role"] == "user"

    @property
    def finish_reason(self) -> str:
        if self.calls_a_tool:
            return "tool_calls"
        return "stop" if self.limit == LENGTH or self.scripted_answer is not None else "length"

    @property
    def _pieces(self) -> list[str]:
        """Return the scripted text in pieces, one for each token: a word with the white space after it."""
        return re.findall(r"\s*\S+\s*", str(self.scripted_answer))

    def text(self, at: int, token: int) -> str:
        return self._pieces[at] if isinstance(self.scripted_answer, str) else text_of(token)

    def tokens(self, index: int) -> list[int]:
        if isinstance(self.scripted_answer, str):
            return [100 + zlib.crc32(piece.encode()) % 100 for piece in self._pieces]
        seed = json.dumps([self.body["messages"], self.body.get("seed"), index]).encode()
        return [byte + 100 for byte in hashlib.sha256(seed).digest()[: self.limit]]

    def tool_call(self, index: int) -> dict[str, Any]:
        if isinstance(self.scripted_answer, Called):
            name, arguments = self.scripted_answer.name, json.dumps(self.scripted_answer.arguments)
        else:
            name, arguments = self.body["tools"][0]["function"]["name"], '{"query": "invoice"}'
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{self.tokens(index)[0]}", "type": "function", "function": function}

    def usage(self, off_by: int = 0) -> dict[str, Any]:
        prompt, sampled = len(self.prompt_ids), self.limit * self.n + off_by
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def chunks(self, fault: Fault) -> list[tuple[dict[str, Any], int]]:
        """Return every chunk with its number of tokens. The chunks of several choices are interleaved."""
        resumed = {choice.index: choice for choice in self._resumed()}
        begun: list[tuple[dict[str, Any], int]] = []
        for index in range(self.n):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            begun.append((self._chunk([first], prompt_token_ids=self.prompt_ids, **self.prompt_text), 0))
        for at in range(self.limit):
            for index in range(self.n):
                choice = resumed.get(index)
                if choice is None or (at >= len(choice.token_ids) and choice.finish_reason is None):
                    begun.append((self._chunk([self._token(index, at, fault)]), 1))
        if not fault.no_usage:
            begun.append((self._chunk([], usage=self.usage(fault.usage_off_by)), 0))
        return begun

    def _token(self, index: int, at: int, fault: Fault) -> dict[str, Any]:
        token = self.tokens(index)[at]
        last = at == self.limit - 1
        delta: dict[str, Any] = {} if self.calls_a_tool else {"content": self.text(at, token)}
        if self.calls_a_tool and at == self.limit - 2:
            call = self.tool_call(index)
            delta = {
                "tool_calls": [{"index": 0, **call, "function": {"name": call["function"]["name"], "arguments": ""}}]
            }
        if self.calls_a_tool and last:
            arguments = self.tool_call(index)["function"]["arguments"]
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
        aborted = fault.abort_after is not None and at == fault.abort_after
        lost = at >= self.limit - fault.lose_logprobs
        return {
            "index": index,
            "delta": delta,
            "logprobs": {"content": [] if lost else [entry(token, self.top)]},
            "finish_reason": "abort" if aborted else self.finish_reason if last else None,
            "stop_reason": None,
            "token_ids": [token],
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": "of-the-engine",
            "object": "chat.completion.chunk",
            "model": self.model,
            "choices": choices,
        } | more

    def _resume(self) -> Resume | None:
        raw = self.body.get("headrace_resume")
        return Resume.model_validate(raw) if raw is not None else None

    def _resumed(self) -> Any:
        resume = self._resume()
        for choice in resume.choices if resume else ():
            expected = self.tokens(choice.index)[: len(choice.token_ids)]
            assert list(choice.token_ids) == expected, "the gateway lost or changed tokens on the way"
            assert list(choice.logprobs) == [logprob_of(token) for token in expected]
        return resume.choices if resume else ()


async def _serve(replica_id: str, port: int, version: str, token_delay_s: float) -> None:
    replica = FakeReplica(replica_id, (version,), token_delay_s=token_delay_s)
    async with replica.running(port):
        await asyncio.Event().wait()


def text_of(token: int) -> str:
    return f"w{token} "


def logprob_of(token: int) -> float:
    return -(token % 64) / 64


def entry(token: int, top: int = 0) -> dict[str, Any]:
    """Return the entry of a token in `logprobs.content`."""
    text = text_of(token)
    ranked = [{"token": text, "logprob": logprob_of(token), "bytes": list(text.encode())}] * top
    return {"token": text, "logprob": logprob_of(token), "bytes": list(text.encode()), "top_logprobs": ranked}


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
