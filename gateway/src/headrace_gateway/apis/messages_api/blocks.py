"""Content blocks of a Messages request, and their translation to chat messages.

The rules of the translation:

- Blocks of text in the system prompt and in a user's message are separate paragraphs. The blocks of an answer are one
  text, because the model wrote them as one.
- A `tool_result` becomes a message with role `tool`. The text of a failed one begins with `Error: ` unless it reports
  an error itself.
- Consecutive messages of one role are one message, as Anthropic's API documents it.
- A system message before the first other message extends the system prompt. A later one becomes part of a user message,
  between `<system>` and `</system>`, because most chat templates accept a system message in the first place only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, JsonValue, ValidationInfo

from headrace_gateway.requests.chat_messages import MEDIA_PARTS
from headrace_gateway.requests.request_context import RequestContext, context_of
from headrace_schemas.values.base import LongText, Model, Text
from headrace_schemas.values.bounds import JsonObject

Json = dict[str, JsonValue]
_PARAGRAPH = "\n\n"
_BILLING_HEADER = "x-anthropic-billing-header:"
"""The first line of Claude Code's system prompt. The line is meant for Anthropic's servers and changes with each
call, so that no prefix of the prompt could be reused."""
_ERROR_SEARCHED = 40
"""Number of characters at the beginning of a failed tool's result that are searched for the word `error`."""


class _Block(Model):
    """Content block. Fields without an effect, such as `cache_control` and `citations`, are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Block):
    """Content block of type `text`."""

    type: Literal["text"]
    text: LongText


class ThinkingBlock(_Block):
    """Content block with the reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: LongText


class RedactedThinkingBlock(_Block):
    """Content block with reasoning that another server encrypted. The gateway cannot read it and leaves it out of the
    prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Block):
    """Content block with a tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject


def _text_block(value: Any, info: ValidationInfo) -> Any:
    """Convert a content block of the Messages API that is no plain text, such as a document or a search result, to a
    text block.

    An image or other media becomes the text that the settings name for it.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise ValueError("must be a block: an object with a type")
    text: Any
    if kind == "document" and (text := _document_text(value.get("source"))) is not None:
        return {"type": "text", "text": text}
    if kind in MEDIA_PARTS:
        return {"type": "text", "text": context_of(info).media_text(kind)}
    if kind == "search_result":
        parts = value.get("content")
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        lines = [text for text in (value.get("title"), value.get("source"), *texts) if isinstance(text, str)]
        return {"type": "text", "text": "\n".join(lines)}
    if kind == "tool_reference":
        return {"type": "text", "text": value.get("tool_name")}
    return value


def _document_text(source: Any) -> str | None:
    """Return the text of a document that was sent as plain text, or None."""
    if not isinstance(source, dict) or source.get("type") != "text":
        return None
    text = source.get("data")
    return text if isinstance(text, str) else None


def _result_block(value: Any, info: ValidationInfo) -> Any:
    block = _text_block(value, info)
    if block["type"] != "text":
        raise ValueError(f"blocks of type {block['type'][:40]!r} are not supported in a tool_result; only text is")
    return block


def _as_blocks(value: Any) -> Any:
    if isinstance(value, str):
        return ({"type": "text", "text": value},)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    return tuple(value)


ResultContent = Annotated[tuple[Annotated[TextBlock, BeforeValidator(_result_block)], ...], BeforeValidator(_as_blocks)]


class ToolResultBlock(_Block):
    """Content block with the result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: ResultContent | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """Text of the result. If the tool failed, it begins with `Error: ` unless its beginning contains the word
        `error`."""
        text = "\n".join(block.text for block in self.content or ())
        if self.is_error and "error" not in text[:_ERROR_SEARCHED].lower():
            return f"Error: {text}"
        return text


