"""User of the stack that calls through a load balancer and accepts only complete answers.

An attempt that loses its connection is repeated at another gateway, as a load balancer does. A request has *failed*
when a gateway answered with an error, when an answer ended in order but was incomplete, when a connection was lost
without a kill of that gateway, or when there was no answer by the deadline. A 503 of a gateway with a full disk means
that the turn was not recorded; a 503 of a killed gateway that has not been healthy since means that it does not know
the routing yet. In both cases the load balancer chooses the other gateway.

Users that arrive independently of the stack's progress: sessions at random moments, with a mean number of turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.chaos.balancer import Balancer

DEADLINE_S = 150.0
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)


class RequestFailed(Exception):
    """Failure of a request as its user sees it. `status` is the HTTP status of an error answer, otherwise 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Acked:
    """Complete answer to a chat request."""

    session_id: str
    content: str
    """Digest of the text that the user was shown."""
    tokens: str = ""
    """Digest of the token ids of the prompt and of the answer, which every answer contains."""
    version: str = ""
    """Version of the model that the answer names."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted feedback about one session."""

    value: float
    gateway: str


@dataclass(slots=True)
class ClientLedger:
    """Ledger of what the users observed. None of its values comes from the stack's own account."""

    acked: dict[str, Acked] = field(default_factory=dict)
    """Complete answers by response id."""
    feedback_ids: set[str] = field(default_factory=set)
    """Ids of the feedback that was accepted."""
    judged: dict[str, list[Verdict]] = field(default_factory=dict)
    """Accepted feedback by session, in the order of acceptance."""
    reached: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Gateways that may have recorded a part of each session, including those whose answer was lost."""
    ended: set[str] = field(default_factory=set)
    """Sessions whose end was accepted."""
    failures: list[str] = field(default_factory=list)
    failed_by: Counter[str] = field(default_factory=Counter)
    """Failed requests by kind."""
    requests: int = 0
    retried: int = 0
    """Number of attempts that lost their connection to a killed gateway."""
    refused: int = 0
    """Number of attempts that were refused by a gateway with a full disk or by one that was restarting."""
    answered_at: dict[str, float] = field(default_factory=dict)
    """Time at which the end of each session's last answer arrived, in seconds since 1970."""
    latencies_s: list[float] = field(default_factory=list)
    """Durations of the answered requests, including their retries, in seconds."""

    def failed(self, kind: str, text: str) -> None:
        self.failed_by[kind] += 1
        self.failures.append(f"{kind}: {text}")


