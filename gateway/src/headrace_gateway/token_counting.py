"""Counting the tokens of a prompt without an answer: `/v1/messages/count_tokens` and `/v1/responses/input_tokens`.

A replica renders and tokenizes the prompt and samples one token, which is neither captured nor returned. The count is
therefore exact on every engine, and the call that follows finds its prompt in the replica's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_gateway.answers import ChatCompletions, answer_headers
from headrace_gateway.chat import Chat, tokens_asked
from headrace_gateway.chat_request import ChatRequest
from headrace_gateway.request_context import RequestContext

ReadCount = Callable[[bytes, RequestContext], ChatRequest]
"""Reads a body of one API. Returns a plain request for one token, or raises `ApiError`."""


@dataclass(frozen=True, slots=True)
class TokenCounting:
    """The endpoint of one API. `fields` are the constant fields of its answer."""

    chat: Chat
    fields: dict[str, str]

    async def count(self, request: Request) -> Response:
        """Return the number of tokens that a call with this body would begin from. Raises `ApiError`."""
        chat = self.chat
        async with chat.admission.enter(request.scope, request.receive, "chat") as admitted:
            call, _ = await chat.understand(request.scope, admitted)
            with chat.admission.limits.work(admitted.caller, 1, tokens_asked(call)) as work:
                _, transcript = await chat.relay.complete(call)
                work.used_tokens = len(transcript.prompt_token_ids) + transcript.sampled
        count = len(transcript.prompt_token_ids)
        return JSONResponse({**self.fields, "input_tokens": count}, headers=answer_headers(call))


def reader(read: ReadCount) -> Callable[[bytes, RequestContext], tuple[ChatRequest, ChatCompletions]]:
    """Return `read` in the form that `Chat` takes."""
    return lambda body, context: (read(body, context), ChatCompletions())
