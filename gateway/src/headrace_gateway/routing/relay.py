"""Relay of calls to replicas. It retries, waits for free replicas, and continues broken streams at other replicas.

Clients notice a failure of replicas only if it lasts longer than `upstream.hold_s`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

from pydantic import ValidationError

from headrace_gateway import metrics
from headrace_gateway.access.refusals import ApiError, overloaded_error
from headrace_gateway.capture.captured_turns import CapturedTurns, find_unseen_answer, history_of
from headrace_gateway.capture.transcript import Transcript
from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.engine_wire import EngineAnswer, EngineUsage
from headrace_gateway.routing.dispatch import Dispatchers
from headrace_gateway.routing.engine import Engines, ReplicaFailed, UpstreamCall
from headrace_gateway.routing.placement import Placement, Upstream
from headrace_gateway.routing.replica_set import ReplicaSet
from headrace_gateway.settings import UpstreamSettings
from headrace_runtime.clock import Clock
from headrace_runtime.process.event_loop import run_off_loop
from headrace_runtime.process.logs import get_logger
from headrace_schemas.events.routing import PROMPT

_ERRORS_MAX = 3
"""Internal errors of engines (status 500) after which a request fails. Other failures count only as waiting time
against `hold_s`."""

log = get_logger(__name__)


class _RetryBudget:
    """Time that one call may still wait for a replica. It is reset whenever tokens arrive, and time at a replica does
    not count."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self.renew()
        self._last = "no replica has the version ready"

    def renew(self) -> None:
        self._waited_s = 0.0
        self._errors = 0
        self.avoid: frozenset[str] = frozenset()
        """Replicas that failed at this request. They are used again only if there are no others."""

    def wait_s(self) -> float:
        """Return the seconds that the call may still wait. Raises `ApiError` 503 if no time is left."""
        left = self._settings.hold_s - self._waited_s
        if left <= 0:
            raise overloaded_error(f"no replica could serve this within {self._settings.hold_s:g} s: {self._last}")
        return left

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def failed(self, replica_id: str, failure: ReplicaFailed) -> None:
        """Record a failed attempt. Raises `ApiError` 502 after too many internal errors of engines."""
        self._last = failure.trouble
        if failure.trouble in ("error", "hung"):
            self.avoid |= {replica_id}
        if failure.trouble == "error":
            self._errors += 1
        if self._errors >= _ERRORS_MAX:
            raise ApiError(502, "engine_error", "the engine failed at this request repeatedly; its log says why")


