"""Handling of one model call, from the request to a durable turn event and a finished response, plain or streamed.

The APIs of `POST /v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages` differ in how a request
is read and how an answer is written (`Read`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from headrace_gateway import metrics
from headrace_gateway.access.limits import Work
from headrace_gateway.access.refusals import CONTEXT_LENGTH_EXCEEDED, ApiError, overloaded_error
from headrace_gateway.apis.admission import Admission, AdmittedRequest
from headrace_gateway.apis.answers import AnswerShape, ChatCompletions, StreamedAnswer, answer_headers
from headrace_gateway.capture.captured_turns import CapturedTurns, message_digests
from headrace_gateway.capture.recent_turns import RecentTurns, RepeatedRequests
from headrace_gateway.capture.transcript import Transcript
from headrace_gateway.capture.turn_events import capture
from headrace_gateway.requests.chat_call import ChatCall, Target, canonical_request, core_of, digest_of
from headrace_gateway.requests.chat_messages import MessageMemory
from headrace_gateway.requests.chat_request import ChatRequest, parse_chat
from headrace_gateway.requests.client_connection import ClientConnection
from headrace_gateway.requests.identity import PURPOSE_HEADER, RequestMetadata, identify, side_call, sub_agent
from headrace_gateway.requests.request_context import RequestContext, metric_label
from headrace_gateway.requests.response_store import ResponseStore
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_gateway.routing.relay import Relay
from headrace_gateway.settings import GatewaySettings
from headrace_runtime.clock import Clock
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_schemas.values import ids

UNDELIVERED_WAIT_S = 10.0
"""Seconds for which a response is still generated after its client disconnected, to be captured as undelivered."""

_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_SHADOW_LOAD_MAX = 0.5
"""Load of a replica (calls per slot) from which on shadow calls are refused, because users have precedence."""
_ROUTING_POLL_S = 0.05
PING_S = 10.0
"""Seconds without an event after which the stream gets a keep-alive event, so that no proxy closes the connection."""
_ANSWERED_BYTES = 100
"""Estimated bytes of one sampled token in an answer or an event."""


_STORED_PROMPT_BYTES = 6
"""Estimated bytes of a prompt token in the dead letter of a call."""
_PROMPT_TOKEN_BYTES = 4
_PROMPT_LENGTH = re.compile(
    r"the maximum context length is (\d{1,18}) tokens, you asked for (\d{1,18}) in the messages"
)
"""Message of a replica about a prompt that does not fit. If the prompt alone fills the context, the call is not
repeated without `max_tokens`, because rendering and tokenizing a long prompt is expensive."""
_ANSWER_TOKENS = 1024
"""Expected tokens of a choice of a request without a limit."""


Read = Callable[[bytes, RequestContext], tuple[ChatRequest, AnswerShape]]
"""Function that parses a body of one API, in any thread. It returns the request and the format of its answers, or
raises `ApiError`."""


def read_chat(body: bytes, context: RequestContext) -> tuple[ChatRequest, AnswerShape]:
    """Read a body of `POST /v1/chat/completions`."""
    return parse_chat(body, context), ChatCompletions()


def estimate_tokens(call: ChatCall) -> int:
    """Estimate the tokens that a call may use: its prompt, and for each choice the limit on the answer."""
    return len(call.core) // _PROMPT_TOKEN_BYTES + call.request.choices * (call.sampling.max_tokens or _ANSWER_TOKENS)


@dataclass(frozen=True, slots=True)
class Chat:
    """ASGI endpoint of one API. It has no state between requests."""

    read: Read
    settings: GatewaySettings
    admission: Admission
    catalog: ModelCatalog
    relay: Relay
    clock: Clock
    workers: WorkerThreads
    recent: RecentTurns
    repeated: RepeatedRequests
    captured: CapturedTurns
    messages: MessageMemory
    responses: ResponseStore | None = None
    """The stored responses, for an API whose requests may refer to them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises `ApiError` before the status is sent; later errors are reported in the stream."""
        async with self.admission.enter(scope, receive, "chat") as admitted:
            call, shape = await self.parse_call(scope, admitted)
            if call.identity.shadow_of is not None:
                self.relay.check_spare_capacity(call, _SHADOW_LOAD_MAX)
            call = replace(call, repeats=self.repeated.begin(call))
            mode = "stream" if call.request.stream else "plain"
            choices, tokens = call.request.choices, estimate_tokens(call)
            with (
                self.admission.limits.work(admitted.caller, choices, tokens) as work,
                metrics.CALL_SECONDS.labels(mode).time(),
            ):
                await self._serve(call, shape, work, ClientConnection(receive, send))

    async def parse_call(self, scope: Scope, admitted: AdmittedRequest) -> tuple[ChatCall, AnswerShape]:
        """Parse an admitted request to a call and the format of its answers. Raises `ApiError`."""
        started_at = self.clock.now()
        bytes_max = admitted.caller.limits.body_bytes_max
        view = None if self.responses is None else self.responses.view(admitted.caller)
        context = RequestContext(
            self.settings.request_rules, bytes_max, view, self.messages.view(admitted.caller.tenant)
        )
        referred_bytes = 0 if view is None else view.bytes_referred_by(admitted.body, bytes_max)
        size_bytes = len(admitted.body) + referred_bytes
        request, shape = await self.workers.run(
            size_bytes, lambda: self.read(admitted.body, context), admitted.caller.tenant
        )
        await self._routing_is_known()
        by_agent = PURPOSE_HEADER not in admitted.headers
        target = self.catalog.resolve(request.model, admitted.caller.may_use, by_agent=by_agent)
        if target.is_substitute and not self.catalog.has_default_model:
            context.report("model")
        for name in context.ignored:
            metrics.IGNORED_FIELDS.labels(metric_label(name)).inc()
        size_bytes = max(len(admitted.body), context.referred_bytes)
        call = await self.workers.run(
            size_bytes, lambda: self._call(scope, admitted, request, target, started_at, context)
        )
        return call, shape

    def _call(
        self,
        scope: Scope,
        admitted: AdmittedRequest,
        request: ChatRequest,
        target: Target,
        started_at: datetime,
        context: RequestContext,
    ) -> ChatCall:
        """Build the call. The method may run in any thread."""
        messages = tuple(message.event for message in request.messages)
        sampling = request.sampling
        metadata = RequestMetadata(admitted.headers, request.metadata or {})
        cache_key = (request.model_extra or {}).get("prompt_cache_key")
        identity = identify(admitted.caller, scope, metadata, target.model, messages, request.user, cache_key)
        encoded = [message.event_json for message in request.messages]
        canonical_json = canonical_request(request, messages, sampling, encoded)
        retry = admitted.headers.get(b"x-stainless-retry-count", b"")
        return ChatCall(
            request=request,
            messages=messages,
            sampling=sampling,
            identity=identity,
            target=target,
            response_id=ids.response_id(identity.session_key),
            digest=digest_of(request.model, canonical_json),
            retry=int(retry) if retry.isdigit() and len(retry) < 10 else 0,
            started_at=started_at,
            core=core_of(canonical_json, request),
            cache_salt=self.admission.keys.cache_salt(admitted.caller.tenant),
            side_call=side_call(admitted.headers, self.settings.side_calls, messages, has_tools=bool(request.tools)),
            sub_agent=sub_agent(admitted.headers),
            message_digests=message_digests(encoded),
            ignored=context.ignored,
            response=context.record,
        )

    async def _routing_is_known(self) -> None:
        """Wait until the routing of the models has been read from the bus, which only requests soon after the start
        have to do."""
        deadline_s = self.clock.monotonic_s() + self.settings.upstream.routing_wait_s
        while not self.catalog.is_ready:
            if self.clock.monotonic_s() > deadline_s:
                raise overloaded_error("no model is routed yet: the bus is away, or the registry has promoted none")
            await self.clock.sleep(_ROUTING_POLL_S)

    async def _serve(self, call: ChatCall, shape: AnswerShape, work: Work, client: ClientConnection) -> None:
        """Send the call to a replica and its answer to the client.

        If the prompt fits into the context but `max_tokens` does not, the call is repeated without `max_tokens`.
        """
        try:
            await self._answer(call, shape, work, client)
        except ApiError as error:
            unfit = error.code == CONTEXT_LENGTH_EXCEEDED and call.sampling.max_tokens is not None
            if not unfit or client.started or self.settings.strict:
                raise
            lengths = _PROMPT_LENGTH.match(str(error))
            if lengths is not None and int(lengths[2]) >= int(lengths[1]):
                raise ApiError(error.status, error.code, lengths[0], error.param) from None
            metrics.IGNORED_FIELDS.labels("max_tokens").inc()
            await self._answer(call.without_max_tokens(), shape, work, client)

    async def _answer(self, call: ChatCall, shape: AnswerShape, work: Work, client: ClientConnection) -> None:
        streamed = shape.streamed(call) if call.request.stream else None
        try:
            async with asyncio.timeout(self.settings.upstream.request_timeout_s) as deadline:
                async with client.watch_disconnect(lambda: self._abandon(call, deadline)):
                    if streamed is None:
                        await self._plain(call, shape, work, client)
                    else:
                        await self._stream(call, streamed, work, client)
        except TimeoutError:
            if client.disconnected:
                metrics.ABANDONED.inc()
                return
            limit_s = self.settings.upstream.request_timeout_s
            error = ApiError(504, "timeout", f"the request took longer than {limit_s:g} s")
            await self._fail(client, streamed, error)
        except ApiError as error:
            await self._fail(client, streamed, error)
        except asyncio.CancelledError:  # the grace period for open requests of a stopping server is over
            if client.disconnected:
                raise
            refusal = overloaded_error("the gateway stops before the answer is complete; send the request again", 1)
            await self._fail(client, streamed, refusal)

    def _abandon(self, call: ChatCall, deadline: asyncio.Timeout) -> None:
        """Shorten the deadline of a call whose client disconnected: an answer that ends in time is captured, another is
        dropped."""
        self.repeated.disconnected(call)
        soon = asyncio.get_running_loop().time() + UNDELIVERED_WAIT_S
        with contextlib.suppress(RuntimeError):  # the deadline has just passed
            deadline.reschedule(min(soon, deadline.when() or soon))

    @staticmethod
    async def _fail(client: ClientConnection, streamed: StreamedAnswer | None, error: ApiError) -> None:
        if not client.started or streamed is None:
            raise error
        await client.body(streamed.error_event(error))

    async def _plain(self, call: ChatCall, shape: AnswerShape, work: Work, client: ClientConnection) -> None:
        body = await self._plain_body(call, shape, work, client)
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await client.start(200, {**length, **shape.headers(call)})
        await client.body(body)

    async def _plain_body(self, call: ChatCall, shape: AnswerShape, work: Work, client: ClientConnection) -> bytes:
        """Capture the whole answer of a call as a turn, and return its response body.

        The parsed answer is freed on return, because it takes twenty times the memory of the body, and a client may
        read the body slowly.
        """
        answer, transcript = await self.relay.complete(call)
        await self._capture(call, transcript, work, delivered=not client.disconnected)
        size_bytes = transcript.sampled * _ANSWERED_BYTES
        return await self.workers.run(size_bytes, lambda: shape.plain_body(call, answer))

    async def _stream(self, call: ChatCall, streamed: StreamedAnswer, work: Work, client: ClientConnection) -> None:
        transcript = Transcript()
        async with (
            contextlib.aclosing(self.relay.stream(call, transcript)) as stream,
            client.keep_alive(streamed.ping, PING_S),
        ):
            async for chunk in stream:
                events = streamed.events(chunk, transcript.version)
                if events and not client.started:
                    waited = self.clock.now() - call.started_at
                    metrics.FIRST_CHUNK_SECONDS.observe(waited.total_seconds())
                    await client.start(200, {**_STREAM, **streamed.headers})
                if events:
                    await client.body(events, more=True)
        await self._capture(call, transcript, work, delivered=not client.disconnected)
        if not client.started:
            await client.start(200, {**_STREAM, **streamed.headers})
        await client.body(streamed.end())

    async def _capture(self, call: ChatCall, transcript: Transcript, work: Work, *, delivered: bool) -> None:
        size_bytes = len(call.core) + transcript.sampled * _ANSWERED_BYTES
        prompt = len(transcript.prompt_token_ids)
        work.used_tokens = prompt + transcript.sampled
        untrained = self.catalog.untrained(call.target.model, transcript.version) if transcript.version else None
        with metrics.CAPTURE_SECONDS.time():
            earlier = self.captured.of_session(call.identity)
            event, turn = await self.workers.run(
                size_bytes, lambda: capture(call, transcript, earlier, delivered=delivered, untrained=untrained)
            )
            await self.admission.publish(event)
        if turn is not None:
            self.captured.add(call.identity, turn)
        stored = turn.event_bytes if turn is not None else len(call.core) + prompt * _STORED_PROMPT_BYTES
        self.admission.limits.store(call.identity.tenant, stored)
        self.recent.note(call.identity.tenant, call.response_id, event)
        self.repeated.end(call)


ReadCount = Callable[[bytes, RequestContext], ChatRequest]
"""Function that parses a body of one API to a plain chat request for one token, or raises `ApiError`."""


@dataclass(frozen=True, slots=True)
class TokenCounting:
    """Endpoint that returns the number of prompt tokens of a call. `fields` are the constant fields of its response.

    A replica renders and tokenizes the prompt and samples one token, which is neither captured nor returned. The count
    is therefore exact on every engine, and the call that follows finds its prompt in the replica's cache.
    """

    chat: Chat
    fields: dict[str, str]

    async def count(self, request: Request) -> Response:
        """Return the number of prompt tokens that a call with this body would have. Raises `ApiError`."""
        chat = self.chat
        async with chat.admission.enter(request.scope, request.receive, "chat") as admitted:
            call, _ = await chat.parse_call(request.scope, admitted)
            with chat.admission.limits.work(admitted.caller, 1, estimate_tokens(call)) as work:
                _, transcript = await chat.relay.complete(call)
                work.used_tokens = len(transcript.prompt_token_ids) + transcript.sampled
        count = len(transcript.prompt_token_ids)
        return JSONResponse({**self.fields, "input_tokens": count}, headers=answer_headers(call))


def reader(read: ReadCount) -> Callable[[bytes, RequestContext], tuple[ChatRequest, ChatCompletions]]:
    """Convert `read`, which returns only a request, to a function that also returns the format of answers, as `Chat`
    needs it."""
    return lambda body, context: (read(body, context), ChatCompletions())
