"""A request that was served, and `TrainingCopy`, which plays it again to be trained."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from headrace.practice.read_only_tools import Tool, WriteRefused, guarded
from headrace.practice.runs import Run


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that the user's agent has answered. `inputs` is a copy, made before the agent saw it."""

    inputs: Any
    answer: Any = None
    labels: frozenset[str] = frozenset()
    """Of the `mark`s that were open when it was asked."""
    task_id: str | None = None
    """What `mark` called the task; its runs are compared with each other. None: a task of its own."""


class TrainingCopy:
    """One run of a training copy. `make_agent` builds the agent with it, `reward` reads it afterwards."""

    def __init__(self, run: Run, request: ServedRequest) -> None:
        self.inputs: Any = copy.deepcopy(request.inputs)
        self.request = request
        self.agent: Any = None
        self.answer: Any = None
        """What the copy answered; `request.answer` is what the user got."""
        self.called: list[str] = []
        """Names of the read-only tools that were called, in order."""
        self.refused: list[str] = []
        """Names of the others that it tried to call."""
        self._run = run

    @property
    def model(self) -> str:
        """The name that its calls have to give as `model`."""
        return self._run.model

    def openai(self, *, blocking: bool = False) -> Any:
        """An `openai.AsyncOpenAI` (`blocking`: an `OpenAI`). The calls of this client are what is trained."""
        return self._run.openai(blocking=blocking)

    @overload
    def tools(self, tools: Mapping[str, Tool]) -> dict[str, Tool]: ...
    @overload
    def tools(self, tools: Iterable[Tool]) -> list[Tool]: ...

    def tools(self, tools: Mapping[str, Tool] | Iterable[Tool]) -> dict[str, Tool] | list[Tool]:
        """The same tools for the copy's agent: those marked read-only work, any other raises `WriteRefused`. A run that
        tried to write has no reward, whatever its agent makes of the refusal."""
        if isinstance(tools, Mapping):
            return {name: guarded(name, tool, self.called, self.refused) for name, tool in tools.items()}
        names = ((getattr(tool, "__name__", type(tool).__name__), tool) for tool in tools)
        return [guarded(name, tool, self.called, self.refused) for name, tool in names]

    def check(self) -> None:
        """Raises `WriteRefused` for the first write that was tried."""
        if self.refused:
            raise WriteRefused(self.refused[0])
