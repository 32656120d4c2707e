"""Which of the requests that users made are played again. A strategy is any object with `should_select`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from headrace.practice.copies import ServedRequest


class SelectionStrategy(Protocol):
    """Called once for each request, by one thread, after the user has the answer. What it raises selects nothing. It
    keeps other copies waiting while it decides, and never a user."""

    def should_select(self, request: ServedRequest) -> bool: ...


@dataclass(frozen=True)
class SamplingRateStrategy:
    """Each request with this probability. Raises `ValueError` for a rate outside of 0 to 1."""

    rate: float = 0.1
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate = {self.rate}: a rate is a probability, 0 to 1")

    def should_select(self, request: ServedRequest) -> bool:
        return self.draw() < self.rate


class ExplicitMarkingStrategy:
    """Requests that were asked inside of `with mark(...)`: of these labels, or of any."""

    def __init__(self, *labels: str) -> None:
        self.labels = frozenset(labels)

    def should_select(self, request: ServedRequest) -> bool:
        return bool(request.labels & self.labels if self.labels else request.labels)


@dataclass(frozen=True, slots=True)
class OpenMarks:
    """What the `mark`s say that the present code is in."""

    labels: frozenset[str] = frozenset()
    task_id: str | None = None


_MARKS: ContextVar[OpenMarks] = ContextVar("headrace_marks", default=OpenMarks())  # noqa: B039 (it is frozen)


@contextmanager
def mark(*labels: str, task_id: str | None = None) -> Iterator[None]:
    """Mark what is asked in the body, in this thread or asyncio task: `with mark("user-feedback"): ask(...)`. Without
    `with` it does nothing. `task_id` names the task, so that other requests may be of the same one."""
    if not labels:
        raise ValueError("mark() without a label marks nothing; say why the request is worth training on")
    outer = _MARKS.get()
    token = _MARKS.set(OpenMarks(outer.labels | frozenset(labels), task_id or outer.task_id))
    try:
        yield
    finally:
        _MARKS.reset(token)


def open_marks() -> OpenMarks:
    return _MARKS.get()