class Relay:
    """Relay of calls to the replicas of a replica set."""

    def __init__(
        self,
        engines: Engines,
        replica_set: ReplicaSet,
        placement: Placement,
        dispatchers: Dispatchers,
        settings: UpstreamSettings,
        clock: Clock,
        captured: CapturedTurns,
    ) -> None:
        self._engines = engines
        self._replica_set = replica_set
        self._placement = placement
        self._dispatchers = dispatchers
        self._settings = settings
        self._clock = clock
        self._captured = captured

    def check_spare_capacity(self, call: ChatCall, load_max: float) -> None:
        """Check that a shadow call may be sent now without delaying calls of users.

        Raises:
            ApiError: 429, no replica has enough free slots.
        """
        if not self._placement.has_spare_capacity(call, load_max):
            message = "purpose 'shadow' is served while replicas have time beside users; try again later"
            raise ApiError(429, "users_first", message, retry_after_s=1)

    async def complete(self, call: ChatCall) -> tuple[EngineAnswer, Transcript]:
        """Return the plain answer to a call and its transcript. Raises `ApiError` if no replica answers or the engine
        refuses the request."""
        async with self._dispatchers.admit(call):
            return await self._complete(call)

    async def _complete(self, call: ChatCall) -> tuple[EngineAnswer, Transcript]:
        budget = _RetryBudget(self._settings)
        while True:
            upstream = await self._find(call, lambda: self._placement.assign(call, budget.avoid), budget)
            try:
                with self._calling(upstream, lambda: self._placement.choose(call) is not None) as upstream_call:
                    body = await self._body(call, upstream)
                    answer = await self._engines.complete(upstream.member.replica, body, upstream_call, call.headers)
            except ReplicaFailed as failure:
                self._note(upstream, failure, budget)
                continue
            replica = upstream.member.replica
            transcript = Transcript(replica.replica_id, replica.started_at, upstream.assignment)
            transcript.add(answer, streamed=False)
            return answer, transcript

    async def stream(self, call: ChatCall, transcript: Transcript) -> AsyncGenerator[EngineAnswer]:
        """Yield the chunks of an answer as one uninterrupted stream. Each chunk was added to `transcript` before.
        Raises like `complete` at any point.

        Chunks before the first token are held back: if their replica fails, another replica may begin with another
        prompt and another version.
        """
        async with self._dispatchers.admit(call), contextlib.aclosing(self._stream(call, transcript)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _stream(self, call: ChatCall, transcript: Transcript) -> AsyncGenerator[EngineAnswer]:
        budget = _RetryBudget(self._settings)
        opening: list[EngineAnswer] = []
        while True:
            upstream = await self._find(call, lambda: self._next_upstream(call, transcript, budget), budget)
            transcript.replica_id = upstream.member.replica.replica_id
            transcript.replica_started_at = upstream.member.replica.started_at
            if not transcript.has_begun:
                transcript.assignment = upstream.assignment
            try:
                with self._calling(upstream, lambda: self._can_move(call, transcript)) as upstream_call:
                    async with contextlib.aclosing(self._chunks(call, upstream, transcript, upstream_call)) as chunks:
                        async for chunk in chunks:
                            budget.renew()
                            opening.append(chunk)
                            while transcript.has_begun and opening:
                                yield opening.pop(0)
                if not transcript.finished(call.request.choices):
                    raise ReplicaFailed("connection", "the stream ended before all choices did")
                return
            except ReplicaFailed as failure:
                if transcript.finished(call.request.choices):
                    yield _count_usage(transcript)
                    return
                self._note(upstream, failure, budget)
                if not transcript.has_begun:
                    opening.clear()
                    transcript.forget()

    def _next_upstream(self, call: ChatCall, transcript: Transcript, budget: _RetryBudget) -> Upstream | None:
        if not transcript.has_begun:
            return self._placement.assign(call, budget.avoid)
        if transcript.sampled and not self._placement.may_resume(call, transcript.version):
            raise overloaded_error("the stream broke and no replica can take it over")
        return self._placement.resume(call, transcript.version, budget.avoid, with_tokens=bool(transcript.sampled))

    def _can_move(self, call: ChatCall, transcript: Transcript) -> bool:
        """Return whether another replica could take over the call now. Replicas that hang do not count."""
        if not transcript.has_begun:
            return self._placement.choose(call) is not None
        upstream = self._placement.resume(call, transcript.version, frozenset(), with_tokens=bool(transcript.sampled))
        return upstream is not None

    async def _chunks(
        self, call: ChatCall, upstream: Upstream, transcript: Transcript, upstream_call: UpstreamCall
    ) -> AsyncGenerator[EngineAnswer]:
        try:
            resume = transcript.resume()
        except ValidationError as error:
            raise ApiError(502, "engine_error", "the stream broke where tokens and logprobs disagree") from error
        begun = set(transcript.choices)
        if resume:
            metrics.RESUMES.inc()
        body = call.body(upstream.version, resume) if resume else await self._body(call, upstream)
        chunks = self._engines.stream(upstream.member.replica, body, upstream_call, call.headers)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                for choice in chunk.choices:
                    if choice.index in begun:
                        choice.delta.role = None  # already sent to the client
                transcript.add(chunk, streamed=True)
                if resume:
                    chunk.prompt_token_ids = None  # already sent to the client
                yield chunk

    async def _body(self, call: ChatCall, upstream: Upstream) -> bytes:
        """Return the body of the request to a replica.

        If the replica has not sampled the session's last answer itself, the body contains the exact tokens of the
        conversation, so that they need not be tokenized again.
        """
        earlier = self._captured.of_session(call.identity)
        unseen = find_unseen_answer(call, upstream.version, upstream.member.replica, earlier)
        if unseen is None:
            return call.body(upstream.version)
        metrics.HISTORIES.inc()
        build = partial(history_of, *unseen)
        return call.body(upstream.version, history=await run_off_loop(unseen[0].size_bytes, build))

    async def _find(self, call: ChatCall, find: Callable[[], Upstream | None], budget: _RetryBudget) -> Upstream:
        while (upstream := find()) is None:
            if missing_abilities := self._placement.missing_abilities(call):
                raise _unsupported_error(call, min(missing_abilities))
            metrics.HOLDS.inc()
            before_s = self._clock.monotonic_s()
            await self._replica_set.wait(budget.wait_s())
            budget.waited(self._clock.monotonic_s() - before_s)
        return upstream

    @contextlib.contextmanager
    def _calling(self, upstream: Upstream, elsewhere: Callable[[], bool]) -> Iterator[UpstreamCall]:
        with self._replica_set.calling(upstream.member, elsewhere) as upstream_call:
            yield upstream_call
        self._replica_set.note_success(upstream.member)

    def _note(self, upstream: Upstream, failure: ReplicaFailed, budget: _RetryBudget) -> None:
        replica_id = upstream.member.replica.replica_id
        metrics.UPSTREAM_FAILURES.labels(failure.trouble).inc()
        log.warning("replica_failed", replica=replica_id, trouble=failure.trouble, error=str(failure))
        match failure.trouble:
            case "full":
                self._replica_set.note_full(upstream.member)
            case "version_missing":
                self._replica_set.note_missing_version(upstream.member, upstream.version)
            case "connection" | "aborted":
                self._replica_set.note_failure(upstream.member)
            case "hung":
                budget.waited(self._clock.monotonic_s() - upstream.member.silent_since_s)
            case "error":
                pass  # the request may be the cause, so only this call avoids the replica
        budget.failed(replica_id, failure)


def _unsupported_error(call: ChatCall, field: str) -> ApiError:
    if field == PROMPT:
        message = f"prompt: no replica of {call.target.model} takes text completions; use /v1/chat/completions"
        return ApiError(400, "unsupported_endpoint", message, field)
    message = (
        f"{field}: no replica of {call.target.model} can hold an answer to a form; leave it out. A replica that can "
        "announces it (`grammars`), which its engine and its inference.tool_parser decide"
    )
    return ApiError(400, "unsupported_field", message, field)


def _count_usage(transcript: Transcript) -> EngineAnswer:
    """Build the usage block of a stream whose replica died after its last token, from the tokens that it sent."""
    prompt = len(transcript.prompt_token_ids)
    sampled = sum(len(choice.token_ids) for choice in transcript.choices.values())
    usage = EngineUsage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)
    transcript.usage = transcript.usage or usage
    return EngineAnswer(usage=transcript.usage)
