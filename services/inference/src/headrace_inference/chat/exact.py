"""Prompts that continue a conversation with exactly the tokens that it had before.

A client sends its conversation back as text and JSON. Tokenizing that text again often gives other ids than the sampled
ones: another split of the same text, or other whitespace in a tool call's JSON after a client parsed and serialized it.
The collector would then see a history that is not a prefix and start a new branch, and tokens that were sampled in one
context would be trained in another.

So the exact ids of a prompt and its answer are remembered under a digest of the conversation up to and including the
answer's message. When the messages of a prompt begin with a remembered conversation, its text is rendered as usual and
compared: the rendered text must begin with the remembered prompt's text, continue with an equivalent answer (equal
reasoning, content and tool calls, with arguments compared as JSON), and end it with the end-of-turn token. Then the
remembered ids are used, and only the text after them is tokenized. Otherwise, because the template drops earlier
reasoning or the client edited a message, the whole text is tokenized, and the collector correctly sees a new branch.

Tenants do not share conversations, because the request's salt is part of each digest.

Digests contain tool call ids, which are random, so equal answers of different sessions are distinct if they call tools.
Equal answers of plain text share an entry; the latest one remains.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_inference import metrics
from headrace_inference.chat.answer import AnswerParser, AnswerSyntax, AnswerTextParser
from headrace_inference.chat.parsers import ParserContext, Parsers
from headrace_inference.chat.tokenizer import UNLIMITED, ChatTokenizer, RenderLimits
from headrace_runtime.chat_messages import argument_value, template_message
from headrace_runtime.errors import Refused
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import Message, Tool
from headrace_schemas.http.replica_api import History

Meaning = tuple[str, str, list[tuple[str, JsonValue]]]
"""Reasoning, content and calls of an answer. Arguments of calls are parsed JSON."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids and as rendered text, with the digest of the messages that it was rendered from."""

    token_ids: list[int]
    text: str
    digest: bytes | None
    """None for a prompt that was not rendered from a conversation."""
    salt: str
    """Salt of the request, which stands for its tenant. Tenants neither use nor displace each other's conversations."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Stored tokens of a prompt and its answer, which the next prompt of the conversation reuses."""

    prompt_text: str
    prompt_length: int
    token_ids: array[int]
    """Tokens of the prompt and of the answer."""


