"""Continues a conversation with exactly the tokens that it had before.

A client sends its conversation back as text and JSON. Tokenizing that text again gives other ids than were sampled more
often than one would think: another split of the same text, other whitespace in a tool call's JSON after a client parsed
and wrote it again. The collector would then see a history that is no prefix and fork, and what
was sampled would be trained in one context and continued in another.

So the exact ids of a prompt and its answer are remembered under a digest of the conversation up to and including the
answer's message. When a prompt arrives whose messages begin with a remembered conversation, its text is rendered as
usual and lined up with what is remembered: the rendered text must begin with the remembered prompt's text, go on with
an answer that reads the same (equal reasoning, content and tool calls, JSON compared as JSON), and end it with the
end-of-turn token. Then the remembered ids are used as they are, and only the text behind them is tokenized. When
anything does not line up, because the template drops earlier reasoning or the client edited a message, the prompt is
tokenized from its text as a whole: it is a new branch, and the collector shall see it as one.

Tenants do not share conversations: the caller's salt is in each digest.

Digests contain tool call ids, which are random, so equal looking answers of different sessions are told apart where
they call tools. Answers of plain text that look equal share an entry; the later one stays.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_inference import metrics
from headrace_inference.chat.answer import Answer, Reading, Text
from headrace_inference.chat.parsers import Asked, Parsers
from headrace_inference.chat.tokenizer import UNLIMITED, ChatTokenizer, RenderLimits
from headrace_runtime.chat_messages import argument_value, template_message
from headrace_schemas import Message, Tool

Meaning = tuple[str, str, list[tuple[str, JsonValue]]]
"""Reasoning, content and calls, with their arguments as JSON."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, as rendered text, and the digest that the conversation has reached with it."""

    token_ids: list[int]
    text: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Known:
    prompt_text: str
    prompt_length: int
    token_ids: array[int]
    """Prompt and answer."""


class ExactPrompts:
    """Bounded by the tokens that it holds; the least recently used conversation goes first.

    Usable from several threads.
    """

    def __init__(self, tokens_max: int, parsers: Parsers) -> None:
        self._tokens_max = tokens_max
        self._parsers = parsers
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._tokens = 0
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
    ) -> Prompt:
        """Conversations of another `salt` are not known. Raises as `ChatTokenizer.render` does."""
        offered = [tool.model_dump(mode="json", exclude_none=True) for tool in tools]
        text = tokenizer.render(list(map(template_message, messages)), offered, extra, limits)
        chain = list(_digests(tokenizer, messages, offered, extra, salt))
        ids = self._continued(tokenizer, text, messages, chain, tools)
        return Prompt(tokenizer.encode(text) if ids is None else ids, text, chain[-1])

    def remember(self, prompt: Prompt, message: Message, token_ids: Sequence[int]) -> None:
        """`token_ids` were sampled for `prompt`, and the client was told `message`."""
        known = _Known(prompt.text, len(prompt.token_ids), array("i", [*prompt.token_ids, *token_ids]))
        if len(known.token_ids) > self._tokens_max:
            return
        digest = _chained(prompt.digest, message)
        with self._lock:
            self._forget(digest)
            self._known[digest] = known
            self._tokens += len(known.token_ids)
            while self._tokens > self._tokens_max:
                self._forget(next(iter(self._known)))

    def _recall(self, digest: bytes) -> _Known | None:
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
            return known

    def _forget(self, digest: bytes) -> None:
        known = self._known.pop(digest, None)
        if known is not None:
            self._tokens -= len(known.token_ids)

    def _continued(
        self,
        tokenizer: ChatTokenizer,
        text: str,
        messages: Sequence[Message],
        chain: Sequence[bytes],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        for digest, message in zip(reversed(chain), reversed(messages), strict=True):
            if message.role != "assistant":
                continue
            known = self._recall(digest)
            if known is not None:
                ids = self._lined_up(tokenizer, known, text, tools)
                metrics.EXACT_PROMPTS.labels("diverged" if ids is None else "exact").inc()
                return ids
        metrics.EXACT_PROMPTS.labels("new").inc()
        return None

    def _lined_up(self, tokenizer: ChatTokenizer, known: _Known, text: str, tools: Sequence[Tool]) -> list[int] | None:
        """The remembered ids and those of the text behind them; None when the text tells another story."""
        if not text.startswith(known.prompt_text) or not tokenizer.eos_text or tokenizer.eos_id is None:
            return None
        end = text.find(tokenizer.eos_text, len(known.prompt_text))
        if end < 0:
            return None
        rendered = tokenizer.plain(text[len(known.prompt_text) : end])
        ids = known.token_ids.tolist()
        asked = Asked(tokenizer.outer, tools)
        how = Reading.of(known.prompt_text, self._parsers, tools=bool(tools), asked=asked)
        sampled = tokenizer.text_of(ids[known.prompt_length :], whole=how.by_token)
        if rendered.strip() != sampled.strip() and meaning(tokenizer, rendered, how) != meaning(
            tokenizer, sampled, how
        ):
            return None
        if ids[-1] != tokenizer.eos_id:  # cut off by its length or a stop string: the template ends the turn
            ids.append(tokenizer.eos_id)
        return ids + tokenizer.encode(text[end + len(tokenizer.eos_text) :])


def meaning(tokenizer: ChatTokenizer, text: str, how: Reading) -> Meaning:
    """What an answer of this text is read as."""
    if how.by_token:
        answer = Answer(tokenizer, how)
        answer.feed(tokenizer.encode(text))
        answer.end()
        whole = answer.whole
    else:
        reader = Text(how)
        reader.feed(text)
        reader.end()
        whole = reader.whole
    calls = [(call.function.name, argument_value(call.function.arguments)) for call in whole.calls]
    return whole.reasoning.strip(), whole.content.strip(), calls


def _digests(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[object],
    extra: Mapping[str, JsonValue],
    salt: str,
) -> Iterator[bytes]:
    """One digest per message: of everything up to and including it."""
    digest = hashlib.sha256(tokenizer.digest + _canonical([salt, tools, extra])).digest()
    for message in messages:
        digest = _chained(digest, message)
        yield digest


def _chained(digest: bytes, message: Message) -> bytes:
    """Two things do not count, and the text decides if they matter: reasoning, which some clients do not send back, and
    a name on an answer, which the model did not say."""
    name = None if message.role == "assistant" else message.name
    calls = [
        (call.id, call.function.name, argument_value(call.function.arguments)) for call in message.tool_calls or ()
    ]
    parts = [message.role, message.text.strip(), name, message.tool_call_id, calls]
    return hashlib.sha256(digest + _canonical(parts)).digest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
