"""Training copies of served requests: the read-only tools that they may call, and strategies that select requests.

A strategy is any object with a method `should_select`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from headrace.errors import HeadraceError, UsageError
from headrace_integrations.practice.runs import Run

Tool = Callable[..., Any]
T = TypeVar("T", bound=Tool)
_READ_ONLY = "headrace_read_only"


class WriteRefused(HeadraceError):
    """Error of a training copy that called a tool not marked as read-only."""

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


def guard_tool(name: str, tool: Tool, called: list[str], refused: list[str]) -> Tool:
    """Return a wrapper of a tool that adds `name` to `called` or `refused` at each call.

    The wrapper has the tool's signature and docstring. For a tool that is not marked as read-only, it raises
    `WriteRefused` without running the tool.
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


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that the user's agent has answered. `inputs` is a copy that was made before the agent got them."""

    inputs: Any
    answer: Any = None
    labels: frozenset[str] = frozenset()
    """Labels of the `mark` contexts that were active when the request was made."""
    task_id: str | None = None
    """Task id from `mark`; runs of one task are compared with each other. None for a task of its own."""


class TrainingCopy:
    """One run of a copy of the agent on a served request.

    `make_agent` builds the copy's agent from it, and `reward` gets it afterwards.
    """

    def __init__(self, run: Run, request: ServedRequest) -> None:
        self.inputs: Any = copy.deepcopy(request.inputs)
        self.request = request
        self.agent: Any = None
        self.answer: Any = None
        """Answer of the copy; `request.answer` is the answer that the user got."""
        self.called: list[str] = []
        """Names of the read-only tools that were called, in order."""
        self.refused: list[str] = []
        """Names of the other tools that the copy tried to call."""
        self._run = run

    @property
    def model(self) -> str:
        """Model name for the calls of the copy."""
        return self._run.model

    def openai(self, *, blocking: bool = False) -> Any:
        """Return an `openai.AsyncOpenAI`, or an `OpenAI` if `blocking`. The calls of this client are trained."""
        return self._run.openai(blocking=blocking)

    @overload
    def tools(self, tools: Mapping[str, Tool]) -> dict[str, Tool]: ...
    @overload
    def tools(self, tools: Iterable[Tool]) -> list[Tool]: ...

    def tools(self, tools: Mapping[str, Tool] | Iterable[Tool]) -> dict[str, Tool] | list[Tool]:
        """Return the tools for the copy's agent: tools marked as read-only work, and any other raises `WriteRefused`.

        A run that tried to write has no reward, even if its agent handles the exception.
        """
        if isinstance(tools, Mapping):
            return {name: guard_tool(name, tool, self.called, self.refused) for name, tool in tools.items()}
        names = ((getattr(tool, "__name__", type(tool).__name__), tool) for tool in tools)
        return [guard_tool(name, tool, self.called, self.refused) for name, tool in names]

    def check(self) -> None:
        """Raise `WriteRefused` if the copy called a tool that is not marked as read-only, for the first such call."""
        if self.refused:
            raise WriteRefused(self.refused[0])


class SelectionStrategy(Protocol):
    """Strategy that selects requests for training copies.

    One thread calls the strategy once for each request, after the user got the answer. If it raises an exception, the
    request is not selected. A slow decision delays other training copies, but never a user.
    """

    def should_select(self, request: ServedRequest) -> bool: ...


@dataclass(frozen=True)
class SamplingRateStrategy:
    """Strategy that selects each request with probability `rate`. Raises `ValueError` for a rate outside of 0 to 1."""

    rate: float = 0.1
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate = {self.rate}: must be a probability from 0 to 1")

    def should_select(self, request: ServedRequest) -> bool:
        return self.draw() < self.rate


class ExplicitMarkingStrategy:
    """Strategy that selects requests made within `with mark(...)` that have one of its labels.

    Without labels it selects all marked requests.
    """

    def __init__(self, *labels: str) -> None:
        self.labels = frozenset(labels)

    def should_select(self, request: ServedRequest) -> bool:
        return bool(request.labels & self.labels if self.labels else request.labels)


@dataclass(frozen=True, slots=True)
class OpenMarks:
    """Labels and task id of the `mark` blocks that are active."""

    labels: frozenset[str] = frozenset()
    task_id: str | None = None


_MARKS: ContextVar[OpenMarks] = ContextVar("headrace_marks", default=OpenMarks())  # noqa: B039 (it is frozen)


@contextmanager
def mark(*labels: str, task_id: str | None = None) -> Iterator[None]:
    """Mark the requests that are made within the `with` block in this thread or asyncio task, for
    `ExplicitMarkingStrategy`.

    For example `with mark("user-feedback"): ask(...)`. A call without `with` has no effect.

    Args:
        labels: reasons why the requests are worth training on.
        task_id: id of the task, so that other requests can belong to the same task.
    """
    if not labels:
        raise ValueError("labels: must not be empty; pass the reason why the request is worth training on")
    outer = _MARKS.get()
    token = _MARKS.set(OpenMarks(outer.labels | frozenset(labels), task_id or outer.task_id))
    try:
        yield
    finally:
        _MARKS.reset(token)


def open_marks() -> OpenMarks:
    """Return the labels and the task id of the active `mark` blocks in this thread or asyncio task."""
    return _MARKS.get()
