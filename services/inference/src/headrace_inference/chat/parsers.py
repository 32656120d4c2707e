"""What reads tool calls and reasoning in answers, by name: the entry points `headrace.tool_parsers` and
`headrace.reasoning_parsers`.

A reader gets the text of one answer in pieces and gives out what it is sure of. Nothing is lost: what looked like the
beginning of a call and is none comes out as content. Ours are in `tool_calls.py` and `reasoning.py`.

A name may be `family:member`: the family is announced under `headrace.tool_parser_families` or
`headrace.reasoning_parser_families`, and knows its members itself (`vllm:hermes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from headrace_runtime.registries import Registry
from headrace_schemas import Tool

T = TypeVar("T")


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
class Asked:
    """What a reader of tokens is told of the request: transformers' tokenizer, and the tools on offer."""

    tokenizer: Any
    tools: Sequence[Tool] = ()


class TokenToolReader(Protocol):
    """As a `ToolReader`, with the token ids behind each piece of text. It gets one token at a time."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Found: ...

    def end(self) -> Found: ...


class TokenReasoningReader(Protocol):
    """As a `ReasoningReader`, with the token ids behind each piece of text. It gets one token at a time."""

    def feed(self, text: str, token_ids: Sequence[int]) -> tuple[str, str]: ...

    def end(self) -> tuple[str, str]: ...


@dataclass(frozen=True, slots=True)
class ToolParser:
    """One way to write tool calls. It has `make`, or `of_tokens` where text alone does not say enough."""

    make: Callable[[], ToolReader] | None = None
    tags: tuple[str, ...] = ()
    """What it looks for: text in an answer even where a tokenizer calls it special, and in what others wrote no tag."""
    of_tokens: Callable[[Asked], TokenToolReader] | None = None
    """Such a reader sees special tokens as text, too, and takes its own away."""
    check: Callable[[], None] | None = None
    """Called once at a start; raises `PluginError` when it cannot be used."""
    form: Callable[[str], tuple[str, str]] | None = None
    """How a call of a function with this name is written, before and after the JSON of its arguments; a newline in it
    may be left out. None: answers cannot be held to calls (`tool_choice`)."""

    def reader(self, asked: Asked | None) -> TokenToolReader:
        """Of one answer."""
        if self.of_tokens is not None and asked is not None:
            return self.of_tokens(asked)
        assert self.make is not None, "a parser makes readers of text, or is asked for readers of tokens"
        return _ToolText(self.make())


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """One way to write reasoning. `make` is told whether the prompt ended inside of it."""

    make: Callable[[bool], ReasoningReader] | None = None
    tags: tuple[str, ...] = ()
    """As a `ToolParser`'s; and so are `of_tokens` and `check`."""
    opening: str = ""
    """A prompt that ends with it, whitespace apart, ended inside reasoning; empty: none does."""
    closing: str = ""
    """Ends reasoning. Empty: an answer that is held by a grammar has none; it is refused where the prompt opened it."""
    of_tokens: Callable[[Asked], TokenReasoningReader] | None = None
    check: Callable[[], None] | None = None

    def reader(self, asked: Asked | None, *, opened: bool) -> TokenReasoningReader:
        """Of one answer."""
        if self.of_tokens is not None and asked is not None:
            return self.of_tokens(asked)
        assert self.make is not None, "a parser makes readers of text, or is asked for readers of tokens"
        return _ReasoningText(self.make(opened))

    def opened(self, prompt: str) -> bool:
        return bool(self.opening) and prompt.rstrip().endswith(self.opening)


@dataclass(frozen=True, slots=True)
class ParserFamily(Generic[T]):
    """Parsers that somebody else keeps, by name."""

    member: Callable[[str], T]
    """Light; what is heavy waits for `check`. Raises `PluginError`."""


class ParserRegistry(Registry[T]):
    """Parsers by name, and by `family:member`."""

    def __init__(self, group: str, kind: type[T], what: str) -> None:
        super().__init__(group, kind, what)
        families = f"{group.removesuffix('s')}_families"
        self._families: Registry[ParserFamily[T]] = Registry(families, ParserFamily, f"family of {what}s")

    def get(self, name: str) -> T:
        family, _, member = name.partition(":")
        return self._families.get(family).member(member) if member else super().get(name)


TOOL_PARSERS: ParserRegistry[ToolParser] = ParserRegistry("tool_parsers", ToolParser, "tool parser")
REASONING_PARSERS: ParserRegistry[ReasoningParser] = ParserRegistry(
    "reasoning_parsers", ReasoningParser, "reasoning parser"
)


@dataclass(frozen=True, slots=True)
class _ToolText:
    """A reader of text, where tokens are offered."""

    text: ToolReader

    def feed(self, text: str, _token_ids: Sequence[int]) -> Found:
        return self.text.feed(text)

    def end(self) -> Found:
        return self.text.end()


@dataclass(frozen=True, slots=True)
class _ReasoningText:
    """A reader of text, where tokens are offered."""

    text: ReasoningReader

    def feed(self, text: str, _token_ids: Sequence[int]) -> tuple[str, str]:
        return self.text.feed(text)

    def end(self) -> tuple[str, str]:
        return self.text.end()


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

    def check(self) -> None:
        """Raises `PluginError` when one of them cannot be used. May import much."""
        for check in filter(None, (self.tools.check, self.reasoning.check)):
            check()


def tags() -> frozenset[str]:
    """What any installed parser looks for."""
    calls, reasoning = TOOL_PARSERS.all().values(), REASONING_PARSERS.all().values()
    return frozenset().union(*(one.tags for one in calls), *(one.tags for one in reasoning))