class Client:
    """Client of many concurrent users with one connection pool."""

    def __init__(self, http: aiohttp.ClientSession, balancer: Balancer, ledger: ClientLedger, model: str) -> None:
        self._http = http
        self._balancer = balancer
        self._ledger = ledger
        self._model = model

    async def ask(self, session_id: str, messages: list[dict[str, str]], **options: object) -> str | None:
        """Send one turn. Return the model's text, or None when the request failed."""
        began = time.monotonic()
        headers = {"x-session-id": session_id}
        body = {"model": self._model, "messages": messages, "return_token_ids": True, **options}
        answer, _ = await self._request(session_id, "/v1/chat/completions", body, headers)
        if answer is None:
            return None
        self._ledger.latencies_s.append(time.monotonic() - began)
        self._ledger.answered_at[session_id] = time.time()
        response_id, text = _text_and_tokens(answer)
        self._ledger.acked[response_id] = Acked(session_id, digest(text), _tokens(answer), str(answer[0].get("model")))
        return text

    async def feedback(self, session_id: str, value: float, **more: object) -> bool:
        """Send feedback and return whether it was accepted. The client sets `feedback_id`, so that a retry is no new
        feedback.
        """
        verdicts = self._ledger.judged.get(session_id, [])
        body = {"session_id": session_id, "feedback_id": f"f-{session_id}-{len(verdicts)}", "value": value, **more}
        answer, gateway = await self._request(session_id, "/v1/feedback", body, {})
        if answer is not None:
            self._ledger.feedback_ids.update(answer[0]["event_ids"])
            self._ledger.judged[session_id] = [*verdicts, Verdict(value, gateway)]
            if more.get("ends_session"):
                self._ledger.ended.add(session_id)
        return answer is not None

    async def end(self, session_id: str) -> None:
        if (await self._request(session_id, f"/v1/sessions/{session_id}/end", None, {}))[0] is not None:
            self._ledger.ended.add(session_id)

    async def _request(
        self, session_id: str, path: str, body: Mapping[str, object] | None, headers: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]] | None, str]:
        """Send a request with retries.

        Returns:
            The JSON objects of the answer (one object, or the chunks of a stream) and its version. If the request
            failed, None instead of the objects; the failure is recorded.
        """
        self._ledger.requests += 1
        deadline = time.monotonic() + DEADLINE_S
        avoid: str | None = None
        while True:
            gateway, began = self._balancer.pick(session_id, avoid), time.monotonic()
            gateway_known = gateway in self._ledger.reached[session_id]
            self._ledger.reached[session_id].add(gateway)
            try:
                async with asyncio.timeout(max(0.1, deadline - began)):
                    return await self._attempt(f"{gateway}{path}", body, headers), gateway
            except TimeoutError:
                self._ledger.failed("no answer", f"{path} within {DEADLINE_S:g} s")
            except RequestFailed as error:
                if error.status == 503 and (
                    self._balancer.may_refuse(gateway, began) or self._balancer.was_down(gateway, began)
                ):
                    self._ledger.refused += 1
                    if not gateway_known:  # a refusal records nothing
                        self._ledger.reached[session_id].discard(gateway)
                    avoid = gateway
                    await asyncio.sleep(0.2)
                    continue
                self._ledger.failed(str(error).split(":")[0], f"{path} at {gateway}: {error}")
            except _LOST as error:
                self._balancer.lost(gateway)
                if self._balancer.was_down(gateway, began):
                    self._ledger.retried += 1
                    avoid = gateway
                    await asyncio.sleep(0.05)
                    continue
                self._ledger.failed("connection lost", f"{path} at {gateway}, which lives: {error!r}")
            return None, gateway

    async def _attempt(
        self, url: str, body: Mapping[str, object] | None, headers: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        async with self._http.post(url, json=body, headers=headers) as response:
            text = await response.text()
        if response.status >= 400:
            raise RequestFailed(f"status {response.status}: {text[:300]}", response.status)
        if response.content_type != "text/event-stream":
            return [json.loads(text)]
        events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            raise RequestFailed(f"stream without its end: {events[-1:]}")
        return [json.loads(event) for event in events[:-1]]


def _text_and_tokens(answer: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the response id and the text of a plain or streamed answer."""
    parts = [(choice.get("message") or choice.get("delta")) for chunk in answer for choice in chunk["choices"]]
    return answer[0]["id"], "".join((part or {}).get("content") or "" for part in parts)


def _tokens(answer: list[dict[str, Any]]) -> str:
    prompt: list[int] = next((chunk["prompt_token_ids"] for chunk in answer if chunk.get("prompt_token_ids")), [])
    choices = [choice for chunk in answer for choice in chunk["choices"]]
    return tokens_digest(prompt, [token for choice in choices for token in choice.get("token_ids") or ()])


def tokens_digest(prompt: Sequence[int], sampled: Sequence[int]) -> str:
    return digest(f"{list(prompt)} {list(sampled)}")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


TURNS_MAX = 5
TASKS = 24
VALUES = (0.0, 0.25, 0.5, 0.75, 1.0)
_REVISED_SHARE = 0.25
"""Probability that the feedback is revised."""
_MEAN_TURNS = (1 + TURNS_MAX) / 2
_SESSIONS_MAX = 240
"""Maximum number of open sessions; the gateway admits 256 concurrent requests of one key."""
_TOPICS = ("invoice", "meeting", "report", "flight", "contract")


@dataclass(slots=True)
class Load:
    """Load of users that arrive at random. `run` starts sessions until `stop` is set; open sessions then continue to
    the end.
    """

    client: Client
    choose: random.Random
    rate: float
    """Turns per second."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    sessions: int = 0
    seconds: float = 0.0
    """Seconds during which users arrived."""

    async def run(self) -> None:
        slots = asyncio.Semaphore(_SESSIONS_MAX)
        began = next_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while not self.stop.is_set():
                next_s += self.choose.expovariate(self.rate / _MEAN_TURNS)
                await self._until(next_s)
                await slots.acquire()
                self.sessions += 1
                session = group.create_task(self._session(self.sessions, self.choose.randrange(2**32)))
                session.add_done_callback(lambda _: slots.release())
            self.seconds = time.monotonic() - began

    async def _until(self, moment_s: float) -> None:
        """Wait until a monotonic time. Sessions that are late, because no slot was free, start at once."""
        if (pause_s := moment_s - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)

    async def _session(self, number: int, seed: int) -> None:
        choose = random.Random(seed)
        session_id = f"chaos-{seed:08x}-{number}"
        messages: list[dict[str, str]] = []
        for turn in range(choose.randint(1, TURNS_MAX)):
            if turn:
                await asyncio.sleep(choose.expovariate(10))  # what an agent does with an answer
            question = f"Who sent the {choose.choice(_TOPICS)} of case {choose.randrange(10**6)}?"
            messages.append({"role": "user", "content": question})
            answer = await self.client.ask(
                session_id, list(messages), max_tokens=choose.randint(4, 12), stream=choose.random() < 0.4
            )
            if answer is None and turn == 0:
                return  # nothing to judge
            messages.append({"role": "assistant", "content": answer or ""})
        await self._judge(session_id, choose)

    async def _judge(self, session_id: str, choose: random.Random) -> None:
        """Give feedback about a session, sometimes several times, and end it before or after the last feedback."""
        task = {"task_id": f"task-{choose.randrange(TASKS)}"}
        ends = choose.random() < 0.5
        await self.client.feedback(session_id, choose.choice(VALUES), ends_session=ends, **task)
        while choose.random() < _REVISED_SHARE:
            await asyncio.sleep(choose.expovariate(2))
            await self.client.feedback(session_id, choose.choice(VALUES), **task)
        if not ends:
            await self.client.end(session_id)
