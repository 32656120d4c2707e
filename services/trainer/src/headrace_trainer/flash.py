"""Attention over a row of sequences by one kernel, on a GPU: flash attention that is told where each sequence starts.

One call for the whole row, whatever the lengths in it, costs the host the same for 2 sequences and for 60.
Keys that several heads share are read where they are, and a sliding window is two numbers and no mask. That a mask is
plain causality or such a window is not told by a name: transformers' own mask is asked about the queries where windows,
chunks and plain causality differ.

Where layers are computed again, this is kept: `contexts` hands what the first pass found to the second one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_WIDTH_MAX, _WIDTH_STEP = 256, 8
"""Numbers of a head that the kernel takes."""
_CAPABILITY_MIN = (8, 0)


@dataclass(frozen=True)
class Row:
    """What the kernel is told about a row."""

    bounds: Tensor
    """int32 on the device: where each sequence starts, and where the last one ends."""
    longest: int
    window: int | None
    """Keys that a query sees, its own among them; None: all up to its own."""

    @property
    def sides(self) -> tuple[int, int]:
        """Keys before and after a query's own that it sees; -1: no bound."""
        return (-1 if self.window is None else self.window - 1), 0


Found = tuple[Tensor, Tensor, Tensor]
"""What attention answers, the logarithm of each query's normaliser, and what else the gradient needs."""


class Kernel(Protocol):
    """Of `[tokens, heads, width]`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float | None) -> Found: ...

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Found, row: Row, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Flash:
    """Torch's own, FlashAttention-2 (arXiv:2307.08691)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float | None) -> Found:
        left, right = row.sides
        found, norms, state, _, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, row.bounds, row.bounds, row.longest, row.longest, 0.0, row.window is None, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return found, norms, state

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Found, row: Row, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = row.sides
        answer, norms, state = found
        of: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, answer, norms, row.bounds, row.bounds, row.longest, row.longest, 0.0,
            row.window is None, state, query.new_empty(0), scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return of


FLASH = Flash()


def row_of(bounds: tuple[int, ...], asked: Mapping[str, Any], device: torch.device) -> Row | None:
    """How the kernel computes a row under the mask that transformers asks for by `asked`; None where it cannot."""
    longest = max(b - a for a, b in pairwise(bounds))
    seen = reach(longest, asked)
    if seen is None:
        return None
    places = torch.tensor(bounds, dtype=torch.int32)
    if device.type == "cuda":
        places = places.pin_memory().to(device, non_blocking=True)  # the device is not waited for
    return Row(places, longest, seen if seen < longest else None)


def reach(longest: int, asked: Mapping[str, Any]) -> int | None:
    """Keys that a query sees at most, its own among them; None where a mask is neither plain causality nor a window."""
    if not asked.get("allow_is_causal_skip", True):
        return None  # something was laid over the mask
    local = asked.get("local_size")
    if local is None or local >= longest:
        return longest
    edges = (0, local - 1, local, local + 1, 2 * local - 1, 2 * local, longest - 1)
    queries = torch.tensor(sorted({edge for edge in edges if 0 <= edge < longest}))[:, None]
    keys = torch.arange(longest)[None]
    none = torch.zeros(1, 1, dtype=torch.int64)
    try:
        shown = asked["mask_function"](none, none, queries, keys)
    except (RuntimeError, TypeError, IndexError):
        return None  # it looks something up on the device; a window does not
    window = (keys <= queries) & (keys > queries - local)
    return int(local) if torch.equal(shown.expand_as(window), window) else None


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel is there for these, as `cast` makes them."""
    width = query.shape[-1]
    fits = width == key.shape[-1] == value.shape[-1] and width <= _WIDTH_MAX and width % _WIDTH_STEP == 0
    if query.device.type != "cuda" or not fits or cast(query).dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(query.device) >= _CAPABILITY_MIN


def cast(tensor: Tensor) -> Tensor:
    """In the type that products are computed in here."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def attend(query: Tensor, key: Tensor, value: Tensor, row: Row, scale: float | None, kernel: Kernel = FLASH) -> Tensor:
    """`[1, heads, T, width]` in, `[1, T, heads, width]` out."""
    three = (cast(tensor)[0].transpose(0, 1) for tensor in (query, key, value))
    found: Tensor = _Attention.apply(*three, row, scale, kernel, _kept.get())  # type: ignore[no-untyped-call]
    return found[None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: Row,
        scale: float | None,
        kernel: Kernel,
        kept: _Kept | None,
    ) -> Tensor:
        if kept is not None and kept.again:
            found = kept.found.popleft()
        else:
            found = kernel.forward(query, key, value, row, scale)
            if kept is not None:
                kept.found.append(found)
        ctx.save_for_backward(query, key, value, *found)
        ctx.row, ctx.scale, ctx.kernel = row, scale, kernel
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *found = ctx.saved_tensors
        three = ctx.kernel.backward(gradient.contiguous(), query, key, value, tuple(found), ctx.row, ctx.scale)
        return *three, None, None, None, None


@dataclass(frozen=True)
class _Kept:
    """What attention found in a layer that will be computed again, in order."""

    found: deque[Found]
    again: bool


_kept: ContextVar[_Kept | None] = ContextVar("attention that is kept", default=None)


def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Of a layer's first pass and its second, for torch's checkpointing: attention is computed in the first alone."""
    found: deque[Found] = deque()
    return _inside(_Kept(found, again=False)), _inside(_Kept(found, again=True))


@contextlib.contextmanager
def _inside(kept: _Kept) -> Iterator[None]:
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
