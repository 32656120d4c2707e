"""Adapters of vLLM's parsers: `tool_parser = "vllm:hermes"`, `reasoning_parser = "vllm:deepseek_r1"`.

The parsers get the tokens of an answer one by one, streamed or not, so that both give the same result. Content is
returned as it arrives; calls are parsed from the complete answer at its end. They work with every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from headrace_inference.chat.parsers import Call, ParsedText, ParserContext, ParserFamily, ReasoningParser, ToolParser
from headrace_runtime.process.logs import get_logger
from headrace_runtime.registries import PluginError

log = get_logger(__name__)
T = TypeVar("T")


class VllmTools:
    """A `TokenToolReader` over a tool parser of vLLM."""

    def __init__(self, make: Callable[[], Any], request: Any) -> None:
        self._make = make
        self._streaming: Any = make()
        self._request = request
        self._text = ""
        self._ids: list[int] = []
        self._content = ""

    def feed(self, text: str, token_ids: Sequence[int]) -> ParsedText:
        """Read the next text, and return the content that later text cannot change."""
        if not text:
            return ParsedText()
        before, ids_before = self._text, self._ids
        self._text, self._ids = before + text, [*ids_before, *token_ids]
        if self._streaming is None:
            return ParsedText()
        try:
            delta = self._streaming.extract_tool_calls_streaming(
                before, self._text, text, ids_before, self._ids, [*token_ids], self._request
            )
        except Exception as error:  # noqa: BLE001 (a parser may raise anything)
            _report(error)
            self._streaming = None  # it may have lost text, so the rest of the content is returned at the end
            return ParsedText()
        content: str = (delta.content if delta is not None else None) or ""
        self._content += content
        return ParsedText(content)

    def end(self) -> ParsedText:
        """Parse the complete answer, and return its calls with the content that was not returned yet."""
        if not self._text:
            return ParsedText()
        extracted = _call_or_none(partial(self._make().extract_tool_calls, self._text, self._request))
        content, calls = self._text, []
        if extracted is not None and extracted.tools_called:
            content = extracted.content or ""
            calls = [Call(call.function.name, call.function.arguments) for call in extracted.tool_calls]
        rest = content[len(self._content) :] if content.startswith(self._content) else ""
        return ParsedText(rest, calls)


class VllmReasoning:
    """A `TokenReasoningReader` over a reasoning parser of vLLM."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._text = ""
        self._ids: list[int] = []

    def feed(self, text: str, token_ids: Sequence[int]) -> tuple[str, str]:
        if not text:
            return "", ""
        before, ids_before = self._text, self._ids
        self._text, self._ids = before + text, [*ids_before, *token_ids]
        read = self._parser.extract_reasoning_streaming
        delta = read(before, self._text, text, ids_before, self._ids, [*token_ids])
        return ("", "") if delta is None else (delta.reasoning or "", delta.content or "")

    def end(self) -> tuple[str, str]:
        return "", ""


def _call_or_none(read: Callable[[], T]) -> T | None:
    """Return the result of `read`, which calls a parser of vLLM, or None if it raises an exception (which is
    logged)."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 (a parser may raise anything)
        _report(error)
        return None


def _report(error: Exception) -> None:
    log.warning("vllm_parser_stumbled", error=f"{type(error).__name__}: {str(error)[:200]}")


def _tool_parser(name: str) -> ToolParser:
    _installed("tool", name)

    def reader(context: ParserContext) -> VllmTools:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        tools = [tool.model_dump(mode="json", exclude_none=True) for tool in context.tools]
        request = ChatCompletionRequest(model="", messages=[], tools=tools)
        return VllmTools(lambda: _tool_class(name)(context.tokenizer, request.tools), request)

    return ToolParser(of_tokens=reader, check=partial(_check_exists, _tool_class, name))


def _reasoning_parser(name: str) -> ReasoningParser:
    _installed("reasoning", name)
    return ReasoningParser(
        of_tokens=lambda context: VllmReasoning(_reasoning_class(name)(context.tokenizer)),
        check=partial(_check_exists, _reasoning_class, name),
    )


def _check_exists(find: Callable[[str], Any], name: str) -> None:
    find(name)


def _tool_class(name: str) -> Any:
    from vllm.tool_parsers import ToolParserManager

    return _member("tool", name, ToolParserManager.get_tool_parser, ToolParserManager.list_registered)


def _reasoning_class(name: str) -> Any:
    from vllm.reasoning import ReasoningParserManager

    return _member(
        "reasoning", name, ReasoningParserManager.get_reasoning_parser, ReasoningParserManager.list_registered
    )


def _member(kind: str, name: str, get: Callable[[str], Any], names: Callable[[], Sequence[str]]) -> Any:
    if name not in names():
        raise PluginError(f"vLLM has no {kind} parser {name!r}; there are {', '.join(sorted(names()))}")
    return get(name)


def _installed(kind: str, name: str) -> None:
    if find_spec("vllm") is None:
        raise PluginError(
            f"the {kind} parser 'vllm:{name}' needs the package vllm, which is not installed in this environment: "
            "`make install GROUP=vllm` makes one for CPUs; for GPUs: pip install -r requirements/vllm.lock"
        )


TOOLS: ParserFamily[ToolParser] = ParserFamily(_tool_parser)
REASONING: ParserFamily[ReasoningParser] = ParserFamily(_reasoning_parser)
