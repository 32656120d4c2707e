"""Strategies that select which requests of users are played again. A strategy is any object with `should_select`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from headrace_integrations.practice.copies import ServedRequest


class SelectionStrategy(Protocol):
    """Strategy that selects requests for training copies.

    One thread calls it once for each request, after the user got the answer. A request is not selected if an exception
    is raised. A slow decision delays other training copies, but never a user.
    """

    def should_select(self, request: ServedRequest) -> bool: ...


@dataclass(frozen=True)
class SamplingRateStrategy:
    """Select each request with probability `rate`. Raises `ValueError` for a rate outside of 0 to 1."""

    rate: float = 0.1
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate = {self.rate}: must be a probability from 0 to 1")

    def should_select(self, request: ServedRequest) -> bool:
        return self.draw() < self.rate


class ExplicitMarkingStrategy:
    """Select requests that were made within `with mark(...)`: with one of these labels, or with any label if there are
    none."""

    def __init__(self, *labels: str) -> None:
        self.labels = frozenset(labels)

    def should_select(self, request: ServedRequest) -> bool:
        return bool(request.labels & self.labels if self.labels else request.labels)


@dataclass(frozen=True, slots=True)
class OpenMarks:
    """Labels and task id of the active `mark` contexts."""

    labels: frozenset[str] = frozenset()
    task_id: str | None = None


_MARKS: ContextVar[OpenMarks] = ContextVar("headrace_marks", default=OpenMarks())  # noqa: B039 (it is frozen)


@contextmanager
def mark(*labels: str, task_id: str | None = None) -> Iterator[None]:
    """Mark the requests that the body makes in this thread or asyncio task.

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
    """Return the active marks of this thread or asyncio task."""
    return _MARKS.get()
