"""Attention on a CPU in float32, by matrix products that are large enough to be fast, and powers of two.

torch's own kernel multiplies 32 queries of one head at a time. Here a tile is some hundred queries of several heads and
sequences with all keys that they attend to, so a product is one call of the matrix library. Keys that several heads
share are read without copies. Attention weights are powers of 2 of scores in base 2, of which a CPU's vector units
compute four in the time of one power of e. The backward pass recomputes a tile from one number per query, the logarithm
of the normalising sum (FlashAttention-2, arXiv:2307.08691, equation 4), so a tile is not stored.
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

from headrace_trainer.torch_learner.model import blocks, recomputing
from headrace_trainer.torch_learner.model.blocks import Block

TILE = 1 << 20
"""Approximate number of scores of a tile: two tiles fit into the cache while their products are computed."""
ROWS, ROWS_MIN = 256, 64
"""Queries of a tile for each key head, those of all heads that share it. More compute masked scores, fewer are slow."""
_LOG2_E = 1 / math.log(2)
_WIDE = (torch.float32, torch.float64)


def supports(query: Tensor) -> bool:
    """Return whether `attend` supports the device and the type of `query`: float32 or float64 on a CPU."""
    return query.device.type == "cpu" and query.dtype in _WIDE and not torch.is_autocast_enabled("cpu")


def attend(query: Tensor, key: Tensor, value: Tensor, cut: tuple[Block, ...], scale: float | None) -> Tensor:
    """Compute attention of equally long sequences, `[B, heads, T, width]`.

    Keys and values may have fewer heads than queries, and values may have another width.

    Args:
        cut: blocks of one sequence (`blocks.divide`).
        scale: factor of the scores; None: the inverse root of the width.
    """
    fine = tuple(_finer(cut, query.shape[1] // key.shape[1]))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    result: Tensor = _Tiled.apply(query, key, value, fine, scale)  # type: ignore[no-untyped-call]
    return result


def _finer(cut: tuple[Block, ...], groups: int) -> Iterator[Block]:
    """Divide blocks into parts that are as large as a tile.

    Args:
        groups: number of query heads that share a key head.
    """
    for block in cut:
        rows = min(ROWS, TILE // block.keys)
        if block.mask is None:
            rows = min(rows, groups * block.keys // 4)  # at most an eighth of the scores of a triangle are masked
        yield from blocks.split(block, max(rows, ROWS_MIN) // groups or 1)


@dataclass(frozen=True)
class _Tile:
    """Range of queries with some of the key heads, whose attention scores fit into the cache together."""

    queries: tuple[slice, slice, slice]
    """Position in `[key heads, groups, T, x]`."""
    keys: tuple[slice, slice]
    """Position in `[key heads, T, x]`."""
    hidden: Tensor
    """`[queries, keys]`, or its last columns: 0, and minus infinity where a key is masked."""

    @classmethod
    def all(cls, cut: tuple[Block, ...], heads: int, groups: int) -> Iterator[_Tile]:
        """Yield all tiles of an attention, those with most keys first.

        Each of the others then fits into memory that an earlier one freed. In the other order a heap that keeps freed
        memory grows with each tile of a long sequence, to tens of gigabytes at 100,000 tokens.

        Args:
            cut: blocks of one sequence.
            heads: number of key heads of all sequences.
            groups: number of query heads that share a key head.
        """
        for block in reversed(cut):
            hidden = _above(block.queries) if block.mask is None else _hidden(block.mask[0, 0])
            several = max(1, TILE // (groups * block.queries * block.keys))
            for head in range(0, heads, several):
                tile_heads = slice(head, min(head + several, heads))
                queries, keys = slice(block.start, block.stop), slice(block.first, block.last)
                yield cls((tile_heads, slice(None), queries), (tile_heads, keys), hidden)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return the tile's part as `[key heads, groups x queries, x]`: heads that share keys are stacked as rows."""
        return tensor[self.queries].flatten(1, 2)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write `values` to the tile's part of a tensor of queries."""
        part = tensor[self.queries]
        part.copy_(values.view(part.shape))

    def hide(self, scores: Tensor) -> Tensor:
        """Add the attention mask to the scores of this tile, in place: masked keys get minus infinity."""
        rows, columns = self.hidden.shape
        count, _, keys = scores.shape
        scores.view(count, -1, rows, keys)[..., keys - columns :].add_(self.hidden)
        return scores


