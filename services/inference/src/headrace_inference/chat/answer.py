"""Conversion of the sampled tokens of one choice into reasoning, content and tool calls, streamed or not."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from headrace_inference.chat.json_scanner import StopStrings
from headrace_inference.chat.parsers import (
    NO_REASONING,
    NO_TOOLS,
    Call,
    ParserContext,
    Parsers,
    ReasoningParser,
    ToolParser,
)
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_schemas import FunctionCall, Message, ToolCall


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """Syntax of the answers to one request: the parsers and the stop strings that apply to them."""

    tools: ToolParser = NO_TOOLS
    reasoning: ReasoningParser = NO_REASONING
    reasoning_opened: bool = False
    """Whether the prompt ends inside reasoning."""
    stops: Sequence[str] = ()
    context: ParserContext | None = None
    """Context for parsers that read tokens."""

    @classmethod
    def of(
        cls,
        prompt: str,
        parsers: Parsers,
        *,
        tools: bool,
        stops: Sequence[str] = (),
        context: ParserContext | None = None,
    ) -> AnswerSyntax:
        """Return the syntax of the answers to a rendered prompt.

        Args:
            prompt: the rendered prompt, whose end determines whether reasoning is open.
            parsers: the parsers of the replica.
            tools: whether the request offers tools. Without tools, tool calls are parsed as content.
            stops: the stop strings of the request.
            context: context for parsers that read tokens.
        """
        tool_parser = parsers.tools if tools else NO_TOOLS
        return cls(tool_parser, parsers.reasoning, parsers.reasoning.opened(prompt), stops, context)

    @property
    def by_token(self) -> bool:
        """Whether a parser reads tokens one by one."""
        return self.context is not None and (self.tools.of_tokens is not None or self.reasoning.of_tokens is not None)


@dataclass(slots=True)
class Delta:
    """New reasoning, content and tool calls of an answer since the previous delta."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __iadd__(self, more: Delta) -> Self:
        self.reasoning += more.reasoning
        self.content += more.content
        self.calls += more.calls
        return self


class AnswerTextParser:
    """Parser of an answer's text into deltas, fed piece by piece. `total` is the sum of all deltas."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._stop = StopStrings(syntax.stops)
        self._reasoning = syntax.reasoning.reader(syntax.context, opened=syntax.reasoning_opened)
        self._tools = syntax.tools.reader(syntax.context)
        self._unread: list[int] = []
        """Tokens whose text is still buffered."""
        self._unanswered: list[int] = []
        """Tokens whose text was read and is neither reasoning nor answer yet."""
        self.total = Delta()

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> Delta:
        """Parse the next piece of text, and return the part of the answer that later text cannot change.

        Args:
            token_ids: the tokens of the piece, for parsers that read tokens.
        """
        delta = Delta()
        self._unread += token_ids
        self._read(delta, self._stop.feed(text))
        return self._add(delta)

    def end(self, text: str = "") -> Delta:
        """Parse the last piece of text, and return it together with everything that was still buffered."""
        delta = Delta()
        self._read(delta, self._stop.feed(text) + self._stop.end())
        reasoning, answer = self._reasoning.end()
        delta.reasoning += reasoning
        self._read_answer(delta, answer)
        parsed = self._tools.end()
        delta.content += parsed.content
        delta.calls += map(_with_id, parsed.calls)
        return self._add(delta)

    def _read(self, delta: Delta, text: str) -> None:
        ids: list[int] = []
        if text:
            ids, self._unread = self._unread, []
        reasoning, answer = self._reasoning.feed(text, ids)
        delta.reasoning += reasoning
        self._unanswered = ids if reasoning else self._unanswered + ids
        self._read_answer(delta, answer)

    def _read_answer(self, delta: Delta, text: str) -> None:
        ids: list[int] = []
        if text:
            ids, self._unanswered = self._unanswered, []
        parsed = self._tools.feed(text, ids)
        delta.content += parsed.content
        delta.calls += map(_with_id, parsed.calls)

    def _add(self, delta: Delta) -> Delta:
        self.total += delta
        return delta

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._stop.complete


class AnswerParser:
    """Parser of an answer's tokens into reasoning, content and tool calls.

    It does not affect which tokens are sampled.
    """

    def __init__(self, tokenizer: ChatTokenizer, syntax: AnswerSyntax) -> None:
        self._tokens = tokenizer.stream(special_as_text=syntax.by_token)
        self._text = AnswerTextParser(syntax)
        self._by_token = syntax.by_token
        self.token_ids: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> Delta:
        """Decode and parse the next tokens, and return the part of the answer that later tokens cannot change."""
        self.token_ids += token_ids
        if not self._by_token:
            return self._text.feed(self._tokens.feed(token_ids))
        delta = Delta()
        for token in token_ids:
            delta += self._text.feed(self._tokens.feed((token,)), (token,))
        return delta

    def end(self) -> Delta:
        """Finish the answer after its last token, and return the rest of the answer, which was still buffered."""
        return self._text.end(self._tokens.end())

    @property
    def total(self) -> Delta:
        """Sum of all deltas so far."""
        return self._text.total

    @property
    def calls(self) -> int:
        """Number of tool calls so far."""
        return len(self._text.total.calls)

    @property
    def message(self) -> Message:
        """The answer so far as a message."""
        total = self._text.total
        return Message(
            role="assistant",
            content=total.content or (None if total.calls else ""),
            reasoning_content=total.reasoning or None,
            tool_calls=tuple(total.calls) or None,
        )

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer. It is not part of the message."""
        return self._text.stop


class StopWatch:
    """Function object that the engine calls with each sampled token: returns whether a stop string has occurred.

    It is a `headrace_inference.engine.Start.until`.
    """

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._tokens = tokenizer.stream()
        self._stop = StopStrings(stops)

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Add tokens that were sampled earlier, and return whether the text so far contains a stop string."""
        self._stop.feed(self._tokens.feed(token_ids))
        return self._stop.complete is not None

    def __call__(self, token_id: int) -> bool:
        return self.replay((token_id,))


def _with_id(call: Call) -> ToolCall:
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=function)
