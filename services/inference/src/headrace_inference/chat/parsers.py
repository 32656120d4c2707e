"""Registries of the parsers of tool calls (`headrace.tool_parsers`) and of reasoning (`headrace.reasoning_parsers`).

A parser creates a reader for each answer. A reader gets the text of the answer in pieces and returns the parts that are
certain. No text is lost: text that looked like the beginning of a call and is not a call is returned as content. The
parsers of Headrace are in `tool_calls.py` and `reasoning.py`.

A name may be `family:member`. Families are announced under `headrace.tool_parser_families` or
`headrace.reasoning_parser_families`, and look up their members themselves (`vllm:hermes`).
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
    """A tool call. `arguments` is JSON exactly as the model wrote it."""

    name: str
    arguments: str


@dataclass(slots=True)
class ParsedText:
    """Result of parsing a piece of an answer: the text for the user and the tool calls."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)


class ToolReader(Protocol):
    """Reader of the tool calls of one answer. It may be used in any thread, one call at a time."""

    def feed(self, text: str) -> ParsedText:
        """Read the next text, and return the content and the complete calls that later text cannot change."""

    def end(self) -> ParsedText:
        """End the answer, and return the text that `feed` had buffered: as content, since it is no complete tool call.

        `feed` must not be called afterwards.
        """


class ReasoningReader(Protocol):
    """Reader of the reasoning of one answer. The `ToolReader` reads the remaining text."""

    def feed(self, text: str) -> tuple[str, str]:
        """Parse the next piece of an answer. Return the new text of the reasoning and of the answer, as far as later
        text cannot change it.
        """

    def end(self) -> tuple[str, str]:
        """End the answer, and return the buffered text: reasoning and the text after it."""


@dataclass(frozen=True, slots=True)
class ParserContext:
    """Data of a request for parsers that read tokens: transformers' tokenizer, and the tools of the request."""

    tokenizer: Any
    tools: Sequence[Tool] = ()


class TokenToolReader(Protocol):
    """A `ToolReader` that also gets the token ids of each text. It gets one token at a time."""

    def feed(self, text: str, token_ids: Sequence[int]) -> ParsedText: ...

    def end(self) -> ParsedText: ...


class TokenReasoningReader(Protocol):
    """A `ReasoningReader` that also gets the token ids of each text. It gets one token at a time."""

    def feed(self, text: str, token_ids: Sequence[int]) -> tuple[str, str]: ...

    def end(self) -> tuple[str, str]: ...