@lru_cache(maxsize=8)
def _above(rows: int) -> Tensor:
    """Return the causal mask of as many keys as queries."""
    return _hidden(blocks.causal(rows, rows, torch.device("cpu")))


def _hidden(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)


class _Buffers(threading.local):
    """Reused memory for a tile's scores and their gradients, for each thread: the system would zero new memory
    first."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def product(self, left: Tensor, right: Tensor, buffer: int) -> Tensor:
        """Return the products of batches of matrices, `left` times `right` transposed, written into buffer 0 or 1."""
        shape = (*left.shape[:2], right.shape[1])
        size = math.prod(shape)
        if self._numbers.dtype != left.dtype or self._numbers.numel() < 2 * size:
            self._numbers = left.new_empty(2 * max(size, TILE))
        start = buffer * (self._numbers.numel() // 2)
        result = self._numbers[start : start + size].view(shape)
        if len(left) == 1:
            torch.mm(left[0], right[0].T, out=result[0])
        else:  # the library copies parts of several matrices in any case, and slowly once they are transposed
            torch.bmm(left, right.contiguous().transpose(1, 2), out=result)
        return result


_buffers = _Buffers()


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, cut: tuple[Block, ...], scale: float) -> Tensor:
        answer, norm = recomputing.compute_once(partial(_forward, query, key, value, cut, scale))
        ctx.save_for_backward(query, key, value, norm)
        ctx.cut, ctx.scale = cut, scale
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, norm = ctx.saved_tensors
        return *_backward(gradient, query, key, value, norm, ctx.cut, ctx.scale), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, cut: tuple[Block, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention tile by tile. Return the result and, for the backward pass, the base-2 logarithm of each
    query's softmax denominator.
    """
    queries, keys, values = _by_key_head(query, key) * (scale * _LOG2_E), key.flatten(0, 1), value.flatten(0, 1)
    heads, groups, length, _ = queries.shape
    answer, norm = query.new_empty(heads, groups, length, value.shape[3]), query.new_empty(heads, groups, length, 1)
    for tile in _Tile.all(cut, heads, groups):
        scores = tile.hide(_buffers.product(tile.of_queries(queries), keys[tile.keys], buffer=0))
        largest = scores.amax(-1, keepdim=True)
        shares = torch.exp2(scores.sub_(largest), out=scores)
        sums = shares.sum(-1, keepdim=True)
        tile.put(answer, torch.bmm(shares, values[tile.keys]).div_(sums))
        tile.put(norm, sums.log2_().add_(largest))
    return answer.view(*query.shape[:3], -1), norm


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, norm: Tensor, cut: tuple[Block, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _by_key_head(query, key) * (scale * _LOG2_E), key.flatten(0, 1), value.flatten(0, 1)
    heads, groups, length, _ = queries.shape
    gradients = _by_key_head(gradient, key)
    of_queries = torch.empty_like(queries)
    # Transposed, because a product with the tile on its right is faster.
    of_keys, of_values = (matrix.new_zeros(heads, matrix.shape[2], length) for matrix in (keys, values))
    for tile in _Tile.all(cut, heads, groups):
        tile_queries = tile.of_queries(queries)
        scores = tile.hide(_buffers.product(tile_queries, keys[tile.keys], buffer=0))
        shares = torch.exp2(scores.sub_(tile.of_queries(norm)), out=scores)
        of_answer = tile.of_queries(gradients)
        of_values[tile.keys[0], :, tile.keys[1]] += torch.bmm(of_answer.transpose(1, 2), shares)
        slope = _buffers.product(of_answer, values[tile.keys], buffer=1)
        torch._softmax_backward_data(slope, shares, -1, shares.dtype, grad_input=slope)
        tile.put(of_queries, torch.bmm(slope, keys[tile.keys]))
        of_keys[tile.keys[0], :, tile.keys[1]] += torch.bmm(tile_queries.transpose(1, 2), slope)
    # `slope` refers to scores in base e: the gradient of queries lacks the scale, and `queries` include it and the
    # base.
    return (
        of_queries.mul_(scale).view(query.shape),
        of_keys.div_(_LOG2_E).transpose(1, 2).reshape(key.shape),
        of_values.transpose(1, 2).reshape(value.shape),
    )


def _by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """Reshape `[B, heads, T, x]` to `[B x key heads, groups, T, x]`."""
    several, shared, (heads, length, x) = len(query), key.shape[1], query.shape[1:]
    return query.reshape(several * shared, heads // shared, length, x)
