"""Stores attention results for layers whose activations are recomputed, so that attention is computed only once."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Results:
    """Attention results of a layer that will be recomputed, in order."""

    values: deque[Any]
    again: bool


_results: ContextVar[_Results | None] = ContextVar("stored attention results", default=None)


def compute_once(compute: Callable[[], T]) -> T:
    """Return the result of `compute`; in a layer's second pass, the stored result of the first."""
    results = _results.get()
    if results is None:
        return compute()
    if results.again:
        stored: T = results.values.popleft()
        return stored
    result = compute()
    results.values.append(result)
    return result


def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the contexts of a layer's first and second pass, for torch's checkpointing."""
    values: deque[Any] = deque()
    return _inside(_Results(values, again=False)), _inside(_Results(values, again=True))


@contextlib.contextmanager
def _inside(results: _Results) -> Iterator[None]:
    token = _results.set(results)
    try:
        yield
    finally:
        _results.reset(token)