@dataclass(frozen=True, slots=True)
class ToolParser:
    """Registered parser of one model family's format of tool calls. It creates readers of text (`make`), or of tokens
    (`of_tokens`) if text alone is not sufficient.
    """

    make: Callable[[], ToolReader] | None = None
    """Creates a reader of text."""
    tags: tuple[str, ...] = ()
    """Tags of the format. In answers they are text even if they are special tokens; in other messages they are no
    tags."""
    of_tokens: Callable[[ParserContext], TokenToolReader] | None = None
    """Creates a reader of tokens. It also gets special tokens as text, and removes its own tags."""
    check: Callable[[], None] | None = None
    """Function that is called once at the start. It raises `PluginError` if the parser cannot be used."""
    form: Callable[[str], tuple[str, str]] | None = None
    """Function that returns the text before and after the JSON arguments in a call of a function with this name. A
    newline in it is optional. None: answers cannot be constrained to calls (`tool_choice`)."""

    def reader(self, context: ParserContext | None) -> TokenToolReader:
        """Return a reader of the tool calls of one answer."""
        if self.of_tokens is not None and context is not None:
            return self.of_tokens(context)
        assert self.make is not None, "a parser of tokens needs a context"
        return _ToolText(self.make())


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Parser of one format of reasoning. Its fields without a description are those of `ToolParser`."""

    make: Callable[[bool], ReasoningReader] | None = None
    """Creates a reader of text. The argument is whether the prompt ends inside reasoning."""
    tags: tuple[str, ...] = ()
    opening: str = ""
    """Text at the end of a prompt that ends inside reasoning, apart from whitespace. Empty: no prompt does."""
    closing: str = ""
    """Text that ends reasoning. Empty: constrained answers have no reasoning, and are refused if the prompt opens
    it."""
    of_tokens: Callable[[ParserContext], TokenReasoningReader] | None = None
    check: Callable[[], None] | None = None

    def reader(self, context: ParserContext | None, *, opened: bool) -> TokenReasoningReader:
        """Return a reader of one answer's reasoning.

        Args:
            context: context for parsers that read tokens; None for parsers of text.
            opened: whether the prompt ends inside reasoning.
        """
        if self.of_tokens is not None and context is not None:
            return self.of_tokens(context)
        assert self.make is not None, "a parser of tokens needs a context"
        return _ReasoningText(self.make(opened))

    def opened(self, prompt: str) -> bool:
        """Return whether the prompt ends inside reasoning."""
        return bool(self.opening) and prompt.rstrip().endswith(self.opening)


@dataclass(frozen=True, slots=True)
class ParserFamily(Generic[T]):
    """Parsers that another package provides by name, such as those of vLLM."""

    member: Callable[[str], T]
    """Function that returns the parser with a name, or raises `PluginError`. It must be fast; `check` may import
    more."""


class ParserRegistry(Registry[T]):
    """Registry of parsers by name and by `family:member`."""

    def __init__(self, group: str, kind: type[T], description: str) -> None:
        super().__init__(group, kind, description)
        families = f"{group.removesuffix('s')}_families"
        self._families: Registry[ParserFamily[T]] = Registry(families, ParserFamily, f"family of {description}s")

    def get(self, name: str) -> T:
        """Return the parser. Raises `PluginError` if there is none."""
        family, _, member = name.partition(":")
        return self._families.get(family).member(member) if member else super().get(name)


TOOL_PARSERS: ParserRegistry[ToolParser] = ParserRegistry("tool_parsers", ToolParser, "tool parser")
REASONING_PARSERS: ParserRegistry[ReasoningParser] = ParserRegistry(
    "reasoning_parsers", ReasoningParser, "reasoning parser"
)


@dataclass(frozen=True, slots=True)
class _ToolText:
    """Adapter of a reader of text to the interface of a reader of tokens."""

    text: ToolReader

    def feed(self, text: str, _token_ids: Sequence[int]) -> ParsedText:
        return self.text.feed(text)

    def end(self) -> ParsedText:
        return self.text.end()


@dataclass(frozen=True, slots=True)
class _ReasoningText:
    """Adapter of a reader of text to the interface of a reader of tokens."""

    text: ReasoningReader

    def feed(self, text: str, _token_ids: Sequence[int]) -> tuple[str, str]:
        return self.text.feed(text)

    def end(self) -> tuple[str, str]:
        return self.text.end()


class _NoTools:
    def feed(self, text: str) -> ParsedText:
        return ParsedText(text)

    def end(self) -> ParsedText:
        return ParsedText()


class _NoReasoning:
    def feed(self, text: str) -> tuple[str, str]:
        return "", text

    def end(self) -> tuple[str, str]:
        return "", ""


NO_TOOLS = ToolParser(_NoTools)
NO_REASONING = ReasoningParser(lambda _opened: _NoReasoning())


@dataclass(frozen=True, slots=True)
class Parsers:
    """Parsers of tool calls and reasoning of a replica."""

    tools: ToolParser = NO_TOOLS
    reasoning: ReasoningParser = NO_REASONING

    def check(self) -> None:
        """Raise `PluginError` if one of the parsers cannot be used. This may import large packages."""
        for check in filter(None, (self.tools.check, self.reasoning.check)):
            check()


def tags() -> frozenset[str]:
    """Return the marker texts, such as `<tool_call>`, of all installed parsers of tool calls and of reasoning."""
    calls, reasoning = TOOL_PARSERS.all().values(), REASONING_PARSERS.all().values()
    return frozenset().union(*(parser.tags for parser in calls), *(parser.tags for parser in reasoning))
