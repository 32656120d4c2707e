"""Tools for runs that play again what was served already: those marked read-only work, and any other is refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.errors import HeadraceError, UsageError

Tool = Callable[..., Any]
T = TypeVar("T", bound=Tool)
_READ_ONLY = "headrace_read_only"


class WriteRefused(HeadraceError):
    """A run that may only read called a tool that nobody marked read-only."""

    def __init__(self, tool: str) -> None:
        super().__init__(
            f"{tool} is not marked read-only, and this run plays a request again that was served already: mark it with "
            "headrace.shadow.read_only if calling it changes nothing, or give the run a sandbox in its place"
        )
        self.tool = tool


def read_only(tool: T) -> T:
    """Mark a tool: calling it again changes nothing for anybody. Whoever marks answers for it. Returns the tool."""
    setattr(tool, _READ_ONLY, True)
    return tool


def guarded(name: str, tool: Tool, called: list[str], refused: list[str]) -> Tool:
    """The tool with its signature and docstring; each call is noted in one of the lists. One that is not marked raises
    `WriteRefused` and is never run."""
    if not callable(tool):
        raise UsageError(f"tool {name!r} is a {type(tool).__name__}, which cannot be called; give its function")
    allowed = bool(getattr(tool, _READ_ONLY, False))

    def enter() -> None:
        (called if allowed else refused).append(name)
        if not allowed:
            raise WriteRefused(name)

    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def awaiting(*positional: Any, **named: Any) -> Any:
            enter()
            return await tool(*positional, **named)

        return awaiting

    @functools.wraps(tool)
    def calling(*positional: Any, **named: Any) -> Any:
        enter()
        return tool(*positional, **named)

    return calling