_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block(value: Any, info: ValidationInfo) -> Any:
    block = _text_block(value, info)
    if block["type"] not in _KINDS:
        message = f"blocks of type {block['type'][:40]!r} are not supported; supported are {', '.join(_KINDS)}"
        raise ValueError(message)
    return block


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Discriminator("type")
    ],
    BeforeValidator(_block),
]
Content = Annotated[tuple[Block, ...], BeforeValidator(_as_blocks)]
SystemContent = Annotated[tuple[Annotated[TextBlock, BeforeValidator(_result_block)], ...], BeforeValidator(_as_blocks)]


class MessageParam(Model):
    """One message of a Messages request."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Content


def chat_messages(system: Sequence[TextBlock], messages: Iterable[MessageParam], context: RequestContext) -> list[Json]:
    """Convert the system prompt and the messages of a Messages request to messages of a chat request."""
    conversation = _Conversation(context)
    conversation.add_system(block.text for block in system)
    for number, message in enumerate(messages):
        if message.role == "system":
            conversation.add_system(block.text for block in message.content if isinstance(block, TextBlock))
        elif message.role == "assistant":
            conversation.add_answer(message.content)
        else:
            conversation.add_user(message.content, f"messages.{number}")
    return conversation.messages()


class _Conversation:
    """Builder of the list of chat messages into which a request of the Messages API is converted."""

    def __init__(self, context: RequestContext) -> None:
        self._messages: list[Json] = []
        self._texts: list[dict[str, list[str]]] = []
        """For each message, the pieces of text of each of its fields. They are joined once, because there may be
        thousands."""
        self._context = context

    def messages(self) -> list[Json]:
        """Return the chat messages in the order in which they were added."""
        return [
            {**message, **{field: "".join(pieces) for field, pieces in texts.items()}}
            for message, texts in zip(self._messages, self._texts, strict=True)
        ]

    def add_system(self, texts: Iterable[str]) -> None:
        paragraphs = []
        for text in texts:
            if text.startswith(_BILLING_HEADER):
                self._context.report("system.billing_header")
            elif text:
                paragraphs.append(text)
        text = _PARAGRAPH.join(paragraphs)
        if not text:
            return
        if self._last_role in (None, "system"):
            self._add_text("system", text)
        else:
            self._add_text("user", f"<system>\n{text}\n</system>")

    def add_user(self, blocks: Sequence[Block], field: str) -> None:
        if not blocks:
            self._add_text("user", "")
        for block in blocks:
            match block:
                case TextBlock():
                    self._add_text("user", block.text)
                case ToolResultBlock():
                    self._begin({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
                case _:
                    raise ValueError(f"{field}: a user's message cannot hold a block of type {block.type!r}")

    def add_answer(self, blocks: Sequence[Block]) -> None:
        if self._last_role != "assistant":
            self._begin({"role": "assistant", "content": ""})
        answer, texts = self._messages[-1], self._texts[-1]
        for block in blocks:
            match block:
                case TextBlock():
                    texts.setdefault("content", []).append(block.text)
                case ThinkingBlock():
                    texts.setdefault("reasoning_content", []).append(block.thinking)
                case ToolUseBlock():
                    calls = answer.setdefault("tool_calls", [])
                    assert isinstance(calls, list)
                    arguments = json.dumps(block.input, ensure_ascii=False)
                    function: Json = {"name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case RedactedThinkingBlock():
                    self._context.ignore("messages.redacted_thinking", "only its author can read it")
                case ToolResultBlock():
                    raise ValueError("messages: an assistant's message cannot hold a block of type 'tool_result'")

    def _add_text(self, role: str, text: str) -> None:
        if self._last_role != role:
            self._begin({"role": role, "content": ""})
        if text:
            pieces = self._texts[-1].setdefault("content", [])
            pieces += [_PARAGRAPH, text] if pieces else [text]

    def _begin(self, message: Json) -> None:
        self._messages.append(message)
        self._texts.append({})

    @property
    def _last_role(self) -> JsonValue:
        return self._messages[-1]["role"] if self._messages else None
