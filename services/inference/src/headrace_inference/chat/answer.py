"""Turns the sampled tokens of one choice into what a client reads, for streams and whole answers alike."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from headrace_inference.chat.parsers import NO_REASONING, NO_TOOLS, Asked, Call, Parsers, ReasoningParser, ToolParser
from headrace_inference.chat.pieces import StopStrings
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_schemas import FunctionCall, Message, ToolCall


@dataclass(frozen=True, slots=True)
class Reading:
    """How answers to one request are read."""

    tools: ToolParser = NO_TOOLS
    reasoning: ReasoningParser = NO_REASONING
    reasoning_opened: bool = False
    """The prompt ended inside reasoning."""
    stops: Sequence[str] = ()
    asked: Asked | None = None
    """For readers that want tokens."""

    @classmethod
    def of(
        cls,
        prompt: str,
        parsers: Parsers,
        *,
        tools: bool,
        stops: Sequence[str] = (),
        asked: Asked | None = None,
    ) -> Reading:
        """`tools`: some are offered; without one nothing is a call."""
        found = parsers.tools if tools else NO_TOOLS
        return cls(found, parsers.reasoning, parsers.reasoning.opened(prompt), stops, asked)

    @property
    def by_token(self) -> bool:
        """Somebody wants to see each token."""
        return self.asked is not None and (self.tools.of_tokens is not None or self.reasoning.of_tokens is not None)


@dataclass(slots=True)
class Delta:
    """What became readable."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __iadd__(self, more: Delta) -> Self:
        self.reasoning += more.reasoning
        self.content += more.content
        self.calls += more.calls
        return self


class Text:
    """Raw text in, deltas out. `whole` is everything so far."""

    def __init__(self, how: Reading) -> None:
        self._stop = StopStrings(how.stops)
        self._reasoning = how.reasoning.reader(how.asked, opened=how.reasoning_opened)
        self._tools = how.tools.reader(how.asked)
        self._unread: list[int] = []
        """Tokens whose text is held back."""
        self._unanswered: list[int] = []
        """Tokens that were read and are neither reasoning nor answer yet."""
        self.whole = Delta()

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> Delta:
        delta = Delta()
        self._unread += token_ids
        self._read(delta, self._stop.feed(text))
        return self._add(delta)

    def end(self, text: str = "") -> Delta:
        """The last text and all that was held back."""
        delta = Delta()
        self._read(delta, self._stop.feed(text) + self._stop.end())
        reasoning, answer = self._reasoning.end()
        delta.reasoning += reasoning
        self._answer(delta, answer)
        found = self._tools.end()
        delta.content += found.content
        delta.calls += map(_with_id, found.calls)
        return self._add(delta)

    def _read(self, delta: Delta, text: str) -> None:
        ids: list[int] = []
        if text:
            ids, self._unread = self._unread, []
        reasoning, answer = self._reasoning.feed(text, ids)
        delta.reasoning += reasoning
        self._unanswered = ids if reasoning else self._unanswered + ids
        self._answer(delta, answer)

    def _answer(self, delta: Delta, text: str) -> None:
        ids: list[int] = []
        if text:
            ids, self._unanswered = self._unanswered, []
        found = self._tools.feed(text, ids)
        delta.content += found.content
        delta.calls += map(_with_id, found.calls)

    def _add(self, delta: Delta) -> Delta:
        self.whole += delta
        return delta


class Answer:
    """Tokens in, deltas out. What is readable never changes which tokens were sampled."""

    def __init__(self, tokenizer: ChatTokenizer, how: Reading) -> None:
        self._tokens = tokenizer.stream(whole=how.by_token)
        self._text = Text(how)
        self._by_token = how.by_token
        self.token_ids: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> Delta:
        self.token_ids += token_ids
        if not self._by_token:
            return self._text.feed(self._tokens.feed(token_ids))
        delta = Delta()
        for token in token_ids:
            delta += self._text.feed(self._tokens.feed((token,)), (token,))
        return delta

    def end(self) -> Delta:
        return self._text.end(self._tokens.end())

    @property
    def whole(self) -> Delta:
        """Everything so far."""
        return self._text.whole

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return len(self._text.whole.calls)

    @property
    def message(self) -> Message:
        whole = self._text.whole
        return Message(
            role="assistant",
            content=whole.content or (None if whole.calls else ""),
            reasoning_content=whole.reasoning or None,
            tool_calls=tuple(whole.calls) or None,
        )


class StopWatch:
    """Tells the engine when a stop string is complete. See `headrace_inference.engine.Start.until`."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._tokens = tokenizer.stream()
        self._stop = StopStrings(stops)

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Take tokens that were sampled elsewhere; whether they hold a stop string already."""
        self._stop.feed(self._tokens.feed(token_ids))
        return self._stop.stopped

    def __call__(self, token_id: int) -> bool:
        return self.replay((token_id,))


def _with_id(call: Call) -> ToolCall:
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=function)
