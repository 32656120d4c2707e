"""What reads tool calls and reasoning in answers, by name: the entry points `headrace.tool_parsers` and
`headrace.reasoning_parsers`.

A reader gets the text of one answer in pieces and gives out what it is sure of. Nothing is lost: what looked like the
beginning of a call and is none comes out as content. Ours are in `tool_calls.py` and `reasoning.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace_runtime.registries import Registry


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is JSON exactly as the model wrote it."""

    name: str
    arguments: str


@dataclass(slots=True)
class Found:
    """What a piece of text brought."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)


class ToolReader(Protocol):
    """Of one answer. In any thread, one call at a time."""

    def feed(self, text: str) -> Found:
        """Content and complete calls, as far as they are clear by now."""

    def end(self) -> Found:
        """What was held back, as content; afterwards nothing more comes."""


class ReasoningReader(Protocol):
    """Of one answer; what it takes for the answer goes on to the `ToolReader`."""

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and answer, as far as they are clear by now."""

    def end(self) -> tuple[str, str]:
        """What was held back; afterwards nothing more comes."""


@dataclass(frozen=True, slots=True)
class ToolParser:
    """One way to write tool calls."""

    make: Callable[[], ToolReader]
    tags: tuple[str, ...] = ()
    """What it looks for: text in an answer even where a tokenizer calls it special, and in what others wrote no tag."""


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """One way to write reasoning. `make` is told whether the prompt ended inside of it."""

    make: Callable[[bool], ReasoningReader]
    tags: tuple[str, ...] = ()
    """As a `ToolParser`'s."""
    opening: str = ""
    """A prompt that ends with it, whitespace apart, ended inside reasoning; empty: none does."""

    def opened(self, prompt: str) -> bool:
        return bool(self.opening) and prompt.rstrip().endswith(self.opening)


TOOL_PARSERS: Registry[ToolParser] = Registry("tool_parsers", ToolParser, "tool parser")
REASONING_PARSERS: Registry[ReasoningParser] = Registry("reasoning_parsers", ReasoningParser, "reasoning parser")


class _NoTools:
    def feed(self, text: str) -> Found:
        return Found(text)

    def end(self) -> Found:
        return Found()


class _NoReasoning:
    def feed(self, text: str) -> tuple[str, str]:
        return "", text

    def end(self) -> tuple[str, str]:
        return "", ""


NO_TOOLS = ToolParser(_NoTools)
NO_REASONING = ReasoningParser(lambda _opened: _NoReasoning())


@dataclass(frozen=True, slots=True)
class Parsers:
    """What is looked for in answers."""

    tools: ToolParser = NO_TOOLS
    reasoning: ReasoningParser = NO_REASONING


def tags() -> frozenset[str]:
    """What any installed parser looks for."""
    calls, reasoning = TOOL_PARSERS.all().values(), REASONING_PARSERS.all().values()
    return frozenset().union(*(one.tags for one in calls), *(one.tags for one in reasoning))
