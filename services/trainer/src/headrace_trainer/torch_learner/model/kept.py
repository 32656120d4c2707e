"""What attention found, for layers whose activations are computed again: it is computed in the first pass alone."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Kept:
    """Of a layer that will be computed again, in order."""

    found: deque[Any]
    again: bool


_kept: ContextVar[_Kept | None] = ContextVar("attention that is kept", default=None)


def once(compute: Callable[[], T]) -> T:
    """What `compute` answers; in a layer's second pass, what it answered in the first."""
    kept = _kept.get()
    if kept is None:
        return compute()
    if kept.again:
        answer: T = kept.found.popleft()
        return answer
    answer = compute()
    kept.found.append(answer)
    return answer


def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Of a layer's first pass and its second, for torch's checkpointing."""
    found: deque[Any] = deque()
    return _inside(_Kept(found, again=False)), _inside(_Kept(found, again=True))


@contextlib.contextmanager
def _inside(kept: _Kept) -> Iterator[None]:
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
