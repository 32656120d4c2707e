"""Read-only tools for runs that replay a served request. Tools marked as read-only work, and any other tool is
refused."""

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
    """A read-only run called a tool that is not marked as read-only."""

    def __init__(self, tool: str) -> None:
        super().__init__(
            f"{tool} is not marked as read-only, and this run replays a request that was already served; "
            "mark the tool with "
            "headrace.shadow.read_only if a call changes nothing, or give the run a sandbox instead"
        )
        self.tool = tool


def read_only(tool: T) -> T:
    """Mark a tool as read-only and return it. The caller guarantees that repeated calls have no side effects."""
    setattr(tool, _READ_ONLY, True)
    return tool


def guarded(name: str, tool: Tool, called: list[str], refused: list[str]) -> Tool:
    """Return a tool with the same signature and docstring that records each call in `called` or `refused`.

    A tool that is not marked as read-only raises `WriteRefused` and is never run.
    """
    if not callable(tool):
        raise UsageError(f"tool {name!r}: is a {type(tool).__name__}, which cannot be called; pass its function")
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
