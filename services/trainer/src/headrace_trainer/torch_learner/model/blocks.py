"""Computes a sequence's attention in blocks of queries, each with only the keys that its queries attend to.

A sliding window of W tokens then costs T x W and not T x T, in time and in memory. Plain causality needs no blocks: a
fused kernel handles it. In the backward pass each block is computed once more, so none of its scores are stored, and
the gradients of keys that several blocks share are added up in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.masking_utils import sdpa_mask

QUERIES = 256
"""Queries of a block. Larger blocks compute more masked scores, smaller ones are slow as matrix products."""


@dataclass(frozen=True)
class Block:
    """Part of a causal attention: queries `start` to `stop` and the keys `first` to `last` that they may attend to.

    Both ends are exclusive.
    """

    start: int
    stop: int
    first: int
    last: int
    mask: Tensor | None
    """`[1, 1, queries, keys]`, True where a key is visible; None: each query attends to all keys up to its own, which
    is the last one of the last query."""

    @property
    def queries(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> int:
        return self.last - self.first


Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, Block], Tensor]
"""Computes attention of one block from its queries, keys and values, and the numbers of the heads."""


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask, `[queries, keys]`, that a `Block` with the mask None has."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def divide(length: int, mask_args: Mapping[str, Any]) -> tuple[Block, ...]:
    """Divide the attention of a sequence into blocks, under the mask that transformers builds from `mask_args`."""
    alone = {**mask_args, "batch_size": 1, "kv_length": length, "kv_offset": 0, "attention_mask": None}
    if _is_plainly_causal(length, alone):
        return (Block(0, length, 0, length, None),)
    blocks: list[Block] = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        first, last = _reach(start, stop, length, mask_args)
        keys = {"kv_length": last - first, "kv_offset": first, "allow_is_causal_skip": False}
        visible = sdpa_mask(**{**alone, **keys, "q_length": stop - start, "q_offset": start})
        assert visible is not None, "allow_is_causal_skip is False"
        blocks.append(_block(start, stop, first, visible, blocks[-1] if blocks else None))
        if len(blocks) == 2 and blocks[0].mask is None and blocks[1].mask is None:
            blocks = [Block(0, stop, 0, stop, None)]
    return tuple(blocks)


def _reach(start: int, stop: int, length: int, mask_args: Mapping[str, Any]) -> tuple[int, int]:
    """Return the range of keys that the queries from `start` to `stop` may attend to.

    Transformers sets `local_size` where a mask is a window or chunks and nothing else, which is where it would omit the
    mask of a shorter sequence. For other masks the range is the whole sequence.
    """
    local = mask_args.get("local_size")
    if local is None or not mask_args.get("allow_is_causal_skip", True):
        return 0, length
    return max(0, start - local), stop


def refine(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Divide attention blocks (ranges of queries with their keys) into blocks of at most `QUERIES` queries.

    This bounds the memory of an implementation that stores all scores of a block.
    """
    return tuple(part for block in blocks for part in split(block, QUERIES))


def split(block: Block, queries: int) -> Iterator[Block]:
    """Divide a block into parts of at most `queries` queries."""
    for start in range(block.start, block.stop, queries):
        stop = min(start + queries, block.stop)
        if block.mask is None:
            yield Block(start, stop, block.first, block.last - (block.stop - stop), None)
        else:
            mask = block.mask[:, :, start - block.start : stop - block.start]
            yield Block(start, stop, block.first, block.last, mask)


def attend(
    query: Tensor, key: Tensor, value: Tensor, heads: Tensor | None, blocks: tuple[Block, ...], how: Attention
) -> Tensor:
    """Compute attention block by block, without a score matrix of the whole sequence.

    Args:
        query: `[B, heads, T, head_dim]`, sequences of equal length, as `key` and `value`.
        heads: attention sink of each head: a learned logit for attending to no token (GPT-OSS). None without sinks.
        blocks: ranges of queries of a sequence, each with the range of keys that it may attend to.
        how: function that computes the attention of one block.
    """
    if len(blocks) == 1:
        return how(query, key, value, heads, blocks[0])
    result: Tensor = _InBlocks.apply(query, key, value, heads, blocks, how)  # type: ignore[no-untyped-call]
    return result


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: Tensor | None,
        blocks: tuple[Block, ...],
        how: Attention,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, heads)
        ctx.blocks, ctx.how = blocks, how
        return torch.cat([how(*_parts_of(block, query, key, value), heads, block) for block in blocks], dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        needed = [index for index, needs_gradient in enumerate(ctx.needs_input_grad[:4]) if needs_gradient]
        # Sums over blocks are in float32, because a key is shared by many blocks.
        sums = {index: torch.zeros_like(inputs[index], dtype=_wide(inputs[index])) for index in needed}
        for block in ctx.blocks:
            parts = [*_parts_of(block, *inputs[:3]), inputs[3]]
            targets = [*_parts_of(block, *(sums.get(index) for index in range(3))), sums.get(3)]
            with torch.enable_grad():
                leaves: list[Any] = [None if part is None else part.detach() for part in parts]
                differentiated: list[Tensor] = [leaves[index].requires_grad_() for index in needed]
                result = ctx.how(*leaves, block)
            block_gradient = gradient[:, :, block.start : block.stop]
            gradients = torch.autograd.grad(result, differentiated, block_gradient)
            for index, part_gradient in zip(needed, gradients, strict=True):
                targets[index].add_(part_gradient)
        return *(sums[index].to(inputs[index].dtype) if index in sums else None for index in range(4)), None, None


def _parts_of(block: Block, query: Tensor | None, key: Tensor | None, value: Tensor | None) -> tuple[Any, Any, Any]:
    """Return the parts of queries, keys and values that belong to a block; None for those that are None."""
    queries, keys = slice(block.start, block.stop), slice(block.first, block.last)
    pairs = ((query, queries), (key, keys), (value, keys))
    query_part, key_part, value_part = (None if tensor is None else tensor[:, :, part] for tensor, part in pairs)
    return query_part, key_part, value_part


def _block(start: int, stop: int, offset: int, visible: Tensor, before: Block | None) -> Block:
    """Return the block of the queries `start` to `stop`, without keys that none of them may attend to.

    Args:
        start: first query.
        stop: end of the queries (exclusive).
        offset: first key of `visible`.
        visible: mask `[1, 1, queries, keys]`.
        before: the previous block, whose mask is used again if it is equal.
    """
    columns = visible[0, 0].any(0).nonzero()
    low, high = int(columns[0]), int(columns[-1]) + 1
    mask, first, last = visible[..., low:high], offset + low, offset + high
    may_be_causal = first == 0 and last == stop and (before is None or before.mask is None)
    if may_be_causal and torch.equal(mask[0, 0], causal(stop - start, last, mask.device)):
        return Block(start, stop, first, last, None)
    if before is not None and before.mask is not None and torch.equal(before.mask, mask):
        return Block(start, stop, first, last, before.mask)  # all blocks of a window share one mask
    return Block(start, stop, first, last, mask.clone())


class _MaskRequested(Exception):
    """Raised when transformers evaluates a mask function, which means that it needs an explicit mask tensor."""


def _is_plainly_causal(length: int, alone: Mapping[str, Any]) -> bool:
    """Return whether transformers would omit the mask of a sequence of `length` tokens, without building the mask."""

    def request(*_: Any) -> Tensor:
        raise _MaskRequested

    try:
        return sdpa_mask(**{**alone, "q_length": length, "q_offset": 0, "mask_function": request}) is None
    except _MaskRequested:
        return False


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