class ExactPrompts:
    """Builder of prompts that reuses the exact tokens of earlier prompts and answers. Thread-safe.

    The number of stored tokens is bounded. Beyond the bound, the least recently used conversation of the tenant with
    the most tokens is removed.
    """

    def __init__(self, tokens_max: int, parsers: Parsers) -> None:
        self._parsers = parsers
        self._conversations: TenantMemory[bytes, _Conversation] = TenantMemory(tokens_max)
        self._lock = threading.Lock()

    def build(
        self,
        tokenizer: ChatTokenizer,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        extra: Mapping[str, JsonValue],
        *,
        salt: str = "",
        limits: RenderLimits = UNLIMITED,
        history: History | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation, with stored tokens where possible.

        Args:
            tokenizer: the version's tokenizer.
            messages: the conversation.
            tools: the tools that the request offers.
            extra: variables for the chat template.
            salt: stands for the tenant. Only conversations with the same salt are used.
            limits: bounds of rendering.
            history: tokens of an earlier call of this conversation, which the gateway sent because another replica, or
                this one before a restart, answered it.

        Raises:
            Refused: the chat template refuses the messages (`ChatTokenizer.render`).
        """
        offered = [tool.model_dump(mode="json", exclude_none=True) for tool in tools]
        text = tokenizer.render(list(map(template_message, messages)), offered, extra, limits)
        chain = list(_digests(tokenizer, messages, offered, extra, salt))

        def earlier_prompt(count: int) -> str:
            return tokenizer.render(list(map(template_message, messages[:count])), offered, extra, limits)

        conversation = self._newest(messages, chain, salt, history, earlier_prompt)
        ids = self._continued_tokens(tokenizer, text, conversation, tools)
        return Prompt(tokenizer.encode(text) if ids is None else ids, text, chain[-1], salt)

    def remember(self, prompt: Prompt, message: Message, token_ids: Sequence[int], *, stop: str | None = None) -> None:
        """Store the tokens that were sampled for a prompt, so that a later prompt can continue them exactly.

        Args:
            prompt: the prompt.
            message: the message that the client received for these tokens.
            token_ids: the sampled tokens.
            stop: the stop string that ended the answer; None if none did. Some clients append it to the message that
                they send back.
        """
        if prompt.digest is None:
            return
        conversation = _Conversation(prompt.text, len(prompt.token_ids), array("i", [*prompt.token_ids, *token_ids]))
        echoes = [message]
        if stop is not None and not message.tool_calls:
            echoes.append(message.model_copy(update={"content": message.text + stop}))
        with self._lock:
            for echo in echoes:
                digest = _chain_digest(prompt.digest, echo)
                self._conversations.set(prompt.salt, digest, conversation, len(conversation.token_ids))

    def _recall(self, salt: str, digest: bytes) -> _Conversation | None:
        with self._lock:
            return self._conversations.get(salt, digest)

    def _newest(
        self,
        messages: Sequence[Message],
        chain: Sequence[bytes],
        salt: str,
        history: History | None,
        earlier_prompt: Callable[[int], str],
    ) -> _Conversation | None:
        """Return the longest stored conversation with which `messages` begin, or `history` if that is longer."""
        for position in reversed(range(len(messages))):
            if messages[position].role != "assistant":
                continue
            conversation = self._recall(salt, chain[position])
            if conversation is not None:
                return conversation
            if history is not None and history.messages == position:
                ids = array("i", [*history.prompt_token_ids, *history.token_ids])
                try:
                    return _Conversation(earlier_prompt(position), len(history.prompt_token_ids), ids)
                except Refused:  # the template renders the whole conversation, and no part of it
                    return None
        return None

    def _continued_tokens(
        self, tokenizer: ChatTokenizer, text: str, conversation: _Conversation | None, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the prompt's tokens: those of `conversation` followed by those of the new messages.

        The result is None if the prompt does not continue the conversation. The outcome is counted.
        """
        if conversation is None:
            metrics.EXACT_PROMPTS.labels("new").inc()
            return None
        ids = self._continue_conversation(tokenizer, conversation, text, tools)
        metrics.EXACT_PROMPTS.labels("diverged" if ids is None else "exact").inc()
        return ids

    def _continue_conversation(
        self, tokenizer: ChatTokenizer, conversation: _Conversation, text: str, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the ids of `conversation` followed by those of the new text.

        The result is None if the rendered `text` does not begin with the text of the conversation.
        """
        prompt_text = conversation.prompt_text
        if not text.startswith(prompt_text) or not tokenizer.eos_text or tokenizer.eos_id is None:
            return None
        end = text.find(tokenizer.eos_text, len(prompt_text))
        if end < 0:
            return None
        rendered = tokenizer.plain(text[len(prompt_text) : end])
        ids = conversation.token_ids.tolist()
        context = ParserContext(tokenizer.transformers_tokenizer, tools)
        syntax = AnswerSyntax.of(prompt_text, self._parsers, tools=bool(tools), context=context)
        sampled = tokenizer.text_of(ids[conversation.prompt_length :], special_as_text=syntax.by_token)
        if rendered.strip() != sampled.strip() and meaning(tokenizer, rendered, syntax) != meaning(
            tokenizer, sampled, syntax
        ):
            return None
        if (
            ids[-1] != tokenizer.eos_id
        ):  # the answer stopped at its length or at a stop string, and the template ends the turn
            ids.append(tokenizer.eos_id)
        return ids + tokenizer.encode(text[end + len(tokenizer.eos_text) :])


def meaning(tokenizer: ChatTokenizer, text: str, syntax: AnswerSyntax) -> Meaning:
    """Parse the text of an answer into reasoning, content and calls."""
    if syntax.by_token:
        answer = AnswerParser(tokenizer, syntax)
        answer.feed(tokenizer.encode(text))
        answer.end()
        total = answer.total
    else:
        reader = AnswerTextParser(syntax)
        reader.feed(text)
        reader.end()
        total = reader.total
    calls = [(call.function.name, argument_value(call.function.arguments)) for call in total.calls]
    return total.reasoning.strip(), total.content.strip(), calls


def _digests(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[object],
    extra: Mapping[str, JsonValue],
    salt: str,
) -> Iterator[bytes]:
    """Yield for each message the digest of the conversation up to and including this message."""
    digest = hashlib.sha256(tokenizer.digest + _canonical([salt, tools, extra])).digest()
    for message in messages:
        digest = _chain_digest(digest, message)
        yield digest


def _chain_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with the digest `digest` after `message` is added.

    It ignores reasoning, which some clients do not send back, and the name of an answer, which the model did not write.
    The comparison of the rendered text decides whether they matter.
    """
    name = None if message.role == "assistant" else message.name
    calls = [
        (call.id, call.function.name, argument_value(call.function.arguments)) for call in message.tool_calls or ()
    ]
    parts = [message.role, message.text.strip(), name, message.tool_call_id, calls]
    return hashlib.sha256(digest + _canonical(parts)).digest()


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
"""One encoder for all messages: `json.dumps` would build one for each."""


def _canonical(value: object) -> bytes:
    return _CANONICAL.encode(value).encode()
