"""Attention on a CPU in float32, by products that are large enough to be fast, and powers of two.

torch's own kernel multiplies 32 queries of one head at a time. Here a tile is some hundred queries of several heads and
sequences with all keys that they see, so a product is one call of the library that multiplies. Keys that several heads
share are read where they are. Shares are powers of 2 of scores in base 2: a CPU's vectors make four of them in the time
of one power of e. The backward pass computes a tile again from one number a query, the logarithm of what its shares are
divided by (FlashAttention-2, arXiv:2307.08691, equation 4), so nothing of a tile is kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace_trainer.torch_learner.model import blocks, kept
from headrace_trainer.torch_learner.model.blocks import Block

TILE = 1 << 20
"""Scores of a tile, about: two tiles stay near the CPU while their products are made."""
ROWS, ROWS_MIN = 256, 64
"""Queries of a tile for each key head, those of all heads that share it. More see more keys in vain, fewer are slow."""
_LOG2_E = 1 / math.log(2)
_WIDE = (torch.float32, torch.float64)


def takes(query: Tensor) -> bool:
    """Whether these are computed as they are, on a CPU."""
    return query.device.type == "cpu" and query.dtype in _WIDE and not torch.is_autocast_enabled("cpu")


def attend(query: Tensor, key: Tensor, value: Tensor, cut: tuple[Block, ...], scale: float | None) -> Tensor:
    """`[B, heads, T, width]` of sequences that are equally long, cut as `blocks.of` says. Keys and values may have
    fewer heads than queries, and values may have another width."""
    fine = tuple(_finer(cut, query.shape[1] // key.shape[1]))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    found: Tensor = _Tiled.apply(query, key, value, fine, scale)  # type: ignore[no-untyped-call]
    return found


def _finer(cut: tuple[Block, ...], groups: int) -> Iterator[Block]:
    """`groups`: heads that share keys."""
    for block in cut:
        rows = min(ROWS, TILE // block.keys)
        if block.mask is None:
            rows = min(rows, groups * block.keys // 4)  # so an eighth of a triangle is computed in vain
        yield from blocks.split(block, max(rows, ROWS_MIN) // groups or 1)


@dataclass(frozen=True)
class _Tile:
    """Queries of a block, of some of the key heads; those of all sequences are counted through."""

    queries: tuple[slice, slice, slice]
    """Where in `[key heads, groups, T, x]`."""
    keys: tuple[slice, slice]
    """Where in `[key heads, T, x]`."""
    hidden: Tensor
    """`[queries, keys]`, or the last columns of it: 0, and minus infinity where a key is not seen."""

    @classmethod
    def all(cls, cut: tuple[Block, ...], heads: int, groups: int) -> Iterator[_Tile]:
        """`heads`: key heads of all sequences; `groups`: query heads of each."""
        for block in cut:
            hidden = _above(block.queries) if block.mask is None else _hidden(block.mask[0, 0])
            several = max(1, TILE // (groups * block.queries * block.keys))
            for head in range(0, heads, several):
                some = slice(head, min(head + several, heads))
                queries, keys = slice(block.start, block.stop), slice(block.first, block.last)
                yield cls((some, slice(None), queries), (some, keys), hidden)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """`[key heads, groups x queries, x]`: heads that share keys stand one below the other."""
        return tensor[self.queries].flatten(1, 2)

    def put(self, tensor: Tensor, found: Tensor) -> None:
        """Back again."""
        here = tensor[self.queries]
        here.copy_(found.view(here.shape))

    def hide(self, scores: Tensor) -> Tensor:
        """In place."""
        rows, columns = self.hidden.shape
        some, _, keys = scores.shape
        scores.view(some, -1, rows, keys)[..., keys - columns :].add_(self.hidden)
        return scores


@lru_cache(maxsize=8)
def _above(rows: int) -> Tensor:
    """What causality hides of as many keys as there are queries."""
    return _hidden(blocks.causal(rows, rows, torch.device("cpu")))


def _hidden(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


class _Rooms(threading.local):
    """Where a tile's scores stand, and their slopes. The next tile takes the same place, and the next call of a thread
    too: what is allocated anew, the system fills with zeros first."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def product(self, left: Tensor, right: Tensor, room: int) -> Tensor:
        """`left` times `right` transposed, of several matrices each, in room 0 or 1."""
        shape = (*left.shape[:2], right.shape[1])
        size = math.prod(shape)
        if self._numbers.dtype != left.dtype or self._numbers.numel() < 2 * size:
            self._numbers = left.new_empty(2 * max(size, TILE))
        start = room * (self._numbers.numel() // 2)
        found = self._numbers[start : start + size].view(shape)
        if len(left) == 1:
            torch.mm(left[0], right[0].T, out=found[0])
        else:  # parts of several matrices are copied for it in any case, and slowly once they are transposed
            torch.bmm(left, right.contiguous().transpose(1, 2), out=found)
        return found


_rooms = _Rooms()


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, cut: tuple[Block, ...], scale: float) -> Tensor:
        answer, norm = kept.once(partial(_forward, query, key, value, cut, scale))
        ctx.save_for_backward(query, key, value, norm)
        ctx.cut, ctx.scale = cut, scale
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, norm = ctx.saved_tensors
        return *_backward(gradient, query, key, value, norm, ctx.cut, ctx.scale), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, cut: tuple[Block, ...], scale: float) -> tuple[Tensor, Tensor]:
    """The answer, and the logarithm of what each query's shares are divided by, to base 2."""
    queries, keys, values = _by_key_head(query, key) * (scale * _LOG2_E), key.flatten(0, 1), value.flatten(0, 1)
    heads, groups, length, _ = queries.shape
    answer, norm = query.new_empty(heads, groups, length, value.shape[3]), query.new_empty(heads, groups, length, 1)
    for tile in _Tile.all(cut, heads, groups):
        scores = tile.hide(_rooms.product(tile.of_queries(queries), keys[tile.keys], room=0))
        most = scores.amax(-1, keepdim=True)
        shares = torch.exp2(scores.sub_(most), out=scores)
        below = shares.sum(-1, keepdim=True)
        tile.put(answer, torch.bmm(shares, values[tile.keys]).div_(below))
        tile.put(norm, below.log2_().add_(most))
    return answer.view(*query.shape[:3], -1), norm


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, norm: Tensor, cut: tuple[Block, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _by_key_head(query, key) * (scale * _LOG2_E), key.flatten(0, 1), value.flatten(0, 1)
    heads, groups, length, _ = queries.shape
    gradients = _by_key_head(gradient, key)
    of_queries = torch.empty_like(queries)
    # Transposed, as a product with a tile on its right is the faster one.
    of_keys, of_values = (matrix.new_zeros(heads, matrix.shape[2], length) for matrix in (keys, values))
    for tile in _Tile.all(cut, heads, groups):
        asking = tile.of_queries(queries)
        scores = tile.hide(_rooms.product(asking, keys[tile.keys], room=0))
        shares = torch.exp2(scores.sub_(tile.of_queries(norm)), out=scores)
        of_answer = tile.of_queries(gradients)
        of_values[tile.keys[0], :, tile.keys[1]] += torch.bmm(of_answer.transpose(1, 2), shares)
        slope = _rooms.product(of_answer, values[tile.keys], room=1)
        torch._softmax_backward_data(slope, shares, -1, shares.dtype, grad_input=slope)
        tile.put(of_queries, torch.bmm(slope, keys[tile.keys]))
        of_keys[tile.keys[0], :, tile.keys[1]] += torch.bmm(asking.transpose(1, 2), slope)
    # `slope` is of scores to base e: what those of queries lack is the scale, and `queries` hold it and the base.
    return (
        of_queries.mul_(scale).view(query.shape),
        of_keys.div_(_LOG2_E).transpose(1, 2).reshape(key.shape),
        of_values.transpose(1, 2).reshape(value.shape),
    )


def _by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """`[B, heads, T, x]` to `[B x key heads, groups, T, x]`."""
    several, shared, (heads, length, x) = len(query), key.shape[1], query.shape[1:]
    return query.reshape(several * shared, heads // shared, length, x)
